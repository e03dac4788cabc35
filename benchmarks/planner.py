"""Planning at scale: seconds, copies and memory to plan the reshard of whole models.

Each model runs in a fresh process, so that its peak memory is its own and no cache is warm.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from machine import describe, peak_memory

from muonckpt.algebra.plan import make_plan
from muonckpt.layouts.mesh import AxisPlacement, Mesh, Shard, mesh_layout

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def one_matrix() -> Tensors:
    yield "w", (8192, 8192)


def llama3_70b() -> Tensors:
    """80 layers, hidden 8192, 64 heads and 8 KV heads of 128, feed-forward 28672, vocabulary 128256."""
    yield "embed", (128256, 8192)
    for layer in range(80):
        for name, shape in (
            ("q", (8192, 8192)),
            ("k", (1024, 8192)),
            ("v", (1024, 8192)),
            ("o", (8192, 8192)),
            ("gate", (28672, 8192)),
            ("up", (28672, 8192)),
            ("down", (8192, 28672)),
            ("norm1", (8192,)),
            ("norm2", (8192,)),
        ):
            yield f"{layer}.{name}", shape
    yield "norm", (8192,)
    yield "head", (128256, 8192)


def experts_235b(fused: bool) -> Tensors:
    """The expert matrices of 94 layers of 128 experts, hidden 4096, expert feed-forward 1536."""
    for layer in range(94):
        for name, shape in (("gate", (1536, 4096)), ("up", (1536, 4096)), ("down", (4096, 1536))):
            if fused:
                yield f"{layer}.{name}", (128, *shape)
            else:
                yield from ((f"{layer}.{expert}.{name}", shape) for expert in range(128))


def rows(ranks: int):
    return lambda name, shape: mesh_layout(shape, Mesh.of(ranks), (Shard(0),))


def experts_3d(ep: int, fsdp: int):
    """One 3-D parameter a layer: experts over EP, the rows of each over FSDP."""
    placements: tuple[AxisPlacement, ...] = (Shard(0), Shard(1))
    return lambda name, shape: mesh_layout(shape, Mesh.of(ep, fsdp), placements)


def experts_2d(ep: int, fsdp: int):
    """One parameter an expert, on the FSDP ranks of its EP rank."""
    meshes = [Mesh((fsdp,), tuple(range(group * fsdp, (group + 1) * fsdp))) for group in range(ep)]

    def layout(name: str, shape: tuple[int, ...]):
        return mesh_layout(shape, meshes[int(name.split(".")[1]) * ep // 128], (Shard(0),))

    return layout


CASES = {
    "8192 x 8192, FSDP 512 -> 768": (one_matrix, rows(512), rows(768), 0.05),
    "Llama-3-70B, FSDP 64 -> 128": (llama3_70b, rows(64), rows(128), 1.0),
    "235B experts 3-D, EP64xFSDP8 -> EP32xFSDP32": (
        lambda: experts_235b(True), experts_3d(64, 8), experts_3d(32, 32), 10.0),
    "235B experts 2-D, EP64xFSDP8 -> EP32xFSDP32": (
        lambda: experts_235b(False), experts_2d(64, 8), experts_2d(32, 32), 10.0),
}  # fmt: skip


def measure(name: str) -> None:
    """Run one case in this process and print its row."""
    tensors, source, target, aim = CASES[name]
    begin = time.perf_counter()
    shapes = dict(tensors())
    sources = {key: source(key, shape) for key, shape in shapes.items()}
    targets = {key: target(key, shape) for key, shape in shapes.items()}
    laid_out = time.perf_counter()
    plans = {key: make_plan(sources[key], target) for key, target in targets.items()}
    planned = time.perf_counter()
    copies = sum(len(plan.copies) for plan in plans.values())
    peak = peak_memory() / 1024
    print(
        f"| {name} | {len(shapes)} | {copies} | {laid_out - begin:.3f} | {planned - laid_out:.3f} | "
        f"{planned - begin:.3f} | {aim} | {peak:.0f} |",
        flush=True,
    )


def main() -> None:
    print(describe())
    print()
    print("| case | tensors | copies | layouts s | plans s | both s | aim s | peak MiB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in CASES:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()
