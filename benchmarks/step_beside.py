"""One step beside other projects' Muons: all in one process group, taking turns, on the same FSDP2 matrices.

The folder that ``PEERS`` names holds checkouts: ``dion``, ``torchtitan``, ``xtuner``, ``VeOmni``, those that there are.
A row is CPU seconds over all ranks, and from all ranks ready to all ranks done; a ratio is taken in every round, and
the medians are shown.  All run five steps of Newton-Schulz in bfloat16, uncompiled (there is no compiler in CI).
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muonckpt.optimizer import Muon

OURS = "muonckpt"

Step = Callable[[], object]

TORCHS_MOST = 100
"""Matrices for which torch.optim.Muon, which gathers each of them by itself for every product, is waited for."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A program: ``module`` of the checkout ``folder``, and how it makes an optimizer of matrices.

    ``bare`` packages are entered without running what they import by themselves.
    """

    folder: str
    module: str
    bare: tuple[str, ...]
    make: Callable[[Any, list[nn.Parameter]], Any]

    def step(self, root: Path, matrices: list[nn.Parameter]) -> Step:
        """The step of its optimizer."""
        sys.path.insert(0, str(root / self.folder))
        for name in self.bare:
            shell = ModuleType(name)
            shell.__path__ = [str(root.joinpath(self.folder, *name.split(".")))]
            sys.modules.setdefault(name, shell)
        step: Step = self.make(importlib.import_module(self.module), matrices).step
        return step


def _dion(module: Any, matrices: list[nn.Parameter]) -> Any:
    mesh = matrices[0].device_mesh  # type: ignore[attr-defined]
    return module.Muon(matrices, distributed_mesh=mesh, use_polar_express=False, nesterov=True)


class _NoStreams:
    """What torchtitan asks of a device, where everything runs in order."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    @staticmethod
    def current_stream(device: object) -> _NoStreams:
        return _NoStreams()

    @staticmethod
    @contextmanager
    def stream(stream: object) -> Iterator[None]:
        yield


_NoStreams.Stream = _NoStreams.Event = _NoStreams  # type: ignore[attr-defined]


def _torchtitan(module: Any, matrices: list[nn.Parameter]) -> Any:
    """It refuses CPUs, and computes on them if it is let."""
    kind = importlib.import_module(f"{module.__name__}.dist_muon").DistMuon
    kind._validate_parameter_storage = lambda self: torch.device("cpu")
    runtime = importlib.import_module(f"{module.__name__}._optimizer_reshard_runtime")
    runtime.torch = ModuleType("torch")  # type: ignore[attr-defined]
    runtime.torch.__dict__.update(vars(torch), get_device_module=lambda device: _NoStreams)
    names = [f"matrices.{number}" for number in range(len(matrices))]
    axis = matrices[0].device_mesh.mesh_dim_names[0]  # type: ignore[attr-defined]
    owned = module.ComputeLayout(shardings_by_mesh_axis={axis: module.Owned()})
    return module.build_dist_muon(
        [{"params": matrices, "param_names": names}],
        compute_sharding_by_fqn=dict.fromkeys(names, owned),
        bucket_configs=[module.BucketConfig(patterns=("matrices.*",))],
    )


def _xtuner(module: Any, matrices: list[nn.Parameter]) -> Any:
    return module.Muon(matrices, nesterov=True, remainder_strategy="pad_all2all")  # gloo refuses its other strategy


def _veomni(module: Any, matrices: list[nn.Parameter]) -> Any:
    module.dist = ModuleType("dist")
    module.dist.__dict__.update(vars(dist), all_to_all=_all_to_all)
    return module.DistributedMuon(matrices, ns_implementation="std")


def _all_to_all(received: list[torch.Tensor], sent: list[torch.Tensor], group: Any) -> None:
    """As ``torch.distributed.all_to_all``, which on gloo takes parts of one size only."""
    wire = torch.cat([part.reshape(-1) for part in sent])
    counts = [part.numel() for part in received]
    arrived = wire.new_empty(sum(counts))
    dist.all_to_all_single(arrived, wire, counts, [part.numel() for part in sent], group)
    for part, came in zip(received, arrived.split(counts), strict=True):
        part.copy_(came.view_as(part))


PEERS = {
    "dion": Peer("dion", "dion", (), _dion),
    "torchtitan DistMuon": Peer(
        "torchtitan", "torchtitan.distributed.flex_shard", ("torchtitan", "torchtitan.distributed"), _torchtitan
    ),
    "XTuner": Peer(
        "xtuner", "xtuner.v1.optim.muon", ("xtuner", "xtuner.v1", "xtuner.v1.optim", "xtuner.v1.utils"),
        _xtuner,
    ),
    "VeOmni": Peer("VeOmni", "veomni.optim.muon", ("veomni", "veomni.optim"), _veomni),
}  # fmt: skip


def peers_at_hand() -> dict[str, Peer]:
    """Those whose checkouts lie in the folder that ``PEERS`` names."""
    folder = os.environ.get("PEERS")
    return {name: peer for name, peer in PEERS.items() if folder and Path(folder, peer.folder).is_dir()}


def steps_of(matrices_of: Callable[[], list[nn.Parameter]]) -> tuple[dict[str, Step], dict[str, str]]:
    """Ours, torch's and the peers' steps, each on matrices of its own; and why others are missing."""
    matrices = matrices_of()
    steps: dict[str, Step] = {OURS: Muon(matrices, ns_coefficients="keller").step}
    missing = {}
    if len(matrices) <= TORCHS_MOST:
        steps["torch.optim.Muon"] = torch.optim.Muon(matrices_of()).step
    else:
        missing["torch.optim.Muon"] = "not tried: on shards it takes 20 ms a matrix"
    for name, peer in peers_at_hand().items():
        try:
            step = peer.step(Path(os.environ["PEERS"]), matrices_of())
            step()
        except Exception as error:  # another project's, which a benchmark reports and goes on
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        else:
            steps[name] = step
    return steps, missing


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of each round by side: CPU over all ranks, and of the clock."""

    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]
    missing: dict[str, str]


def alternating(matrices_of: Callable[[], list[nn.Parameter]], rounds: int) -> Rounds:
    """Steps in turns, the order turning with every round; the first two rounds are not counted."""
    steps, missing = steps_of(matrices_of)
    seconds_of_rounds = Rounds({name: [] for name in steps}, {name: [] for name in steps}, missing)
    order = list(steps)
    for number in range(rounds + 2):
        order.append(order.pop(0))
        for name in order if number % 2 else reversed(order):
            cpu, wall = _timed(steps[name])
            if number >= 2:
                seconds_of_rounds.cpu[name].append(cpu)
                seconds_of_rounds.wall[name].append(wall)
    return seconds_of_rounds


def _timed(step: Step) -> tuple[float, float]:
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    step()
    cpu_seconds = torch.tensor([time.process_time() - used], dtype=torch.float64)
    dist.barrier()
    wall = time.perf_counter() - begin
    dist.all_reduce(cpu_seconds)
    return float(cpu_seconds), wall


def show(title: str, rounds: Rounds) -> None:
    """A table; ours over each of the others by medians of ratios."""
    print(f"\n{title}\n\n| | CPU ms of all ranks | ms | ours over it: CPU | ours over it: ms |\n|---|---|---|---|---|")
    for name in sorted(rounds.cpu, key=lambda name: statistics.median(rounds.cpu[name])):
        cpu, wall = (1000 * statistics.median(seconds_of_steps[name]) for seconds_of_steps in (rounds.cpu, rounds.wall))
        cells = [
            f"{_ratio(seconds_of_steps[OURS], seconds_of_steps[name]):.2f}"
            for seconds_of_steps in (rounds.cpu, rounds.wall)
        ]
        print(f"| {name} | {cpu:.1f} | {wall:.1f} | {' | '.join(cells)} |", flush=True)
    for name, reason in rounds.missing.items():
        print(f"| {name} | {reason} | | | |", flush=True)


def _ratio(our_values: Iterable[float], their_values: Iterable[float]) -> float:
    return statistics.median(
        cpu_seconds / their_value for cpu_seconds, their_value in zip(our_values, their_values, strict=True)
    )
