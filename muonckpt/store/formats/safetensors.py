"""safetensors: one file, or a folder of files with an index as Hugging Face libraries use it.

A file is 8 bytes (the header's length, little-endian), the header (JSON), and the data.  The header maps each tensor to
its dtype, shape and byte range in the data, which the ranges tile; ``__metadata__`` maps strings to strings.  What the
format does not record is in a manifest there, under ``muonckpt``: docs/formats/safetensors.md.

Source: the checks of the Rust reader, safetensors 0.8 (``tensor.rs``: ``HeaderTooLarge`` at 100 MB, ``InvalidOffset``,
``TensorInvalidInfo``, ``MetadataIncompleteBuffer``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...algebra.box import MAX_DIMS, MAX_ELEMENTS, Box, Index
from ...algebra.fingerprint import as_hex
from ...names.errors import DamageError, DestinationError, SeveralSavesError, SourceError, about
from ...names.wording import listed
from ...programs.signs import NOT_READ
from ...record.chunks import in_columns
from ...record.json_fields import compact, digest_of
from ...record.record import Chunk, Extent, Manifest, StateRecord
from ..io import limits
from ..io.checksums import Sums, xxh3_128
from ..io.location import Location
from ..io.new_file import write_synced
from ..io.regular import File, open_regular
from ..reading.dtypes import itemsize
from ..reading.payloads import Payloads
from ..reading.reader import Reader
from .weight_files import (
    INDEX_NAME,
    Shards,
    WeightIndex,
    read_shards,
    read_shards_without_index,
    unread_beside,
    weights_in,
)

_ZIP = b"PK\x03\x04"

MAX_HEADER_BYTES = 100_000_000

METADATA_KEY = "__metadata__"
"""The one name that no tensor can have."""

MANIFEST_KEY = "muonckpt"
"""The key of our manifest in the metadata."""

DTYPE_OF_CODE: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }
)
"""Torch's name of each element type by the format's; types of less than a byte (F4, F6) are not supported."""

CODE_OF_DTYPE: Mapping[str, str] = MappingProxyType({name: code for code, name in DTYPE_OF_CODE.items()})

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: torch's name of its ``dtype``, and ``start`` and ``stop`` in bytes of the data.

    Raises:
        DamageError: dtype and shape need a range of another length.
    """

    dtype: str
    shape: Index
    start: int
    stop: int

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_DIMS or not all(
            0 <= number <= MAX_ELEMENTS for number in (*self.shape, self.start, self.stop)
        ):
            raise DamageError(f"expected at most {MAX_DIMS} sizes, and offsets, of 0 to {MAX_ELEMENTS}, found others")
        needed = math.prod(self.shape) * itemsize(self.dtype)
        if self.stop - self.start != needed:
            raise DamageError(
                f"expected {needed} bytes for {self.dtype} of shape {self.shape}, found {self.start}:{self.stop}"
            )


@dataclass(frozen=True, slots=True)
class Header:
    """``entries`` in the order of their bytes, without gap or overlap.

    Raises:
        DamageError: there is a gap, an overlap or a wrong order.
    """

    entries: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]

    def __post_init__(self) -> None:
        end = 0
        for name, entry in self.entries.items():
            if entry.start != end:
                raise DamageError(f"expected tensor {name!r} at byte {end} of the data, found it at {entry.start}")
            end = entry.stop

    @property
    def data_length(self) -> int:
        return max((entry.stop for entry in self.entries.values()), default=0)

    def encode(self) -> bytes:
        """Return the bytes before the data, a multiple of 8, so that 8-byte elements are aligned."""
        fields: dict[str, Any] = {METADATA_KEY: dict(self.metadata)}
        for name, entry in self.entries.items():
            place = [entry.start, entry.stop]
            fields[name] = {"dtype": CODE_OF_DTYPE[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def read_header(file: File) -> tuple[Header, int, str]:
    """Return the header of an open file, the byte at which its data begins, and the xxh3-128 of its text in hex.

    Raises:
        SourceError: it is not a safetensors file, or contradicts itself or its length.
    """
    header, start, digest = front_of(file)
    if start + header.data_length != file.size:
        raise DamageError(f"expected {start + header.data_length} bytes, found {file.size}: it was cut")
    return header, start, digest


def front_of(file: File) -> tuple[Header, int, str]:
    """Do the same as `read_header` for a file that may be cut behind its header."""
    size = file.size
    head = file.read(0, 8)
    length = int.from_bytes(head, "little")
    most = min(max(size - 8, 0), MAX_HEADER_BYTES)
    if head[:4] == _ZIP:
        raise SourceError(
            "expected a safetensors file, found a zip archive, such as torch.save writes: load it and save it with "
            "torch.distributed.checkpoint or safetensors"
        )
    if size < 8 or length > most:
        kind = DamageError if file.read(8, 1) == b"{" else SourceError  # cut, or another kind of file
        raise kind(
            f"expected a safetensors file (checkpoints of other formats are directories): a header of at most {most} "
            f"bytes in {size}, found one of {length}"
        )
    if length > limits.SMALL_DESCRIPTION:
        rest = max(file.on_disk - 8 - length, 0)
        limits.check_limit(
            length, limits.SMALL_DESCRIPTION + rest, f"bytes of a header before {rest} bytes on the disk"
        )
    text = file.read(8, length)
    header, start = parse_header(text), 8 + length
    if start + header.data_length < size:
        raise DamageError(f"expected {start + header.data_length} bytes, found {size}: it grew")
    return header, start, xxh3_128([text])


def parse_header(text: bytes) -> Header:
    limits.check_text(text)
    try:
        fields: Any = json.loads(text.decode(), object_pairs_hook=_unique)
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
    except (ValueError, RecursionError) as error:
        raise DamageError(f"damaged safetensors header: {type(error).__name__}: {error}") from error
    metadata = fields.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamageError(f"expected strings in {METADATA_KEY}, found something else")
    strange = DamageError if MANIFEST_KEY in metadata else SourceError
    entries = {name: _entry(name, value, strange) for name, value in fields.items()}
    return Header(dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))), metadata)


def _entry(name: str, value: Any, strange: type[SourceError]) -> HeaderEntry:
    match value:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop], **more} if not more and all(
            type(number) is int
            for number in (*shape, start, stop)  # a bool is not a number here
        ):
            pass
        case _:
            raise DamageError(f"tensor {name!r}: expected dtype, shape and data_offsets, found {str(value)[:200]}")
    if code not in DTYPE_OF_CODE:
        raise strange(f"tensor {name!r}: expected one of the dtypes {', '.join(DTYPE_OF_CODE)}, found {code!r}")
    try:
        return HeaderEntry(DTYPE_OF_CODE[code], tuple(shape), start, stop)
    except DamageError as error:
        raise DamageError(f"tensor {name!r}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


HeaderOf = Callable[[File], tuple[Header, int, str]]
"""Reads the header of an open file, as `read_header` does."""

INDEX_FILE = "model.safetensors.index.json"
"""The index of a sharded checkpoint, as we write it."""

_DATA = "data"
"""The file in our manifest's extents, which count from the data section: the header's length must not matter."""

_PARTS = "DCP_SHARDING_INFO"
"""A key that DCP's ``HuggingFaceStorageWriter`` writes to ``__metadata__``: tensors may be parts, of tensors whose size
is not recorded.  Where it has written whole tensors there is an index."""

ENDING = ".safetensors"


def reader(path: Location) -> Reader:
    """Read a file, the files of an index, or those of a folder.

    Raises:
        SourceError: there is none, it is damaged, or headers, index and manifest disagree; or a single file lies beside
            checkpoints of a run.
    """
    opened = located(path, read_weights(path, read_header))
    for fault in opened.faults:
        raise DamageError(f"{folder(path)}: {fault}") from fault
    return opened


def remains(path: Location, without: Collection[str]) -> Reader:
    """Read what is left of a file that is cut, or of a folder where files of a checkpoint, or its index, are lost.

    Raises:
        SourceError: as `reader`, but for what is cut, missing or damaged; or files are of several saves.
    """
    return located(path, read_weights(path, front_of))


def located(path: Location, weights: Weights) -> Reader:
    place = folder(path)
    beside = unread_beside([str(entry.name) for entry in place.iterdir()], weights.files) if place == path else []
    unread = [*beside, *weights.copies]
    provenance = {**weights.provenance, NOT_READ: unread} if unread else weights.provenance
    return Reader(Manifest(tuple(weights.tensors), (), provenance), Payloads(folder(path)), weights.faults)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a file or of a folder.

    Attributes:
        files: the names of the files, and of the index, that are read.
        copies: copies of tensors that are not read, each with its file.
        faults: what is lost or wrongly described.
    """

    tensors: Sequence[StateRecord]
    provenance: Mapping[str, Any]
    files: Sequence[str]
    copies: Sequence[str] = ()
    faults: tuple[SourceError, ...] = ()


def read_weights(path: Location, header_of: HeaderOf) -> Weights:
    """Read the headers of a file, of the files of an index, or of those that count in a folder.

    Extents name files in ``folder(path)``.  Other programs' tensors have only a key.

    Args:
        header_of: `read_header`, or `front_of` to read a cut file as well.

    Raises:
        SourceError: there is none, it is damaged, or headers, index and manifest disagree.
    """
    refuse_stray(path)
    place = folder(path)
    names = sorted(str(entry.name) for entry in place.iterdir()) if not path.name.endswith(ENDING) else [path.name]
    chosen = weights_in(place, names, ENDING) if path.is_dir() else path.name
    provenances: dict[str, Mapping[str, Any]] = {}

    def read(name: str, expected: str | None) -> dict[str, StateRecord]:
        alone = chosen in (None, name)
        with about(place / name if alone else name):
            provenances[name], tensors = _read_file(place, name, expected, header_of, alone)
        return {tensor.key: tensor for tensor in tensors}

    if chosen is None:
        shards = read_shards_without_index(place, names, ENDING, read)
        if len({compact(dict(provenances[name])) for name in shards.files}) > 1:
            mixture = SeveralSavesError("the files are of several saves, and no index says which are those of one")
            shards = dataclasses.replace(shards, faults=(mixture, *shards.faults))
    elif INDEX_NAME.fullmatch(chosen):
        index = WeightIndex.at(place / chosen)
        with about(place):
            shards = read_shards(index, names, ENDING, read)
    else:
        shards = Shards({chosen: read(chosen, None)})
    files = [*shards.files, *([chosen] if chosen and chosen not in shards.files else [])]
    return Weights(
        [tensor for tensors in shards.files.values() for tensor in tensors.values()],
        next((recorded for name in shards.files if (recorded := provenances[name])), {"format": "safetensors"}),
        files,
        shards.copies,
        shards.faults,
    )


def folder(path: Location) -> Location:
    return path if path.is_dir() else path.parent


def refuse(tensors: Sequence[StateRecord]) -> None:
    """Refuse tensors that the format cannot hold.

    Raises:
        SourceError: the format lacks the dtype, or cannot have the key.
    """
    for tensor in tensors:
        if tensor.dtype not in CODE_OF_DTYPE:
            raise SourceError(
                f"tensor {tensor.key!r}: safetensors has no dtype {tensor.dtype}; it has {', '.join(CODE_OF_DTYPE)}"
            )
        if tensor.key == METADATA_KEY:
            raise SourceError(f"safetensors keeps the name {METADATA_KEY!r} for itself; no tensor can have it")
        try:
            tensor.key.encode()
        except UnicodeEncodeError:
            raise SourceError(f"tensor {tensor.key!r}: the format demands names of valid Unicode") from None


def front(tensors: Sequence[StateRecord], provenance: Mapping[str, Any], sums: Sequence[tuple[str, int]] = ()) -> bytes:
    """Return the bytes before the elements of these tensors, which follow one another in this order.

    Args:
        sums: digest and share of the fingerprint of each tensor; without them the header has the same length.

    Raises:
        DestinationError: the header would be longer than readers accept.
    """
    none = Sums()
    entries, chunks, start = {}, [], 0
    sums = sums or [(none.digest, none.share)] * len(tensors)
    for tensor, (digest, _) in zip(tensors, sums, strict=True):
        place = Extent(_DATA, start, length_of(tensor))
        entries[tensor.key] = HeaderEntry(tensor.dtype, tensor.shape, start, place.end)
        chunks.append(([Chunk(Box.of(tensor.shape), place, place, digest)], len(tensor.shape)))
        start = place.end
    described = (
        dataclasses.replace(tensor, chunks=own, fingerprint=as_hex(share))
        for tensor, own, (_, share) in zip(tensors, in_columns(chunks), sums, strict=True)
    )
    # "format" tells Hugging Face libraries whose tensors these are; some refuse a file without it.
    manifest = Manifest(tuple(described), (), provenance).to_json()
    head = Header(entries, {"format": "pt", MANIFEST_KEY: manifest}).encode()
    if len(head) - 8 > MAX_HEADER_BYTES:
        size = f"a header of {len(head)} bytes, of at most {MAX_HEADER_BYTES}"
        raise DestinationError(f"{size}; give a smaller `shard_size=`")
    return head


def shards(tensors: Sequence[StateRecord], most: int) -> list[tuple[str, list[StateRecord]]]:
    """Distribute tensors over files in order; return each file's name and tensors.

    A file has at most ``most`` bytes of elements, or one tensor.  Without tensors there is one empty file.
    """
    contents: list[list[StateRecord]] = [[]]
    used = 0
    for tensor in tensors:
        if contents[-1] and used + length_of(tensor) > most:
            contents.append([])
            used = 0
        contents[-1].append(tensor)
        used += length_of(tensor)
    return [(f"model-{number:05d}-of-{len(contents):05d}.safetensors", own) for number, own in enumerate(contents, 1)]


def write_shard_index(manifest: Manifest, names: Sequence[str], directory: Location) -> None:
    """Write the index of finished shards, and wait until it is on disk.

    The digests of their headers, which have the tensors' digests, bind the files together.
    """
    headers = {}
    for name in names:
        with open_regular(directory / name) as opened:
            _, _, headers[name] = read_header(opened)
    files = {tensor.key: tensor.chunks[0].item.file for tensor in manifest.tensors}
    sizes = {"total_size": sum(map(length_of, manifest.tensors))}
    ours = {"version": 1, "headers": headers}
    seal = digest_of([sizes, ours, files])
    index = {"metadata": {**sizes, MANIFEST_KEY: {**ours, "digest": seal}}, "weight_map": files}
    write_synced(directory / INDEX_FILE, json.dumps(index, indent=1, ensure_ascii=False).encode())


def by_element_size(tensors: Sequence[StateRecord]) -> list[StateRecord]:
    """Sort tensors by element size, the largest first, which aligns all of them."""
    return sorted(tensors, key=lambda tensor: -itemsize(tensor.dtype))


def length_of(tensor: StateRecord) -> int:
    return Box.of(tensor.shape).numel * itemsize(tensor.dtype)


def _read_file(
    folder: Location, name: str, expected: str | None, header_of: HeaderOf, alone: bool
) -> tuple[Mapping[str, Any], list[StateRecord]]:
    """Return the provenance and the tensors of a file, whose header has to have the expected digest, if any."""
    with open_regular(folder / name) as opened:
        file_header, start, actual = header_of(opened)
    if actual != (expected or actual):
        raise DamageError(
            f"its header has digest {actual}, the index expects {expected}: it is damaged, or of another save"
        )
    if _PARTS in file_header.metadata and alone:
        raise SourceError(
            "expected whole tensors, found what one rank had of them (by DCP's HuggingFaceStorageWriter with "
            "save_distributed): consolidate the files of all ranks with torch first"
        )
    text = file_header.metadata.get(MANIFEST_KEY)
    recorded = Manifest(()) if text is None else Manifest.from_json(text)
    known = {tensor.key: tensor for tensor in recorded.tensors}
    lost = sorted(known.keys() - file_header.entries.keys())
    if lost:
        raise DamageError(f"expected tensor {lost[0]!r}, which {METADATA_KEY} describes; found none")
    stored = []
    for key, entry in file_header.entries.items():
        place, box = Extent(name, start + entry.start, entry.stop - entry.start), Box.of(entry.shape)
        tensor = known.get(key)
        if tensor and (tensor.dtype, tensor.shape, [*tensor.boxes]) != (entry.dtype, entry.shape, [box]):
            raise DamageError(
                f"tensor {key!r}: {entry.dtype} of shape {entry.shape}, but {METADATA_KEY} says otherwise"
            )
        digest = None if tensor is None else tensor.chunks[0].digest
        stored.append(([Chunk(box, place, place, digest)], len(entry.shape)))
    tensors = [
        dataclasses.replace(known[key], chunks=chunks)
        if key in known
        else StateRecord(key, (key,), entry.shape, entry.dtype, chunks)
        for (key, entry), chunks in zip(file_header.entries.items(), in_columns(stored), strict=True)
    ]
    return recorded.provenance, tensors


_OF_RUN = re.compile(r"(iter_|checkpoint-|step-|global_step)[0-9]+(\.[0-9]+)?")
"""Folders in which programs keep the checkpoints of a run: Megatron, Hugging Face, ours, DeepSpeed."""


def refuse_stray(path: Location) -> None:
    """Refuse a folder of checkpoints by step that also has one file of tensors, hardly the one that was meant.

    A model of several files can only be named by its folder, so for one there is a warning.

    Raises:
        SourceError: the folder has one file of tensors, and checkpoints.
    """
    if not path.is_dir():
        return
    entries: list[Location] = list(path.iterdir())
    steps = sorted(entry.name for entry in entries if _OF_RUN.fullmatch(entry.name) and entry.is_dir())
    files = sorted(entry.name for entry in entries if entry.name.endswith((".safetensors", ".safetensors.index.json")))
    if not (steps and files):
        return
    held = f"{path} holds the checkpoints {listed(steps, 4)} of a run, and {files[0]}"
    if len(files) == 1:
        raise SourceError(f"{held}: name the checkpoint that you mean, or {path / files[0]}")
    warnings.warn(f"{held}, which is read; name a checkpoint of the run if you mean that", stacklevel=2)
