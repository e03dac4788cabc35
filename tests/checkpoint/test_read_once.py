"""All ranks together read each stored byte once, whatever they ask for, and find damage all the same."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from hypothesis import given, strategies as st
from support import sweep
from support.machines import Ranges, bytes_of_cluster, on_machine, recorded_reads
from support.placed import numbered
from support.sharded import as_stock
from support.stored_bytes import bytes_read
from support.workers import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt import SourceError
from muonckpt.checkpoint.chunk_reader import PartialSum, judge_sums
from muonckpt.names.resumption import LoadTraffic
from muonckpt.store.io.checksums import join_crc32


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 1 << 40))
def test_the_sum_of_two_runs_is_that_of_both_end_to_end(first, second, far):
    assert join_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
    in_two_steps = join_crc32(join_crc32(zlib.crc32(first), 0, far), 0, 5)
    assert join_crc32(zlib.crc32(first), 0, far + 5) == in_two_steps


SHAPES = {"w": (1024, 1024), "odd": (1023, 513), "cube": (8, 128, 256), "bias": (777,), "scalar": ()}

HOMES = {
    "FSDP 4": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "HSDP 2 x 2": ((2, 2), (Replicate(), Shard(0))),
    "DDP 4": ((4,), (Replicate(),)),
    "TP x DP": ((2, 2), (Replicate(), Shard(1))),
    "FSDP x TP": ((2, 2), (Shard(0), Shard(1))),
}


def state(home: str, has_values: bool) -> dict[str, torch.Tensor]:
    """Return tensors on a mesh, the same on all ranks; ``tied`` has the memory of ``w``."""
    mesh_shape, placements = HOMES[home]
    mesh = init_device_mesh("cpu", mesh_shape)
    values = {}
    for name, shape in SHAPES.items():
        value = numbered(shape) if has_values else torch.zeros(shape)
        fitting = [Replicate() if isinstance(p, Shard) and p.dim >= value.ndim else p for p in placements]
        values[name] = distribute_tensor(value, mesh, fitting, src_data_rank=None)
    return {**values, "tied": values["w"], "plain": torch.full((5,), 2.0 * has_values), "item": [1.5 * has_values, "a"]}


def save_job(rank: int, world: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    values = {
        name: distribute_tensor(numbered(shape), mesh, [Shard(0) if shape else Replicate()])
        for name, shape in SHAPES.items()
    }
    muonckpt.save({**values, "tied": values["w"], "plain": torch.full((5,), 2.0), "item": [1.5, "a"]}, path)


def load_job(
    rank: int, world: int, path: str, home: str, machines: tuple, arguments: dict
) -> tuple[Ranges, LoadTraffic]:
    """Load on one of several machines, and return what this process has read of files with data, and the traffic."""
    template = state(home, has_values=False)
    with on_machine(machines[rank]), recorded_reads() as ranges:
        report = muonckpt.load(template, path, **arguments)
    # Every tensor and item is that of the state which was saved.
    for name, expected in state(home, has_values=True).items():
        value = template[name]
        local, expected_local = (v.to_local() if isinstance(v, DTensor) else v for v in (value, expected))
        assert torch.equal(local, expected_local) if isinstance(local, torch.Tensor) else local == expected_local, name
    return dict(ranges), report.traffic


MACHINES = {"one machine": (0, 0, 0, 0), "2 x 2": (0, 0, 1, 1), "in turn": (0, 1, 0, 1), "four": (0, 1, 2, 3)}

CASES = [*product((1, 3), HOMES, MACHINES, ({}, {"check": "before"}, {"memory": 1 << 20}))]


@pytest.mark.parametrize(("saved_on", "home", "machines", "arguments"), sweep(CASES, *CASES[::7]), ids=str)
def test_machines_together_read_each_byte_once(saved_on, home, machines, arguments, tmp_path):
    run(saved_on, save_job, str(tmp_path / "c"))
    checkpoint = muonckpt.open(tmp_path / "c")
    size = 4 * int(checkpoint.outline.elements.sum())
    numbers = MACHINES[machines]
    results = run(4, load_job, str(tmp_path / "c"), home, numbers, arguments)
    (traffic,) = {traffic for _, traffic in results}
    assert traffic.passes == (2 if "check" in arguments else 1)
    assert size <= bytes_of_cluster([ranges for ranges, _ in results], numbers) <= size * 1.02 + 4096
    # Ranks of one machine send each other nothing; alone, they read each byte once.
    if machines == "one machine":
        assert traffic.bytes_sent == 0
    if machines == "four":
        assert size <= traffic.bytes_read / traffic.passes <= size * 1.02
        assert traffic.bytes_sent > 0 or home == "FSDP 4"


def other_order_job(rank: int, world: int, path: str) -> tuple[str, bool]:
    template = {name: torch.zeros(3, 2) for name in "ab"}
    with contextlib.chdir(f"{path}/{rank}"), pytest.raises(SourceError) as raised:  # each sees its own in one place
        muonckpt.load(template, "/proc/self/cwd/model.safetensors")
    return str(raised.value), any(value.any() for value in template.values())


def test_ranks_that_see_tensors_in_another_order_are_told(tmp_path):
    for rank, names in enumerate(["ab", "ab", "ba"]):
        header = {
            name: {"dtype": "F32", "shape": [3, 2], "data_offsets": [24 * number, 24 * number + 24]}
            for number, name in enumerate(names)
        }
        raw = json.dumps(header).encode()
        payload = b"".join(torch.full((6,), 1.0 + "ab".index(name)).numpy().tobytes() for name in names)
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + payload)
    for message, is_touched in run(3, other_order_job, str(tmp_path)):
        assert "rank 2 sees another checkpoint" in message and not is_touched


def damaged_job(rank: int, world: int, path: str) -> str:
    with pytest.raises(SourceError) as raised:
        muonckpt.load(state("FSDP 4", has_values=False), path)
    return str(raised.value)


@pytest.mark.parametrize("stock", [False, True], ids=["manifest", "stock"])
def test_every_rank_hears_of_damage_in_what_one_has_read(stock, tmp_path):
    run(1, save_job, str(tmp_path / "c"))
    tensor = next(t for t in muonckpt.open(tmp_path / "c").outline.tensors if t.key == "w")
    payload = tensor.chunks[0].payload
    if stock:
        as_stock(tmp_path / "c")
    with (tmp_path / "c" / payload.file).open("r+b") as file:
        file.seek(payload.end - 1)
        file.write(b"?")
    for message in run(4, damaged_job, str(tmp_path / "c")):
        assert f"tensor 'w' box {tensor.chunks[0].box}" in message and payload.file in message
        assert f"is damaged: {'CRC-32' if stock else 'digest'}" in message


def test_what_a_rank_misread_is_an_error_although_the_file_is_whole(tmp_path):
    muonckpt.save({"w": torch.arange(12.0).reshape(4, 3)}, tmp_path / "c")
    checkpoint = muonckpt.open(tmp_path / "c")
    chunk = checkpoint.tensors["w"].record.chunks[0]
    length, half = chunk.payload.length, chunk.payload.length // 2
    raw = (tmp_path / "c" / chunk.payload.file).read_bytes()[chunk.payload.offset : chunk.payload.end]

    def part(start: int, stop: int, flip: int = 0) -> PartialSum:
        return PartialSum("w", 0, start, stop, zlib.crc32(raw[start:stop]) ^ flip, 1)

    judge_sums(checkpoint, [part(half, length), part(0, half), part(0, half)], [0, 7])
    for parts in (
        [part(0, half), part(half, length, flip=4)],
        [part(0, half, flip=1), part(half, length)],
        [part(0, half)],  # not all of it
        [part(0, half), part(half, length), part(half, length, flip=2)],  # one of two that read it
    ):
        with pytest.raises(SourceError, match=r"'w'.*changed while it was read.*read by rank 7"):
            judge_sums(checkpoint, parts, [0, 7])


@pytest.mark.parametrize("arguments", [{}, {"check": "before"}, {"memory": 1 << 20}], ids=str)
def test_a_checksum_inside_an_item_is_compared_also_where_it_is_read_in_parts(arguments, tmp_path):
    """Tensors of one storage have its CRC-32 alone, and with little memory each of them is read in parts."""
    path, storage = tmp_path / "weights.pt", numbered((2048, 1024))
    torch.save({"a": storage[:1024], "b": storage[1024:]}, path)
    payload = muonckpt.open(path).tensors["a"].record.chunks[0].payload
    with path.open("r+b") as file:
        file.seek(payload.end - 3)
        file.write(b"?")
    template = {"a": torch.zeros(1024, 1024), "b": torch.zeros(1024, 1024)}
    with pytest.raises(SourceError, match="damaged"):
        muonckpt.load(template, path, **arguments)


@pytest.mark.parametrize("arguments", [{"check": "before"}, {}, {"memory": 1 << 20}], ids=str)
def test_a_checksum_that_a_format_keeps_behind_a_chunk_is_compared_where_it_is_read_in_parts(arguments, tmp_path):
    """A chunk of zarr with the codec crc32c has no other checksum, and is larger than the memory."""
    group = zarr.create_group(tmp_path / "z", zarr_format=3)
    codec = zarr.codecs.Crc32cCodec()
    group.create_array("w", data=numbered((1024, 1024)).numpy(), chunks=(1024, 1024), compressors=[codec])
    (file,) = (each for each in (tmp_path / "z" / "w").rglob("*") if each.is_file() and each.name != "zarr.json")
    with file.open("r+b") as chunk:
        chunk.seek(1000)
        chunk.write(b"?")
    template = {"w": torch.zeros(1024, 1024)}
    with pytest.raises(SourceError, match="checksum do not match"):
        muonckpt.load(template, tmp_path / "z", **arguments)
    assert "check" not in arguments or not template["w"].any()


def save_stored_apart(path: Path, kind: str) -> None:
    """Save tensors whose parts are no runs of bytes, or have no checksum of their own."""
    values = {name: numbered(shape) for name, shape in APART.items()}
    if kind == "column-major":
        dcp.save({name: value.t().contiguous().t() for name, value in values.items()}, checkpoint_id=path, no_dist=True)
    elif kind == "one storage":
        storage = torch.cat([value.reshape(-1) for value in values.values()])
        parts = storage.split([value.numel() for value in values.values()])
        torch.save({name: part.view(APART[name]) for name, part in zip(APART, parts, strict=True)}, path)
    elif kind == "tied":
        torch.save({"a": values["a"], "b": values["a"], "c": values["c"]}, path)
    else:
        group, codec = zarr.create_group(path, zarr_format=3), zarr.codecs.Crc32cCodec()
        for name, value in values.items():
            group.create_array(name, data=value.numpy(), chunks=value.shape, compressors=[codec])


APART = {"a": (1024, 700), "b": (700, 1024), "c": (512, 512)}
KINDS_APART = ("column-major", "one storage", "tied", "crc32c")


def load_apart_job(rank: int, world: int, path: str, kind: str, placement: int | None, arguments: dict) -> tuple:
    """Load, each rank on a machine of its own; return the bytes that this process has read, and the report's."""
    mesh, tied = init_device_mesh("cpu", (world,)), {"b": "a"} if kind == "tied" else {}
    placements = [Replicate() if placement is None else Shard(placement)]
    values = {name: numbered(APART[tied.get(name, name)]) for name in APART}
    expected = {name: distribute_tensor(value, mesh, placements, src_data_rank=None) for name, value in values.items()}
    template = {name: torch.zeros_like(value) for name, value in expected.items()}
    with on_machine(rank):
        muonckpt.load({name: torch.zeros_like(value) for name, value in expected.items()}, path, **arguments)
        read_before = bytes_read()
        report = muonckpt.load(template, path, **arguments)
        num_read = bytes_read() - read_before
    for name, value in expected.items():
        assert torch.equal(template[name].to_local(), value.to_local()), name
    return num_read, report.traffic


APART_CASES = [*product(KINDS_APART, (0, 1, None), ({}, {"check": "before"}, {"memory": 1 << 20}))]


@pytest.mark.parametrize(("kind", "placement", "arguments"), sweep(APART_CASES, *APART_CASES[::4]), ids=str)
def test_what_cannot_be_checked_in_parts_is_read_once_by_one_machine(kind, placement, arguments, tmp_path):
    save_stored_apart(tmp_path / "c", kind)
    files = [tmp_path / "c"] if (tmp_path / "c").is_file() else (tmp_path / "c").rglob("*")
    size = sum(file.stat().st_size for file in files)
    results = run(4, load_apart_job, str(tmp_path / "c"), kind, placement, arguments)
    (traffic,) = {traffic for _, traffic in results}
    counts = [num_read for num_read, _ in results]
    assert sum(counts) <= 1.02 * size * traffic.passes
    if kind != "crc32c" or "check" not in arguments:  # of which the second pass has what the first one decoded
        assert traffic.bytes_read == pytest.approx(sum(counts), rel=0.02)
