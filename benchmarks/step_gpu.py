"""A whole optimizer step on one GPU: what it takes, what of it is not Newton-Schulz, and how far that is from memory.

    python benchmarks/step_gpu.py [--limit 120] [--out out/step_gpu.json]

A model of 1.5 billion parameters on an NVIDIA GPU; without one, a small model on the CPU, whose figures only show that
this runs.  What is not Newton-Schulz, the rest, is the step less the same batches orthogonalised alone.  Its floor is
the least that memory must move, at the bandwidth that a copy reaches here: fp32 momentum read and written, fp32
gradient read, 16 bits written for Newton-Schulz; 16 bits read, fp32 parameter read and written.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import describe
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from muonckpt.optimizer import Muon
from muonckpt.optimizer.methods.muon import MUON
from muonckpt.optimizer.step.step import Batch, make_batches

AIM = 1.3
BYTES = 4 + 4 + 4 + 2 + 2 + 4 + 4
"""Moved for an element, at least."""

ROUNDS = 9

ON_GPU = ("rest", "floor", "rest / floor", "launches", "memory beyond the state")
TOP = 12
"""Kernels of a step that are listed."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's matrices: query, key, value, output; gate, up, down, in every layer."""

    name: str
    layers: int
    width: int
    keys: int
    inner: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        d, k, f = self.width, self.keys, self.inner
        return [(d, d), (k, d), (k, d), (d, d), (f, d), (f, d), (d, f)] * self.layers

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))


LARGE = Model("1.5B (28 layers, 1536, 256 keys, 8960)", 28, 1536, 256, 8960)
SMALL = Model("tiny (2 layers, 32, 16 keys, 80)", 2, 32, 16, 80)


def made(model: Model, device: torch.device) -> list[nn.Parameter]:
    """Its matrices, with gradients."""
    params = [nn.Parameter(torch.randn(shape, device=device) / 50) for shape in model.shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one run: on a GPU from its first launch to its last, on a CPU of this process."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.process_time()
    work()
    return time.process_time() - start


def medians(works: dict[str, Callable[[], object]], device: torch.device, until: float) -> dict[str, float]:
    """Of runs in turn, after two that are not counted; fewer rounds than `ROUNDS` if time is up before."""
    seconds_of_works: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 2):
        for name, work in works.items():
            seconds_of_works[name].append(seconds(work, device))
        if number >= 2 and time.monotonic() > until:
            break
    return {name: statistics.median(all_seconds[2:]) for name, all_seconds in seconds_of_works.items()}


def newton_schulz(opt: Muon, device: torch.device) -> Callable[[], object]:
    """All that the step orthogonalises, in its batches, and nothing else."""
    [schedule] = opt.schedules.values()
    group = opt.param_groups[0]
    batches = [
        batch
        for stage in schedule.stages
        for batch in make_batches(schedule.units, stage.owned, lambda param: group, lambda param: MUON)
    ]
    memory = torch.randn(max(batch.places.numel for batch in batches), device=device).bfloat16()

    def run(batches: Sequence[Batch] = batches) -> None:
        for batch in batches:
            batch.orthogonalized(memory[: batch.places.numel])

    return run


def bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 28, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(7)][2:]
    return 2 * source.nbytes / statistics.median(times)


def kernels(work: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Of a run on the GPU: the name of each kernel, how often it is launched, and its milliseconds; longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
        work()
        torch.cuda.synchronize()
    rows = [
        (event.key, event.count, event.self_device_time_total / 1e3)
        for event in events.key_averages()
        if event.device_type == DeviceType.CUDA and not event.key.startswith(("Memcpy", "Memset", "Optimizer.step"))
    ]
    return sorted(rows, key=lambda row: -row[2])


def memory(work: Callable[[], object]) -> int:
    """Bytes that a run allocates at most beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(model: Model, device: torch.device, limit: float) -> dict[str, float | None]:
    """Figures by name; None for what needs a GPU and has none.

    Args:
        limit: seconds after which no new round of timing begins.
    """
    until = time.monotonic() + limit
    params = made(model, device)
    adamw = torch.optim.AdamW(params, lr=1e-6, fused=device.type == "cuda")
    opt, torch_optimizer = Muon(params, lr=1e-3), torch.optim.Muon(params)
    opt.step()
    newton_schulz_seconds = newton_schulz(opt, device)
    newton_schulz_seconds()
    works: dict[str, Callable[[], object]] = {
        "step": opt.step, "Newton-Schulz alone": newton_schulz_seconds, "torch.optim.Muon": torch_optimizer.step,
        "torch.optim.AdamW": adamw.step,
    }  # fmt: skip
    if device.type != "cuda":
        return {**medians(works, device, until), **dict.fromkeys(ON_GPU)}
    peak, listed = memory(opt.step), kernels(opt.step)
    for name, count, milliseconds in listed[:TOP]:
        print(f"  {milliseconds:8.3f} ms  {count:5} x  {name[:100]}")
    seconds_of_works = medians(works, device, until)
    floor, update_seconds = (
        BYTES * model.numel / bandwidth(device),
        seconds_of_works["step"] - seconds_of_works["Newton-Schulz alone"],
    )
    return {
        **seconds_of_works, "rest": update_seconds, "floor": floor, "rest / floor": update_seconds / floor,
        "launches": sum(count for _, count, _ in listed), "memory beyond the state": peak,
    }  # fmt: skip


def show(model: Model, seconds_of_works: dict[str, float | None]) -> None:
    print(f"{model.name}, {model.numel / 1e6:.4g} million elements in {len(model.shapes)} matrices\n")
    units = {
        "rest / floor": (1, f"times (aim {AIM})"), "launches": (1, "kernels"),
        "memory beyond the state": (1 / 2**20, "MiB"),
    }  # fmt: skip
    for name, value in seconds_of_works.items():
        factor, unit = units.get(name, (1e3, "ms"))
        print(f"| {name} | {'not measured' if value is None else f'{factor * value:.4g}'} | {unit} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of timing, about")
    parser.add_argument("--out", type=Path, help="where to write the figures, JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = describe() + (f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ", no GPU")
    print(machine)
    model = LARGE if device.type == "cuda" else SMALL
    seconds_of_works = measure(model, device, arguments.limit)
    show(model, seconds_of_works)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps({"machine": machine, "model": model.name, "seconds": seconds_of_works}, indent=1)
        )


if __name__ == "__main__":
    main()
