"""A proof that ours does what another program's optimizer does: both step copies of the same parameters.

The other optimizer runs its own code, on copies of one parameter of each kind, with its own options.  In float32 its
casts to 16 bits are taken out, and compiled functions run as they are written.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ...names.vocabulary import EXP_AVG, MOMENTUM, Convention
from ...names.wording import fields_of
from ...optimizer import Muon
from ...optimizer.newton_schulz.recipe import flops
from .programs import known_optimizer
from .replaced import OurGroup, Replacement
from .treatments import Treatment

STEPS = 2

LARGEST = 1 << 17
"""Elements of the largest copy: of larger parameters a corner with the same ratio of rows to columns is stepped."""

MOST_FLOPS = 2e11
"""Of Newton-Schulz in all steps of a proof: some seconds on a few cores.  The cheapest kinds come first."""

NEAR = 1e-3
"""The relative difference of updates in float32 above which two optimizers are not the same: rounding makes 1e-5."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near two optimizers are, in one arithmetic.

    Attributes:
        update, momentum: the largest difference of a parameter's update, or of its momentum in one convention, as a
            part of the other's, over all steps.
        worst: the parameter with the largest difference of the update.
    """

    update: float
    momentum: float
    worst: str

    @property
    def digits(self) -> str:
        return _digits(self.update)


def _digits(difference: float) -> str:
    if difference == 0:
        return "bit for bit"
    return f"equal to {math.floor(-math.log10(difference))} digits" if difference <= 0.1 else "not equal"


@dataclass(frozen=True, slots=True)
class Proof:
    """A comparison of both optimizers' steps.

    Attributes:
        steps: taken by both, with the same gradients.
        parameters: that were stepped, one of each kind.
        exact: in float32 throughout; ``as_run`` with Newton-Schulz in the dtype that both have by themselves.
        corners: those of which a corner was stepped, as the whole would take too long.
        left_out: parameters of kinds that are too large to be stepped here, and have no such corner.
        failure: why the other optimizer cannot be stepped here; the rest is then None.
    """

    steps: int
    parameters: tuple[str, ...]
    exact: Agreement | None
    as_run: Agreement | None
    corners: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    failure: str = ""

    @property
    def equal(self) -> bool:
        """Return whether the optimizers do the same, up to rounding."""
        return self.exact is not None and self.exact.update <= NEAR and self.exact.momentum <= NEAR

    def to_json(self) -> dict[str, Any]:
        return {**fields_of(self), "equal": self.equal}


def prove(optimizers: Sequence[Optimizer], replaced: Replacement) -> Proof:
    """Step both optimizers on copies of one parameter of each kind, twice, with the same gradients."""
    chosen, left_out = _chosen(replaced.groups)
    names = tuple(one.name for one in chosen)
    corners = tuple(one.name for one, shape in chosen.items() if shape != one.shape)
    if not chosen:
        return Proof(0, (), None, None, (), left_out, "every kind of parameter is too large")
    with _alone():
        try:
            exact = _compared(optimizers, replaced.groups, chosen, in_float32=True)
            as_run = _compared(optimizers, replaced.groups, chosen, in_float32=False)
        except Exception as error:  # of their code
            return Proof(
                0, names, None, None, corners, left_out, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
    return Proof(STEPS, names, exact, as_run, corners, left_out)


def _chosen(groups: Sequence[OurGroup]) -> tuple[dict[Treatment, tuple[int, ...]], tuple[str, ...]]:
    """Return one parameter of each shape in each group, with the shape of its copy, and the names of kinds left out."""
    kinds: dict[tuple[int, tuple[int, ...]], Treatment] = {}
    for number, group in enumerate(groups):
        for one in group.members:
            kinds.setdefault((number, one.shape), one)
    costs: dict[Treatment, tuple[float, tuple[int, ...]]] = {}
    for (number, _), one in kinds.items():
        shape = _corner(one, groups[number])
        steps = int(groups[number].options.get("ns_steps", 0))
        each = flops(shape[-2], shape[-1], steps) * math.prod(shape[:-2]) if one.by_muon else 1e3 * math.prod(shape)
        costs[one] = 2 * 2 * STEPS * each, shape
    spent, chosen = 0.0, dict[Treatment, tuple[int, ...]]()
    for one, (cost, shape) in sorted(costs.items(), key=lambda item: item[1]):
        spent += cost
        if spent <= MOST_FLOPS:
            chosen[one] = shape
    return chosen, tuple(one.name for one in costs if one not in chosen)


def _corner(one: Treatment, group: OurGroup) -> tuple[int, ...]:
    """Return the shape of a copy: the parameter's, or where that is large a corner's on which the update looks alike.

    Fused matrices have their sizes in options, and XTuner keeps a factor of the shape as state.
    """
    shape = [*one.shape]
    if not one.by_muon:
        while math.prod(shape) > LARGEST:
            shape = [-(-size // 2) for size in shape]
        return tuple(shape)
    if any(group.options.get(option) for option in ("pieces", "columns")) or group.method.derived:
        return one.shape
    if math.prod(shape) > LARGEST:
        shape[:-2] = [min(size, 2) for size in shape[:-2]]
    for factor in (5, 3, 2, 2, 2, 2, 2, 2, 2, 2):
        if math.prod(shape) > LARGEST and not shape[-2] % factor and not shape[-1] % factor:
            shape[-2:] = [size // factor for size in shape[-2:]]
    return tuple(shape)


def _compared(
    optimizers: Sequence[Optimizer],
    groups: Sequence[OurGroup],
    chosen: Mapping[Treatment, tuple[int, ...]],
    in_float32: bool,
) -> Agreement:
    theirs, mine = ({one.parameter: nn.Parameter(start) for one, start in _starts(chosen)} for _ in range(2))
    twins = [_twin(optimizer, theirs) for optimizer in optimizers]
    arithmetic = {"ns_dtype": "float32"} if in_float32 else {}
    ours = Muon(
        [
            {
                **group.options,
                **(arithmetic if "ns_dtype" in group.options else {}),
                "params": [mine[one.parameter] for one in group.members if one.parameter in mine],
            }
            for group in groups
        ]
    )
    worst = Agreement(0.0, 0.0, next(iter(chosen)).name)
    for step in range(STEPS):
        before = [{one: at[one.parameter].detach().clone() for one in chosen} for at in (theirs, mine)]
        for one, gradient in zip(chosen, _random(chosen, 1000 + step), strict=True):
            theirs[one.parameter].grad, mine[one.parameter].grad = gradient.clone(), gradient.clone()
        with torch.compiler.set_stance("force_eager"), _Float32() if in_float32 else nullcontext():  # type: ignore[no-untyped-call]
            for twin in twins:
                twin.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            ours.step()
        for group in groups:
            for one in group.members:
                if one.parameter not in theirs:
                    continue
                their, own = theirs[one.parameter], mine[one.parameter]
                update = _apart(own.detach() - before[1][one], their.detach() - before[0][one])
                slots = twins[group.source[0]].state[their], ours.state[own]
                momentum = _momenta_apart(group, *slots)
                if update > worst.update:
                    worst = Agreement(update, worst.momentum, one.name)
                worst = Agreement(worst.update, max(worst.momentum, momentum), worst.worst)
    return worst


def _momenta_apart(group: OurGroup, theirs: Mapping[str, Any], ours: Mapping[str, Tensor]) -> float:
    """Return the difference of momenta, or of first moments, as averages."""
    common = "momentum" if group.momentum is not None else "first"
    slot = group.method.slots.get(common)
    if slot is None or not isinstance(theirs.get(slot), Tensor):
        return 0.0
    their = theirs[slot].double()
    if group.momentum is not None and group.known.dialect.convention is Convention.SUM:
        their = their * (1 - group.momentum)
    return _apart(ours[MOMENTUM if group.momentum is not None else EXP_AVG], their)


def _apart(mine: Tensor, theirs: Tensor) -> float:
    difference, size = (float(t.double().norm()) for t in (mine.double() - theirs.double(), theirs))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (0.0 if not difference else math.inf)


def _starts(chosen: Mapping[Treatment, tuple[int, ...]]) -> Iterator[tuple[Treatment, Tensor]]:
    """Yield each parameter with its values in float32, or with random ones where it has none."""
    for one, values in zip(chosen, _random(chosen, 0), strict=True):
        corner = one.parameter.detach()[tuple(slice(size) for size in chosen[one])]
        yield one, values.mul_(0.02) if corner.is_meta else corner.to("cpu", torch.float32, copy=True).contiguous()


def _random(chosen: Mapping[Treatment, tuple[int, ...]], seed: int) -> Iterator[Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    for shape in chosen.values():
        yield torch.randn(shape, generator=generator)


def _twin(optimizer: Optimizer, copies: Mapping[Tensor, Tensor]) -> Optimizer:
    """Return an optimizer of the same class and options for copies of some of its parameters, as it is before a step.

    `copy.deepcopy` would leave out what an optimizer keeps beside its groups and state.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__ = {name: _following(value, copies) for name, value in vars(optimizer).items()}
    twin.__dict__.pop("step", None)  # a scheduler's, bound to the other
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.state = defaultdict(dict)
    for parameter, copied in copies.items():
        kept = {
            name: value for name, value in optimizer.state.get(parameter, {}).items() if not isinstance(value, Tensor)
        }
        if kept:
            twin.state[copied] = kept
    known = known_optimizer(optimizer)
    methods = known.dialect.methods if known is not None else ()
    counters = {method.options["step"] for method in methods if "step" in method.options}
    twin.param_groups = [
        {
            **group,
            **dict.fromkeys(counters & group.keys(), 0),
            "params": [copies[parameter] for parameter in group["params"] if parameter in copies],
        }
        for group in optimizer.param_groups
    ]
    return twin


def _following(value: Any, copies: Mapping[Tensor, Tensor]) -> Any:
    """Return an attribute with copies in place of parameters that are keys."""
    if isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
        return {copies[key]: own for key, own in value.items() if isinstance(key, Tensor) and key in copies}
    return value


class _Float32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float32 what is cast to 16 bits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.bfloat16, torch.float16):
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@contextmanager
def _alone() -> Iterator[None]:
    """Give optimizers that ask for their rank a process group of this process alone."""
    if dist.is_initialized() or not dist.is_available():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
