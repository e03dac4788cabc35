"""Parameters that groups list and that have no state, because they were frozen or never had a gradient.

Programs that make state at a parameter's first update save none for these.  One that makes all state at once refuses
such a checkpoint, so a conversion says which they are, and writes their state as zeros if it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...box import Box
from ...errors import SourceError
from ...layout import Fragment, Place, TensorLayout
from ...record import StateRecord
from ...vocabulary import Convention
from ..engine.checklist import Action, Findings
from ..engine.outputs import OutputTensor
from .context import Context
from .dialect import StoredMethod, key_of
from .group_options import SourceGroup
from .source_parameters import AS_THE_PARAMETER, Param, SlotTensors


def stateless_params(
    context: Context, groups: tuple[SourceGroup, ...], names: list[tuple[str, ...]], params: Mapping[str, Param]
) -> dict[str, Param]:
    """The parameters of groups that have no state, by name, where the group tells their method.

    It does by an option, or by the method of the others in it if that is one.
    """
    found: dict[str, Param] = {}
    for group, members in zip(groups, names, strict=True):
        with_state = [params[name] for name in members if name in params]
        for name in members:
            method = None if name in params else _method(context, group, with_state)
            if method is not None:
                target = method if context.same_dialect else context.target.writes(method)
                own = group.chain if context.same_dialect else {}
                chain = with_state[0].chain if with_state else own
                found[name] = Param(name, (name,), method, target, group, 0, chain, stateless=True)
    return found


def _method(context: Context, group: SourceGroup, others: list[Param]) -> StoredMethod | None:
    option = context.dialect.method_option or ""
    if option in group.items:
        named = context.values.read(group.items[option])
        return next((method for method in context.dialect.methods if method.name == named), None)
    methods = {param.source_method.name: param.source_method for param in others}
    return next(iter(methods.values())) if len(methods) == 1 else None


def zero_state(
    context: Context, by_slot: SlotTensors, stateless: Mapping[str, Param], findings: Findings
) -> Iterator[OutputTensor]:
    """The state of these parameters as zeros; without it, ``findings`` hear which they are.

    Raises:
        SourceError: the shape of a parameter is not known, or not how its state begins.
    """
    weights = by_slot.get(None, {})
    for name, param in stateless.items():
        slots = {common: slot for common, slot in param.target_method.slots.items() if common != "step"}
        if name not in weights or slots.keys() - AS_THE_PARAMETER:
            why = f"not known how {', '.join(slots.values())} begin" if name in weights else "no weight tells the shape"
            raise SourceError(f"parameter {name!r} has no state, and it cannot be filled with zeros: {why}")
        weight = weights[name]
        for common, slot in slots.items():
            dtype = next((t.dtype for t in by_slot.get(param.source_method.slots[common], {}).values()), weight.dtype)
            dtype = context.overrides.state_dtype or dtype
            path = context.state_path(name, slot, param.chain)
            convention = _convention(context) if common == "momentum" else None
            record = StateRecord(
                key_of(path), path, weight.shape, dtype, (), name=name, slot=slot, convention=convention
            )
            box = Box.of(weight.shape)
            fragments = (Fragment(box, Place(_ZERO, 0, (0,) * box.ndim)),) if box.numel else ()
            yield OutputTensor(record, TensorLayout(weight.shape, fragments), in_memory={_ZERO: bytes(16)})
    if stateless:
        findings.check(Action.SET, "state that was missing", *sorted(stateless), reason="written as zeros")


_ZERO = "zero"


def _convention(context: Context) -> Convention | None:
    """Zeros are the same in any convention, so they are in that of the momentum beside them."""
    return context.target.convention or context.overrides.target or context.dialect.convention


def report_missing(stateless: Mapping[str, Param], findings: Findings) -> None:
    """Say which parameters have no state."""
    if stateless:
        reason = (
            "frozen, or never had a gradient; where the target makes all state at once, --fill-missing writes zeros, "
            "and fresh=[…] of muonckpt.load lets them start anew"
        )
        findings.check(Action.LEFT, "no state in the source", *sorted(stateless), reason=reason)
