"""Rules: a kind of parameter, and selectors by module type, number of dims, or name; open `groups` for their use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from fnmatch import fnmatchcase
from typing import Union

from torch import Tensor, nn

from ..names.errors import ArgumentError, called_like, constructed_like
from .planning.matrices import Split


@dataclass(frozen=True, slots=True)
class ParamKind:
    """A kind of parameter: its algorithm, the numbers of dims it may have (None: any), advice for other ones, and
    whether it is flattened to a matrix (`Fused`).
    """

    algorithm: str
    dims: tuple[int, ...] | None = None
    advice: str = ""
    flatten: bool = False


_OTHER = "kind 'other' gives anything to AdamW"

KINDS: Mapping[str, ParamKind] = {
    "matrix": ParamKind("muon", (2,), f"a stack is kind 'experts', a kernel is kind 'convolution', and {_OTHER}"),
    "experts": ParamKind("muon", (3,), f"one expert's own matrix is kind 'matrix', and {_OTHER}"),
    "convolution": ParamKind("muon", (3, 4, 5), f"one of two dims is kind 'matrix', and {_OTHER}", flatten=True),
    "embedding": ParamKind("adamw"),
    "head": ParamKind("adamw"),
    "router": ParamKind("muon", (2,), _OTHER),
    "vector": ParamKind("adamw", (0, 1), _OTHER),
    "other": ParamKind("adamw"),
}
"""AdamW trains embeddings and output heads, as in Jordan et al. 2024 and Liu et al. 2025 (arXiv 2502.16982).  Routers
are matrices as any other: sources are the code of Liu et al., torchtitan's recipe for Kimi K2.5, and Megatron."""


WHOLE = Split()


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_convolution(module: nn.Module) -> bool:
    """Return whether a module is one of torch's convolutions."""
    return isinstance(module, CONVOLUTIONS)


def is_no_convolution(module: nn.Module) -> bool:
    """Return whether a module is none of them."""
    return not is_convolution(module)


def is_match(name: str, pattern: str) -> bool:
    """Return whether a pattern of a rule is one of a name; a ``*.`` before it also matches at the top of the model."""
    return fnmatchcase(name, pattern) or (pattern.startswith("*.") and fnmatchcase(name, pattern.removeprefix("*.")))


@dataclass(frozen=True, slots=True)
class Use:
    """One place of a parameter in a model: its qualified name, its module, and its name there."""

    name: str
    owner: nn.Module
    attribute: str
    parameter: Tensor


@constructed_like("Rule('matrix', '*.proj.weight')")
@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """A kind, and selectors of the parameters that have it: all that are given must match, and one must be given.

    Args:
        kind: a key of `KINDS`.
        names: one or more patterns over the whole qualified name.  ``*`` matches anything (dots too), ``?`` one
            character, ``[qkv]`` one of the three; case counts.  ``*.`` at the start matches nothing as well, so that
            ``*.up.weight`` is also the ``up.weight`` of the model itself.
        module: type of the module that holds the parameter, or a base of it.
        attribute: name of the parameter in that module.
        dims: numbers of dims of the parameter.
        where: a condition on that module.
        split: the matrices that are fused in the parameter.  None: one, or one for each group of a convolution; then
            ``names`` have to spell a known fused name out (`families.FUSED`).
        optional: selecting nothing is no error, as in a set for several models.
        why: a reason, shown with the decision.
    """

    kind: str
    names: str | tuple[str, ...] | None = None
    _: KW_ONLY
    module: type[nn.Module] | None = None
    attribute: str | None = None
    dims: tuple[int, ...] | None = None
    where: Callable[[nn.Module], bool] | None = None
    split: Split | None = None
    optional: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"{self!r}: unknown kind; expected one of {', '.join(KINDS)}")
        if all(selector is None for selector in (self.names, self.module, self.attribute, self.dims, self.where)):
            raise ArgumentError(f"{self!r} would select every parameter; give it names, a module, an attribute or dims")
        if self.split not in (None, WHOLE) and KINDS[self.kind].algorithm != "muon":
            raise ArgumentError(f"{self!r}: only matrices, experts, convolutions and routers are split")

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names or ()

    def split_in(self, module: nn.Module) -> Split:
        """Return the matrices that are fused in a parameter of this module.

        The groups of a convolution are equal parts of the first dim: the out channels, or the in channels of a
        transposed one.
        """
        if self.split is None and self.kind == "convolution" and isinstance(module, CONVOLUTIONS):
            return Split(module.groups)
        return self.split or WHOLE

    def reason(self, use: Use) -> str | None:
        """Return in words why this rule selects a parameter, or None."""
        matching = [pattern for pattern in self.patterns if is_match(use.name, pattern)]
        is_selected = (
            (self.names is None or matching)
            and (self.module is None or isinstance(use.owner, self.module))
            and (self.attribute is None or use.attribute == self.attribute)
            and (self.dims is None or use.parameter.dim() in self.dims)
            and (self.where is None or self.where(use.owner))  # last, as it may rely on the other selectors
        )
        if not is_selected:
            return None
        place = ".".join(filter(None, [self.module.__name__ if self.module else "", self.attribute]))
        dims = f"{use.parameter.dim()}-D" if self.dims else ""
        where = getattr(self.where, "__name__", repr(self.where)) if self.where else ""
        reason = " and ".join(filter(None, [*matching[:1], place, dims, where]))
        return f"{reason} ({self.why})" if self.why else reason

    def __repr__(self) -> str:
        arguments = []
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            if value != parameter.default:
                keyword = "" if parameter.name in ("kind", "names") else f"{parameter.name}="
                text = getattr(value, "__name__", repr(value))
                text = f"{value.__module__}.{value.__qualname__}" if parameter.name == "module" else text
                arguments.append(f"{keyword}{text}")
        return f"Rule({', '.join(arguments)})"


Rules = Union[Rule, Iterable["Rules"]]  # noqa: UP007
"""Rules as users give them: rules side by side are one layer, where an earlier one beats a later one.  So
``[[Rule("other", "*.scale")], MODULE_TYPES]`` has two layers; how deep they are nested says nothing."""

EXAMPLE = "[[Rule('other', '*.scale')], MODULE_TYPES]"
"""Rules as they are written in a line of code."""


def layers_of(rules: Rules) -> list[tuple[Rule, ...]]:
    """Return the layers of rules, the first one to be asked first; raise ArgumentError if something is no rule."""
    if isinstance(rules, Rule):
        return [(rules,)]
    if isinstance(rules, str | nn.Module) or not isinstance(rules, Iterable):
        intruder = repr(rules) if isinstance(rules, str) else f"a {type(rules).__name__}"
        raise ArgumentError(f"rules: expected rules in lists, as in rules={EXAMPLE}; found {intruder} among them")
    # A list among rules makes layers of its own, and ends the layer before it.
    layers: list[tuple[Rule, ...]] = []
    follows_rule = False
    for item in rules:
        if isinstance(item, Rule) and follows_rule:
            layers[-1] += (item,)
        else:
            layers += layers_of(item)
        follows_rule = isinstance(item, Rule)
    return layers


@called_like("stacked_qkv(heads=32, kv_heads=8, head_dim=128)")
def stacked_qkv(heads: int, kv_heads: int, head_dim: int) -> Split:
    """Return the split of a projection of all queries, then all keys, then all values."""
    return Split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))


@called_like("grouped_qkv(heads=32, kv_heads=8, head_dim=128)")
def grouped_qkv(heads: int, kv_heads: int, head_dim: int) -> Split:
    """Return the split of a projection with a block of rows for each key head: its queries, its key, its value, as in
    Megatron's ``linear_qkv`` and torchtitan's ``wqkv``.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ArgumentError(f"kv_heads={kv_heads}: expected a divisor of heads={heads}")
    return Split((heads // kv_heads * head_dim, head_dim, head_dim), interleaved=kv_heads)
