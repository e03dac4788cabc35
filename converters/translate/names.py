"""Names and structure: rules that map tensors of one program to tensors of another.

A rule renames a tensor, splits one *whole* into *parts*, or joins parts into a whole; it applies to a parameter and to
its optimizer state.  A table of rules is TOML, so that it can be printed, edited and passed;
:meth:`NameRules.inverse` is the table of the opposite direction.  Tensors that no rule matches stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...names.errors import SourceError, TargetError, did_you_mean
from ...names.renaming import PLACEHOLDER, as_toml


def _placeholders(pattern: str) -> frozenset[str]:
    return frozenset(name for name, _ in PLACEHOLDER.findall(pattern))


@dataclass(frozen=True, slots=True)
class NameRule:
    """A row of the table.  ``source`` and ``target`` are patterns of parameter names; one side has exactly one pattern.

    ``{x}`` in a pattern matches one part of a dotted name, or some characters of it, ``{x*}`` one or more whole
    parts with their dots.  Both sides have the same placeholders, except ``each``.

    Attributes:
        source, target: one to one renames; one to many splits; many to one joins.
        dim: the dim of the whole along which the parts lie.
        shares: relative sizes of the parts, such as ``(24, 8, 8)``; empty means equal sizes, or those of the parts.
        interleaved: how many times the parts alternate: ``q0 k0 v0 q1 k1 v1 …`` for 2.
        each: the placeholder that numbers the parts from 0; it is only in the pattern of the parts.
        count: the number of numbered parts; needed to split unstacked tensors.
        stacked: the parts lack the dim, such as experts that are the matrices of one 3-d tensor.
        keeps_groups: an optimizer's groups name the whole even if the state is in parts (Megatron's ``_w``, ``_v``).

    Raises:
        SourceError: the row is not a valid rule.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    dim: int = 0
    shares: tuple[int, ...] = ()
    interleaved: int = 1
    each: str | None = None
    count: int | None = None
    stacked: bool = False
    keeps_groups: bool = False

    def __post_init__(self) -> None:
        common_placeholders = {_placeholders(pattern) - {self.each} for pattern in (*self.source, *self.target)}
        numbered_sides = self._is_numbered(self.source) + self._is_numbered(self.target)
        num_parts = max(len(self.source), len(self.target))
        has_misplaced_each = self.each is not None and (numbered_sides != 1 or num_parts != 1)
        has_wrong_shares = bool(self.shares) and (len(self.shares) != num_parts or min(self.shares) < 1)
        is_negative = self.dim < 0 or self.interleaved < 1 or (self.count or 1) < 1
        for is_wrong, expectation in (
            (min(len(self.source), len(self.target)) != 1, "one side must have exactly one pattern"),
            (len(common_placeholders) != 1, "every pattern must have the same placeholders"),
            (has_misplaced_each, "`each` must be in the parts' one pattern"),
            (self.stacked and self.each is None, "`stacked` needs `each`"),
            (has_wrong_shares, "one share >= 1 for each part"),
            (is_negative, "dim >= 0, interleaved and count >= 1"),
        ):
            if is_wrong:
                raise SourceError(f"rule {self}: {expectation}")

    def _is_numbered(self, side: tuple[str, ...]) -> bool:
        return self.each in frozenset[str | None]().union(*map(_placeholders, side))

    @property
    def splits(self) -> bool:
        """Return whether the parts are the target; also true of a renaming."""
        return self._is_numbered(self.target) or (len(self.source) == 1 and not self._is_numbered(self.source))

    def inverse(self) -> NameRule:
        return replace(self, source=self.target, target=self.source)

    def __str__(self) -> str:
        return f"{' + '.join(self.source)} -> {' + '.join(self.target)}"


@dataclass(frozen=True, slots=True)
class NameRules:
    """A table: its rules are applied in order, each to the result of the earlier ones."""

    rules: tuple[NameRule, ...] = ()

    @classmethod
    def from_toml(cls, text: str) -> NameRules:
        """Read a table: ``[[rule]]`` with ``from``, ``to`` and the attributes of :class:`NameRule`.

        Raises:
            SourceError: it is not TOML, has an unknown key, or a row is not a rule.
        """
        import tomllib  # imported here because few commands read a table

        try:
            data = tomllib.loads(text)
            if data.keys() != {"rule"}:
                raise SourceError(f"rules: expected [[rule]] tables only, found {sorted(data)}")
            return cls(tuple(map(_rule, data["rule"])))
        except (tomllib.TOMLDecodeError, TypeError, KeyError, AttributeError) as error:
            raise SourceError(f"rules: {error}") from error

    def to_toml(self) -> str:
        """Return the table as text that :meth:`from_toml` reads, without attributes that have the default."""
        rows = []
        for rule in self.rules:
            sides = {"from": rule.source, "to": rule.target}
            row: dict[str, object] = {key: side[0] if len(side) == 1 else side for key, side in sides.items()}
            options = ((field, getattr(rule, field.name)) for field in fields(rule)[2:])
            rows.append(row | {field.name: value for field, value in options if value != field.default})
        return f"{as_toml(rows)}\n"

    def inverse(self) -> NameRules:
        return NameRules(tuple(rule.inverse() for rule in reversed(self.rules)))

    def __add__(self, other: NameRules) -> NameRules:
        return NameRules((*self.rules, *other.rules))


_KINDS = MappingProxyType(
    {"dim": int, "shares": list, "interleaved": int, "each": str, "count": int, "stacked": bool, "keeps_groups": bool}
)
"""The types of a row's values in TOML, beside the patterns ``from`` and ``to``."""


def _rule(row: Mapping[str, Any]) -> NameRule:
    """Return a rule from an entry of a table."""
    keys = {"from", "to", *_KINDS}
    if not row.keys() <= keys:
        raise SourceError(f"rules: unknown keys {sorted(row.keys() - keys)}; expected some of {sorted(keys)}")
    sides = [side if isinstance(side, list) else [side] for side in (row["from"], row["to"])]
    options = {key: row[key] for key in _KINDS if key in row}
    values = [(_KINDS[key], value) for key, value in options.items()]
    values += [(str, pattern) for pattern in chain(*sides)]
    if isinstance(shares := options.get("shares", []), list):
        values += [(int, share) for share in shares]
    for kind, value in values:
        if type(value) is not kind:  # so that a bool is not taken for an int
            raise SourceError(f"rules: expected {kind.__name__}, found {value!r}")
    source, target = map(tuple, sides)
    return NameRule(source, target, **{**options, "shares": tuple(shares)})


# Ready-made tables.


def _written(text: str, **attributes: Any) -> NameRule:
    source, target = (tuple(side.split(" + ")) for side in text.split(" -> "))
    return NameRule(source, target, **attributes)


_EXPERTS = "{p*}.experts.experts.{e}.linear_fc1.weight"
_TABLES: Mapping[str, tuple[NameRule, ...]] = {
    # Megatron-LM's fsdp_dtensor stores the gate and the up half of a SwiGLU's fc1 as `_w` and `_v`.  Its groups
    # (`param_to_group_meta`) name the whole.  Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py.
    "megatron-swiglu": tuple(
        _written(f"{fc1}_w + {fc1}_v -> {fc1}", shares=(1, 1), keeps_groups=True)
        for fc1 in ("{p*}.linear_fc1.weight", "{p*}.linear_fc1.weight{n}")
    ),
    # Experts that are one matrix each, numbered over all ranks, as one stacked 3-d tensor.
    "megatron-experts": (
        _written("{p*}.experts.linear_{f}.weight{e} -> {p*}.experts.linear_{f}.weight", each="e", stacked=True),
    ),
    # Experts that are one matrix each, as torch_dist has them: one tensor for all, below one more `experts`; gate
    # and up are one after the other in it.  Source: `sharded_state_dict` of Megatron's `TEGroupedMLP`.
    "torch-dist-experts": (
        _written("{p*}.experts.linear_{f}.weight{e} -> {p*}.experts.experts.linear_{f}.weight", each="e", stacked=True),
    ),
    # The same with Megatron's `singleton_local_shards`: every expert by its number, and its gate and up apart.
    "torch-dist-singletons": (
        _written("{p*}.experts.linear_{f}.weight{e} -> {p*}.experts.experts.{e}.linear_{f}.weight"),
        _written(f"{_EXPERTS} -> {_EXPERTS}_w + {_EXPERTS}_v", shares=(1, 1), keeps_groups=True),
    ),
    # Megatron-LM's fsdp_dtensor stores the fused down-projection of MLA, and the norm in it, as runs without fusion
    # have them.  Groups name the whole.  Source: `handle_mla_down_proj_in_state_dict` (#6271).  To split, add
    # `shares`, such as [1536, 576]: q_lora_rank, and kv_lora_rank + qk_pos_emb_head_dim.
    "megatron-mla": (
        _written(
            "{p*}.linear_q_down_proj.weight + {p*}.linear_kv_down_proj.weight -> {p*}.linear_qkv_down_proj.weight",
            keeps_groups=True,
        ),
        _written("{p*}.input_layernorm.weight -> {p*}.self_attention.linear_qkv_down_proj.layer_norm_weight"),
    ),
    # And layers of multi-token prediction under the name that they had before.  Source: `handle_mtp_in_state_dict`.
    "megatron-mtp": (_written("mtp.layers.{n}.transformer_layer.{p*} -> mtp.layers.{n}.mtp_model_layer.{p*}"),),
    # Hugging Face's names: projections that are fused in some models and separate in others.  Joining takes the
    # parts as they are; to split, add `shares`, such as [24, 8, 8].
    "hf-qkv": (_written("{p*}.q_proj.weight + {p*}.k_proj.weight + {p*}.v_proj.weight -> {p*}.qkv_proj.weight"),),
    "hf-gate-up": (_written("{p*}.gate_proj.weight + {p*}.up_proj.weight -> {p*}.gate_up_proj.weight", shares=(1, 1)),),
}
READY_MADE: Mapping[str, NameRules] = MappingProxyType({name: NameRules(rules) for name, rules in _TABLES.items()})

_INVERSE = "inverse:"


def load_rules(name: str) -> NameRules:
    """Return the ready-made table of this name, or the table in a TOML file; ``inverse:`` gives the opposite direction.

    Raises:
        TargetError: there is no such table, or the file is not a table.
    """
    plain = name.removeprefix(_INVERSE)
    try:
        rules = READY_MADE.get(plain) or NameRules.from_toml(Path(plain).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        near = f"{', '.join(READY_MADE)}{did_you_mean(plain, [*READY_MADE])}"
        raise TargetError(f"cannot read rules {plain!r} ({error}), and it is none of {near}") from error
    except SourceError as error:
        raise TargetError(f"{plain}: {error}") from error
    return rules if plain == name else rules.inverse()
