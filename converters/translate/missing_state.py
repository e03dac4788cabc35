"""Parameters that groups list and that have no state, because they were frozen or never had a gradient.

Programs that make state at a parameter's first update save none for these.  One that makes all state at once refuses
such a checkpoint, so a conversion says which they are, and writes their state as zeros if it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from ...box import Box, Index
from ...errors import SourceError
from ...layout import Fragment, Place, TensorLayout
from ...record import StateRecord, no_chunks
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
        beside = [param.source_method for param in others]  # with masters, if they have some
        return next((method for method in (*beside, *context.dialect.methods) if method.name == named), None)
    methods = {param.source_method.name: param.source_method for param in others}
    return next(iter(methods.values())) if len(methods) == 1 else None


def zero_state(
    context: Context, by_slot: SlotTensors, stateless: Mapping[str, Param], findings: Findings
) -> Iterator[OutputTensor]:
    """The first state of these parameters: zeros, and masters that are the weights; ``findings`` hear which they are.

    Raises:
        SourceError: the shape of a parameter is not known, or not how its state begins.
    """
    weights = by_slot.get(None, {})
    for name, param in stateless.items():
        slots = {common: slot for common, slot in param.target_method.slots.items() if common != "step"}
        unknown = [slot for common, slot in slots.items() if common not in _SHAPES and common != _MASTER]
        if name not in weights or unknown:
            why = f"not known how {', '.join(unknown)} begins" if name in weights else "no weight tells the shape"
            raise SourceError(
                f"parameter {name!r} has no state, and --fill-missing cannot write it: {why}; leave out the flag, and "
                "let the parameter start with fresh=[…] of muonckpt.load, or leave the slot out with --drop"
            )
        weight = weights[name]
        none = no_chunks(len(weight.shape))
        for common, slot in slots.items():
            path = context.state_path(name, slot, param.chain)
            record = StateRecord(key_of(path), path, weight.shape, "float32", none, name=name, slot=slot)
            if common == _MASTER:
                held = None if weight.dtype == "float32" else weight.dtype
                yield context.chunks.output(record, weight.layout, held=held)
                continue
            shape = _SHAPES[common](weight.shape)
            dtype = next((t.dtype for t in by_slot.get(param.source_method.slots[common], {}).values()), weight.dtype)
            dtype = (common in AS_THE_PARAMETER and context.overrides.state_dtype) or dtype
            convention = _convention(context) if common == "momentum" else None
            box = Box.of(shape)
            fragments = (Fragment(box, Place(_ZERO, 0, (0,) * box.ndim)),) if box.numel else ()
            record = replace(record, shape=shape, dtype=dtype, convention=convention)
            yield OutputTensor(record, TensorLayout.of(shape, fragments), in_memory={_ZERO: bytes(16)})
    if stateless:
        reason = "written as zeros; masters, where there are, as the weights"
        findings.check(Action.SET, "state that was missing", *sorted(stateless), reason=reason)


_ZERO, _MASTER = "zero", "master"

_SHAPES: Mapping[str, Callable[[Index], Index]] = MappingProxyType(
    {**dict.fromkeys(AS_THE_PARAMETER, lambda shape: shape), "dion_rows": lambda shape: (*shape[:-1], 1)}
)
"""The shapes of slots that begin as zeros, by common names, from that of the parameter.  Ours of NorMuon is not among
them, because it depends on options of the group."""


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
