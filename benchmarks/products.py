"""The products of Newton-Schulz on a GPU, by kind: our kernels beside torch's, and how near both are to the chip.

    python benchmarks/products.py [--limit 40] [--out out/products.json]

Each is replayed as a CUDA graph.  TFLOP/s count the multiplications that are needed: of symmetric results one triangle,
which torch's products do twice.  Without an NVIDIA GPU there is nothing to measure, and it says so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe
from torch import Tensor

from muonckpt.optimizer.ground.devices import time_replays
from muonckpt.optimizer.ground.tensors import Places, Stack

STACKS: tuple[tuple[int, int, int], ...] = (
    (1, 1024, 1024),
    (1, 2048, 2048),
    (1, 4096, 4096),
    (1, 8192, 8192),
    (1, 4096, 16384),
    (128, 768, 2048),
    (64, 128, 4096),
)
"""How many matrices, their short and their long side."""

A, B, C = 3.4445, -4.7750, 2.0315


def works(count: int, short: int, long: int, device: torch.device) -> dict[str, tuple[Callable[[], object], ...]]:
    """By kind of product: by our kernels, and by torch's."""
    from muonckpt.optimizer.triton.kernel_products import KernelProducts

    kind = KernelProducts(torch.bfloat16)
    x = (torch.randn(count, short, long, device=device) / long**0.5).bfloat16()
    wide = Stack(x.view(-1), Places(((count, short, long),)))
    r = x @ x.mT
    square = Stack(r.view(-1), Places(((count, short, short),)))
    out: Tensor = torch.empty_like(r)
    result: Tensor = torch.empty_like(x)
    return {
        "gram": (lambda: kind.gram(wide), lambda: torch.bmm(x, x.mT, out=out)),
        "square": (
            lambda: kind.polynomial(square, B, C),
            lambda: torch.baddbmm(r, r, r, beta=B, alpha=C, out=out),
        ),
        "added": (lambda: kind.multiply_add(wide, A, square), lambda: torch.baddbmm(x, r, x, beta=A, out=result)),
    }


def flops(count: int, short: int, long: int) -> dict[str, int]:
    """What is needed; a multiply-add is two."""
    return {"gram": count * short**2 * long, "square": count * short**3, "added": 2 * count * short**2 * long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which no new stack is begun")
    parser.add_argument("--out", type=Path, help="where to write the figures, JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU: not measured")
        return
    device = torch.device("cuda")
    machine = f"{describe()}, {torch.cuda.get_device_name(device)}"
    print(f"{machine}\n\n| stack | product | ours ms | TFLOP/s | torch ms | TFLOP/s | times as fast |")
    print("|---|---|---|---|---|---|---|")
    rows: list[list[object]] = []
    begin = time.monotonic()
    for stack in STACKS:
        if time.monotonic() - begin > arguments.limit:
            print(f"{stack} and what follows: not measured, out of time")
            break
        needed_flops = flops(*stack)
        for name, pair in works(*stack, device).items():
            for work in pair:
                work()
            our_seconds, peer_seconds = (time_replays(work) for work in pair)
            rows.append([*stack, name, our_seconds, peer_seconds])
            rates = [needed_flops[name] / seconds / 1e12 for seconds in (our_seconds, peer_seconds)]
            print(
                f"| {stack[0]} x {stack[1]} x {stack[2]} | {name} | {our_seconds * 1e3:.4f} | {rates[0]:.0f} "
                f"| {peer_seconds * 1e3:.4f} | {rates[1]:.0f} | {peer_seconds / our_seconds:.2f} |",
                flush=True,
            )
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
