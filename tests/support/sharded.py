"""Checkpoints for tests of what reads them, saved on small meshes; and what they hold, by independent means."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt.record.record import Extent, Manifest
from muonckpt.store.formats.dcp_metadata import parse_metadata
from muonckpt.store.reading.dtypes import itemsize
from support.dcp_metadata import dump_metadata
from support.manifest_json import manifest_at, put
from support.workers import run as on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.complex128, torch.float8_e4m3fn]  # fmt: skip
SHAPES = {"vector": (7,), "row": (1, 9), "cube": (3, 4, 5), "tower": (5, 2, 3, 2), "none": (0, 4), "nothing": (4, 0),
          "scalar": ()}  # fmt: skip
WIDE = {"long": ((300_001,), torch.float32), "flat": ((1, 262_147), torch.float32), "tall": ((100_003, 2), torch.half),
        "two": ((2, 150_001), torch.bfloat16), "deep": ((2, 3, 50_021), torch.uint8), "words": ((40_001,), torch.int64),
        "halves": ((1, 9_001), torch.complex128)}  # fmt: skip


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaNs and negative zeros among them."""
    size = (*shape, dtype.itemsize)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, size, generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def small() -> dict[str, torch.Tensor]:
    values_by_dtype = {
        str(dtype).removeprefix("torch."): some((13, 5), dtype, seed) for seed, dtype in enumerate(DTYPES)
    }
    return values_by_dtype | {name: some(shape, torch.float32, 99) for name, shape in SHAPES.items()}


def wide() -> dict[str, torch.Tensor]:
    """Rows larger than the smallest band."""
    return {name: some(shape, dtype, 5) for name, (shape, dtype) in WIDE.items()}


VALUES = {"small": small, "wide": wide}

# mesh, and the dim that each of its axes shards
MESHES = {"rows1": ((1,), (0,)), "rows3": ((3,), (0,)), "rows4": ((4,), (0,)), "columns3": ((3,), (1,)),
          "replicas2": ((2,), (None,)), "hsdp2x2": ((2, 2), (None, 0)), "grid2x2": ((2, 2), (0, 1)),
          "turned2x2": ((2, 2), (1, 0))}  # fmt: skip
SOURCES = [f"stock {mesh}" for mesh in MESHES] + [
    "own rows3",
    "own rows4",
    "own columns3",
    "own hsdp2x2",
    "own grid2x2",
]


def save_job(rank, world, path, values, mesh_name, stock):
    shape, dims = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", shape)

    def place(value):
        # a dim that the tensor does not have: its first one, unless another axis has that already
        cut_dims = [dim if dim is None or dim < value.ndim else None if 0 in dims else 0 for dim in dims]
        placements = [Replicate() if dim is None else Shard(dim) for dim in cut_dims]
        return distribute_tensor(value, mesh, placements, src_data_rank=None)

    tensors = {name: place(value) if value.ndim else value for name, value in VALUES[values]().items()}
    save = (lambda state, path: dcp.save(state, checkpoint_id=path)) if stock else muonckpt.save
    save({"t": tensors, "hyper": {"lr": 0.5, "betas": (0.9, 0.95)}, "step": 3}, path)


def save_all(name: str, values: str, path: Path) -> None:
    """Save the values of this name ("small", "wide") by a writer on a mesh: "own rows3", "stock grid2x2", …"""
    writer, mesh = name.split()
    on_ranks(math.prod(MESHES[mesh][0]), save_job, str(path), values, mesh, writer == "stock")


def raw_bytes(path: Path, extent: Extent) -> bytes:
    with (path / extent.file).open("rb") as stream:
        stream.seek(extent.offset)
        return stream.read(extent.length)


def elements_of(path: Path) -> dict[str, bytes]:
    """Each tensor's elements in row-major order, one at a time; fails where one is missing or there twice."""
    bytes_by_key = {}
    for tensor in muonckpt.open(path).manifest.tensors:
        size = itemsize(tensor.dtype)
        cells: list[bytes | None] = [None] * math.prod(tensor.shape)
        for chunk in tensor.chunks:
            raw = raw_bytes(path, chunk.payload)
            for at, index in enumerate(product(*map(range, chunk.box.lo, chunk.box.hi))):
                flat = 0
                for i, length in zip(index, tensor.shape, strict=True):
                    flat = flat * length + i
                assert cells[flat] is None, (tensor.key, index)
                cells[flat] = raw[at * size : (at + 1) * size]
        assert None not in cells, tensor.key
        bytes_by_key[tensor.key] = b"".join(cells)
    return bytes_by_key


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def stock_load(path: Path, like: Manifest) -> dict[str, bytes]:
    """Every tensor, as stock DCP loads it whole."""
    state = {t.key: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in like.tensors}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return {key: bits(value) for key, value in state.items()}


GOLDENS = ["torch_fsdp4/ckpt", "torch_hsdp2x2/ckpt", "dion_fsdp4/ckpt", "xtuner_fsdp4/ckpt", "titan_fsdp4/ckpt",
           "megatron/fsdp_dtensor/dp4/iter_0000010", "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010"]  # fmt: skip


def truth_of(path: Path) -> dict[str, bytes]:
    """The tensors of the safetensors file beside a golden checkpoint, under the ends of their checkpoint keys."""
    data = (path.parent / "truth.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    bytes_by_key = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            end = name.removeprefix("param/").replace("state/", "state.", 1).replace("/", ".")
            bytes_by_key[end] = data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
    return bytes_by_key


def manifest_edited(path: Path, change) -> None:
    """Change the entries of a manifest, by key, and leave it without digests of descriptions."""
    data = manifest_at(path / "muonckpt.json")
    change({entry["key"]: entry for entry in (*data["tensors"], *data["blobs"])})
    data.pop("files", None)
    put(path / "muonckpt.json", data)


def as_stock(path: Path) -> Path:
    """Leave a checkpoint of ours as stock DCP would have written it, without a trace of the manifest."""
    (path / "muonckpt.json").unlink()
    (path / ".metadata").write_bytes(unmarked((path / ".metadata").read_bytes()))
    return path


def unmarked(metadata: bytes) -> bytes:
    """A ``.metadata`` of ours as stock DCP would have written it."""
    return dump_metadata(replace(parse_metadata(metadata), extra=()))


@contextmanager
def no_checksums() -> Iterator[None]:
    """What torch saves inside has no CRC-32s."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def edit(file: Path, at: int, bit: int = 4) -> None:
    """Flip a bit of one byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)
