"""Hostile checkpoints: a few bytes, or holes, that would cost their reader much memory or time.

Each of `CASES`, called, gives what makes one of a folder that holds a small checkpoint of ours.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from muonckpt.store.formats.torch_save.stored_zip import directory, store
from support.manifest_json import gathered, manifest_at

COLLIDING = (1 << 61) - 1
"""All multiples of it have the hash 0."""


def item(pickled: bytes) -> bytes:
    """An item of ``torch.save`` with this pickle."""
    out, entries = store((("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")), 0)
    return out + directory(entries, len(out))


def integer(value: int) -> bytes:
    data = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(data)]) + data


def colliding(count: int) -> bytes:
    keys = b"".join(integer(number * COLLIDING) + pickle.NONE for number in range(1, count))
    return b"\x80\2" + pickle.EMPTY_DICT + pickle.MARK + keys + pickle.SETITEMS + pickle.STOP


def laughs(levels: int = 9, width: int = 10) -> bytes:
    """Lists of lists, each of which is used ten times: 10 ** 9 when they are written out."""
    out = b"\x80\2" + pickle.EMPTY_LIST + pickle.BINPUT + b"\0"
    for level in range(1, levels + 1):
        uses = (pickle.BINGET + bytes([level - 1])) * width
        out += pickle.EMPTY_LIST + pickle.BINPUT + bytes([level]) + pickle.MARK + uses + pickle.APPENDS
    return out + pickle.STOP


def containers(kind: bytes, count: int) -> bytes:
    return b"\x80\2" + pickle.EMPTY_LIST + pickle.MARK + kind * count + pickle.APPENDS + pickle.STOP


def option(pickled: bytes) -> Callable[[Path], None]:
    """Our checkpoint, in which the option of a group is this pickle."""

    def make(folder: Path) -> None:
        manifest = manifest_at(folder / "muonckpt.json")
        data = item(pickled)
        (folder / "__9_0.distcp").write_bytes(data)
        for blob in manifest["blobs"]:
            blob |= {"file": "__9_0.distcp", "item": [0, len(data)], "digest": None}
        described(folder, json.dumps(gathered({key: manifest[key] for key in manifest if key in KEPT})))

    return make


KEPT = ("format", "version", "provenance", "tensors", "blobs")


def described(folder: Path, text: str) -> None:
    (folder / "muonckpt.json").write_text(text)
    (folder / ".metadata").unlink(missing_ok=True)


def alone(name: str, data: bytes | str, size: int = 0) -> Callable[[Path], None]:
    """A folder with this file only, extended to ``size`` bytes by a hole."""

    def make(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        with (folder / name).open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.truncate(max(size, file.tell()))

    return make


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        manifest = manifest_at(folder / "muonckpt.json")
        change(manifest)
        described(folder, json.dumps(gathered({key: manifest[key] for key in manifest if key in KEPT})))

    return make


def manifest_of(tensors: str) -> str:
    lists = '"data_files": [], "layouts": [], "boxes": []'
    return f'{{"format": "muonckpt", "version": 2, "provenance": {{}}, {lists}, "tensors": {tensors}, "blobs": []}}'


def safetensors(header: str | bytes, length: int | None = None) -> bytes:
    data = header.encode() if isinstance(header, str) else header
    return (length or len(data)).to_bytes(8, "little") + data


def array(**fields: object) -> str:
    chunks = {"name": "regular", "configuration": {"chunk_shape": fields.pop("chunks", [1])}}
    keys = {"name": "default", "configuration": {"separator": "/"}}
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}]
    usual = {"zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "float32", "chunk_grid": chunks}
    return json.dumps({**usual, "chunk_key_encoding": keys, "fill_value": 0, "codecs": plain, **fields})


def holes(name: str, size: int) -> Callable[[Path], None]:
    """Our checkpoint as stock DCP has it, with an item that is a hole of so many bytes."""

    def make(folder: Path) -> None:
        manifest = manifest_at(folder / "muonckpt.json")
        with (folder / name).open("wb") as file:
            file.truncate(size)
        for blob in manifest["blobs"]:
            blob |= {"file": name, "item": [0, size], "digest": None}
        described(folder, json.dumps(gathered({key: manifest[key] for key in manifest if key in KEPT})))

    return make


def rank_files(pickled: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        alone("layer_wise.json", json.dumps({"algorithm": "padded-nscost", "parameter": [PARAMETER]}))(folder)
        (folder / "layer_wise_optimizer_0.pt").write_bytes(item(pickled))

    return make


def boxed(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> Callable[[Path], None]:
    """A folder with a tensor of bytes in these boxes, all from the beginning of one file, which is a hole of one byte
    for each element of the largest."""
    lo, hi = [list(corners) for corners in zip(*boxes, strict=True)]
    sizes = [math.prod(stop - start for start, stop in zip(*box, strict=True)) for box in boxes]
    zero_columns = {name: [0] * len(boxes) for name in ("file", "item", "payload")}
    unknown = {name: [None] * len(boxes) for name in ("crc32", "digest")}
    fields = dict.fromkeys(("name", "slot", "convention", "pieces", "layout", "fingerprint"))
    chunks = {"boxes": 0, **zero_columns, **unknown, "item_length": sizes, "payload_length": sizes}
    tensor = {"key": "w", "path": ["w"], "shape": shape, "dtype": "uint8", "chunks": chunks, **fields}
    manifest = {"format": "muonckpt", "version": 2, "provenance": {}, "data_files": ["__0_0.distcp"], "layouts": [],
                "boxes": [{"lo": lo, "hi": hi}], "tensors": [tensor], "blobs": []}  # fmt: skip

    def make(folder: Path) -> None:
        alone("__0_0.distcp", b"", max(sizes))(folder)
        (folder / "muonckpt.json").write_text(json.dumps(manifest))

    return make


def nested(count: int) -> Callable[[Path], None]:
    """Intervals each of which contains the next."""
    return boxed([2 * count], [([number], [2 * count - number]) for number in range(count)])


def strips(count: int) -> Callable[[Path], None]:
    """Half of a square cut into rows and the other half into columns, so that projections overlap on each dim, but for
    the last column, which is missing."""
    rows = [([number, 0], [number + 1, count]) for number in range(count)]
    columns = [([0, count + number], [count, count + number + 1]) for number in range(count - 1)]
    return boxed([count, 2 * count], [*rows, *columns])


PARAMETER = {"name": "w", "shape": [4, 4]}
LAYER_WISE = {"algorithm": "padded-nscost", "parameter": [{"name": "w", "shape": [1 << 2000] * 64}]}
MANY = 24 << 20

CASES: dict[str, Callable[[], Callable[[Path], None]]] = {
    "colliding keys in an option": lambda: option(colliding(50_000)),
    "colliding keys in .metadata": lambda: alone(".metadata", colliding(30_000)),
    "colliding floats in an option": lambda: option(
        b"\x80\2}(" + b"".join(b"G" + struct.pack(">d", float(n * COLLIDING)) + b"N" for n in range(1, 50_000)) + b"u."
    ),
    "nested references in an option": lambda: option(laughs()),
    "shared text in an option": lambda: option(
        b"\x80\2X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\0]q\1(" + b"h\0" * 200_000 + b"e."
    ),
    "empty lists in an option": lambda: option(containers(b"]", 7 << 20)),
    "empty dicts in an option": lambda: option(containers(b"}", 7 << 20)),
    "marks in an option": lambda: option(b"\x80\2" + b"(" * (7 << 20) + b"."),
    "a very long pickle in an option": lambda: option(containers(b"N", 64 << 20)),
    "empty lists in .metadata": lambda: alone(".metadata", containers(b"]", 12 << 20)),
    "a sparse .metadata": lambda: alone(".metadata", b"\x80\4", 1 << 30),
    "an empty sparse .metadata": lambda: alone(".metadata", b"", 1 << 30),
    "3 GiB of JSON": lambda: alone("muonckpt.json", '{"format": "muonckpt", "tensors": [', 3 << 30),
    "lists in our manifest": lambda: alone("muonckpt.json", manifest_of("[" + "[]," * (MANY // 3) + "[]]")),
    "few lists in our manifest": lambda: alone("muonckpt.json", manifest_of("[" + "[]," * 300_000 + "[]]")),
    "deep JSON": lambda: alone("muonckpt.json", manifest_of("[" * 60_000)),
    "deep provenance": lambda: edited(lambda m: m["provenance"].update(x=json.loads("[" * 800 + "]" * 800))),
    "long numbers": lambda: edited(lambda m: m["tensors"][0].update(shape=[10**4000] * 64)),
    "large numbers": lambda: edited(lambda m: m["tensors"][0].update(shape=[1 << 62] * 64)),
    "a tensor without end": lambda: edited(
        lambda m: m["tensors"][0].update(shape=[1 << 50], chunks=[{**m["tensors"][0]["chunks"][0], "hi": [1 << 50]}])
    ),
    "nested boxes": lambda: nested(1800),
    "crossed strips around a hole": lambda: strips(2800),
    "elements of holes": lambda: boxed([10 << 30], [([0], [10 << 30])]),
    "an item of holes": lambda: holes("__9_0.distcp", 1 << 32),
    "lists in flat_buffers.json": lambda: alone("flat_buffers.json", manifest_of("[" + "[]," * (MANY // 3) + "[]]")),
    "deep layer_wise.json": lambda: alone("layer_wise.json", "[" * 60_000),
    "deep tables in layer_wise.json": lambda: alone("layer_wise.json", '{"a":' * 900 + "1" + "}" * 900),
    "large sizes in layer_wise.json": lambda: alone("layer_wise.json", json.dumps(LAYER_WISE)),
    "dots in layer_wise.toml": lambda: alone("layer_wise.toml", ".".join(["a"] * 500_000) + " = 1"),
    "deep layer_wise.toml": lambda: alone("layer_wise.toml", "a = " + "[" * 60_000),
    "a sparse layer_wise.toml": lambda: alone("layer_wise.toml", "a = 1\n", 1 << 30),
    "lists in a rank's file": lambda: rank_files(containers(b"]", 24 << 20)),
    "colliding keys in a rank's file": lambda: rank_files(colliding(30_000)),
    "a header of holes": lambda: alone("a.safetensors", (90_000_000).to_bytes(8, "little") + b"{", 1 << 30),
    "lists in a header": lambda: alone("a.safetensors", safetensors('{"a":[' + "[]," * (MANY // 3) + "[]]}")),
    "deep header": lambda: alone("a.safetensors", safetensors("[" * 60_000)),
    "large sizes in a header": lambda: alone(
        "a.safetensors",
        safetensors(json.dumps({"a": {"dtype": "F32", "shape": [10**4000] * 64, "data_offsets": [0, 4]}})),
    ),
    "a sparse index": lambda: alone("model.safetensors.index.json", '{"weight_map": {', 3 << 30),
    "lists in an index": lambda: alone("model.safetensors.index.json", "[" + "[]," * (MANY // 3) + "[]]"),
    "a sparse zarr.json": lambda: alone("zarr.json", '{"zarr_format": 3', 3 << 30),
    "lists in zarr.json": lambda: alone(
        "zarr.json", array(attributes={"x": "lists"}).replace('"lists"', "[" + "[]," * (MANY // 4) + "[]]")
    ),
    "large sizes in zarr.json": lambda: alone("zarr.json", array(shape=[10**4000] * 64, chunks=[10**4000] * 64)),
    "many chunks in zarr.json": lambda: alone("zarr.json", array(shape=[1 << 59])),
}


def shard_index(folder: Path) -> None:
    """A shard that is a hole, with an index of 1 GiB."""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    index = [*codecs, {"name": "crc32c"}]
    sharding = {"chunk_shape": [1], "codecs": codecs, "index_codecs": index, "index_location": "end"}
    count = 1 << 26
    fields = {"codecs": [{"name": "sharding_indexed", "configuration": sharding}]}
    alone("zarr.json", array(shape=[count], chunks=[count], **fields))(folder)
    (folder / "c").mkdir()
    with (folder / "c" / "0").open("wb") as file:
        file.truncate(16 * count + 4)


def decoded(folder: Path) -> None:
    """A compressed chunk of 1 TiB, which is a small file."""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {"level": 9}}]
    alone("zarr.json", array(shape=[1 << 38], chunks=[1 << 38], codecs=codecs))(folder)
    (folder / "c").mkdir()
    (folder / "c" / "0").write_bytes(zlib.compress(bytes(1 << 20), wbits=31))


def many_members(folder: Path) -> None:
    """An item with a zip directory of many members."""
    out, entries = store(((str(number), b"") for number in range(3000)), 0)
    name = bytes(out)
    directory_bytes = directory(tuple(itertools.islice(itertools.cycle(entries), 60_000)), len(out))
    option(b"N.")(folder)
    (folder / "__9_0.distcp").write_bytes(name + directory_bytes)
    manifest = json.loads((folder / "muonckpt.json").read_text())
    for blob in manifest["blobs"]:
        blob["item"] = [0, len(name) + len(directory_bytes)]
    described(folder, json.dumps(manifest))


CASES |= {
    "a shard's index of holes": lambda: shard_index,
    "a bomb in gzip": lambda: decoded,
    "many members of a zip": lambda: many_members,
}
