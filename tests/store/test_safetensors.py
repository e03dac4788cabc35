"""safetensors: what we write the stock library loads, what it writes we read, and nothing damaged passes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors as stock
import safetensors.torch as stock_torch
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, strategies as st
from support.commands import called
from support.resharded import make_job
from support.sharded import SHAPES, bits, raw_bytes, small, some, wide
from support.whole import assemble, write_values

import muonckpt
from muonckpt import SourceError
from muonckpt.algebra.box import Box
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.engine.whole_files import SafetensorsFiles
from muonckpt.converters.target.topology import Target
from muonckpt.record.chunks import no_chunks
from muonckpt.record.record import Manifest, StateRecord
from muonckpt.store.formats import safetensors
from muonckpt.store.formats.registry import SAFETENSORS, format_of
from muonckpt.store.formats.safetensors import CODE_OF_DTYPE
from muonckpt.store.io.location import Remote, is_there, location
from muonckpt.store.reading.dtypes import DTYPES
from muonckpt.store.reading.payloads import Payloads, count_nonfinite

LOADABLE = sorted(CODE_OF_DTYPE.keys() - {"float8_e8m0fnu"})
"""What the stock library loads into torch: F8_E8M0 it can write only."""


def values() -> dict[str, torch.Tensor]:
    tensors = {name: some((13, 5), getattr(torch, name), seed) for seed, name in enumerate(LOADABLE)}
    return tensors | {name: some(shape, torch.float32, 99) for name, shape in SHAPES.items()}


def read(path: Path) -> Manifest:
    return muonckpt.open(path).outline


def stored(path: Path) -> dict[str, bytes]:
    manifest = read(path)
    return {t.key: raw_bytes(safetensors.folder(path), t.chunks[0].payload) for t in manifest.tensors}


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {key: bits(value) for key, value in tensors.items()}


# --- both ways --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1, 256 << 20])
def test_the_stock_library_loads_what_we_write(memory, tmp_path):
    """Large tensors in one go, or in the smallest bands that there are."""
    tensors = values() | {name: value for name, value in wide().items() if value.dtype != torch.complex128}
    write_values(tmp_path / "a.safetensors", SafetensorsFiles(), tensors, memory=memory)
    loaded = stock_torch.load_file(tmp_path / "a.safetensors")
    assert {key: (v.shape, v.dtype) for key, v in loaded.items()} == {k: (v.shape, v.dtype) for k, v in tensors.items()}
    assert expected(loaded) == expected(tensors) == stored(tmp_path / "a.safetensors")
    with stock.safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert bits(opened.get_slice("cube")[1:3, :2]) == bits(tensors["cube"][1:3, :2])
    mode = (tmp_path / "a.safetensors").stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    assert mode == 0o666 & ~umask


def test_we_read_what_the_stock_library_writes(tmp_path):
    tensors = values() | {"float8_e8m0fnu": some((3, 3), torch.float8_e8m0fnu, 4)}
    stock_torch.save_file(tensors, tmp_path / "a.safetensors", {"author": "somebody"})
    assert stored(tmp_path / "a.safetensors") == expected(tensors)
    for tensor in read(tmp_path / "a.safetensors").tensors:
        value = tensors[tensor.key]
        assert (tensor.shape, tensor.dtype) == (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        assert (tensor.path, tensor.name, tensor.slot, tensor.fingerprint) == ((tensor.key,), None, None, None)


def test_elements_are_read_by_box_even_where_they_are_not_aligned(tmp_path):
    """Old writers did not pad the header."""
    data = np.arange(60, dtype="<f4")
    head = json.dumps({"w": {"dtype": "F32", "shape": [3, 4, 5], "data_offsets": [0, 240]}}).encode()
    head += b" " * (1 - len(head) % 2)
    (tmp_path / "a").write_bytes(len(head).to_bytes(8, "little") + head + data.tobytes())
    (tensor,) = read(tmp_path / "a").tensors
    assert tensor.chunks[0].payload.offset % 4
    with Payloads(tmp_path) as payloads:
        part = assemble(payloads, tensor, Box((1, 0, 2), (3, 4, 4)))
    assert (part.view("<f4") == data.reshape(3, 4, 5)[1:3, :, 2:4]).all()
    assert count_nonfinite(part, "float32") == 0


def test_an_index_and_its_files_are_read_and_written_as_hugging_face_libraries_do(tmp_path):
    tensors = values()
    write_values(tmp_path / "a", SafetensorsFiles(500), tensors)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "a").glob("*.safetensors")}
    assert files == set(index["weight_map"].values()) and len(files) > 3
    assert all(re.fullmatch(rf"model-\d{{5}}-of-{len(files):05d}\.safetensors", name) for name in files)
    assert index["metadata"]["total_size"] == sum(v.numel() * v.itemsize for v in tensors.values())
    loaded = {}
    for name in files:
        part = stock_torch.load_file(tmp_path / "a" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
        total = sum(v.numel() * v.itemsize for v in part.values())
        assert total <= 500 or len([v for v in part.values() if v.numel()]) == 1
        loaded |= part
    assert expected(loaded) == expected(tensors) == stored(tmp_path / "a")
    assert [t.key for t in read(tmp_path / "a").tensors if t.dtype == "float32"] == [
        key for key, value in tensors.items() if value.dtype == torch.float32
    ]


def test_files_are_cut_where_a_header_would_be_too_long_for_readers(tmp_path):
    """A name is in a header three times, and readers refuse headers that are longer than 1 MiB and the data."""
    tensors = {f"{number}.{'x' * 20_000}": torch.full((4,), float(number)) for number in range(50)}
    write_values(tmp_path / "a", SafetensorsFiles(1 << 30), tensors)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    parts = [stock_torch.load_file(file) for file in files]
    assert [len(part) for part in parts] == [12, 13, 12, 13]
    assert expected({key: value for part in parts for key, value in part.items()}) == stored(tmp_path / "a")
    assert stored(tmp_path / "a") == expected(tensors)


def test_a_folder_with_one_file_needs_no_index(tmp_path):
    stock_torch.save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert format_of(tmp_path) is format_of(tmp_path / "model.safetensors") is SAFETENSORS
    assert stored(tmp_path) == stored(tmp_path / "model.safetensors") == {"w": bits(torch.ones(3))}


@pytest.mark.parametrize("name", sorted(DTYPES.keys() - CODE_OF_DTYPE.keys()))
def test_what_the_format_cannot_say_is_refused_by_name(name):
    with pytest.raises(SourceError, match=rf"'x': safetensors has no dtype {name}; it has F64|.*{name}"):
        safetensors.check_storable([StateRecord("x", ("x",), (2,), name, no_chunks(1))])


@pytest.mark.parametrize("key", ["__metadata__", "\ud800"])
def test_names_that_the_format_cannot_say_are_refused(key):
    with pytest.raises(SourceError, match="name"):
        safetensors.check_storable([StateRecord(key, ("x",), (2,), "float32", no_chunks(1))])


# --- damaged and hostile files ----------------------------------------------------------------------------------------


def file_of(head: bytes, data: bytes = bytes(8)) -> bytes:
    return len(head).to_bytes(8, "little") + head + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def header_of(**entries) -> bytes:
    return json.dumps(entries).encode()


DAMAGED = {
    "nothing": b"",
    "less than a length": b"\1\0\0",
    "length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "longest length": b"\xff" * 8 + b"{}",
    "no JSON": file_of(b"{", b""),
    "not UTF-8": file_of(b'{"\xff": 1}', b""),
    "a list": file_of(b"[]", b""),
    "deep": file_of(b'{"a":' * 100_000, b""),
    "a long number": file_of(b'{"w": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 8]}}'),
    "twice": file_of(b'{"w": ' + json.dumps(entry()).encode() + b', "w": ' + json.dumps(entry()).encode() + b"}"),
    "no entry": file_of(header_of(w=3)),
    "a missing field": file_of(header_of(w={"dtype": "F32", "shape": [2]})),
    "one field more": file_of(header_of(w=entry(what=1))),
    "an unknown dtype": file_of(header_of(w=entry("F128"))),
    "parts of bytes": file_of(header_of(w=entry("F4", (16,)))),
    "a dtype that is none": file_of(header_of(w=entry(["F32"]))),
    "a negative dim": file_of(header_of(w=entry(shape=(-1, -2)))),
    "a fraction": file_of(header_of(w=entry(shape=(2.0,)))),
    "a truth for a number": file_of(header_of(w=entry(shape=(2, True)))),
    "a text for a number": file_of(header_of(w=entry(offsets=("0", 8)))),
    "a wrong length": file_of(header_of(w=entry(shape=(3,)))),
    "a length that wraps": file_of(header_of(w=entry(shape=(2**62, 4, 2)))),
    "many dims": file_of(header_of(w=entry(shape=[2] + [1] * 5000))),
    "reversed": file_of(header_of(w=entry(shape=(), offsets=(8, 4)))),
    "negative": file_of(header_of(w=entry(offsets=(-8, 0)))),
    "a gap": file_of(header_of(w=entry(offsets=(4, 12))), bytes(12)),
    "an overlap": file_of(header_of(v=entry(), w=entry(offsets=(4, 12))), bytes(12)),
    "data after the end": file_of(header_of(w=entry()), bytes(9)),
    "data cut": file_of(header_of(w=entry()), bytes(7)),
    "metadata of numbers": file_of(header_of(w=entry(), __metadata__={"a": 1})),
    "metadata that is none": file_of(header_of(w=entry(), __metadata__=[])),
    "our manifest damaged": file_of(header_of(w=entry(), __metadata__={"muonckpt": "{}"})),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused(kind, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(DAMAGED[kind])
    with pytest.raises(SourceError, match=r"a\.safetensors"):
        read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("extra", [bytes(9), b"its own trailer " * 9])
def test_the_error_about_bytes_after_the_data_prints_the_command_that_cuts_them(extra, tmp_path):
    whole = file_of(header_of(w=entry()), bytes(range(8)))
    path = tmp_path / "a b.safetensors"
    path.write_bytes(whole + extra)
    with pytest.raises(SourceError, match=f"{len(extra)} bytes lie after the data") as raised:
        muonckpt.open(path)
    assert repr(extra[:16]) in str(raised.value)
    found = called("inspect", path).stdout
    command = re.search(r"truncate -s [0-9]+ '.*a b\.safetensors'", found.replace("\n", " "))
    assert command, found
    subprocess.run(command[0], shell=True, check=True)
    assert path.read_bytes() == whole
    with muonckpt.open(path) as opened:
        assert opened.tensors["w"].bits().tobytes() == bytes(range(8))


@given(st.data())
def test_whatever_we_accept_the_stock_library_accepts_and_reads_alike(data):
    whole = bytearray(file_of(header_of(v=entry("U8", (2, 4)), w=entry(offsets=(8, 16))), bytes(16)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 17))] = data.draw(st.sampled_from(b' "0123456789,:[]{}-.eFU'))
    length = int.from_bytes(whole[:8], "little")
    try:
        ours = safetensors.parse_header(bytes(whole[8 : 8 + length]))
        accepted = length <= len(whole) - 8 and ours.data_length == len(whole) - 8 - length
    except SourceError:
        return
    if accepted:
        theirs = {name: (CODES_OF[e["dtype"]], tuple(e["shape"])) for name, e in stock.deserialize(bytes(whole))}
        assert theirs == {name: (e.dtype, e.shape) for name, e in ours.entries.items()}


CODES_OF = {code: name for name, code in CODE_OF_DTYPE.items()}


def test_a_description_that_is_not_of_this_file_is_refused(tmp_path):
    write_values(tmp_path / "a", SafetensorsFiles(), {"v": torch.ones(4), "w": torch.ones(2, 2)})
    with stock.safe_open(tmp_path / "a", "pt") as opened:
        ours = opened.metadata()
    for other in ({}, {"w": torch.ones(4)}, {"w": torch.ones(2, 2).int()}):
        stock_torch.save_file({"v": torch.ones(4), **other}, tmp_path / "b", ours)
        with pytest.raises(SourceError, match=r"/b: .*'w'"):
            read(tmp_path / "b")


INDEX = "model.safetensors.index.json"
INDICES = {
    "a file that is not there": {"v": "a.safetensors", "w": "c.safetensors"},
    "a tensor that is not there": {"v": "a.safetensors", "w": "b.safetensors", "x": "b.safetensors"},
    "a tensor too little": {"v": "a.safetensors", "w": "b.safetensors"},
    "the wrong file": {"v": "b.safetensors", "w": "a.safetensors"},
    "a path": {"v": "../a.safetensors", "w": "b.safetensors"},
    "an absolute path": {"v": "/etc/passwd", "w": "b.safetensors"},
    "numbers": {"v": 1, "w": 2},
}


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_that_is_not_true_is_refused(kind, tmp_path):
    stock_torch.save_file({"v": torch.ones(2)}, tmp_path / "a.safetensors")
    stock_torch.save_file({"w": torch.ones(2), "u": torch.ones(2)}, tmp_path / "b.safetensors")
    good = {"v": "a.safetensors", "w": "b.safetensors", "u": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": good}))
    assert {t.key for t in read(tmp_path).tensors} == good.keys()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": INDICES[kind]}))
    with pytest.raises(SourceError):
        read(tmp_path)


def test_files_without_an_index_or_with_two_are_refused(tmp_path):
    for name in ("a", "b"):
        stock_torch.save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(SourceError, match="expected one index"):
        read(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(SourceError, match="expected one index"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "[" * 60_000])
def test_a_damaged_index_is_refused(text, tmp_path):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(SourceError, match="damaged index"):
        read(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_shard_without_an_index_is_not_a_whole_checkpoint(tmp_path):
    stock_torch.save_file({"w": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(SourceError, match="expected one index"):
        read(tmp_path)


class Fickle(MemoryFileSystem):
    """A store whose first answer for a range of that length is zeros."""

    def __init__(self, length: int) -> None:
        super().__init__(skip_instance_cache=True)
        self.wrong = {length}

    def cat_ranges(self, paths, starts, ends, **how):
        parts = super().cat_ranges(paths, starts, ends, **how)
        return [bytes(len(part)) if len(part) in self.wrong and not self.wrong.clear() else part for part in parts]


def test_a_header_that_tells_of_other_elements_is_not_published(tmp_path):
    """In an object store the header comes first: its sums are those of an earlier reading."""
    stock_torch.save_file({"w": torch.arange(64.0)}, tmp_path / "source.safetensors")
    source = Remote(Fickle(256), f"/{tmp_path.name}/source.safetensors")
    source.write((tmp_path / "source.safetensors").read_bytes())
    out = location(f"memory://{tmp_path.name}/out.safetensors")
    with pytest.raises(SourceError, match="changed between two reads"):
        run_job(make_job(source, Target({"dp": 1}), container=SafetensorsFiles()), out)
    assert not is_there(out) and is_there(source)
    run_job(make_job(source, Target({"dp": 1}), container=SafetensorsFiles()), out)  # now it always says the same
    assert is_there(out)


def test_what_one_rank_had_of_a_tensor_is_not_taken_for_all_of_it(tmp_path):
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "parts"), save_distributed=True)
    dcp.save({"a": torch.ones(2, 3)}, storage_writer=writer, no_dist=True)
    (file,) = (tmp_path / "parts").iterdir()
    for place in (tmp_path / "parts", file):
        with pytest.raises(SourceError, match="what one rank had of them"):
            read(place)
    dcp.save(
        {"a": torch.ones(2, 3)}, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "whole")), no_dist=True
    )
    assert [tensor.shape for tensor in read(tmp_path / "whole").tensors] == [(2, 3)]


def test_the_same_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        stock_torch.save_file({"v": torch.ones(2), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    names = {"v": "a.safetensors", "a": "a.safetensors", "b": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(SourceError, match="'v' is in another file"):
        read(tmp_path)


def test_links_and_pipes_are_not_opened(tmp_path):
    stock_torch.save_file({"v": torch.ones(2)}, tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "nothing"):
        with pytest.raises(SourceError, match=name):
            read(tmp_path / name)


def test_a_stray_file_in_the_folder_of_a_run_is_not_taken_for_the_run(tmp_path):
    """One file beside checkpoints by step is refused; a model of several files, which has no other name, is read."""
    (tmp_path / "iter_0000010").mkdir()
    stock_torch.save_file({"v": torch.ones(2)}, tmp_path / "stray.safetensors")
    for look in (muonckpt.open, muonckpt.verify):
        with pytest.raises(SourceError, match=r"holds the checkpoints iter_0000010 of a run, and stray\.safetensors"):
            look(tmp_path)
    assert muonckpt.open(tmp_path / "stray.safetensors").tensors.keys() == {"v"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"v": "stray.safetensors"}}))
    with pytest.warns(UserWarning, match="name a checkpoint of the run"):
        assert muonckpt.open(tmp_path).tensors.keys() == {"v"}


def test_every_type_of_the_small_values_is_known():
    assert {str(v.dtype).removeprefix("torch.") for v in small().values()} - CODE_OF_DTYPE.keys() == {"complex128"}
