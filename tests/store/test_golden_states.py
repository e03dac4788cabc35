"""States that other programs saved are read exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from isal import isal_zlib
from support.golden import golden
from support.stored_bytes import assemble, raw

import muonckpt
from muonckpt.store.formats.torch_save import stored_zip

KeyPath = tuple[str | int, ...]


def safetensors(file: Path) -> dict[str, bytes]:
    """Name to raw bytes."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    ranges = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: data[start + lo : start + hi] for name, (lo, hi) in ranges.items()}


def contents(path: Path) -> dict[KeyPath, bytes]:
    manifest = muonckpt.open(path).manifest
    for blob in manifest.blobs:
        data = raw(path, blob.item)
        for member in stored_zip.read_members(lambda at, n, data=data: data[at : at + n], len(data)):
            assert isal_zlib.crc32(data[member.offset : member.offset + member.length]) == member.crc32
    return {tensor.path: assemble(path, tensor) for tensor in manifest.tensors}


@pytest.mark.parametrize("name", ["torch_fsdp4", "torch_hsdp2x2", "dion_fsdp4", "xtuner_fsdp4", "titan_fsdp4"])
def test_golden_optimizer_states_are_read_exactly(name: str) -> None:
    actual = contents(golden(name) / "ckpt")
    truth = safetensors(golden(name) / "truth.safetensors")
    compared = 0
    for key, value in truth.items():
        kind, _, rest = key.partition("/")
        parameter, _, slot = rest.partition("/")
        if kind == "param":
            places: list[KeyPath] = [("model", parameter), (parameter,)]
        else:
            places = [("optimizer", "state", parameter, slot), ("optimizer", f"state.{parameter}.{slot}")]
        stored = [actual[place] for place in places if place in actual]
        if stored:  # some programs keep small numbers as plain objects
            assert stored == [value], key
            compared += 1
    assert compared >= len(actual) - 4 and compared > 30


@pytest.mark.parametrize("name", ["torch_fsdp4", "torch_hsdp2x2", "dion_fsdp4", "xtuner_fsdp4"])
def test_golden_optimizer_slots_are_recognised(name: str) -> None:
    manifest = muonckpt.open(golden(name) / "ckpt").outline
    slots = {(t.name, t.slot) for t in manifest.tensors if t.slot is not None}
    assert slots == {(t.path[2], t.path[3]) for t in manifest.tensors if t.path[:2] == ("optimizer", "state")}
    expected = {"torch": "momentum_buffer", "dion_": "momentum", "xtune": "momentum"}[name[:5]]
    assert ("layers.0.mlp.down.weight", expected) in slots


@pytest.mark.parametrize(
    "name",
    [
        *("fsdp_dtensor/dp4/iter_0000010", "fsdp_dtensor/dp4tp2ep2/iter_0000010"),
        *("layer_wise/ws4_padded/torch_dist", "layer_wise/ws4_pingpong/torch_dist"),
    ],
)
def test_golden_megatron_checkpoints_are_read_exactly(name: str) -> None:
    path = golden("megatron") / name
    actual = {".".join(map(str, key)): value for key, value in contents(path).items()}
    assert actual == safetensors(path.parent / "truth.safetensors")
