"""Reports of the parameters that an optimizer steps, and warnings of settings that work but are probably not meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..names.errors import warn_on_rank
from ..names.vocabulary import ParamGroup
from ..names.wording import listed, merged_names, table
from .methods.matrix import Methods, Scales, fused_of, is_matrix_method
from .planning.matrices import Fused, sides_of
from .planning.schedule import Schedule
from .step.agreement import this_rank
from .step.rank_sets import RankSet

LARGEST_VECTOR = 1 << 22
"""Elements of the largest vector that a model is expected to have; wrappers flatten matrices to larger ones."""

SHOWN_NAMES = 20
"""Names that a group shows, each for all layers; others are counted."""

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
        fused: the matrices in each parameter, in words; empty if it is one.
        weight_decay: as the group has it.
        update_rms: the smallest and largest expected root mean square of an update at the present rate, without decay
            (``1 / √max(m, n)`` for an orthogonal ``m x n`` matrix); None where the method does not say.
    """

    number: int
    name: str
    algorithm: str
    parameters: int
    matrices: int
    elements: int
    weight_decay: float
    update_rms: tuple[float, float] | None
    names: tuple[str, ...] = ()
    fused: str = ""

    @property
    def layers(self) -> str:
        """The names, one for all layers in which they differ by numbers, with how many these are."""
        return listed(merged_names(self.names), SHOWN_NAMES)


@dataclass(frozen=True, slots=True)
class MuonReport:
    """An optimizer's groups, and this rank's part of a step.

    Attributes:
        matrices_by_rank: the fewest and the most matrices that a rank orthogonalises, and this rank's number; None
            before the first step, which plans.
        sent_bytes: bytes that this rank sends to others in a step; None before the first step.
        state_bytes: bytes of state on this rank.
        doubts: warnings of settings that are probably not meant.
    """

    groups: tuple[GroupReport, ...]
    matrices_by_rank: tuple[int, int, int] | None
    sent_bytes: int | None
    state_bytes: int
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        # A table of the groups, and their names.
        rows = [("group", "name", "algorithm", "parameters", "matrices", "elements", "decay", "update RMS")]
        for group in self.groups:
            rms = " to ".join(dict.fromkeys(f"{rms:.2g}" for rms in group.update_rms or ())) or "-"
            counts = str(group.parameters), str(group.matrices), f"{group.elements:,}"
            rows.append((str(group.number), group.name, group.algorithm, *counts, f"{group.weight_decay:g}", rms))
        lines = table(rows)
        for group in self.groups:
            lines += [f"group {group.number}: {group.layers}"] if group.names else []
            lines += [f"group {group.number}, in each parameter: {group.fused}"] if group.fused else []
        # Work, traffic and memory of this rank beside the others'.
        if self.matrices_by_rank is None:
            lines.append("owners are known after the first step")
        else:
            fewest, highest, count = self.matrices_by_rank
            lines.append(
                f"{fewest} to {highest} matrices a rank, {count} on this one, which sends {self.sent_bytes:,} bytes a "
                "step"
            )
        lines.append(f"{self.state_bytes:,} bytes of state on this rank")
        return "\n".join([*lines, *(f"warning: {doubt}" for doubt in self.doubts)])


def count_matrices(schedules: Sequence[Schedule]) -> tuple[int, int, int] | None:
    """Return `MuonReport.matrices_by_rank`; None without schedules."""
    counts: Counter[int] = Counter()
    for schedule in schedules:
        counts.update(dict.fromkeys(schedule.ranks, 0))
        counts.update(unit.owner for unit in schedule.units)
    return (min(counts.values()), max(counts.values()), counts[this_rank()]) if counts else None


def count_sent_bytes(schedules: Sequence[Schedule]) -> int | None:
    """Return the bytes that this rank sends to others in a step; None without schedules."""
    # On the way to owners and back; bytes for itself stay here.
    sent_bytes = 0
    for schedule in schedules:
        index = schedule.ranks.index(this_rank()) if this_rank() in schedule.ranks else 0
        for stage in schedule.stages:
            for route in (stage.gather, stage.scatter):
                sent_bytes += sum(route.send_counts) - route.send_counts[index]
    return sent_bytes if schedules else None


def report_group(
    number: int, group: ParamGroup, scales: Scales, methods: Methods, names: Mapping[Tensor, str]
) -> GroupReport:
    """Return the report of a group of this number, given the names of parameters in a model."""
    params, algorithm, rate = group["params"], group["algorithm"], float(group["lr"])
    # An update's root mean square without the rate: of each shape of matrices, or of elements.
    matrices: list[tuple[int, int]] = []
    fused = fused_of(group) if is_matrix_method(algorithm) else Fused()
    expected: list[float | None] = [1.0] if algorithm == "lion" else [*ADAMW_RMS]
    if is_matrix_method(algorithm):
        for param in params:
            matrices += sides_of(tuple(param.shape), fused)
        expected = expected if not matrices else []
        for shape in dict.fromkeys(matrices):
            rms = methods[algorithm].rms(*shape, group)
            expected.append(rms and rms * scales.factor(group, *shape))
    update_rms = [rate * rms for rms in expected if rms is not None]
    bounds = (min(update_rms), max(update_rms)) if update_rms else None
    elements = sum(param.numel() for param in params)
    labels = tuple(group.get("param_names") or (names[param] for param in params if param in names))
    name = str(group.get("name", ""))
    sizes = len(params), len(matrices), elements
    return GroupReport(number, name, algorithm, *sizes, float(group["weight_decay"]), bounds, labels, str(fused))


def find_doubts(groups: Sequence[ParamGroup], most_elementwise: float) -> Iterator[str]:
    """Yield warnings of settings that are probably not meant."""
    # Elements with at least two dims, by whether Muon steps them; and vectors that were matrices.
    elements: Counter[bool] = Counter()
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param.ndim > 1:
                elements[is_matrix_method(group["algorithm"])] += param.numel()
            elif param.numel() > LARGEST_VECTOR:
                yield (
                    f"group {number} has a vector of {param.numel():,} elements: if a wrapper has flattened matrices, "
                    "Muon cannot orthogonalise them; wrap the model in a way that keeps their shapes"
                )
    share = elements[False] / max(1, sum(elements.values()))
    if share > most_elementwise:
        yield (
            f"{share:.0%} of the elements in parameters of two dims or more are stepped by AdamW or Lion: give "
            "the matrices of hidden layers to a group of Muon"
        )


def warn_of_no_gradient() -> None:
    """Warn that no parameter has a gradient."""
    warn_on_rank(
        "no parameter of this optimizer has a gradient, so a step changes nothing. If the model was sharded "
        "(fully_shard) or materialised (to_empty) after the optimizer was built, it has other parameters now: "
        "build the optimizer of those",
        RuntimeWarning,
    )


def warn_if_unshared(rank_set: RankSet) -> None:
    """Warn if this rank orthogonalises plain tensors by itself while other ranks may hold the same ones."""
    plain = [member for member in rank_set.matrices if not isinstance(member.param, DTensor)]
    world = dist.get_world_size() if dist.is_initialized() else 1
    if plain and world > 1:
        warn_on_rank(
            f"{len(plain)} parameters of matrix groups are plain tensors, so each of {world} ranks orthogonalises all "
            "of them. If ranks hold the same parameters (DDP, without ZeroRedundancyOptimizer), give "
            "replicas=torch.distributed.group.WORLD, or the group of DDP, and they share the work",
            RuntimeWarning,
        )
