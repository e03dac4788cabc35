"""Parameter groups of a model by explicit rules: what is unclear is refused, not guessed.

``sorting`` applies rules to a model, ``rules`` has them and the ready-made sets, ``decisions`` is the table that
results. Open ``sorting`` first.
"""

from .decisions import Decision, Decisions
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
from .sorting import sort_parameters

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
