"""DCP directories: what torch writes we read, what we write torch reads, and what is wrong is said."""

from __future__ import annotations

import math
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from isal import isal_zlib
from support.sharded import unmarked
from support.stored_bytes import assemble, raw
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import muonckpt
from muonckpt import LayoutError, SourceError
from muonckpt.algebra.box import Box, flat_boxes
from muonckpt.record.record import Blob, Chunk, Chunks, Extent, Manifest, StateRecord
from muonckpt.store.formats.dcp_metadata import metadata_parts
from muonckpt.store.formats.torch_save import tensor_item as torch_zip
from muonckpt.store.reading.dtypes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

State = dict[str, Any]


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def example() -> State:
    parameters = {"layer.weight": torch.arange(20.0).reshape(4, 5), "layer.bias": torch.zeros(3, dtype=torch.bfloat16)}
    state = {name: {"momentum_buffer": value + 1, "step": torch.tensor(3.0)} for name, value in parameters.items()}
    return {
        "model": parameters,
        "optimizer": {"state": state, "param_groups": [{"lr": 0.5, "params": list(parameters)}]},
        "other": {"state": {"layer.weight": {"x": torch.zeros(2)}}},
        "epoch": 7,
    }


def manifest_of(path: Path) -> Manifest:
    """All that is known of a checkpoint, its items opened."""
    return muonckpt.open(path).manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    stock.save(example(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    return tmp_path / "ckpt"


def test_what_torch_saves_is_read(saved: Path) -> None:
    manifest = manifest_of(saved)
    tensors = {tensor.path: tensor for tensor in manifest.tensors}
    for name, value in example()["model"].items():
        assert assemble(saved, tensors["model", name]) == bits(value)
        actual = tensors["optimizer", "state", name, "momentum_buffer"]
        assert assemble(saved, actual) == bits(value + 1)
        assert (actual.name, actual.slot, actual.shape) == (name, "momentum_buffer", tuple(value.shape))
        assert (actual.convention, actual.fingerprint) == (None, None)
    assert tensors["optimizer", "state", "layer.bias", "step"].shape == ()
    # A "state" without "param_groups" beside it is not an optimizer's.
    others = [tensors["other", "state", "layer.weight", "x"], tensors["model", "layer.bias"]]
    assert {(tensor.name, tensor.slot) for tensor in others} == {(None, None)}
    blobs = {blob.path: blob for blob in manifest.blobs}
    group = ("optimizer", "param_groups", 0)
    assert blobs.keys() == {("epoch",), (*group, "lr"), (*group, "params")}
    assert raw(saved, blobs[("epoch",)].item).startswith(b"PK")
    assert manifest.provenance["version"] == "1.0.0"


def test_without_payloads_items_stay_closed(saved: Path) -> None:
    closed, opened = muonckpt.open(saved).outline, manifest_of(saved)
    assert all(c.payload is None and c.crc32 is None for t in closed.tensors for c in t.chunks)
    assert [[c.item for c in t.chunks] for t in closed.tensors] == [[c.item for c in t.chunks] for t in opened.tensors]
    assert closed.blobs == opened.blobs


def test_items_are_opened_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {f"s{number}": torch.full((number + 1,), float(number)) for number in range(40)}
    large = {f"x{number}": torch.full((100_000,), float(number)) for number in range(5)}
    stock.save({**small, "t": torch.ones(300, 200).T, **large}, checkpoint_id=tmp_path)
    reads, pread = list[int](), os.pread

    def counted(handle: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(handle, length, offset)

    with muonckpt.open(tmp_path) as opened, monkeypatch.context() as patch:
        patch.setattr(os, "pread", counted)
        located = {tensor.key: tensor.chunks[0] for tensor in opened.manifest.tensors}
        assert opened.tensors["s7"].numpy().tolist() == [7.0] * 8 and (opened.tensors["x3"].numpy() == 3).all()
    assert located["t"].strides == (1, 200) and not located["x1"].strides
    assert None not in {chunk.crc32 for chunk in located.values()}
    # One for all small items and the first head; one between two payloads each; "t" is read by itself.
    assert sum(length < 200_000 for length in reads) == len(reads) < 20


def write(path: Path, boxes: dict[str, list[Box]], tensors: dict[str, Tensor], gap: int) -> Manifest:
    """The items of a checkpoint of our own: each box of each tensor, in turn in one of two files, with gaps."""
    path.mkdir()
    ends = [0, 0]
    records = []
    for number, (key, tensor) in enumerate(tensors.items()):
        name = str(tensor.dtype).removeprefix("torch.")
        chunks = []
        for box in boxes[key]:
            file = (number + len(chunks)) % 2
            payload = bits(tensor[tuple(map(slice, box.lo, box.hi))])
            made, start = torch_zip.frame(name, box.shape), ends[file] + gap
            with (path / f"__{file}_0.distcp").open("ab") as stream:
                stream.write(bytes(gap) + made.head + payload + made.tail(isal_zlib.crc32(payload)))
            item = Extent(f"__{file}_0.distcp", start, made.length)
            ends[file] = item.end
            place = Extent(item.file, start + made.payload_offset, made.payload_length)
            chunks.append(Chunk(box, item, place, crc32=isal_zlib.crc32(payload)))
        records.append(
            StateRecord(key, ("a", key.removeprefix("a.")), tuple(tensor.shape), name, Chunks.of(chunks, tensor.dim()))
        )
    return Manifest(tuple(records))


def cut(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """The boxes of a tensor that lies in a flat buffer cut at random."""
    numel = math.prod(shape)
    cuts = sorted(rng.randrange(numel + 1) for _ in range(rng.randrange(4)))
    return [box for lo, hi in zip([0, *cuts], [*cuts, numel], strict=True) for box in flat_boxes(shape, lo, hi)]


@pytest.mark.parametrize("gap", [0, 100])
def test_what_we_write_torch_loads(tmp_path: Path, gap: int) -> None:
    rng = random.Random(gap)
    names = ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "float8_e4m3fn", "complex64"]
    tensors = {}
    for number in range(24):
        shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(4)))
        count = math.prod(shape) * DTYPES[name := names[number % len(names)]].itemsize
        values = torch.frombuffer(bytearray(rng.randbytes(count)), dtype=torch.uint8)
        tensors[f"a.{number}é"] = values.view(getattr(torch, name)).reshape(shape)
    manifest = write(tmp_path / "ckpt", {k: cut(rng, tuple(t.shape)) for k, t in tensors.items()}, tensors, gap=gap)
    (tmp_path / "ckpt" / ".metadata").write_bytes(unmarked(b"".join(metadata_parts(manifest))))
    target = {"a": {key.removeprefix("a."): torch.zeros_like(value) for key, value in tensors.items()}}
    stock.load(target, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert {f"a.{key}": bits(value) for key, value in target["a"].items()} == {k: bits(t) for k, t in tensors.items()}
    assert replace(manifest_of(tmp_path / "ckpt"), provenance={}) == manifest


def test_ambiguous_manifests_are_not_written() -> None:
    chunk = Chunk(Box((0,), (2,)), Extent("f", 0, 1))
    tensor = StateRecord("w", ("w",), (2,), "float32", Chunks.of([chunk], 1))
    for manifest in (
        Manifest((tensor, tensor)),
        Manifest((tensor,), (Blob("w", ("w",), Extent("f", 1, 1)),)),
        Manifest((replace(tensor, chunks=Chunks.of([chunk, chunk], 1)),)),
    ):
        with pytest.raises(LayoutError, match="twice"):
            list(metadata_parts(manifest))


# Golden checkpoints.


# What is refused.


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the stock metadata of a checkpoint."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


KEY = "model.layer.weight"
AT = MetadataIndex(KEY, torch.Size((0, 0)))


def place(**changes: object) -> Callable[[Path], None]:
    """Change where the item of a tensor is said to be."""

    def change(metadata: Any) -> None:
        info = metadata.storage_data[AT]
        metadata.storage_data[AT] = _StorageInfo(**{**vars(info), **changes})

    return lambda path: edit(path, change)


def chunk(**changes: tuple[int, ...]) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        for name, value in changes.items():
            setattr(metadata.state_dict_metadata[KEY].chunks[0], name, torch.Size(value))

    return lambda path: edit(path, change)


def drop(key: str) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda m: m.state_dict_metadata.pop(key))


def relink(path: Path) -> None:
    (path / "__0_0.distcp").rename(path / "elsewhere")
    (path / "__0_0.distcp").symlink_to("elsewhere")


def pipe(path: Path) -> None:
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")


def link_metadata(path: Path) -> None:
    (path / ".metadata").rename(path / "metadata")
    (path / ".metadata").symlink_to("metadata")


def pipe_metadata(path: Path) -> None:
    (path / ".metadata").unlink()
    os.mkfifo(path / ".metadata")


def rank_local(path: Path) -> None:
    (path / ".metadata").rename(path / "__3.metadata")


def unfinished(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")


def truncate(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size - 1)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda path: (path / "__0_0.distcp").unlink(), "rank 0.s file __0_0.distcp is missing"),
    "cut file": (truncate, r"cut short \([0-9]+ of [0-9]+ bytes\)"),
    "link": (relink, "that of __0_0.distcp is called elsewhere"),
    "pipe": (pipe, "expected a regular file"),
    "linked metadata": (link_metadata, "symbolic link"),
    "piped metadata": (pipe_metadata, "expected a regular file"),
    "rank-local": (rank_local, "use_collectives=False"),
    "unfinished": (unfinished, "did not finish"),
    "no metadata": (lambda path: (path / ".metadata").unlink(), "expected .metadata beside __0_0.distcp, found none"),
    "cut metadata": (lambda path: os.truncate(path / ".metadata", 900), "cut or damaged"),
    "parent": (place(relative_path="../x"), "file name '../x'"),
    "absolute": (place(relative_path="/etc/passwd"), "file name '/etc/passwd'"),
    "hidden": (place(relative_path=".metadata"), "file name '.metadata'"),
    "outside": (place(length=1 << 40), "begins before that|is cut short"),
    "overlap": (place(offset=10), "begins before that"),
    "encoded": (place(transform_descriptors=["stream.zstd/1"]), "encoded with .*zstd"),
    "box": (chunk(sizes=(5, 5)), r"within shape \(4, 5\), found \[0:5, 0:5\]"),
    "rank of box": (chunk(sizes=(20,)), "expected 2 dims"),
    "moved box": (chunk(offsets=(1, 0), sizes=(3, 5)), "found one for 'model.layer.weight' at offsets"),
    "not stored": (lambda path: edit(path, lambda m: m.storage_data.pop(AT)), "none: its writer did not finish"),
    "not listed": (drop(KEY), "items of known tensors only"),
    "blob not listed": (drop("epoch"), "found one for 'epoch' at offsets None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_directories_are_refused(saved: Path, case: str) -> None:
    damage, message = REFUSED[case]
    damage(saved)
    with pytest.raises(SourceError, match=message) as caught:
        muonckpt.open(saved)
    assert str(saved) in str(caught.value)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no directory"):
        muonckpt.open(tmp_path / "none")
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / ".metadata").touch()
    with pytest.raises(SourceError, match=r"Give the path of one, such as .*/iter_0000010$"):
        muonckpt.open(tmp_path)


REFUSED_ITEMS: dict[str, tuple[Tensor, str]] = {
    "dtype": (torch.zeros(4, 5, dtype=torch.float64), "expected float32 .*found float64"),
    "shape": (torch.zeros(5, 4), r"expected float32 of shape \(4, 5\).*found float32 of shape \(5, 4\)"),
    "conjugate": (torch.zeros(4, 5, dtype=torch.complex64).conj(), "flags"),
}


@pytest.mark.parametrize("case", REFUSED_ITEMS)
def test_items_that_contradict_the_metadata_are_refused(saved: Path, case: str) -> None:
    tensor, message = REFUSED_ITEMS[case]
    torch.save(tensor, saved / "item")
    place(relative_path="item", offset=0, length=(saved / "item").stat().st_size)(saved)
    muonckpt.open(saved)
    with pytest.raises(SourceError, match=message) as caught:
        manifest_of(saved)
    assert KEY in str(caught.value) and "[0:4, 0:5]" in str(caught.value)


def test_a_damaged_item_is_named(saved: Path) -> None:
    tensor = next(t for t in muonckpt.open(saved).outline.tensors if t.key == KEY)
    with (saved / "__0_0.distcp").open("r+b") as stream:
        stream.seek(tensor.chunks[0].item.offset + 70)
        stream.write(b"?")
    with pytest.raises(SourceError, match=r"at byte \d+: tensor 'model.layer.weight'.*checksum .* for data.pkl"):
        manifest_of(saved)
