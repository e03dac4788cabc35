"""One optimizer step on gloo ranks: muonckpt's Muon against torch.optim.Muon on the same FSDP2 model.

Both run the same number of Newton-Schulz iterations with the same coefficients in bfloat16, on the same gradients.
Bytes and collectives are counted at the process group (`traffic.py`), in processes of their own, so that counting
costs no time.  Steps alternate; a ratio is taken for every pair of neighbouring ones, and the table shows medians.

What other Muons needed for the same matrices is printed beside it (dion 0a059a4, XTuner b934f46, VeOmni d977449,
torchtitan b5bcd76, each with its own defaults).  Those counts are exact and comparable; the times are of another
machine, and are not.  With ``PEERS`` set to a folder of checkouts, their steps are timed here (`step_beside`).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TypeVar

import step_beside
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import traffic
from machine import describe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonckpt.optimizer import Muon

Answer = TypeVar("Answer")

ROUNDS = 9
WIRE = 2
"""Bytes of an element that travels: Newton-Schulz takes 16 bits."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model of equal layers, each with matrices of these shapes, over this many ranks."""

    name: str
    layers: int
    shapes: tuple[tuple[int, int], ...]
    world: int
    elsewhere: dict[str, tuple[int, int, float]]
    """Published beside it: milliseconds a step (on another machine), collectives, MB sent by the busiest rank."""


TRANSFORMER = ((256, 256),) * 4 + ((640, 256),) * 2 + ((256, 640),)
"""Query, key, value, output; gate, up; down."""

CASES = (
    Case(
        "42 matrices, d=256", 6, TRANSFORMER, 4,
        {"dion": (91, 8, 3.69), "XTuner": (165, 22, 4.28), "XTuner, padded": (138, 22, 3.69),
         "VeOmni": (170, 22, 7.08), "torchtitan DistMuon": (75, 2, 6.82)},
    ),
    Case(
        "42 matrices, d=256", 6, TRANSFORMER, 2,
        {"dion": (123, 8, 4.52), "XTuner": (152, 42, 4.52), "XTuner, padded": (102, 42, 4.52),
         "VeOmni": (105, 42, 9.04), "torchtitan DistMuon": (61, 2, 9.04)},
    ),
    Case(
        "3 matrices, 512 x 512", 1, ((512, 512),) * 3, 4,
        {"dion": (46, 2, 0.79), "XTuner": (41, 2, 2.36), "XTuner, padded": (34, 2, 0.79),
         "VeOmni": (23, 2, 1.31), "torchtitan DistMuon": (33, 2, 1.31)},
    ),
)  # fmt: skip

OURS, THEIRS = "muonckpt", "torch.optim.Muon"


def least_bytes(sizes: Sequence[int], world: int) -> float:
    """The least that the busiest rank can send if whole matrices are orthogonalised and every rank holds 1/world of
    each: matrices of these numbers of elements, ``WIRE`` bytes an element, there and back.

    A rank that owns ``owned`` of ``total`` elements sends its share of the others, and the others' shares of its own:
    ``(total - owned) / world + owned * (world - 1) / world``.  Some rank owns the mean or more, and the largest matrix.
    """
    total, owned = sum(sizes), max(sum(sizes) / world, max(sizes))
    return WIRE * ((total - owned) + owned * (world - 1)) / world


class Layer(nn.Module):
    """Matrices of zeros: after some steps they are the sum of the updates."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(shape) for shape in shapes)


def sharded(case: Case) -> list[nn.Parameter]:
    """The model's matrices, by rows over all ranks, with the same gradients whenever this is called."""
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("dp_shard",))
    layers = [fully_shard(Layer(case.shapes), mesh=mesh) for _ in range(case.layers)]
    matrices = [matrix for layer in layers for matrix in layer.parameters()]
    generator = torch.Generator().manual_seed(0)
    for matrix in matrices:
        gradient = torch.randn(matrix.shape, generator=generator)
        matrix.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
    return matrices


@dataclass(frozen=True, slots=True)
class Sides:
    """Both optimizers, each with a model of its own."""

    matrices: dict[str, list[nn.Parameter]]
    steps: dict[str, Callable[[], object]]

    @classmethod
    def of(cls, case: Case) -> Sides:
        matrices = {side: sharded(case) for side in (OURS, THEIRS)}
        our_values, their_values = Muon(matrices[OURS], ns_coefficients="keller"), torch.optim.Muon(matrices[THEIRS])
        return cls(matrices, {OURS: our_values.step, THEIRS: their_values.step})

    def disagreement(self) -> float:
        """How far both sums of updates are from each other, relative to torch's."""
        our_values, their_values = (
            torch.cat([whole(m).flatten() for m in self.matrices[side]]) for side in (OURS, THEIRS)
        )
        return ((our_values - their_values).norm() / their_values.norm()).item()


def whole(matrix: torch.Tensor) -> torch.Tensor:
    assert isinstance(matrix, DTensor)
    return matrix.detach().full_tensor()


@dataclass(frozen=True, slots=True)
class Count:
    """Of one step: collectives by name, of rank 0 (all ranks take part in all), and bytes of the busiest rank."""

    kinds: Counter[str]
    sent: float


def count(case: Case) -> dict[str, Count]:
    """The second step of each side: what is done once has been done."""
    sides, counters, counts_of_sides = Sides.of(case), traffic.register(), {}
    for side, step in sides.steps.items():
        step()
        counters.reset()
        step()
        kinds, sent = Counter(counters.collectives), [counters.sent] * case.world
        dist.all_gather_object(sent, counters.sent)
        counts_of_sides[side] = Count(kinds, max(sent))
    return counts_of_sides


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each round, by side, and how far the two sides' updates are apart."""

    seconds: dict[str, list[float]]
    disagreement: float


def measure(case: Case) -> Timing:
    """All steps but the first round's, which warms up."""
    sides = Sides.of(case)
    seconds: dict[str, list[float]] = {side: [] for side in sides.steps}
    for number in range(ROUNDS + 1):
        for side in list(sides.steps) if number % 2 else reversed(sides.steps):
            seconds[side].append(timed(sides.steps[side]))
    return Timing({side: values[1:] for side, values in seconds.items()}, sides.disagreement())


def timed(step: Callable[[], object]) -> float:
    """Seconds from all ranks ready to all ranks done."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


FEW_ROUNDS = 200
"""A step of few matrices takes some milliseconds."""

FEW = tuple(
    Case(f"{count} of {rows} x {columns}", 1, ((rows, columns),) * count, 4, {})
    for count, rows, columns in ((1, 512, 512), (3, 512, 512), (8, 512, 512), (1, 128, 128), (3, 128, 128),
                                 (24, 128, 128), (4, 256, 1024))
)  # fmt: skip

BESIDE = FEW + tuple(
    Case(name, layers, shapes, world, {})
    for name, layers, shapes in (
        ("42 matrices, d=256", 6, TRANSFORMER),
        ("1000 matrices, 64 x 64", 10, ((64, 64),) * 100),
    )
    for world in (1, 2, 4)
)


def beside(case: Case) -> step_beside.Rounds:
    """Our step among those of all others that are at hand."""
    return step_beside.alternating(lambda: sharded(case), FEW_ROUNDS if case in FEW else ROUNDS)


def on_ranks(case: Case, backend: str, job: Callable[[Case], Answer]) -> Answer:
    """What ``job(case)`` returns on rank 0 of ``case.world`` processes."""
    answers: SimpleQueue[Answer] = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (case, backend, job, str(Path(folder, "store")), answers), nprocs=case.world)
    return answers.get()


def worker(
    rank: int, case: Case, backend: str, job: Callable[[Case], Answer], store: str, answers: SimpleQueue[Answer]
) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    traffic.register()
    dist.init_process_group(backend, store=dist.FileStore(store, case.world), rank=rank, world_size=case.world)
    answer = job(case)
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process whose interpreter shuts down (pytorch issue 190489)


def show_table(case: Case, counts: dict[str, Count], timing: Timing) -> None:
    least = least_bytes([prod(shape) for shape in case.shapes] * case.layers, case.world)
    print(f"\n{case.name}, {case.world} ranks\n")
    print("| | ms a step | collectives | MB sent by the busiest rank | times the least |")
    print("|---|---|---|---|---|")
    for side, count in counts.items():
        milliseconds, megabytes = 1000 * statistics.median(timing.seconds[side]), count.sent / 1e6
        print(f"| {side} | {milliseconds:.0f} | {count.kinds.total()} | {megabytes:.2f} | {count.sent / least:.3f} |")
    for name, (published, collectives, megabytes) in case.elsewhere.items():
        print(f"| {name} | ({published}) | {collectives} | {megabytes:.2f} | {1e6 * megabytes / least:.2f} |")
    print(f"| the least | | 2 a stage | {least / 1e6:.2f} | 1 |\n")


def show_ratio(counts: dict[str, Count], timing: Timing) -> None:
    for side, counts_of_sides in counts.items():
        print(f"{side}: {', '.join(f'{number} {kind}' for kind, number in counts_of_sides.kinds.items())}.")
    ratios = [
        our_seconds / their_seconds
        for our_seconds, their_seconds in zip(timing.seconds[OURS], timing.seconds[THEIRS], strict=True)
    ]
    print(
        f"{OURS} takes {statistics.median(ratios):.3f} of the time of {THEIRS} ({min(ratios):.3f} - "
        f"{max(ratios):.3f}); their updates differ by {100 * timing.disagreement:.1f} %."
    )


def main() -> None:
    print(f"{describe()}; gloo, {ROUNDS} alternating rounds; times in parentheses are from another machine")
    for case in CASES:
        counts, timing = on_ranks(case, traffic.BACKEND, count), on_ranks(case, "gloo", measure)
        show_table(case, counts, timing)
        show_ratio(counts, timing)
    for case in BESIDE:
        step_beside.show(f"{case.name}, {case.world} ranks", on_ranks(case, "gloo", beside))


if __name__ == "__main__":
    main()
