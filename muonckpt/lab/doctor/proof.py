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
from ...optimizer.planning.matrices import sides_of
from .programs import known_optimizer
from .replaced import OurGroup, Replacement
from .treatments import Treatment

STEPS = 2

MAX_ELEMENTS = 1 << 17
"""Elements of the largest copy: of larger parameters a corner with the same ratio of rows to columns is stepped."""

MAX_FLOPS = 2e11
"""The FLOPs of Newton-Schulz in all steps of a proof: some seconds on a few cores.  The cheapest kinds come first."""

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
        """Say how near the updates are."""
        if self.update == 0:
            return "bit for bit"
        return f"equal to {math.floor(-math.log10(self.update))} digits" if self.update <= 0.1 else "not equal"


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


Shapes = Mapping[Treatment, tuple[int, ...]]
"""The shapes of copies, by the parameters that are copied."""


def prove(optimizers: Sequence[Optimizer], replacement: Replacement) -> Proof:
    """Step both optimizers on copies of one parameter of each kind, twice, with the same gradients."""
    shapes, left_out = _select(replacement.groups)
    names = tuple(treatment.name for treatment in shapes)
    corners = tuple(treatment.name for treatment, shape in shapes.items() if shape != treatment.shape)
    if not shapes:
        return Proof(0, (), None, None, (), left_out, "every kind of parameter is too large")
    with _process_group_of_one():
        try:
            exact = _compare(optimizers, replacement.groups, shapes, in_float32=True)
            as_run = _compare(optimizers, replacement.groups, shapes, in_float32=False)
        except Exception as error:  # in the code of the other program
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Proof(0, names, None, None, corners, left_out, failure)
    return Proof(STEPS, names, exact, as_run, corners, left_out)


def _select(groups: Sequence[OurGroup]) -> tuple[Shapes, tuple[str, ...]]:
    """Choose one parameter of each shape in each group, with the shape of its copy; also return the names left out."""
    representatives: dict[tuple[int, tuple[int, ...]], Treatment] = {}
    for group_index, group in enumerate(groups):
        for member in group.members:
            representatives.setdefault((group_index, member.shape), member)
    # Both optimizers step in both arithmetics.
    costs: dict[Treatment, tuple[float, tuple[int, ...]]] = {}
    for (group_index, _), treatment in representatives.items():
        shape = _copy_shape(treatment, groups[group_index])
        if treatment.by_muon:
            iterations = int(groups[group_index].options.get("ns_steps", 0))
            step_flops = sum(flops(*matrix, iterations) for matrix in sides_of(shape, treatment.fused))
        else:
            step_flops = 1000 * math.prod(shape)
        costs[treatment] = 2 * 2 * STEPS * step_flops, shape
    # The cheapest come first, so that one large kind does not keep all others from being proved.
    total, shapes = 0.0, dict[Treatment, tuple[int, ...]]()
    for treatment, (cost, shape) in sorted(costs.items(), key=lambda item: item[1]):
        total += cost
        if total <= MAX_FLOPS:
            shapes[treatment] = shape
    return shapes, tuple(treatment.name for treatment in costs if treatment not in shapes)


def _copy_shape(treatment: Treatment, group: OurGroup) -> tuple[int, ...]:
    """Return the shape of a copy: the parameter's, or that of a corner on which the update is computed in the same way.

    Fused matrices have their sizes in options, and XTuner keeps a factor of the shape as state.
    """
    shape = [*treatment.shape]
    if not treatment.by_muon:
        while math.prod(shape) > MAX_ELEMENTS:
            shape = [-(-size // 2) for size in shape]
        return tuple(shape)
    if any(group.options.get(option) for option in ("pieces", "columns")) or group.method.derived:
        return treatment.shape
    # A few matrices of a stack, then factors that rows and columns share: the ratio sets the rate.  Those of a kernel
    # are its channels.
    row_dim = treatment.fused.row_dim(treatment.shape)
    if math.prod(shape) > MAX_ELEMENTS:
        shape[:row_dim] = [min(size, 2) for size in shape[:row_dim]]
    sides = slice(row_dim, row_dim + 2)
    for factor in (5, 3, 2, 2, 2, 2, 2, 2, 2, 2):
        if math.prod(shape) > MAX_ELEMENTS and not any(size % factor for size in shape[sides]):
            shape[sides] = [size // factor for size in shape[sides]]
    return tuple(shape)


def _compare(
    optimizers: Sequence[Optimizer], groups: Sequence[OurGroup], shapes: Shapes, in_float32: bool
) -> Agreement:
    """Step twins of these optimizers and ours from the same values, and return the largest differences."""
    values = {treatment.parameter: start for treatment, start in _initial_values(shapes)}
    foreign_copies = {parameter: nn.Parameter(start.clone()) for parameter, start in values.items()}
    our_copies = {parameter: nn.Parameter(start) for parameter, start in values.items()}
    twins = [_twin(optimizer, foreign_copies) for optimizer in optimizers]
    our_groups: list[dict[str, Any]] = []
    for group in groups:
        precision = {"ns_dtype": "float32"} if in_float32 and "ns_dtype" in group.options else {}
        copies = [our_copies[member.parameter] for member in group.members if member.parameter in our_copies]
        our_groups.append({**group.options, **precision, "params": copies})
    muon = Muon(our_groups)

    update, momentum, worst = 0.0, 0.0, next(iter(shapes)).name
    for step in range(STEPS):
        # Updates are compared, not weights: in these they would hide behind the values.
        foreign_starts = {parameter: copy.detach().clone() for parameter, copy in foreign_copies.items()}
        our_starts = {parameter: copy.detach().clone() for parameter, copy in our_copies.items()}
        for treatment, gradient in zip(shapes, _random(shapes, 1000 + step), strict=True):
            foreign_copies[treatment.parameter].grad = gradient.clone()
            our_copies[treatment.parameter].grad = gradient.clone()
        with torch.compiler.set_stance("force_eager"), _Float32() if in_float32 else nullcontext():  # type: ignore[no-untyped-call]
            for twin in twins:
                twin.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            muon.step()
        for group in groups:
            for member in group.members:
                parameter = member.parameter
                if parameter not in values:
                    continue
                foreign_copy, our_copy = foreign_copies[parameter], our_copies[parameter]
                difference = _relative_difference(
                    our_copy.detach() - our_starts[parameter], foreign_copy.detach() - foreign_starts[parameter]
                )
                if difference > update:
                    update, worst = difference, member.name
                foreign_state = twins[group.source[0]].state[foreign_copy]
                momentum = max(momentum, _momentum_difference(group, foreign_state, muon.state[our_copy]))
    return Agreement(update, momentum, worst)


def _momentum_difference(group: OurGroup, foreign_state: Mapping[str, Any], our_state: Mapping[str, Tensor]) -> float:
    """Return the difference of momenta, or of first moments, as averages."""
    slot = group.method.slots.get("first" if group.momentum is None else "momentum")
    if slot is None or not isinstance(foreign_state.get(slot), Tensor):
        return 0.0
    average = foreign_state[slot].double()
    if group.momentum is not None and group.program.dialect.convention is Convention.SUM:
        average = average * (1 - group.momentum)
    return _relative_difference(our_state[EXP_AVG if group.momentum is None else MOMENTUM], average)


def _relative_difference(tensor: Tensor, reference: Tensor) -> float:
    difference, size = (float(t.double().norm()) for t in (tensor.double() - reference.double(), reference))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (0.0 if not difference else math.inf)


def _initial_values(shapes: Shapes) -> Iterator[tuple[Treatment, Tensor]]:
    """Yield each parameter with its values in float32, or with random ones where it has none."""
    for treatment, noise in zip(shapes, _random(shapes, 0), strict=True):
        corner = treatment.parameter.detach()[tuple(slice(size) for size in shapes[treatment])]
        if corner.is_meta:
            yield treatment, noise.mul_(0.02)
        else:
            yield treatment, corner.to("cpu", torch.float32, copy=True).contiguous()


def _random(shapes: Shapes, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    for shape in shapes.values():
        yield torch.randn(shape, generator=generator)


def _twin(optimizer: Optimizer, copies: Mapping[Tensor, Tensor]) -> Optimizer:
    """Return an optimizer of the same class and options for copies of some of its parameters, as it is before a step.

    `copy.deepcopy` would leave out what an optimizer keeps beside its groups and state.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # Attributes by parameter follow to the copies.
        if isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
            value = {copies[key]: entry for key, entry in value.items() if isinstance(key, Tensor) and key in copies}
        twin.__dict__[name] = value
    twin.__dict__.pop("step", None)  # a scheduler's, bound to the other
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    # Flags in the state tell methods; tensors and counters begin anew.
    twin.state = defaultdict(dict)
    for parameter, copied in copies.items():
        state = optimizer.state.get(parameter, {})
        flags = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        if flags:
            twin.state[copied] = flags
    program = known_optimizer(optimizer)
    methods = program.dialect.methods if program is not None else ()
    counters = {method.options["step"] for method in methods if "step" in method.options}
    twin.param_groups = []
    for group in optimizer.param_groups:
        members = [copies[parameter] for parameter in group["params"] if parameter in copies]
        zeros = dict.fromkeys(counters & group.keys(), 0)
        twin.param_groups.append({**group, **zeros, "params": members})
    return twin


class _Float32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float32 what is cast to 16 bits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.bfloat16, torch.float16):
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@contextmanager
def _process_group_of_one() -> Iterator[None]:
    """Give optimizers that ask for their rank a process group of this process alone."""
    if dist.is_initialized() or not dist.is_available():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
