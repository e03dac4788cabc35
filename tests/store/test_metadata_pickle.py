"""DCP's .metadata: read like torch reads it, written so that torch reads it, and nothing in it is ever run."""

from __future__ import annotations

import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path, PosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.dcp_metadata import dump_metadata
from support.golden import golden
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

from muonckpt import SourceError
from muonckpt.algebra.box import Box
from muonckpt.programs.signs import OUR_MARK
from muonckpt.record.chunks import no_chunks
from muonckpt.record.record import Blob, Chunk, Chunks, Extent, Manifest, StateRecord
from muonckpt.store.formats import dcp_metadata
from muonckpt.store.formats.dcp_metadata import Metadata, StoredItem, TensorMeta, metadata_parts, parse_metadata
from muonckpt.store.formats.torch_save import inert_pickle
from muonckpt.store.formats.torch_save.inert_pickle import unpickle
from muonckpt.store.reading.dtypes import DTYPES

HAD = [name for name in DTYPES if hasattr(torch, name)]

GOLDEN = [
    *("torch_fsdp4/ckpt", "torch_hsdp2x2/ckpt", "dion_fsdp4/ckpt", "xtuner_fsdp4/ckpt", "titan_fsdp4/ckpt"),
    *("megatron/fsdp_dtensor/dp4/iter_0000010", "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010"),
    *("megatron/layer_wise/ws4_padded/torch_dist", "megatron/layer_wise/ws4_pingpong/torch_dist"),
]


def plain(stock: dcp.Metadata) -> Metadata:
    """The same content, taken from torch's own objects."""
    entries = stock.state_dict_metadata.items()
    return Metadata(
        {
            key: TensorMeta(
                str(entry.properties.dtype).removeprefix("torch."),
                tuple(entry.size),
                tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
            )
            for key, entry in entries
            if isinstance(entry, dcp.TensorStorageMetadata)
        },
        tuple(key for key, entry in entries if isinstance(entry, dcp.BytesStorageMetadata)),
        {
            (index.fqn, None if index.offset is None else tuple(index.offset)): StoredItem(
                info.relative_path, info.offset, info.length, tuple(info.transform_descriptors or ())
            )
            for index, info in stock.storage_data.items()
        },
        dict(stock.planner_data or {}),
        stock.version,
    )


def small() -> dcp.Metadata:
    """Stock metadata of a 5x4 tensor in two boxes, a scalar and a blob."""
    boxes = [((0, 0), (3, 4)), ((3, 0), (2, 4))]
    chunks = [dcp.ChunkStorageMetadata(torch.Size(lo), torch.Size(sizes)) for lo, sizes in boxes]
    properties = dcp.TensorProperties(dtype=torch.bfloat16)
    scalar = [dcp.ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    return dcp.Metadata(
        {
            "w": dcp.TensorStorageMetadata(properties, torch.Size((5, 4)), chunks),
            "step": dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size(()), scalar),
            "lr": dcp.BytesStorageMetadata(),
        },
        {"w": ("w",), "lr": ("groups", 0, "lr")},
        {
            dcp.MetadataIndex("w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 0, 1500),
            dcp.MetadataIndex("w", torch.Size((3, 0)), 1): _StorageInfo("__1_0.distcp", 0, 1500, ["stream.zstd/1"]),
            dcp.MetadataIndex("step", torch.Size(())): _StorageInfo("__0_0.distcp", 1500, 1500),
            dcp.MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 5_000_000_000, 1261),
        },
        dcp.StorageMeta(PosixPath("/a/b"), "id"),
        "1.0.0",
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_metadata_is_read_as_torch_reads_it(name: str) -> None:
    data = (golden(name) / ".metadata").read_bytes()
    metadata = parse_metadata(data)
    stock = pickle.loads(data)
    assert metadata.extra == (("all_local_plans",) if "torch_dist" in name else ())
    expected = plain(stock)
    assert metadata == Metadata(*(getattr(expected, field) for field in Metadata.__slots__[:-1]), extra=metadata.extra)
    assert list(metadata.storage) == list(expected.storage)
    assert plain(pickle.loads(dump_metadata(metadata))) == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol: int) -> None:
    assert parse_metadata(pickle.dumps(small(), protocol)) == plain(small())


def test_the_directory_of_the_save_may_come_from_any_system() -> None:
    metadata = small()
    data = pickle.dumps(metadata)
    older, newer = b"\x8c\x07pathlib\x94", b"\x8c\x0epathlib._local\x94"  # as Python 3.13 names it
    for here, there in ((older, newer), (newer, older)):
        assert parse_metadata(data.replace(here, there)) == plain(metadata)
    assert (older in data) != (newer in data)
    metadata.storage_meta = dcp.StorageMeta(PureWindowsPath("C:/run"), "id")
    assert parse_metadata(pickle.dumps(metadata)) == plain(metadata)
    metadata.storage_meta = None
    assert parse_metadata(pickle.dumps(metadata)) == plain(metadata)


def test_attributes_of_other_programs_are_named() -> None:
    metadata = small()
    metadata.mcore_data = {"w": {"shape": (5, 4), "scale": 0.5, "big": 1 << 70, "flag": True, "none": [None]}}
    metadata.all_local_plans = [SavePlan([])]
    assert parse_metadata(pickle.dumps(metadata)).extra == ("mcore_data", "all_local_plans")


names = st.text(min_size=1, max_size=12)
index = st.integers(0, 1 << 40)
boxes = st.lists(st.tuples(index, index), max_size=4)


@st.composite
def metadata(draw: st.DrawFn) -> Metadata:
    keys = draw(st.lists(names, unique=True, max_size=6))
    split = draw(st.integers(0, len(keys)))
    tensors = {}
    for key in keys[:split]:
        shape = tuple(draw(st.lists(index, max_size=5)))
        offsets = draw(st.lists(st.tuples(*(index for _ in shape)), unique=True, max_size=3))
        tensors[key] = TensorMeta(
            draw(st.sampled_from(HAD)),
            shape,
            tuple((lo, shape) for lo in offsets),
        )
    places = [(key, lo) for key, tensor in tensors.items() for lo, _ in tensor.chunks]
    item = st.builds(StoredItem, names, index, index, st.just(()))
    return Metadata(
        tensors,
        tuple(keys[split:]),
        {place: draw(item) for place in (*places, *((key, None) for key in keys[split:]))},
        {key: tuple(draw(st.lists(st.one_of(names, index), max_size=4))) for key in keys},
        draw(st.none() | names),
    )


@settings(max_examples=100)
@given(metadata())
def test_dump_and_parse_are_inverse_and_torch_agrees(value: Metadata) -> None:
    data = dump_metadata(value)
    assert parse_metadata(data) == value
    assert plain(pickle.loads(data)) == value


def test_opcodes_that_are_written_again_say_what_each_object_says() -> None:
    """The writer repeats opcodes of earlier tensors and chunks; here every object is pickled by itself."""
    key = "optimizer.state.modèle.layers.{}.mlp.experts.linear_fc1.weight.momentum_buffer"
    tensors, shapes = [], [((640, 64), "float32"), ((3, 64), "bfloat16"), ((640, 64), "bfloat16"), ((), "int64")]
    for number in range(80):
        shape, dtype = shapes[number % 4]
        starts = range(0, shape[0], 10) if shape else [0]
        corners = [((lo, 0), (min(lo + 10, shape[0]), 64)) if shape else ((), ()) for lo in starts]
        chunks = [Chunk(Box(*c), Extent(f"__{r}_0.distcp", number << 28, r + 1)) for r, c in enumerate(corners)]
        name = key.format(number)
        tensors.append(
            StateRecord(name, ("optimizer", "state", name, number), shape, dtype, Chunks.of(chunks, len(shape)))
        )
    blobs = tuple(Blob(name, ("g", name), Extent("__0_0.distcp", 1 << 40, 9)) for name in ("lr", "mu"))
    data = b"".join(metadata_parts(Manifest(tuple(tensors), blobs)))
    items = [((blob.key, None), blob.item) for blob in blobs]
    items += [((tensor.key, chunk.box.lo), chunk.item) for tensor in tensors for chunk in tensor.chunks]
    described = {t.key: [(chunk.box.lo, chunk.box.shape) for chunk in t.chunks] for t in tensors}
    value = Metadata(
        {t.key: TensorMeta(t.dtype, t.shape, tuple(described[t.key])) for t in tensors},
        ("lr", "mu"),
        {place: StoredItem(item.file, item.offset, item.length) for place, item in items},
        {entry.key: entry.path for entry in (*tensors, *blobs)},
        extra=(OUR_MARK,),
    )
    assert data == dump_metadata(value)
    assert len(data) < 160 * len(items)
    assert parse_metadata(data) == value


def test_what_cannot_be_read_is_not_written() -> None:
    with pytest.raises(SourceError, match="float31"):
        list(metadata_parts(Manifest((StateRecord("w", ("w",), (), "float31", no_chunks(0)),))))


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def changed(change: Callable[[dcp.Metadata], object]) -> bytes:
    value = small()
    change(value)
    return pickle.dumps(value)


def sharing_chunks(copies: int) -> bytes:
    """One list of two chunks that stands for the chunks of many tensors."""
    value = small()
    value.state_dict_metadata |= {f"w{n}": value.state_dict_metadata["w"] for n in range(copies)}
    return pickle.dumps(value)


def set_size(size: object) -> Callable[[dcp.Metadata], object]:
    return lambda value: setattr(value.state_dict_metadata["w"], "size", size)


DEEP = 60_000
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "eval": (lambda: pickle.dumps(Call(eval, "1")), "'builtins eval'; nothing was run"),
    "system": (lambda: changed(lambda m: setattr(m, "extra", Call(os.system, "true"))), "'posix system'"),
    "torch.load": (lambda: changed(lambda m: setattr(m, "extra", Call(torch.load, "f"))), "torch.serialization load"),
    "getattr": (lambda: pickle.dumps(Call(getattr, small, "x")), "'builtins getattr'"),
    "dotted": (lambda: b"\x80\4\x8c\5torch\x8c\x0cSize.__new__\x93.", "Size.__new__"),
    "text opcode": (lambda: b"cos\nsystem\n(Vtrue\ntR.", "'os system'"),
    "inst opcode": (lambda: b"(Vtrue\nios\nsystem\n.", "only opcodes of plain data"),
    "extension": (lambda: b"\x80\4\x82\1.", "only opcodes of plain data"),
    "persistent": (lambda: b"\x80\4NQ.", "'persistent id'"),
    "memo bomb": (lambda: b"\x80\4Nr\xff\xff\xff\x7f.", "number 0 for the next memo entry"),
    "text bomb": (lambda: b"\x80\4X\xff\xff\xff\xff.", "cut or damaged"),
    "bytes bomb": (lambda: b"\x80\4\x8e" + b"\xff" * 7 + b"\x7f.", "cut or damaged"),
    "deep key": (lambda: b"\x80\4})" + b"\x85" * DEEP + b"Ns.", "as a dict key, found tuple"),
    "deep tuple": (lambda: b"\x80\4)" + b"\x85" * DEEP + b".", "expected Record, found tuple"),
    "deep list": (lambda: b"\x80\2" + b"]" * DEEP + b"a" * (DEEP - 1) + b".", "expected Record, found list"),
    "deep name": (lambda: b"\x80\4)" + b"\x85" * DEEP + b"N\x93.", "expected str"),
    "no key": (lambda: b"\x80\4}]Ns.", "as a dict key, found list"),
    "empty": (lambda: b"", "cut or damaged"),
    "no pickle": (lambda: b"{}", "expected only opcodes"),
    "underflow": (lambda: b"\x80\4\x85.", "cut or damaged"),
    "unmarked": (lambda: b"\x80\4}u.", "cut or damaged"),
    "odd pairs": (lambda: b"\x80\4}(\x8c\1au.", "cut or damaged"),
    "extend a dict": (lambda: b"\x80\4}(Ne.", "expected list, found dict"),
    "fill a dict": (lambda: b"\x80\4}}b.", "expected Record, found dict"),
    "call a string": (lambda: b"\x80\4\x8c\1a)R.", "expected Global, found str"),
    "longer": (lambda: pickle.dumps(small()) + b"N", "end of the pickle"),
    "other object": (lambda: pickle.dumps(torch.Size([2])), "class Metadata, found torch Size"),
    "no storage": (lambda: changed(lambda m: delattr(m, "storage_data")), "part missing .'storage_data'"),
    "null storage": (lambda: changed(lambda m: setattr(m, "storage_data", None)), "expected dict, found NoneType"),
    "negative": (lambda: changed(set_size((5, -4))), ">= 0, found -4"),
    "bool": (lambda: changed(set_size((True, 4))), "expected int, found bool"),
    "float": (lambda: changed(set_size((5.0, 4))), "expected int, found float"),
    "text size": (lambda: changed(set_size("54")), "expected a sequence, found str"),
    "many dims": (lambda: changed(set_size((1,) * 65)), "at most 64 items"),
    "wrong object": (lambda: changed(set_size(torch.float32)), "expected a sequence"),
    "shared chunks": (lambda: sharing_chunks(1), "2 chunks and 1 items"),
    "bad path": (lambda: changed(lambda m: m.planner_data.update(w=("a", None))), "expected str, found NoneType"),
    "dtype": (lambda: changed(lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", 3)), "Global"),
    "no dtype": (lambda: pickle.dumps(small()).replace(b"bfloat16", b"Xfloat16"), "'torch Xfloat16'"),
    "no such": (lambda: changed(lambda m: m.state_dict_metadata.update(w=3)), "expected Record, found int"),
    "version": (lambda: changed(lambda m: setattr(m, "version", 1)), "expected str, found int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_or_damaged_metadata_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(SourceError, match=message):
        parse_metadata(make())


def test_one_item_stored_twice_is_refused() -> None:
    value = Metadata({}, ("a", "b"), {("a", None): StoredItem("f", 0, 1), ("b", None): StoredItem("f", 1, 1)})
    data = dump_metadata(value).replace(b"X\1\0\0\0b\x94", b"X\1\0\0\0a\x94")
    with pytest.raises(SourceError, match="one stored item for 'a' at offset None, found two"):
        parse_metadata(data)


def test_code_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "run"
    data = changed(lambda m: setattr(m, "extra", Call(os.mkdir, str(trap))))
    with pytest.raises(SourceError, match="mkdir"):
        parse_metadata(data)
    assert not trap.exists()
    pickle.loads(data)
    assert trap.exists()  # the trap works


def large(shared: bool) -> dcp.Metadata:
    """Stock metadata of 40 tensors on 8 ranks; a chunk and its item can share their offsets and name, or not."""
    entries: dict[str, Any] = {"lr": dcp.BytesStorageMetadata()}
    items = {}
    for number in range(40):
        key, shape = f"modèle.{number}.momentum_buffer", ((), (48,), (80, 3), (1 << 33, 4, 1))[number % 4]
        corners = [torch.Size((rank * shape[0] // 8, *shape[1:])) for rank in range(8)] if shape else [torch.Size()]
        chunks = [dcp.ChunkStorageMetadata(corner, torch.Size(shape)) for corner in corners]
        entries[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size(shape), chunks)
        for rank, chunk in enumerate(chunks):
            own = (key, chunk.offsets) if shared else (f"modèle.{number}.momentum_buffer", torch.Size(chunk.offsets))
            index = dcp.MetadataIndex(*own, rank if number % 3 else None)
            items[rank, number] = index, _StorageInfo(f"__{rank}_0.distcp", number << rank << 27, 64 + number)
    stored = dict(items[place] for place in sorted(items))
    return dcp.Metadata(entries, {key: ("state", key) for key in entries}, stored, dcp.StorageMeta(), "1.0.0")


@pytest.mark.parametrize("shared", [True, False])
def test_objects_that_recur_are_read_in_columns(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = large(shared)
    data = pickle.dumps(stock)
    with monkeypatch.context() as only_columns:
        only_columns.delattr(dcp_metadata, "unpickle")
        metadata = parse_metadata(data)
    assert metadata == plain(stock)
    assert [*metadata.storage] == [*plain(stock).storage]
    content = inert_pickle.unpickle_in_columns(data, dcp_metadata.CLASSES)
    items = [key for key in content.state["storage_data"] if type(key) is inert_pickle.ObjectColumns]
    assert sum(alike.count for alike in items) > 0.8 * len(metadata.storage)


def test_damage_to_objects_that_recur_is_judged_as_if_each_were_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    data = pickle.dumps(large(False))
    start = data.index(b"storage_data")

    def judged(damaged: bytes) -> object:
        try:
            return parse_metadata(damaged)
        except SourceError as error:
            return str(error)

    verdicts = set()
    for number in range(30):
        damaged = bytearray(data)
        position = rng.randrange(start if number % 2 else len(data) // 8, len(data))
        damaged[position] = rng.choice((0, 255, 0x94, damaged[position] ^ 1, rng.randrange(256)))
        found = judged(bytes(damaged))
        with monkeypatch.context() as one_by_one:
            one_by_one.setattr(dcp_metadata, "unpickle_in_columns", unpickle)
            assert judged(bytes(damaged)) == found
        verdicts.add(type(found))
    assert verdicts == {str, Metadata}


def test_long_integers_keep_their_value() -> None:
    for value in (0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**63, 2**100):
        data = b"\x80\4" + inert_pickle.integer(value) + b"."
        assert unpickle(data, ()) == pickle.loads(data) == value
    assert unpickle(b"\x80\2G" + struct.pack(">d", 0.5) + b".", ()) == 0.5
