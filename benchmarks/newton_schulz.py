"""Newton-Schulz, ours against plain torch and what else is installed: checked first, then timed, run after run in turn.

    python benchmarks/newton_schulz.py [--quick] [--limit 180] [--out out/newton_schulz.json]

On an NVIDIA GPU: plain torch, torch.compile (two shapes), ours by torch's products and by our kernels, plain and Gram
form, and what `peer_kernels` finds; launched from Python, and replayed as CUDA graphs.  The floor is the work of the
symmetric form at the dense peak of the chip.  On a CPU: the function of torch.optim.Muon against ours, at
small sizes.  At the end it measures which form is the fastest where, and writes the table: `CostTable.from_json` reads
it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from machine import describe
from peer_kernels import KELLER, PEERS, Peer, Polynomials, found
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muonckpt.names.coefficients import COEFFICIENTS
from muonckpt.optimizer.ground.devices import time_replays
from muonckpt.optimizer.ground.tensors import Places
from muonckpt.optimizer.newton_schulz.costs import CostTable, measure
from muonckpt.optimizer.newton_schulz.iterations import orthogonalize_all
from muonckpt.optimizer.newton_schulz.products import Choice, Form, prefer_kernels
from muonckpt.optimizer.newton_schulz.recipe import Recipe, flops

Method = Callable[[Tensor, Places], Tensor]
"""Of matrices end to end in one memory."""

GPU_SHAPES: tuple[Places, ...] = (
    Places(((1, 1024, 1024),)),
    Places(((1, 2048, 2048),)),
    Places(((1, 4096, 4096),)),
    Places(((1, 8192, 8192),)),
    Places(((1, 4096, 16384),)),
    Places(((1, 2048, 5632),)),
    Places(((128, 2048, 768),)),
    Places(((64, 128, 4096),)),
    Places(((24, 512, 512), (24, 512, 1408), (48, 128, 512))),
    Places(((1, 512, 512),)),
    Places(((1, 256, 256),)),
)
CPU_SHAPES: tuple[Places, ...] = (
    Places(((1, 64, 64),)),
    Places(((1, 128, 128),)),
    Places(((1, 256, 256),)),
    Places(((1, 384, 384),)),
    Places(((1, 512, 512),)),
    Places(((1, 512, 2048),)),
    Places(((1, 128, 512),)),
    Places(((1, 768, 256),)),
    Places(((16, 64, 256),)),
)
QUICK = 3
"""How many shapes `--quick` does."""

STEPS = len(KELLER)

PEAK = {"NVIDIA H200": 790e12, "NVIDIA H100 80GB HBM3": 790e12}
"""Dense 16-bit FLOP/s that are taken for the chip's peak: an assumption (989 on paper)."""

SAMPLE = 0.01
"""Seconds that what is timed at once takes, about: small matrices are done many times in a row, as in a step."""

COMPILED = 2
"""How many shapes are given to torch.compile, which takes longer than all else."""

GATES = (256, 512, 1024, 1536, 2048, 4096)
"""Sides of the squares, and short sides of matrices four times as wide, for which the fastest form is measured."""

FAR = 0.05
"""Relative distance from the same polynomials in float64 that is a fault: bf16 leaves about 0.012."""


def one_by_one(function: Callable[..., Tensor]) -> Method:
    """torch.optim.Muon's function, or what is made of it, matrix by matrix."""

    def method(memory: Tensor, places: Places) -> Tensor:
        products = [function(matrix, KELLER[0], STEPS, 1e-7) for matrix in places.split_matrices(memory)]
        return products[0].reshape(-1) if len(products) == 1 else torch.cat([matrix.reshape(-1) for matrix in products])

    return method


by_torch = one_by_one(_zeropower_via_newtonschulz)


def compiled() -> Method:
    """By torch.compile."""
    torch.compiler.reset()  # else only the first eight shapes of a run are compiled, and the rest done as they are
    return one_by_one(torch.compile(_zeropower_via_newtonschulz, dynamic=False))


def batched(memory: Tensor, places: Places) -> Tensor:
    """What a stack of one shape allows in plain torch: batched products in bf16."""
    products = []
    for stack in stacks(memory, places):
        tall = stack.shape[1] > stack.shape[2]
        x = (stack.mT if tall else stack).bfloat16()
        x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
        for a, b, c in KELLER:
            r = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(r, r, r, beta=b, alpha=c), x, beta=a)
        products.append((x.mT if tall else x).reshape(-1))
    return torch.cat(products)


def ours(dtype: torch.dtype, gram: tuple[int, ...] | None = None, choice: Choice = prefer_kernels) -> Method:
    """What the optimizer runs, or in another form."""

    @cache
    def form(device: torch.device, places: Places) -> Form:  # known before the first step, too
        count, rows, columns = places.runs[0]
        return choice(device, dtype, rows, columns, count)

    recipe = Recipe(COEFFICIENTS["keller"], STEPS, dtype, gram=gram)
    return lambda memory, places: orthogonalize_all(memory, places, recipe, form(memory.device, places))


def by_peer(peer: Peer) -> Method:
    """A peer's, stack by stack; imported when it is called first, as it may lack something."""
    peer_method = cache(peer.made)
    return lambda memory, places: torch.cat([peer_method()(stack).reshape(-1) for stack in stacks(memory, places)])


def stacks(memory: Tensor, places: Places) -> list[Tensor]:
    """The matrices of each shape, a view."""
    sizes = [count * rows * columns for count, rows, columns in places.runs]
    return [part.view(run) for part, run in zip(memory.split(sizes), places.runs, strict=True)]


def methods(device: torch.device, compile_too: bool) -> dict[str, Method]:
    """By name; plain torch first."""
    methods_by_name: dict[str, Method] = {"torch.optim.Muon": by_torch, "ours": ours(torch.bfloat16)}
    if device.type == "cuda":
        methods_by_name |= {
            **({"torch.compile": compiled()} if compile_too else {}),
            "torch, batched": batched,
            "ours, Gram": ours(torch.bfloat16, (2,)),
            "ours, fp16": ours(torch.float16),
            "ours, by torch": ours(torch.bfloat16, choice=lambda *facts: Form(kernels=False, gram=False)),
        }
        methods_by_name |= {name: by_peer(peer) for name, peer in found().items()}
    return methods_by_name


def reference(memory: Tensor, places: Places, polynomials: Polynomials) -> Tensor:
    """The same polynomials in float64."""
    products = []
    for stack in stacks(memory, places):
        tall = stack.shape[1] > stack.shape[2]
        x = stack.mT.double() if tall else stack.double()
        x = x / torch.linalg.matrix_norm(x, keepdim=True)
        for a, b, c in polynomials:
            r = x @ x.mT
            x = a * x + (b * r + c * r @ r) @ x
        products.append((x.mT if tall else x).reshape(-1))
    return torch.cat(products)


def errors(methods_to_test: Mapping[str, Method], places: Places, device: torch.device) -> dict[str, float | str]:
    """Relative distance of each method from float64 on fresh matrices, or why it does not run."""
    memory = torch.randn(places.numel, device=device)
    of_name = {name: peer.polynomials for name, peer in PEERS.items()}
    exact = {polynomials: reference(memory, places, polynomials) for polynomials in {KELLER, *of_name.values()}}
    distances: dict[str, float | str] = {}
    for name, method in methods_to_test.items():
        expected = exact[of_name.get(name, KELLER)]
        try:
            distances[name] = ((method(memory, places).double() - expected).norm() / expected.norm()).item()
        except Exception as error:  # a peer's, of any kind: its row says so
            if name != "torch.compile" and name not in PEERS:
                raise
            distances[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return distances


def seconds(method: Method, memory: Tensor, places: Places, times: int) -> float:
    """Of one of so many runs in a row: on a GPU by its own clock, on a CPU of this process, which others on the machine
    disturb less."""
    if memory.is_cuda:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            method(memory, places)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times
    start = time.process_time()
    for _ in range(times):
        method(memory, places)
    return (time.process_time() - start) / times


def floor(places: Places, name: str) -> float | None:
    """Seconds of the symmetric form's multiplications at the peak of a chip, None if that is not known: ``s²l`` for a
    triangle of the Gram matrix, ``s³`` for one of its square, ``2 s²l`` for the last product."""
    sides = [(count, *sorted(shape)) for count, *shape in places.runs]
    work = sum(count * STEPS * (3 * short**2 * long + short**3) for count, short, long in sides)
    return work / PEAK[name] if name in PEAK else None


def row(
    places: Places, device: torch.device, runs: int, until: float, *, compile_too: bool = False
) -> dict[str, object]:
    """Check all methods, and time them in turn, with no new round after ``until``."""
    methods_to_test = methods(device, compile_too)
    error = errors(methods_to_test, places, device)
    far = {name: e for name, e in error.items() if isinstance(e, float) and not e <= FAR}
    if any(name.startswith(("ours", "torch.optim")) for name in far):
        raise SystemExit(f"{places}: too far from float64: {far}")
    error |= {name: f"too far from float64: {e:.3f}" for name, e in far.items()}
    running = {name: method for name, method in methods_to_test.items() if isinstance(error[name], float)}
    memory = torch.randn(places.numel, device=device)
    times: dict[str, list[float]] = {name: [] for name in running}
    seconds_of_one = max(seconds(by_torch, memory, places, 1) for _ in range(2))
    in_a_row = max(1, min(50, int(SAMPLE / seconds_of_one)))
    for count in range(runs + 2):
        for name, method in running.items():
            took = seconds(method, memory, places, in_a_row)
            if count >= 2:
                times[name].append(took)
        if count >= 2 and time.monotonic() > until:
            break
    plain = times["torch.optim.Muon"]
    graphs = {
        name: time_replays(partial(method, memory, places), times=min(in_a_row, 10))
        for name, method in running.items()
        if device.type == "cuda" and name != "torch.compile"
    }
    return {
        "shapes": places.runs,
        "floor": floor(places, torch.cuda.get_device_name(device) if device.type == "cuda" else ""),
        "error": error,
        "median": {name: statistics.median(all_seconds) for name, all_seconds in times.items()},
        "faster": {
            name: statistics.median(p / t for p, t in zip(plain, all_seconds, strict=True))
            for name, all_seconds in times.items()
        },
        "replayed": graphs,
    }


def show(results: Mapping[str, object]) -> None:
    """One case as lines."""
    shapes, lowest = results["shapes"], results["floor"]
    gflop = sum(count * flops(m, n, STEPS) for count, m, n in shapes) / 1e9  # type: ignore[attr-defined]
    named = " and ".join(f"{count} x {m} x {n}" for count, m, n in shapes)  # type: ignore[attr-defined]
    print(f"\n{named}, {gflop:.3g} GFLOP" + (f", floor {lowest * 1e3:.4g} ms" if lowest else ""))  # type: ignore[operator]
    replays = results["replayed"]
    for name, error in results["error"].items():  # type: ignore[attr-defined]
        if isinstance(error, str):
            print(f"  {name:20} does not run: {error}")
            continue
        median, faster = results["median"][name], results["faster"][name]  # type: ignore[index]
        line = f"  {name:20} {median * 1e3:9.4g} ms  {faster:5.2f} x torch"
        if replay := replays.get(name):  # type: ignore[attr-defined]
            times = replays["torch.optim.Muon"] / replay  # type: ignore[index]
            line += f"; replayed {replay * 1e3:9.4g} ms  {times:5.2f} x torch"
            line += f"  {lowest / replay:4.0%} of the floor" if lowest else ""  # type: ignore[operator]
        print(f"{line}  error {error:.4f}", flush=True)


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
    machine = describe() + (f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ", no GPU")
    print(machine)
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    rows: list[dict[str, object]] = []
    report: dict[str, object] = {"machine": machine, "rows": rows}

    def write() -> None:
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1))

    methods_to_test = shapes[:QUICK] if arguments.quick else shapes
    begin = time.monotonic()
    for number, places in enumerate(methods_to_test, 1):
        until = begin + arguments.limit * number / len(methods_to_test)
        rows.append(row(places, device, 5 if arguments.quick else 15, until, compile_too=number <= COMPILED))
        show(rows[-1])
        write()
    table = gates(device, GATES if device.type == "cuda" else GATES[:2])
    report["table"] = json.loads(table.as_json())
    write()


if __name__ == "__main__":
    main()
