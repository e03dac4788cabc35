"""Many chunks: what each stored box costs the commands beside its bytes, up to a million tiny chunks.

Each checkpoint has ``tensors`` momenta and weights of a mixture-of-experts model, each cut by rows over ``ranks``.
Commands run in fresh processes; CPU seconds are those of all threads, so that other work on the machine counts little.
Modules are compiled once, before the first figure, as an installation leaves them.  `reshard` writes for
half the ranks, `convert` for one; `diff` reads the checkpoint twice; `open` reads one tensor in Python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash
from machine import describe

from muonckpt.algebra.box import Box
from muonckpt.algebra.fingerprint import as_hex, fingerprint
from muonckpt.names.vocabulary import Convention
from muonckpt.record.record import Chunk, Chunks, Extent, Manifest, StateRecord
from muonckpt.store.formats.native import write_native
from muonckpt.store.formats.torch_save.stored_zip import aligned
from muonckpt.store.formats.torch_save.tensor_item import frame
from muonckpt.store.io.checksums import crc32

ROWS, COLUMNS = 2, 4
"""The shape of a chunk."""


def names(count: int) -> list[tuple[str, ...]]:
    """Paths of the first tensors of a model with 128 experts a layer, and of their momenta."""

    def every():
        layer = 0
        while True:
            for expert in range(128):
                for matrix in ("gate", "up", "down"):
                    name = f"layers.{layer}.experts.{expert}.{matrix}.weight"
                    yield "model", name
                    yield "optimizer", "state", name, "momentum_buffer"
            layer += 1

    return list(islice(every(), count))


def write(folder: Path, tensors: int, ranks: int) -> None:
    """Write the checkpoint; items are copies of one template with their own elements and checksums."""
    folder.mkdir()
    around = frame("float32", (ROWS, COLUMNS))
    stride = aligned(around.length)
    paths = names(tensors)
    values = np.random.default_rng(0).standard_normal((tensors, ranks, ROWS, COLUMNS), np.float32)
    probe, other_tail = around.tail(0), around.tail(0xFFFFFFFF)
    places = [i for i in range(len(probe)) if probe[i : i + 4] == bytes(4) and other_tail[i : i + 4] == b"\xff" * 4]
    item = np.zeros(stride, np.uint8)
    item[: around.length] = np.frombuffer(around.head + bytes(around.payload_length) + probe, np.uint8)
    at, end = around.payload_offset, around.payload_offset + around.payload_length
    sums = np.empty((ranks, tensors), np.uint32)
    for rank in range(ranks):
        file = np.tile(item, (tensors, 1))
        file[:, at:end] = values[:, rank].reshape(tensors, -1).view(np.uint8)
        sums[rank] = [crc32([row.tobytes()]) for row in file[:, at:end]]
        for place in places:
            file[:, end + place : end + place + 4] = sums[rank][:, None].view(np.uint8)
        file.tofile(folder / f"__{rank}_0.distcp")
    boxes = [Box((rank * ROWS, 0), ((rank + 1) * ROWS, COLUMNS)) for rank in range(ranks)]
    layout = {"algorithm": "mesh", "version": 1, "mesh": [ranks], "axes": ["dp"], "ranks": list(range(ranks)),
              "placements": ["Shard(0)"]}  # fmt: skip

    def record(number: int) -> StateRecord:
        path, value = paths[number], values[number]
        of_optimizer = path[0] == "optimizer"
        chunks = (
            Chunk(
                boxes[rank],
                Extent(f"__{rank}_0.distcp", number * stride, around.length),
                Extent(f"__{rank}_0.distcp", number * stride + at, around.payload_length),
                xxhash.xxh3_128_hexdigest(value[rank].tobytes()),
                int(sums[rank, number]),
            )
            for rank in range(ranks)
        )
        whole = fingerprint(value.reshape(ranks * ROWS, COLUMNS).view(np.uint32), (0, 0))
        return StateRecord(
            ".".join(path), path, (ranks * ROWS, COLUMNS), "float32", Chunks.of(chunks, 2),
            name=path[2] if of_optimizer else None, slot=path[3] if of_optimizer else None,
            convention=Convention.EMA if of_optimizer else None, layout=layout, fingerprint=as_hex(whole),
        )  # fmt: skip

    provenance = {"program": "many_chunks", "world": ranks, "step": 1}
    write_native(Manifest(tuple(map(record, range(tensors))), (), provenance), folder)


_TIMED = """
import resource, sys
if sys.argv[1] == "open":
    import muonckpt
    tensors, code = muonckpt.open(sys.argv[2]).tensors, 0
    tensors[next(iter(tensors))].numpy()
else:
    from muonckpt.cli.main import run
    code = run(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)  # its ru_maxrss would include the parent's memory
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(f"{used.ru_utime + used.ru_stime:.6f} {peak} {code}", file=sys.stderr)
"""


_COMPILED = tempfile.TemporaryDirectory()
"""Where compiled modules are kept."""


def measured(*arguments: str) -> tuple[float, float]:
    """CPU seconds and peak MiB of a command in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    completed = subprocess.run(
        [sys.executable, "-c", _TIMED, *arguments], capture_output=True, text=True, check=True,
        env={**environment, "PYTHONPYCACHEPREFIX": _COMPILED.name, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    seconds, peak, code = completed.stderr.splitlines()[-1].split()
    assert code == "0", completed.stdout + completed.stderr
    return float(seconds), int(peak) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "sizes", nargs="*", default=["156x64", "782x64", "3125x64", "15625x64"], metavar="TENSORSxRANKS"
    )
    parser.add_argument("--folder", help="where checkpoints are kept; without it they are temporary")
    parser.add_argument("--commands", default="inspect,verify,reshard,convert,diff,report,open")
    settings = parser.parse_args()
    print(describe())
    base, _ = min(measured("convert", "--list-rules") for _ in range(3))
    print(f"\na command that reads nothing: {base:.3f} s of CPU\n")
    print("| tensors x ranks | chunks | command | CPU s | µs a chunk | peak MiB |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=settings.folder) as temporary:
        for size in settings.sizes:
            tensors, ranks = map(int, size.split("x"))
            source = Path(settings.folder or temporary) / f"many-{size}"
            if not source.exists():
                write(source, tensors, ranks)
            for command in settings.commands.split(","):
                out = f"{temporary}/out"
                rewritten = [out, "--mesh", f"dp={max(ranks // 2, 1)}", "--memory", "64MiB"]
                command_arguments = {
                    "reshard": rewritten,
                    "convert": [out, "--memory", "64MiB"],
                    "diff": [str(source)],
                    "report": ["-o", f"{temporary}/page.html"],
                }
                seconds, peak = measured(command, str(source), *command_arguments.get(command, []))
                shutil.rmtree(out, ignore_errors=True)
                seconds_per_chunk = seconds / (tensors * ranks) * 1e6
                row = (
                    f"{tensors} x {ranks}",
                    tensors * ranks,
                    command,
                    f"{seconds:.2f}",
                    f"{seconds_per_chunk:.1f}",
                    f"{peak:.0f}",
                )
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
