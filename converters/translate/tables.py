"""Ready-made tables of names and structure, for direct use or for editing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ...errors import SourceError, TargetError, did_you_mean
from .names import NameRules

READY_MADE: Mapping[str, str] = MappingProxyType(
    {
        # Megatron-LM's fsdp_dtensor stores the gate and the up half of a SwiGLU's fc1 as `_w` and `_v`.  Its groups
        # (`param_to_group_meta`) name the whole.  Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py.
        "megatron-swiglu": """\
[[rule]]
from = ['{p*}.linear_fc1.weight_w', '{p*}.linear_fc1.weight_v']
to = '{p*}.linear_fc1.weight'
shares = [1, 1]
keeps_groups = true

[[rule]]
from = ['{p*}.linear_fc1.weight{n}_w', '{p*}.linear_fc1.weight{n}_v']
to = '{p*}.linear_fc1.weight{n}'
shares = [1, 1]
keeps_groups = true
""",
        # Experts that are one matrix each, numbered over all ranks, as one stacked 3-d tensor.
        "megatron-experts": """\
[[rule]]
from = '{p*}.experts.linear_{f}.weight{e}'
to = '{p*}.experts.linear_{f}.weight'
each = 'e'
stacked = true
""",
        # Experts that are one matrix each, as torch_dist has them: one tensor for all, behind one more `experts`; gate
        # and up are one after the other in it.  Source: `sharded_state_dict` of Megatron's `TEGroupedMLP`.
        "torch-dist-experts": """\
[[rule]]
from = '{p*}.experts.linear_{f}.weight{e}'
to = '{p*}.experts.experts.linear_{f}.weight'
each = 'e'
stacked = true
""",
        # The same with Megatron's `singleton_local_shards`: every expert by its number, and its gate and up apart.
        "torch-dist-singletons": """\
[[rule]]
from = '{p*}.experts.linear_{f}.weight{e}'
to = '{p*}.experts.experts.{e}.linear_{f}.weight'

[[rule]]
from = '{p*}.experts.experts.{e}.linear_fc1.weight'
to = ['{p*}.experts.experts.{e}.linear_fc1.weight_w', '{p*}.experts.experts.{e}.linear_fc1.weight_v']
shares = [1, 1]
keeps_groups = true
""",
        # Hugging Face's names: what is fused there in some models and separate in others.  Joining takes the parts as
        # they are; to split, add `shares`, such as [24, 8, 8].
        "hf-qkv": """\
[[rule]]
from = ['{p*}.q_proj.weight', '{p*}.k_proj.weight', '{p*}.v_proj.weight']
to = '{p*}.qkv_proj.weight'
""",
        "hf-gate-up": """\
[[rule]]
from = ['{p*}.gate_proj.weight', '{p*}.up_proj.weight']
to = '{p*}.gate_up_proj.weight'
shares = [1, 1]
""",
    }
)
"""The text of each table."""

_INVERSE = "inverse:"


def ready_made(name: str) -> NameRules:
    """The ready-made table of this name; the prefix ``inverse:`` gives the opposite direction.

    Raises:
        TargetError: there is no such table.
    """
    if name.removeprefix(_INVERSE) not in READY_MADE:
        known = f"expected one of {', '.join(READY_MADE)}{did_you_mean(name.removeprefix(_INVERSE), [*READY_MADE])}"
        raise TargetError(f"unknown table of rules {name!r}; {known}")
    return load_rules(name)


def load_rules(name: str) -> NameRules:
    """The ready-made table of this name, or the table in a TOML file; ``inverse:`` gives the opposite direction.

    Raises:
        TargetError: there is no such table, or the file is not a table.
    """
    plain = name.removeprefix(_INVERSE)
    try:
        rules = NameRules.from_toml(READY_MADE.get(plain) or Path(plain).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        known = f"{', '.join(READY_MADE)}{did_you_mean(plain, [*READY_MADE])}"
        raise TargetError(f"cannot read rules {plain!r} ({error}), and it is none of {known}") from error
    except SourceError as error:
        raise TargetError(f"{plain}: {error}") from error
    return rules if plain == name else rules.inverse()
