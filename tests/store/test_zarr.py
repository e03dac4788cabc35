"""zarr v3: what we write the stock library opens, what it writes we read by box, and nothing damaged passes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from support import hostile
from support.commands import run
from support.sharded import SHAPES, bits, raw_bytes, some, wide
from support.whole import assemble, write, write_values
from support.work import Work

import muonckpt
from muonckpt import SourceError
from muonckpt.algebra.box import Box
from muonckpt.converters.engine.whole_files import ZarrFiles
from muonckpt.record.chunks import no_chunks
from muonckpt.record.record import StateRecord
from muonckpt.store.formats import zarr_writer
from muonckpt.store.formats.registry import ZARR, format_of
from muonckpt.store.formats.zarr import nodes, stored_as
from muonckpt.store.formats.zarr_writer import CHUNK_BYTES
from muonckpt.store.reading.dtypes import DTYPES, itemsize
from muonckpt.store.reading.payloads import chunk_elements

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

SMALL = (200, 40)
"""Bytes of shards and chunks: small tensors have several chunks in several files, and chunks beyond their edges."""
MORE_SHAPES = {"long": (301,), "prime": (13, 7), "wide": (2, 97), "deep": (3, 5, 7, 2), "one": (1, 1, 1)}


def values() -> dict[str, torch.Tensor]:
    types = [name for name in DTYPES if hasattr(torch, name) and not name.startswith(("bits", "float4"))]
    tensors = {name: some((13, 5), getattr(torch, name), seed) for seed, name in enumerate(types)}
    return tensors | {name: some(shape, torch.float32, 99) for name, shape in (SHAPES | MORE_SHAPES).items()}


WRITTEN = {
    "usual": (values, (None, CHUNK_BYTES), {}),
    "small": (values, SMALL, {}),
    "in bands": (wide, (1 << 20, 200_000), {"memory": 1}),
}
"""Tensors, and how they are written: the last ones have chunks that go through memory in parts."""


def write_chunks(path: Path, sizes: tuple[int | None, int], tensors: dict[str, torch.Tensor], **how) -> None:
    """Write a hierarchy with shards and chunks of these bytes."""
    shard_bytes, chunk_bytes = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_writer, "CHUNK_BYTES", chunk_bytes)
        write_values(path, ZarrFiles(shard_bytes), tensors, **how)


@pytest.fixture(params=WRITTEN)
def written(request, tmp_path):
    """A hierarchy that we wrote, and what it holds."""
    tensors, sizes, how = WRITTEN[request.param]
    write_chunks(tmp_path / "z", sizes, tensors(), **how)
    return tmp_path / "z", tensors()


def read_back(path: Path) -> dict[str, bytes]:
    """All elements of a hierarchy, as we read them."""
    with muonckpt.open(path).payloads as payloads:
        return {t.key: assemble(payloads, t, Box.of(t.shape)).tobytes() for t in muonckpt.open(path).manifest.tensors}


# --- both ways --------------------------------------------------------------------------------------------------------


def test_the_stock_library_opens_what_we_write(written):
    path, values = written
    group = zarr.open_group(path, mode="r")
    names = [name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]
    assert sorted(names) == sorted(f"{key}/value" for key in values)
    for key, value in values.items():
        array = group[f"{key}/value"]
        name = str(value.dtype).removeprefix("torch.")
        assert (array.shape, str(array.dtype)) == (tuple(value.shape), stored_as(name))
        assert np.ascontiguousarray(array[...]).tobytes() == bits(value), key
        assert array.attrs["muonckpt"]["dtype"] == name and array.attrs["muonckpt"]["key"] == key
        if value.numel() and value.ndim == 2:
            assert np.ascontiguousarray(array[1:, :3]).tobytes() == bits(value[1:, :3])


def test_we_read_what_we_write(written):
    path, values = written
    assert format_of(path) is ZARR
    manifest = muonckpt.open(path).manifest
    assert manifest.provenance["step"] == 3
    assert [(t.key, t.dtype, t.shape) for t in sorted(manifest.tensors, key=lambda t: t.key)] == sorted(
        (key, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for key, v in values.items()
    )
    assert read_back(path) == {key: bits(value) for key, value in values.items()}
    with muonckpt.open(path).payloads as payloads:
        for tensor in manifest.tensors:
            tensor.chunk_layout()
            for chunk in tensor.chunks:  # straight from the file
                assert chunk_elements(payloads, tensor, chunk).tobytes() == raw_bytes(path, chunk.payload)


def test_small_chunks_really_are_small(tmp_path):
    write_chunks(tmp_path / "z", SMALL, values())
    for tensor in muonckpt.open(tmp_path / "z").manifest.tensors:
        sizes = [chunk.payload.length for chunk in tensor.chunks]
        assert max(sizes, default=0) <= max(SMALL[1], itemsize(tensor.dtype))
        files = {chunk.item.file for chunk in tensor.chunks}
        stored = sum((tmp_path / "z" / file).stat().st_size for file in files)
        assert len(files) >= sum(sizes) / (2 * SMALL[0]) and stored < 3 * sum(sizes) + 100


def test_what_zarr_has_keeps_its_type_and_the_rest_its_bits():
    same = ("bool", "int8", "uint64", "float16", "float64", "complex64", "complex128")
    assert [stored_as(name) for name in same] == list(same)
    assert [stored_as(name) for name in ("bfloat16", "float8_e5m2", "complex32")] == ["uint16", "uint8", "uint32"]


NUMBERS = np.arange(7 * 6 * 5, dtype="f4").reshape(7, 6, 5)
FOREIGN = {
    "as zarr likes it": {"chunks": (3, 4, 5)},
    "plain": {"chunks": (3, 6, 5), "compressors": None},
    "plain in tiles": {"chunks": (3, 4, 2), "compressors": None},
    "plain, whole": {"chunks": (7, 6, 5), "compressors": None},
    "checked": {"chunks": (3, 6, 5), "compressors": [zarr.codecs.Crc32cCodec()]},
    "big-endian": {"chunks": (3, 6, 5), "compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")},
    "transposed": {"chunks": (3, 6, 5), "compressors": None, "filters": [zarr.codecs.TransposeCodec(order=(2, 0, 1))]},
    "gzip": {"chunks": (3, 6, 5), "compressors": [zarr.codecs.GzipCodec()]},
    "shards": {"chunks": (1, 6, 5), "shards": (3, 6, 5), "compressors": None},
    "shards of tiles": {"chunks": (1, 2, 3), "shards": (3, 4, 6), "compressors": None},
    "shards, zstd": {"chunks": (1, 6, 5), "shards": (3, 6, 5)},
    "old keys": {"chunks": (3, 6, 5), "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "keys with points": {"chunks": (3, 6, 5), "chunk_key_encoding": {"name": "default", "separator": "."}},
    "old keys with slashes": {"chunks": (3, 6, 5), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
}


def foreign(path: Path, kind: str, data: np.ndarray = NUMBERS) -> None:
    group = zarr.open_group(path, mode="w")
    how = {**FOREIGN[kind], "config": {"write_empty_chunks": True}}
    group.create_array("a/b/w", shape=data.shape, dtype=data.dtype, **how)[...] = data


@pytest.mark.parametrize("kind", FOREIGN)
def test_arrays_that_others_wrote_are_read_by_box(kind, tmp_path):
    foreign(tmp_path, kind)
    (tensor,) = muonckpt.open(tmp_path).manifest.tensors
    assert (tensor.key, tensor.path, tensor.shape, tensor.dtype) == ("a/b/w", ("a", "b", "w"), (7, 6, 5), "float32")
    tensor.chunk_layout()
    assert read_back(tmp_path) == {"a/b/w": NUMBERS.tobytes()}
    with muonckpt.open(tmp_path).payloads as payloads:
        part = assemble(payloads, tensor, Box((2, 1, 3), (7, 5, 4)))
    assert (part.view("<f4") == NUMBERS[2:7, 1:5, 3:4]).all()


@pytest.mark.parametrize(("kind", "chunks"), [("plain", 3), ("shards", 7), ("plain in tiles", 18), ("gzip", 3)])
def test_only_what_is_stored_as_it_is_is_read_without_the_library(kind, chunks, tmp_path, monkeypatch):
    foreign(tmp_path, kind)
    assert len(muonckpt.open(tmp_path).manifest.tensors[0].chunks) == chunks
    monkeypatch.setattr(zarr, "open_array", lambda *a, **k: pytest.fail("opened"))
    if kind in ("plain", "shards"):
        assert read_back(tmp_path) == {"a/b/w": NUMBERS.tobytes()}
    else:
        with pytest.raises(pytest.fail.Exception, match="opened"):
            read_back(tmp_path)


@pytest.mark.parametrize("name", ["bool", "int8", "uint64", "int16", "float16", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("codec", [None, "auto"])
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 3), (3, 0)])
def test_every_type_and_shape_of_others_is_read(name, codec, shape, tmp_path):
    data = np.frombuffer(bits(some(shape, getattr(torch, name), 1)), name).reshape(shape)
    group = zarr.open_group(tmp_path, mode="w")
    how = {"chunks": tuple(max(n // 2, 1) for n in shape), "config": {"write_empty_chunks": True}}
    group.create_array("w", shape=shape, dtype=name, compressors=codec, **how)[...] = data
    assert muonckpt.open(tmp_path).manifest.tensors[0].dtype == name
    assert read_back(tmp_path) == {"w": data.tobytes()}


def test_an_array_at_the_root_is_a_checkpoint_of_one_tensor(tmp_path):
    zarr.create_array(tmp_path / "w", shape=(3,), dtype="i4", chunks=(2,))[:] = [1, 2, 3]
    (tensor,) = muonckpt.open(tmp_path / "w").manifest.tensors
    assert tensor.key == "w" and read_back(tmp_path / "w") == {"w": np.array([1, 2, 3], "<i4").tobytes()}


# --- places -----------------------------------------------------------------------------------------------------------


def place(*path: str | int, slot: str | None = None) -> StateRecord:
    return StateRecord(".".join(map(str, path)), path, (1,), "uint8", no_chunks(1), slot=slot)


def test_a_slot_lies_in_the_group_of_its_parameter_and_any_name_has_a_place(tmp_path):
    tensors = [
        place("opt", "state", "layers.0.w", "exp_avg", slot="exp_avg"),
        place("opt", "state", "layers.0.w", "exp_avg_sq", slot="exp_avg_sq"),
        place("model", "layers.0.w"),
        *(place(name) for name in ("ä/b", "a_b", "a b", "..", ".x", "__x", "", "x" * 300, "x" * 299, "zarr.json", "c")),
        place("list", 0),
        place("list", "00"),
    ]
    found = nodes(tensors)
    assert found[:3] == ["opt/state/layers.0.w/exp_avg", "opt/state/layers.0.w/exp_avg_sq", "model/layers.0.w/value"]
    write(tmp_path / "z", ZarrFiles(), [(tensor, bytes([len(tensor.key) % 251])) for tensor in tensors])
    names = {node.attrs["muonckpt"]["key"]: int(node[0]) for _, node in zarr.open_group(tmp_path / "z").members(None)
             if isinstance(node, zarr.Array)}  # fmt: skip
    assert names == {t.key: len(t.key) % 251 for t in tensors}
    assert {(t.key, t.path) for t in muonckpt.open(tmp_path / "z").manifest.tensors} == {
        (t.key, t.path) for t in tensors
    }


@pytest.mark.parametrize(
    "tensors",
    [[place("a", 0), place("a", "0")], [place("a", "b", slot="b"), place("a", "b", "c")], [place("w"), place("w")]],
)
def test_two_tensors_in_one_place_are_refused(tensors):
    with pytest.raises(SourceError, match=r"its place 'a/[0b].*is taken|its place 'w/value'"):
        nodes(tensors)


def test_a_group_costs_two_looks_at_files_and_one_more_for_each_record_of_a_verification(tmp_path):
    """Its folder is listed and its description read; `verify` lists all files before and after."""
    looks: dict[str, list[int]] = {"open": [], "verify": []}
    group = json.dumps({"zarr_format": 3, "node_type": "group"})
    for count in (1, 40, 140):  # the first imports what is needed
        folder = tmp_path / f"{count}" / "z"
        folder.parent.mkdir()
        for place in (folder, *(folder / f"g{number}" for number in range(count))):
            place.mkdir()
            (place / "zarr.json").write_text(group)
        for name, look in (("open", lambda place: muonckpt.open(place).close()), ("verify", called_verify)):
            with Work() as work:
                look(folder)
            looks[name].append(work.looks)
    assert {name: (more - few) / 100 for name, (_, few, more) in looks.items()} == {"open": 2, "verify": 4}


def called_verify(place: Path) -> None:
    assert run(["verify", str(place)]) == 0


def test_chunks_that_were_never_there_are_not_looked_for_one_by_one(tmp_path):
    place = tmp_path / "alone" / "array"  # what lies beside a checkpoint is looked at as well: a step to go back to
    (place / "c").mkdir(parents=True)
    (place / "zarr.json").write_text(hostile.array(shape=[1 << 59]))
    for number in (0, 3):
        (place / "c" / f"{number}").write_bytes(bytes(4))
    muonckpt.verify(place)  # looks for plug-ins, once in a process
    with Work() as work:
        assert muonckpt.verify(place).verdict == "faulty"
    assert work.looks < 300


# --- damaged and hostile hierarchies ----------------------------------------------------------------------------------


@pytest.fixture
def ours(tmp_path):
    tensors = {"w": torch.arange(30.0).reshape(10, 3), "v": torch.arange(3)}
    write_chunks(tmp_path / "z", (72, 24), tensors)
    return tmp_path / "z"


def edit(file: Path, change) -> None:
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


CHANGES = {
    "version": lambda f: f.update(zarr_format=2),
    "kind": lambda f: f.update(node_type="tree"),
    "no shape": lambda f: f.pop("shape"),
    "negative": lambda f: f.update(shape=[-1, 3]),
    "a fraction": lambda f: f.update(shape=[10.5, 3]),
    "a truth": lambda f: f.update(shape=[True, 3]),
    "other shape": lambda f: f.update(shape=[9, 3]),
    "larger shape": lambda f: f.update(shape=[2**60, 3]),
    "more dims": lambda f: f.update(shape=[10, 3, 1]),
    "type": lambda f: f.update(data_type="int32"),
    "unknown type": lambda f: f.update(data_type="float128"),
    "type that is none": lambda f: f.update(data_type=["r8"]),
    "grid": lambda f: f["chunk_grid"].update(name="rectangular"),
    "no chunks": lambda f: f["chunk_grid"]["configuration"].update(chunk_shape=[0, 3]),
    "uneven shards": lambda f: f["chunk_grid"]["configuration"].update(chunk_shape=[5, 3]),
    "larger shards": lambda f: f["chunk_grid"]["configuration"].update(chunk_shape=[2**40, 3]),
    "keys": lambda f: f["chunk_key_encoding"].update(name="other"),
    "separator": lambda f: f["chunk_key_encoding"]["configuration"].update(separator="/../"),
    "index codecs": lambda f: f["codecs"][0]["configuration"].update(index_codecs=[]),
    "index place": lambda f: f["codecs"][0]["configuration"].update(index_location="middle"),
    "codecs": lambda f: f.update(codecs=None),
    "a codec": lambda f: f["codecs"][0]["configuration"].update(codecs=[{"name": "bytes", "configuration": 3}]),
    "nested shards": lambda f: f["codecs"][0]["configuration"].update(codecs=json.loads(json.dumps(f["codecs"]))),
    "transformers": lambda f: f.update(storage_transformers=[{"name": "x"}]),
    "attributes": lambda f: f.update(attributes=[]),
    "our attributes": lambda f: f["attributes"].update(muonckpt=3),
    "our version": lambda f: f["attributes"]["muonckpt"].update(version=2),
    "our key": lambda f: f["attributes"]["muonckpt"].update(key=3),
    "our shape": lambda f: f["attributes"]["muonckpt"].update(shape=[3, 10]),
    "our dtype": lambda f: f["attributes"]["muonckpt"].update(dtype="bfloat16"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_damaged_description_is_refused(kind, ours):
    edit(ours / "w" / "value" / "zarr.json", CHANGES[kind])
    with pytest.raises(SourceError, match=r"w/value"):
        muonckpt.open(ours)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b'{"a":' * 100_000, b"{}"])
def test_a_description_that_is_no_json_is_refused(text, ours):
    (ours / "w" / "value" / "zarr.json").write_bytes(text)
    with pytest.raises(SourceError, match=r"w/value"):
        muonckpt.open(ours)


DAMAGE = {
    "a file gone": lambda z: (z / "w/value/c/1/0").unlink(),
    "an array gone": lambda z: [(z / "v/value/zarr.json").unlink()],
    "a file cut": lambda z: os.truncate(z / "w/value/c/1/0", 50),
    "a file cut to nothing": lambda z: os.truncate(z / "w/value/c/0/0", 0),
    "a file longer": lambda z: (z / "w/value/c/1/0").open("ab").write(b"\0"),
    "the index changed": lambda z: flip(z / "w/value/c/1/0", -12),
    "a link for a file": lambda z: linked(z / "w/value/c/1/0"),
    "a link for a folder": lambda z: linked(z / "w/value/c"),
    "a pipe for a file": lambda z: ((z / "w/value/c/1/0").unlink(), os.mkfifo(z / "w/value/c/1/0")),
    "a folder for a file": lambda z: ((z / "w/value/c/1/0").unlink(), (z / "w/value/c/1/0").mkdir()),
    "the root": lambda z: (z / "zarr.json").write_text("{}"),
}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def linked(path: Path) -> None:
    path.rename(path.parents[-1] / path.parent / "elsewhere")
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_hierarchy_is_refused(kind, ours):
    muonckpt.open(ours)
    DAMAGE[kind](ours)
    with pytest.raises(SourceError):
        muonckpt.open(ours)


def reindexed(file: Path, entry: int, place: tuple[int, int], count: int) -> None:
    """Change an entry of the index of a shard, and its checksum."""
    from google_crc32c import value

    data = file.read_bytes()
    index = np.frombuffer(data[-16 * count - 4 : -4], "<u8").reshape(-1, 2).copy()
    index[entry] = place
    raw = index.tobytes()
    file.write_bytes(data[: -16 * count - 4] + raw + value(raw).to_bytes(4, "little"))


@pytest.mark.parametrize("place", [(2**64 - 1, 2**64 - 1), (0, 10**6), (10**6, 28), (2**64 - 2, 28), (0, 24)])
def test_an_index_that_is_not_true_is_refused(place, ours):
    reindexed(ours / "w" / "value" / "c" / "0" / "0", 1, place, 3)
    with pytest.raises(SourceError, match=r"c/0/0: box \[2:4, 0:3\]"):
        muonckpt.open(ours)


def test_verify_judges_by_the_checksums_of_the_format_too(ours, tmp_path):
    flip(ours / "w" / "value" / "c" / "0" / "0", 5)
    assert {finding.kind for finding in muonckpt.verify(ours).findings} == {"crc32c", "digest", "fingerprint"}
    for kind, unchecked in {"checked": 0, "plain": 3}.items():
        foreign(tmp_path / kind, kind)
        assert muonckpt.verify(tmp_path / kind).unchecked == unchecked and not muonckpt.verify(tmp_path / kind).findings


@pytest.mark.parametrize(("kind", "at"), [("gzip", -6), ("checked", 8), ("shards, zstd", 8)])
def test_what_cannot_be_decoded_is_an_error_of_the_source(kind, at, tmp_path):
    foreign(tmp_path, kind)
    flip(tmp_path / "a" / "b" / "w" / "c" / "0" / "0" / "0", at)
    with pytest.raises(SourceError, match=r"c/0/0/0"):
        read_back(tmp_path)


@pytest.mark.parametrize("kind", ["plain", "gzip", "shards", "shards, zstd"])
def test_a_chunk_that_others_left_out_is_no_zero(kind, tmp_path):
    group = zarr.open_group(tmp_path, mode="w")
    how = {**FOREIGN[kind], "config": {"write_empty_chunks": False}}
    group.create_array("w", shape=(6, 6, 5), dtype="f4", **how)[:2] = NUMBERS[:2] + 1
    with pytest.raises(SourceError, match="may have been lost; write it with write_empty_chunks"):
        muonckpt.open(tmp_path)
