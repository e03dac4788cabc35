"""Raw flat buffers for tests: written by us, and as somebody else would leave them, filled by an oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from muonckpt.converters.engine.container import container_of
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import ShardRule, Target
from muonckpt.layouts.buffers.parameters import Parameter
from muonckpt.layouts.buffers.records import GroupBuffer
from muonckpt.record.chunks import no_chunks
from muonckpt.record.record import Manifest, StateRecord
from muonckpt.store.formats import flat_buffers
from muonckpt.store.reading.dtypes import itemsize
from support.manifest_json import gathered, spread
from support.resharded import make_job

INDEX = "flat_buffers.json"
EXPERTS = ShardRule("*experts*", (("ep", 0),))
MESHES = {1: ({"dp": 1}, ()), 3: ({"dp": 3}, ()), 4: ({"dp": 2, "ep": 2}, (EXPERTS,))}


def written(source: Path, path: Path, layout: str, dp: int, **options: Any) -> Manifest:
    mesh, rules = MESHES[dp]
    report = run_job(make_job(source, Target(mesh, rules, layout), container=container_of("buffers")), path, **options)
    assert report is not None
    return report


def filled(index: dict[str, Any], values: dict[str, np.ndarray], padding: bytes = b"\0") -> dict[str, bytes]:
    """The files of ranks, from the JSON alone: buffers filled parameter by parameter, cut at the shards' ends."""
    files: dict[str, bytearray] = {}
    for entry in index["provenance"]["buffers"]:
        size = itemsize(entry["parameters"][0]["dtype"])
        buffer = bytearray(padding * (entry["numel"] * size))
        for parameter, origin in zip(entry["parameters"], entry["origins"], strict=True):
            box = tuple(slice(lo, lo + n) for lo, n in zip(origin, parameter["shape"], strict=True))
            buffer[parameter["start"] * size : parameter["stop"] * size] = values[parameter["name"]][box].tobytes()
        for rank, (file, offset, length) in enumerate(entry["files"]):
            rank_bytes = b"".join(
                buffer[start * size : stop * size] for start, stop, of in entry["shards"] if of == rank
            )
            assert len(rank_bytes) == length and offset % 4096 == 0
            if rank_bytes:
                whole = files.setdefault(file, bytearray())
                assert not any(whole[offset:])
                whole.extend(bytes(max(offset + length - len(whole), 0)))
                whole[offset : offset + length] = rank_bytes
    return {name: bytes(content) for name, content in files.items()}


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / INDEX).read_text())


def binaries(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name.startswith("rank_")}


def with_version(path: Path, version: int) -> None:
    index = index_of(path)
    for entry in index["provenance"]["buffers"]:
        entry["version"] = version
    (path / INDEX).write_text(json.dumps(index))


def dumped(path: Path, buffers: list[GroupBuffer], values: dict[str, np.ndarray]) -> Path:
    """What somebody else would write who has these buffers in memory: no chunks, no sums."""
    parameters = [entry.parameter for buffer in buffers for entry in buffer.layout.parameters]
    tensors = [
        StateRecord(p.name, (p.name,), p.shape, p.dtype, no_chunks(len(p.shape)), slot="momentum_buffer")
        for p in parameters
    ]
    records = [entry.to_json() for entry in flat_buffers.place(buffers)]
    manifest_text = Manifest(tuple(tensors), (), {"program": "another", "buffers": records}).to_json()
    index = gathered(spread(json.loads(manifest_text)))
    path.mkdir()
    (path / INDEX).write_text(json.dumps(index))
    for name, content in filled(index, values, padding=b"\xff").items():
        (path / name).write_bytes(content)
    return path


PARAMETERS = [Parameter(f"layers.{n}.w", (6 + n % 2, 5), "float32") for n in range(7)]
NUMBERS = {
    p.name: np.arange(n * 100, n * 100 + p.numel, dtype="<f4").reshape(p.shape) for n, p in enumerate(PARAMETERS)
}


def grouped(layouts, group=(0, 1, 2)) -> list[GroupBuffer]:
    return [
        GroupBuffer(
            "momentum_buffer", 0, group, tuple((0,) * len(entry.parameter.shape) for entry in layout.parameters), layout
        )
        for layout in layouts
    ]
