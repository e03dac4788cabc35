"""Items as torch.save writes them: written byte for byte, read from a range of bytes, refused when they are odd."""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from isal import isal_zlib
from torch import Tensor

from muonckpt import SourceError
from muonckpt.store.formats.torch_save.stored_zip import member_data, read_members
from muonckpt.store.formats.torch_save.tensor_item import TensorItem, frame, read_tensor, tail, template
from muonckpt.store.reading.dtypes import DTYPES, dtype, itemsize

HAD = [name for name in DTYPES if hasattr(torch, name)]
"""What this torch has of them: `bcomplex32` came with 2.15."""

SIZES = (0, 1, 2, 3, 5, 17, 63, 64, 255, 256, 300)


def random_tensor(rng: random.Random, name: str, shape: tuple[int, ...]) -> Tensor:
    """Any bits at all, so also NaNs, negative zeros and denormals."""
    count = math.prod(shape) * itemsize(name)
    if not count:
        return torch.empty(shape, dtype=getattr(torch, name))
    return (
        torch.frombuffer(bytearray(rng.randbytes(count)), dtype=torch.uint8).view(getattr(torch, name)).reshape(shape)
    )


def random_shape(rng: random.Random) -> tuple[int, ...]:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.randrange(6)))
    return shape if math.prod(shape) < 1 << 16 else shape[:1]


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def open_item(data: bytes) -> TensorItem:
    return read_tensor(lambda offset, length: data[offset : offset + length], 0, len(data))


def written(name: str, shape: tuple[int, ...], payload: bytes) -> bytes:
    planned = frame(name, shape)
    return planned.head + payload + planned.tail(isal_zlib.crc32(payload))


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32)")
@pytest.mark.parametrize("name", HAD)
def test_items_are_byte_identical_to_torch_save(name: str) -> None:
    rng = random.Random(name)
    for shape in [(), (0,), (3, 0), (2, 3, 5, 7, 1, 1), *(random_shape(rng) for _ in range(12))]:
        tensor = random_tensor(rng, name, shape)
        data = saved(tensor)
        planned = frame(name, shape)
        payload = data[planned.payload_offset :][: planned.payload_length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            serialization_id = archive.read("archive/.data/serialization_id")
        assert planned.head + payload + tail(name, shape, zlib.crc32(payload), serialization_id) == data, shape
        assert planned.length == len(data)
        assert open_item(data) == TensorItem(
            name, shape, tensor.stride(), planned.payload_offset, len(payload), zlib.crc32(payload)
        )


def test_an_empty_part_may_begin_beyond_its_storage() -> None:
    """As the writer of DCP in torch 2.9 leaves it."""
    item = open_item(saved(torch.empty(0).as_strided((2, 0), (1, 1), 2)))
    assert item.shape == (2, 0)


def test_the_dtype_table_is_that_of_torch() -> None:
    known = torch.storage._dtype_to_storage_type_map().items()
    assert {str(t).removeprefix("torch."): s for t, s in known if not str(t).startswith("torch.q")} == {
        name: d.storage for name, d in DTYPES.items() if d.storage
    }
    assert {str(t).removeprefix("torch.") for t in torch.storage._new_dtypes()} == {
        name for name in HAD if not DTYPES[name].storage
    }
    assert all(getattr(torch, name).itemsize == DTYPES[name].itemsize for name in HAD)
    with pytest.raises(SourceError, match="float31"):
        dtype("float31")


class Sink:
    """A stream that keeps the ends of what is written to it."""

    def __init__(self) -> None:
        self.head, self.tail, self.length = b"", b"", 0

    def write(self, data: memoryview) -> int:
        if len(self.head) < 2048:
            self.head += bytes(data[:2048])
        self.tail = (self.tail + bytes(data[-2048:]))[-2048:]
        self.length += len(data)
        return len(data)

    def flush(self) -> None: ...


@pytest.mark.parametrize("count", [2**32 - 66, 2**32 - 2, 2**32 - 1, 2**32, 2**32 + 5])
def test_large_items_have_the_zip64_fields_of_torch(count: int) -> None:
    # The memory of the tensor is never touched, and without checksums torch does not read it either.
    sink, planned = Sink(), frame("uint8", (count,))
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.empty(count, dtype=torch.uint8), sink)
    finally:
        torch.serialization.set_crc32_options(checksums)
    at = sink.tail.rindex(b"Z", 0, sink.tail.index(b"PK\1\2")) + 1
    serialization_id = sink.tail[at : at + 40]
    end = tail("uint8", (count,), 0, serialization_id)
    small = [serialization_id, b"1", b"64", b"little", b"3\n"]
    small.append(next(planned.head[i : j + 1] for i in [64] for j in [planned.head.index(b".PK")]))
    assert planned.length == sink.length
    assert without_checksums(planned.head, small) == sink.head[: len(planned.head)]
    assert without_checksums(end, small) == sink.tail[-len(end) :]


def without_checksums(data: bytes, contents: list[bytes]) -> bytes:
    for content in contents:
        data = data.replace(struct.pack("<I", zlib.crc32(content)), bytes(4))
    return data


def test_an_item_beyond_4_gib_is_read(tmp_path: Path) -> None:
    planned, start = frame("bfloat16", (1 << 16, 1 << 16)), 512
    with (tmp_path / "sparse").open("wb") as stream:
        stream.seek(start)
        stream.write(planned.head)
        stream.seek(planned.payload_length, io.SEEK_CUR)
        stream.write(planned.tail(123))
    with (tmp_path / "sparse").open("rb") as stream:
        item = read_tensor(lambda at, count: os.pread(stream.fileno(), count, at), start, planned.length)
        with zipfile.ZipFile(stream) as archive:
            stored = archive.getinfo("archive/data/0")
    assert (item.shape, item.offset, item.length) == ((1 << 16, 1 << 16), start + planned.payload_offset, 2**33)
    assert (item.crc32, stored.CRC, stored.file_size) == (123, 123, 2**33)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e4m3fn", "uint32", "complex128"])
def test_our_items_are_read_by_torch_and_by_zip_checkers(name: str) -> None:
    rng = random.Random(1)
    for shape in ((), (0, 4), (5, 7)):
        tensor = random_tensor(rng, name, shape) if name != "bool" else torch.ones(shape, dtype=torch.bool)
        payload = bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        data = written(name, shape, payload)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_an_item_may_lie_anywhere_in_a_file() -> None:
    data = saved(torch.arange(12.0).reshape(3, 4))
    file = b"\0" * 777 + data + b"PK\5\6 and junk"
    item = read_tensor(lambda offset, length: file[offset : offset + length], 777, len(data))
    assert file[item.offset : item.offset + item.length] == struct.pack("<12f", *range(12))


@pytest.mark.parametrize(
    ("tensor", "row_major"),
    [
        (torch.empty(5, 7).T, False),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
        (torch.empty(3, 1).T, True),
        (torch.empty(1, 3, 1, 4).to(memory_format=torch.channels_last), False),
        (torch.empty(2, 1, 4, 1).to(memory_format=torch.channels_last), True),
        (torch.empty(4, 1, 5).permute(1, 0, 2), True),
        (torch.empty(0, 3).T, True),
        (torch.empty(()), True),
        (torch.empty(3, 4, requires_grad=True), True),
    ],
)
def test_the_order_of_the_elements_is_reported(tensor: Tensor, row_major: bool) -> None:
    item = open_item(saved(tensor))
    assert (item.shape, item.strides, item.row_major) == (tensor.shape, tensor.stride(), row_major)
    assert item.row_major == tensor.is_contiguous()


def test_a_flipped_byte_shows_in_the_checksum() -> None:
    data = bytearray(saved(torch.arange(100.0)))
    item = open_item(data)
    data[item.offset + 17] ^= 4
    assert open_item(data).crc32 == item.crc32 != zlib.crc32(data[item.offset :][: item.length])


def test_switched_off_checksums_are_unknown_and_not_wrong() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        off, empty = saved(torch.arange(9)), saved(torch.empty(0))
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_item(off).crc32 is None and open_item(empty).crc32 is None
    assert open_item(saved(torch.empty(0))).crc32 == 0
    assert {member.crc32 for member in read_members(lambda at, n: off[at : at + n], len(off))} == {None}


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return exec, ("raise SystemExit('code in an item was run')",)


def test_members_of_any_item_are_listed_and_never_unpickled() -> None:
    data = saved({"a": torch.arange(3), "b": torch.arange(5.0), "c": Evil()})
    members = {m.name: m for m in read_members(lambda at, n: data[at : at + n], len(data))}
    assert next(iter(members)) == "data.pkl" and {"data/0", "data/1", "version"} <= members.keys()
    for member in members.values():
        assert zlib.crc32(data[member.offset : member.offset + member.length]) == member.crc32


def zipped(pickled: bytes, payload: bytes = bytes(16), name: str = "archive/data/0", order: str = "little") -> bytes:
    """An item as Python's zipfile makes it, with a pickle of the test's choosing."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", order)
        archive.writestr(name, payload)
    return stream.getvalue()


def pickled() -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(4)))) as archive:
        return archive.read("archive/data.pkl")


def deflated() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled())
        archive.writestr("archive/data/0", bytes(16))
    return stream.getvalue()


def patched(at_last: bytes, offset: int, new: bytes) -> bytes:
    """An item with some bytes of its last such record replaced."""
    data = bytearray(saved(torch.zeros(4)))
    at = data.rindex(at_last) + offset
    data[at : at + len(new)] = new
    return bytes(data)


REFUSED = {
    "conjugate": (lambda: saved(torch.zeros(3, dtype=torch.complex64).conj()), "flags .*conj"),
    "offset": (lambda: saved(torch.zeros(8)[2:6]), "view of 8"),
    "prefix": (lambda: saved(torch.zeros(8)[:6]), "view of 8"),
    "expanded": (lambda: saved(torch.zeros(4, 1).expand(4, 3)), "from 0 on, found 4"),
    "repeated": (lambda: saved(torch.zeros(4).as_strided((2, 2), (1, 1))), "strides"),
    "parameter": (lambda: saved(torch.nn.Parameter(torch.zeros(3))), "_rebuild_parameter"),
    "sparse": (lambda: saved(torch.zeros(3).to_sparse()), "one tensor"),
    "two tensors": (lambda: saved([torch.zeros(3), torch.zeros(2)]), "one tensor"),
    "number": (lambda: saved(3), "one tensor"),
    "list": (lambda: saved([torch.zeros(3)]), "expected Record, found list"),
    "old format": (lambda: pickle.dumps([1, 2, 3] * 100), "its end record"),
    "empty": (lambda: b"", "in an item of 0 bytes"),
    "compressed": (deflated, "method 8"),
    "encrypted": (lambda: patched(b"PK\1\2", 8, b"\x09\x08"), "flags 0x809"),
    "comment": (lambda: patched(b"PK\5\6", 20, b"\1\0"), "its end record"),
    "big-endian": (lambda: zipped(pickled(), order="big"), "little-endian"),
    "short payload": (lambda: zipped(pickled(), bytes(12)), "expected 16 bytes"),
    "folders": (lambda: zipped(pickled(), name="other/data/0"), "one folder"),
    "duplicate": (lambda: zipped(pickled(), name="archive/data.pkl"), "different names"),
    "no payload": (lambda: zipped(pickled(), name="archive/data/1"), "one tensor"),
    "other header": (lambda: saved(torch.zeros(4)).replace(b"archive/data/0", b"archive/data/9", 1), "the header of"),
    "shared header": (lambda: patched(b"archive/data/0", -4, bytes(4)), "to end by byte 0"),
    "overlap": (lambda: patched(b"PK\1\2", 20, struct.pack("<2I", 999, 999)), "to end by"),
    "outside": (lambda: patched(b"archive/version", -4, struct.pack("<I", 1 << 30)), "in an item of"),
    "saturated": (lambda: patched(b"archive/version", -4, struct.pack("<I", 0xFFFFFFFF)), "zip64 field"),
    "directory": (lambda: patched(b"PK\5\6", 16, struct.pack("<I", 1 << 30)), "end records that agree"),
    "trailing bytes": (lambda: saved(torch.zeros(4)) + b"\0", "its end record"),
    "code": (lambda: zipped(pickle.dumps(Evil(), 2)), "'__builtin__ exec'"),
    "code, any name": (lambda: zipped(b"\x80\2ctorch._utils\n_rebuild_qtensor\n."), "_rebuild_qtensor"),
    "flipped pickle": (lambda: saved(torch.zeros(4)).replace(b"cpu", b"gpu", 1), "checksum .* for data.pkl"),
    "memo bomb": (lambda: zipped(b"\x80\2Nr\xff\xff\xff\x7f."), "memo entry"),
    "large pickle": (lambda: zipped(b"\x80\2" + b"]" * 5000 + b"."), "at most 4096"),
    "wrong count": (lambda: zipped(pickled().replace(b"K\4t", b"K\5t")), "view of 5"),
    "float offset": (lambda: zipped(pickled().replace(b"QK\0", b"QN")), "expected int"),
    "negative size": (lambda: zipped(pickled().replace(b"K\4\x85", b"J\xfc\xff\xff\xff\x85")), ">= 0"),
    "hooks": (lambda: zipped(pickled().replace(b")Rq\x09", b")\x85Rq\x09")), "without hooks"),
    "dtypes": (lambda: zipped(pickled().replace(b"FloatStorage", b"float32")), "to agree"),
    "untyped v2": (lambda: zipped(pickled().replace(b"torch\nFloat", b"torch.storage\nUntyped")), "to agree"),
    "deep": (lambda: zipped(pickled()[:-1] + b"\x85" * 3000 + b"."), "expected Record"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", REFUSED)
def test_odd_items_are_refused(case: str) -> None:
    make, message = REFUSED[case]
    data = make()
    with pytest.raises(SourceError, match=message):
        open_item(data)


def test_python_made_items_of_the_same_structure_are_read() -> None:
    assert open_item(zipped(pickled())).shape == (4,)


def test_damage_is_refused_or_harmless_and_never_a_crash() -> None:
    rng = random.Random(0)
    data = saved(torch.arange(40.0).reshape(5, 8))
    whole = open_item(data)
    for _ in range(1500):
        at = rng.randrange(len(data))
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        try:
            item = open_item(damaged)
        except SourceError:
            continue
        same = (item.dtype, item.shape, item.offset, item.length) == (
            (whole.dtype, whole.shape, whole.offset, whole.length)
        )
        assert same, at
    for length in range(0, len(data), 3):
        with pytest.raises(SourceError):
            open_item(data[:length])
    with pytest.raises(SourceError, match="found 100"):
        read_tensor(lambda at, n: data[:100], 0, len(data))


@pytest.mark.parametrize("value", [3, torch.arange(40.0).reshape(5, 8)], ids=["item", "tensor"])
def test_torch_loads_what_is_taken_for_whole(value: object) -> None:
    """With one bit of an item's directory flipped: what passes our checks does not fail, or become another value."""
    data = saved(value)
    rng = random.Random(0)
    for at in range(data.index(b"PK\1\2"), len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        stream = io.BytesIO(damaged)
        try:
            for member in read_members(partial(piece, stream), len(damaged)):
                member_data(partial(piece, stream), member, 1 << 20)
        except SourceError:
            continue
        stream.seek(0)
        assert torch.equal(torch.as_tensor(torch.load(stream, weights_only=True)), torch.as_tensor(value))


def piece(stream: io.BytesIO, start: int, count: int) -> bytes:
    stream.seek(start)
    return stream.read(count)


@pytest.mark.parametrize(
    ("name", "shape"), [("float32", (2, 4)), ("bfloat16", (3,)), ("uint16", ()), ("int64", (1, 2, 3))]
)
def test_a_template_recognises_exactly_the_items_that_reading_accepts_alike(name, shape):
    """Torch's own items too, whose identity differs; no changed byte outside the elements goes unnoticed."""
    stream = io.BytesIO()
    tensor = torch.zeros(shape, dtype=getattr(torch, name))
    torch.save(tensor, stream)
    own = template(name, shape)
    around = frame(name, shape)
    for item in (stream.getvalue(), around.head + bytes(around.payload_length) + around.tail(0x1234567)):
        crc32 = own.crc32_of(item[: len(own.head)], item[own.tail_offset :])
        parsed = read_tensor(lambda at, count, item=item: item[at : at + count], 0, len(item))
        assert (parsed.offset, parsed.length, parsed.crc32) == (len(own.head), own.payload_length, crc32)
    outside = [*range(len(own.head)), *range(own.tail_offset, own.length)]
    free = {at for where in own.crc32_at for at in range(own.tail_offset + where.start, own.tail_offset + where.stop)}
    fixed = {own.tail_offset + at for where, _ in own.fixed for at in range(where.start, where.stop)}
    identity = set(outside[len(own.head) :]) - free - fixed
    assert len(identity) <= 48  # 40 digits, and twice their CRC-32
    for at in set(outside) - identity:
        changed = bytearray(item)
        changed[at] ^= 1
        assert own.crc32_of(bytes(changed[: len(own.head)]), bytes(changed[own.tail_offset :])) is None
