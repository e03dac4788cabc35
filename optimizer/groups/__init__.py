"""Parameter groups of a model by explicit rules: what is unclear is refused, not guessed.

``rules`` has the rules and ready-made sets, ``sorting`` applies them to a model.  Open ``sorting`` first.
"""

from .rules import (
    DEEPSEEK,
    KINDS,
    LLAMA,
    MIXTRAL,
    MODULE_TYPES,
    NO_HEAD,
    QWEN,
    TORCHTITAN,
    Rule,
    Split,
    grouped_qkv,
    stacked_qkv,
)
from .sorting import Decision, Decisions, sort_parameters

__all__ = [
    "DEEPSEEK",
    "KINDS",
    "LLAMA",
    "MIXTRAL",
    "MODULE_TYPES",
    "NO_HEAD",
    "QWEN",
    "TORCHTITAN",
    "Decision",
    "Decisions",
    "Rule",
    "Split",
    "grouped_qkv",
    "sort_parameters",
    "stacked_qkv",
]
