"""Reports of what an optimizer does with which parameters, and warnings of what works but is probably not meant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..names.errors import warn_on_rank
from ..names.vocabulary import ParamGroup
from ..names.wording import folded, listed, table
from .methods.matrix import Methods, Scales, fused_of, is_matrix_method
from .planning.matrices import SHAPES, rows_columns, shapes_of
from .planning.schedule import Schedule
from .step.rank_sets import RankSet, ranks_of

LARGEST_VECTOR = 1 << 22
"""Elements of the largest vector that a model is expected to have; wrappers flatten matrices to larger ones."""

SHOWN = 20
"""Names that a group shows, each for all layers; the others are counted."""

ADAMW_RMS = (0.2, 0.4)
"""The root mean square of AdamW's updates, divided by the rate, measured by Liu et al. 2025 (arXiv 2502.16982)."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A parameter group.

    Attributes:
        name: the user's.
        matrices: how many are orthogonalised.
        elements: of all its parameters, on all ranks.
        names: of its parameters, where the optimizer knows them: by `for_model`, or made of named parameters.
        update_rms: the smallest and largest expected root mean square of an update at the present rate, without decay
            (``1 / √max(m, n)`` for an orthogonal ``m x n`` matrix); None where the method does not say.
    """

    number: int
    name: str
    algorithm: str
    parameters: int
    matrices: int
    elements: int
    update_rms: tuple[float, float] | None
    names: tuple[str, ...] = ()

    @property
    def layers(self) -> str:
        """The names, one for all layers in which they differ by numbers, with how many these are."""
        alike = folded((name, "") for name in self.names)
        return listed([name if count == 1 else f"{name} ({count})" for name, count, _ in alike], SHOWN)


@dataclass(frozen=True, slots=True)
class MuonReport:
    """An optimizer's groups, and this rank's part of a step.

    Attributes:
        owned: the fewest and the most matrices that a rank orthogonalises, and this rank's number; None before the
            first step, which plans.
        sent: bytes that this rank sends to others in a step; None before the first step.
        state: bytes of state on this rank.
        at_owners: the fewest and the most bytes of a rank's state that rests with it as an owner; None where no method
            keeps any.
        offload: where state rests, as `Muon` takes it.
        visiting: the most bytes of state that a step has on the device at once, in any of its parts; None if it rests
            there, or before the first step.
        skipped: steps of this run that were skipped, as gradients were not finite.
        doubts: warnings of what is probably not meant.
    """

    groups: tuple[GroupReport, ...]
    owned: tuple[int, int, int] | None
    sent: int | None
    state: int
    at_owners: tuple[int, int] | None
    offload: str | None
    visiting: int | None
    skipped: int
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        header = ("group", "name", "algorithm", "parameters", "matrices", "elements", "update RMS")
        rows = [
            (
                *(str(group.number), group.name, group.algorithm, str(group.parameters), str(group.matrices)),
                *(
                    f"{group.elements:,}",
                    " to ".join(dict.fromkeys(f"{rms:.2g}" for rms in group.update_rms or ())) or "-",
                ),
            )
            for group in self.groups
        ]
        lines = table([header, *rows])
        lines += [f"group {group.number}: {group.layers}" for group in self.groups if group.names]
        if self.owned is None:
            lines.append("owners are known after the first step")
        else:
            fewest, most, mine = self.owned
            lines.append(
                f"{fewest} to {most} matrices a rank, {mine} on this one, which sends {self.sent:,} bytes a step"
            )
        lines.append(f"{self.state:,} bytes of state on this rank")
        if self.at_owners is not None:
            fewest, most = self.at_owners
            lines[-1] += f"; {fewest:,} to {most:,} bytes a rank rest at the owners of matrices"
        if self.offload is not None:
            lines[-1] += "; it rests in host memory"
        if self.visiting is not None:
            lines[-1] += f", and a step has at most {self.visiting:,} bytes of it on the device"
        if self.skipped:
            lines.append(f"{self.skipped} steps were skipped, as gradients were not finite")
        return "\n".join([*lines, *(f"warning: {doubt}" for doubt in self.doubts)])


def matrices_of_ranks(schedules: Sequence[Schedule]) -> tuple[int, int, int] | None:
    """Return the fewest and the most matrices that a rank owns, and this rank's number; None without schedules."""
    owned = Counter({rank: 0 for schedule in schedules for rank in schedule.ranks})
    owned.update(unit.owner for schedule in schedules for unit in schedule.units)
    return (min(owned.values()), max(owned.values()), owned[_this_rank()]) if owned else None


def bytes_sent(schedules: Sequence[Schedule]) -> int | None:
    """Return the bytes that this rank sends to others in a step; None without schedules."""
    sent = 0
    for schedule in schedules:
        here = schedule.ranks.index(_this_rank()) if _this_rank() in schedule.ranks else 0
        for stage in schedule.stages:
            sent += sum(sum(route.send_counts) - route.send_counts[here] for route in (stage.gather, stage.scatter))
    return sent if schedules else None


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def group_report(
    number: int, group: ParamGroup, scales: Scales, methods: Methods, names: Mapping[Tensor, str]
) -> GroupReport:
    """Return the report of a group of this number, given the names of parameters in a model."""
    params, algorithm, rate = group["params"], group["algorithm"], float(group["lr"])
    matrices: list[tuple[int, int]] = []
    expected: Sequence[float | None] = (1.0,) if algorithm == "lion" else ADAMW_RMS
    if is_matrix_method(algorithm):
        matrices = [rows_columns(shape) for param in params for shape in shapes_of(tuple(param.shape), fused_of(group))]
        rms = {shape: methods[algorithm].rms(*shape, group) for shape in dict.fromkeys(matrices)}
        scaled = {shape: own and own * scales.factor(group, *shape) for shape, own in rms.items()}
        expected = [*scaled.values()] if matrices else expected
    known = [rate * rms for rms in expected if rms is not None]
    elements = sum(param.numel() for param in params)
    bounds = (min(known), max(known)) if known else None
    own = tuple(group.get("param_names") or (names[param] for param in params if param in names))
    return GroupReport(number, str(group.get("name", "")), algorithm, len(params), len(matrices), elements, bounds, own)


def bytes_at_owners(
    groups: Sequence[ParamGroup],
    methods: Methods,
    owners: Mapping[Tensor, Sequence[int]],
    replicas: dist.ProcessGroup | None,
) -> tuple[int, int] | None:
    """Return the fewest and the most bytes that a rank has of state that rests at owners."""
    held: Counter[int] = Counter()
    for group in groups:
        for param in group["params"]:
            if param not in owners:
                continue
            held.update(dict.fromkeys(ranks_of(param, replicas), 0))
            shapes = list(map(rows_columns, shapes_of(tuple(param.shape), fused_of(group))))
            for kept in methods[group["algorithm"]].slots_of(group).values():
                itemsize = (kept.dtype or param.dtype).itemsize if kept.at_owner else 0
                for owner, shape in zip(owners[param], shapes, strict=True):
                    held[owner] += math.prod(SHAPES[kept.shape].of_matrix(*shape)) * itemsize
    return (min(held.values()), max(held.values())) if held else None


def doubts_of(groups: Sequence[ParamGroup], most_elementwise: float) -> Iterator[str]:
    """Yield what is probably not meant, as warnings."""
    counted: Counter[bool] = Counter()
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param.ndim > 1:
                counted[is_matrix_method(group["algorithm"])] += param.numel()
            elif param.numel() > LARGEST_VECTOR:
                yield (
                    f"group {number} has a vector of {param.numel():,} elements: if a wrapper has flattened matrices, "
                    "Muon cannot orthogonalise them; wrap the model in a way that keeps their shapes"
                )
    share = counted[False] / max(1, sum(counted.values()))
    if share > most_elementwise:
        yield (
            f"{share:.0%} of the elements in parameters of two dims or more are stepped by AdamW or Lion: give "
            "the matrices of hidden layers to a group of Muon"
        )


def warn_of_no_gradient(stacklevel: int) -> None:
    """Warn that no parameter has a gradient; ``stacklevel`` is counted from here."""
    warn_on_rank(
        "no parameter of this optimizer has a gradient, so a step changes nothing. If the model was sharded "
        "(fully_shard) or materialised (to_empty) after the optimizer was built, it has other parameters now: "
        "build the optimizer of those",
        RuntimeWarning,
        stacklevel=stacklevel,
    )


def warn_if_unshared(held: RankSet) -> None:
    """Warn if this rank orthogonalises plain tensors by itself while other ranks may hold the same ones."""
    plain = [member for member in held.matrices if not isinstance(member.param, DTensor)]
    world = dist.get_world_size() if dist.is_initialized() else 1
    if plain and world > 1:
        warn_on_rank(
            f"{len(plain)} parameters of matrix groups are plain tensors, so each of {world} ranks orthogonalises all "
            "of them. If ranks hold the same parameters (DDP, without ZeroRedundancyOptimizer), give "
            "replicas=torch.distributed.group.WORLD, or the group of DDP, and they share the work",
            RuntimeWarning,
            stacklevel=2,
        )
