"""Newton-Schulz, ours against plain torch and what else is installed: checked first, then timed, run after run in turn.

    python benchmarks/newton_schulz.py [--quick] [--limit 180] [--out out/newton_schulz.json]

On an NVIDIA GPU: plain torch, torch.compile, ours by torch's products and by our kernels, plain and Gram form, and
gram-newton-schulz if it is installed.  The floor is the work of the symmetric form at the dense peak of the chip.  On a
CPU: the function of torch.optim.Muon against ours, at small sizes.  At the end it measures which form is the fastest
where, and writes the table: `CostTable.from_json` reads it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from machine import describe
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muonckpt.optimizer import gram as gram_form
from muonckpt.optimizer.costs import CostTable, measure
from muonckpt.optimizer.forms import Form
from muonckpt.optimizer.newton_schulz import orthogonalize_batch

Shape = tuple[int, int, int]
Method = Callable[[Tensor], Tensor]

GPU_SHAPES: tuple[Shape, ...] = (
    (1, 1024, 1024),
    (1, 2048, 2048),
    (1, 4096, 4096),
    (1, 8192, 8192),
    (1, 4096, 16384),
    (1, 2048, 5632),
    (128, 2048, 768),
    (64, 128, 4096),
)
CPU_SHAPES: tuple[Shape, ...] = (
    (1, 64, 64),
    (1, 256, 256),
    (1, 512, 512),
    (1, 512, 2048),
    (1, 768, 256),
    (16, 64, 256),
)
QUICK = 3
"""How many shapes `--quick` does."""

STEPS = 5
KELLER = (3.4445, -4.7750, 2.0315)
"""What torch.optim.Muon uses; all methods are given the same polynomials."""

PEAK = {"NVIDIA H200": 790e12, "NVIDIA H100 80GB HBM3": 790e12}
"""Dense 16-bit FLOP/s that are taken for the chip's peak: an assumption (989 on paper)."""

SAMPLE = 0.01
"""Seconds that what is timed at once takes, about: small matrices are done many times in a row, as in a step."""

GATES = (256, 512, 1024, 1536, 2048, 4096)
"""Sides of the squares, and short sides of matrices four times as wide, for which the fastest form is measured."""

FAR = 0.05
"""Relative distance from the same polynomials in float64 that is a fault: bf16 leaves about 0.012."""


def by_torch(stack: Tensor) -> Tensor:
    """torch.optim.Muon's function, matrix by matrix."""
    return torch.stack([_zeropower_via_newtonschulz(matrix, KELLER, STEPS, 1e-7) for matrix in stack])


def ours(dtype: torch.dtype, gram: Sequence[int] | None = None) -> Method:
    """What the optimizer runs."""
    return lambda stack: orthogonalize_batch(stack, coefficients="keller", steps=STEPS, dtype=dtype, gram=gram)


def by_kernels(dtype: torch.dtype) -> Method:
    """Our kernels, also where `forms` would not choose them."""
    form = Form(kernels=True, gram=False)
    return lambda stack: orthogonalize_batch(stack, coefficients="keller", steps=STEPS, dtype=dtype, form=form)


def gram_newton_schulz() -> Method:
    """Dao-AILab's package."""
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(ns_coefficients=[KELLER] * STEPS, gram_newton_schulz_reset_iterations=[2])


def methods(device: torch.device) -> dict[str, Method]:
    """By name; plain torch first."""
    found: dict[str, Method] = {"torch.optim.Muon": by_torch, "ours": ours(torch.bfloat16)}
    if device.type == "cuda":
        found |= {
            "torch.compile": torch.compile(by_torch, dynamic=False),
            "ours, Gram": ours(torch.bfloat16, (2,)),
            "kernels, bf16": by_kernels(torch.bfloat16),
            "kernels, fp16": by_kernels(torch.float16),
        }
        if find_spec("gram_newton_schulz"):
            found["gram-newton-schulz"] = gram_newton_schulz()
    return found


def reference(stack: Tensor) -> Tensor:
    """The same polynomials in float64."""
    a, b, c = KELLER
    x = stack.double()
    x = x.mT if stack.shape[1] > stack.shape[2] else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    for _ in range(STEPS):
        r = x @ x.mT
        x = a * x + (b * r + c * r @ r) @ x
    return x.mT if stack.shape[1] > stack.shape[2] else x


def errors(chosen: Mapping[str, Method], shape: Shape, device: torch.device) -> dict[str, float | str]:
    """Relative distance of each method from float64 on a fresh matrix, or why it does not run."""
    stack = torch.randn(shape, device=device)
    exact = reference(stack)
    found: dict[str, float | str] = {}
    for name, method in chosen.items():
        try:
            found[name] = ((method(stack).double() - exact).norm() / exact.norm()).item()
        except Exception as error:  # a peer's, of any kind: its row says so
            if name not in ("torch.compile", "gram-newton-schulz"):
                raise
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return found


def seconds(method: Method, stack: Tensor, times: int) -> float:
    """Of one of so many runs in a row: on a GPU by its own clock, on a CPU of this process, which others on the machine
    disturb less."""
    if stack.is_cuda:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            method(stack)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times
    start = time.process_time()
    for _ in range(times):
        method(stack)
    return (time.process_time() - start) / times


def floor(shape: Shape, name: str) -> float | None:
    """Seconds of the symmetric form's multiplications at the peak of a chip, None if that is not known: ``s²l`` for a
    triangle of the Gram matrix, ``s³`` for one of its square, ``2 s²l`` for the last product."""
    count, m, n = shape
    short, long = sorted((m, n))
    return count * STEPS * (3 * short**2 * long + short**3) / PEAK[name] if name in PEAK else None


def row(shape: Shape, device: torch.device, runs: int, until: float) -> dict[str, object]:
    """Check all methods at a shape, and time them in turn, with no new round after ``until``."""
    chosen = methods(device)
    error = errors(chosen, shape, device)
    far = {name: e for name, e in error.items() if isinstance(e, float) and not e <= FAR}
    if far:
        raise SystemExit(f"{shape}: too far from float64: {far}")
    running = {name: method for name, method in chosen.items() if isinstance(error[name], float)}
    stack = torch.randn(shape, device=device)
    times: dict[str, list[float]] = {name: [] for name in running}
    once = max(seconds(by_torch, stack, 1) for _ in range(2))
    in_a_row = max(1, min(50, int(SAMPLE / once)))
    for count in range(runs + 2):
        for name, method in running.items():
            took = seconds(method, stack, in_a_row)
            if count >= 2:
                times[name].append(took)
        if count >= 2 and time.monotonic() > until:
            break
    plain = times["torch.optim.Muon"]
    return {
        "shape": shape,
        "floor": floor(shape, torch.cuda.get_device_name(device) if device.type == "cuda" else ""),
        "error": error,
        "median": {name: statistics.median(all_) for name, all_ in times.items()},
        "faster": {
            name: statistics.median(p / t for p, t in zip(plain, all_, strict=True)) for name, all_ in times.items()
        },
    }


def show(found: Mapping[str, object]) -> None:
    """One shape as lines."""
    count, m, n = found["shape"]  # type: ignore[misc]
    lowest, gflop = found["floor"], count * gram_form.cost(m, n, STEPS) / 1e9
    print(f"\n{count} x {m} x {n}, {gflop:.3g} GFLOP" + (f", floor {lowest * 1e3:.4g} ms" if lowest else ""))  # type: ignore[operator]
    for name, error in found["error"].items():  # type: ignore[attr-defined]
        if isinstance(error, str):
            print(f"  {name:20} does not run: {error}")
            continue
        median, faster = found["median"][name], found["faster"][name]  # type: ignore[index]
        of_floor = f"  {lowest / median:4.0%} of the floor" if lowest else ""  # type: ignore[operator]
        print(f"  {name:20} {median * 1e3:9.4g} ms  {faster:5.2f} x torch{of_floor}  error {error:.4f}")


def gates(device: torch.device, sides: Sequence[int]) -> CostTable:
    """Which form is the fastest where: what `Muon` takes as ``cost`` and ``form``."""
    shapes = [shape for side in sides for shape in ((side, side), (side, 4 * side))]
    table = measure(shapes, gram=(2,), device=device, repeats=3)
    print("\nfastest form by shape:")
    for (short, long), times in table.nanoseconds.items():
        best = min(times, key=times.__getitem__)
        arithmetic, form = "kernels" if best.kernels else "torch", "Gram" if best.gram else "plain"
        print(
            f"  {short} x {long}: {arithmetic}, {form} ({', '.join(f'{time / 1e6:.3g}' for time in times.values())} ms)"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK} shapes, fewer runs")
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds of timing, about; later shapes get fewer runs"
    )
    parser.add_argument("--out", type=Path, help="where to write the figures, JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = describe() + (f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ", no GPU")
    print(where)
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    rows = []
    chosen = shapes[:QUICK] if arguments.quick else shapes
    begin = time.monotonic()
    for number, shape in enumerate(chosen, 1):
        until = begin + arguments.limit * number / len(chosen)
        rows.append(row(shape, device, 5 if arguments.quick else 15, until))
        show(rows[-1])
    table = gates(device, GATES if device.type == "cuda" else GATES[:2])
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps({"machine": where, "rows": rows, "table": json.loads(table.as_json())}, indent=1)
        )


if __name__ == "__main__":
    main()
