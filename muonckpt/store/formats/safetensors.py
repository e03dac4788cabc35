"""safetensors: one file, or a folder of files with an index as Hugging Face libraries use it.

A file is 8 bytes (the header's length, little-endian), the header (JSON), and the data.  The header maps each tensor to
its dtype, shape and byte range in the data, which the ranges tile; ``__metadata__`` maps strings to strings, among them
our manifest: docs/formats/safetensors.md.

Source: the checks of the Rust reader, safetensors 0.8 (``tensor.rs``: ``HeaderTooLarge`` at 100 MB, ``InvalidOffset``,
``TensorInvalidInfo``, ``MetadataIncompleteBuffer``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from ...algebra.box import MAX_DIMS, MAX_ELEMENTS, Box, Index
from ...algebra.fingerprint import as_hex
from ...algebra.grouping import batches
from ...names.errors import DamageError, SeveralSavesError, SourceError, about
from ...names.wording import listed, shell_line
from ...programs.signs import NOT_READ
from ...record.chunks import in_columns
from ...record.json_fields import compact, digest_of
from ...record.record import Chunk, Extent, Manifest, StateRecord, by_key
from ..io import limits
from ..io.checksums import Sums, xxh3_128
from ..io.location import Location, entries_of, is_folder, length_of, names_in
from ..io.new_file import write_synced
from ..io.regular import File, open_regular
from ..reading.dtypes import itemsize
from ..reading.payloads import Payloads, Reader, tensor_bytes
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
    """Describes one tensor: torch's name of its ``dtype``, and ``start`` and ``stop`` in bytes of the data.

    Raises:
        DamageError: dtype and shape need a range of another length.
    """

    dtype: str
    shape: Index
    start: int
    stop: int

    def __post_init__(self) -> None:
        numbers = (*self.shape, self.start, self.stop)
        if len(self.shape) > MAX_DIMS or min(numbers) < 0 or max(numbers) > MAX_ELEMENTS:
            raise DamageError(f"expected at most {MAX_DIMS} sizes, and offsets, of 0 to {MAX_ELEMENTS}, found others")
        length = math.prod(self.shape) * itemsize(self.dtype)
        if self.stop - self.start != length:
            raise DamageError(
                f"expected {length} bytes for {self.dtype} of shape {self.shape}, found {self.start}:{self.stop}"
            )


@dataclass(frozen=True, slots=True)
class Header:
    """Describes the tensors of a file: ``entries`` in the order of their bytes.

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
        SourceError: it is not a safetensors file, contradicts itself, or is cut before the end of its header.
    """
    size = file.size
    head = file.read(0, 8)
    length = int.from_bytes(head, "little")
    max_bytes = min(max(size - 8, 0), MAX_HEADER_BYTES)
    # The length is compared with limits before so many bytes are read.
    if head[:4] == _ZIP:
        raise SourceError(
            "expected a safetensors file, found a zip archive, such as torch.save writes: load it and save it with "
            "torch.distributed.checkpoint or safetensors"
        )
    if size < 8 or length > max_bytes:
        kind = DamageError if file.read(8, 1) == b"{" else SourceError  # cut, or another kind of file
        raise kind(
            f"expected a safetensors file (checkpoints of other formats are directories): a header of at most "
            f"{max_bytes} bytes in {size}, found one of {length}"
        )
    if length > limits.SMALL_DESCRIPTION:
        data_bytes = max(file.on_disk - 8 - length, 0)
        noun = f"bytes of a header before {data_bytes} bytes on the disk"
        limits.check_limit(length, limits.SMALL_DESCRIPTION + data_bytes, noun)
    # Bytes after the data are damage as well.
    text = file.read(8, length)
    header, start = parse_header(text), 8 + length
    end = start + header.data_length
    if end < size:
        head = file.read(end, min(size - end, 16))
        command = shell_line("truncate", "-s", end, file.place)
        raise DamageError(
            f"expected {end} bytes, found {size}: {size - end} bytes lie after the data, which begin with "
            f"{head!r}; if they are none of yours, cut them with: {command}"
        )
    return header, start, xxh3_128([text])


def parse_header(text: bytes) -> Header:
    # JSON with a name twice would be read differently by different readers.
    limits.check_text(text)
    try:
        fields: Any = json.loads(text.decode(), object_pairs_hook=_refuse_repeated_names)
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
    except (ValueError, RecursionError) as error:
        raise DamageError(f"damaged safetensors header: {type(error).__name__}: {error}") from error
    metadata = fields.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamageError(f"expected strings in {METADATA_KEY}, found something else")
    # We write no dtype that the format lacks.
    dtype_error = DamageError if MANIFEST_KEY in metadata else SourceError
    entries = {name: _parse_entry(name, value, dtype_error) for name, value in fields.items()}
    return Header(dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))), metadata)


def _parse_entry(name: str, value: Any, dtype_error: type[SourceError]) -> HeaderEntry:
    with about(f"tensor {name!r}"):
        match value:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop], **extra} if not extra:
                numbers = (*shape, start, stop)
            case _:
                numbers = (None,)
        if {*map(type, numbers)} != {int}:  # a bool is not a number here
            raise DamageError(f"expected dtype, shape and data_offsets, found {str(value)[:200]}")
        if code not in DTYPE_OF_CODE:
            raise dtype_error(f"expected one of the dtypes {', '.join(DTYPE_OF_CODE)}, found {code!r}")
        return HeaderEntry(DTYPE_OF_CODE[code], tuple(shape), start, stop)


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""The only file of a checkpoint in the staging directory, and the index of several."""

_DATA = "data"
"""The file in our manifest's extents, which count from the data section: the header's length must not matter."""

_SHARDING_KEY = "DCP_SHARDING_INFO"
"""A key that DCP's ``HuggingFaceStorageWriter`` writes to ``__metadata__``: tensors may be parts, of tensors whose size
is not recorded.  Where it has written whole tensors there is an index."""

ENDING = ".safetensors"


def reader(path: Location) -> Reader:
    """Read a file, the files of an index, or those of a folder.

    Faults are cut, missing and damaged files of several, and a lost or wrong index.

    Raises:
        SourceError: there is none, it is damaged, or headers, index and manifest disagree; or a single file lies beside
            checkpoints of a run.
    """
    weights, place = read_weights(path), folder(path)
    beside = unread_beside(names_in(place), weights.files) if place == path else []
    unread = [*beside, *weights.copies]
    provenance = {**weights.provenance, NOT_READ: unread} if unread else weights.provenance
    return Reader(Manifest(tuple(weights.tensors), (), provenance), Payloads(place), weights.faults)


@dataclass(frozen=True, slots=True)
class Weights:
    """Holds the tensors of a file or of a folder.

    Attributes:
        files: the names of the files, and of the index, that are read.
        copies: copies of tensors that are not read, each with its file.
        faults: the lost or wrongly described files and tensors.
    """

    tensors: Sequence[StateRecord]
    provenance: Mapping[str, Any]
    files: Sequence[str]
    copies: Sequence[str] = ()
    faults: tuple[SourceError, ...] = ()


def read_weights(path: Location) -> Weights:
    """Read the headers of a file, of the files of an index, or of a folder's files of weights.

    Extents name files in ``folder(path)``.  Other programs' tensors have only a key.

    Raises:
        SourceError: there is none, it is damaged, or headers, index and manifest disagree.
    """
    refuse_stray(path)
    place = folder(path)
    names = names_in(place) if not path.name.endswith(ENDING) else [path.name]
    main_file = weights_in(place, names, ENDING) if is_folder(path) else path.name
    provenances: dict[str, Mapping[str, Any]] = {}

    def read(name: str, header_digest: str | None) -> dict[str, StateRecord]:
        has_no_index = main_file in (None, name)
        with about(place / name if has_no_index else name):
            provenances[name], tensors = _read_file(place, name, header_digest, has_no_index)
        return by_key(tensors)

    # The files of a set without an index, those of an index, or one file.
    if main_file is None:
        shards = read_shards_without_index(place, names, ENDING, read)
        if len({compact(dict(provenances[name])) for name in shards.files}) > 1:
            mixture = SeveralSavesError("the files are of several saves, and no index says which are those of one")
            shards = dataclasses.replace(shards, faults=(mixture, *shards.faults))
    elif INDEX_NAME.fullmatch(main_file):
        index = WeightIndex.read(place / main_file)
        with about(place):
            shards = read_shards(index, names, ENDING, read)
    else:
        shards = Shards({main_file: read(main_file, None)})

    # The first file that has one gives the provenance; of other programs' files none has.
    tensors = list(chain.from_iterable(entries.values() for entries in shards.files.values()))
    provenance = next(filter(None, map(provenances.__getitem__, shards.files)), {"format": "safetensors"})
    files = dict.fromkeys([*shards.files, *([main_file] if main_file else [])])
    # A file may be cut after its header.
    faults = list(shards.faults)
    for name, entries in shards.files.items():
        end = max((tensor.chunks[0].item.end for tensor in entries.values()), default=0)
        length = length_of(place / name)
        if length is None or length < end:
            faults.append(DamageError(f"expected {end} bytes in {place / name}, found {length}: it was cut"))
    return Weights(tensors, provenance, files=list(files), copies=shards.copies, faults=tuple(faults))


def folder(path: Location) -> Location:
    return path if is_folder(path) else path.parent


def check_storable(tensors: Sequence[StateRecord]) -> None:
    """Check that the format can hold these tensors.

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
        # JSON can have half a surrogate pair, Rust's strings cannot.
        try:
            tensor.key.encode()
        except UnicodeEncodeError:
            raise SourceError(f"tensor {tensor.key!r}: the format demands names of valid Unicode") from None


def encode_front(
    tensors: Sequence[StateRecord], provenance: Mapping[str, Any], sums: Sequence[tuple[str, int]] = ()
) -> bytes:
    """Return the bytes before the elements of the tensors, which follow one another in this order.

    Args:
        sums: digest and share of the fingerprint of each tensor; without them the header has the same length.
    """
    # The manifest's extents count from the data section, as the header's do.
    entries, chunks, start = {}, [], 0
    sums = sums or [(Sums().digest, 0)] * len(tensors)
    for tensor, (digest, _) in zip(tensors, sums, strict=True):
        place = Extent(_DATA, start, tensor_bytes(tensor))
        entries[tensor.key] = HeaderEntry(tensor.dtype, tensor.shape, start, place.end)
        chunks.append(([Chunk(box=Box.of(tensor.shape), item=place, payload=place, digest=digest)], len(tensor.shape)))
        start = place.end
    records = []
    for tensor, tensor_chunks, (_, share) in zip(tensors, in_columns(chunks), sums, strict=True):
        records.append(dataclasses.replace(tensor, chunks=tensor_chunks, fingerprint=as_hex(share)))
    # "format" tells Hugging Face libraries whose tensors these are; some refuse a file without it.
    manifest = Manifest(tuple(records), (), provenance).to_json()
    return Header(entries, {"format": "pt", MANIFEST_KEY: manifest}).encode()


def shards(
    tensors: Sequence[StateRecord], max_bytes: int, provenance: Mapping[str, Any]
) -> list[tuple[str, Sequence[StateRecord]]]:
    """Distribute tensors over files in order; return each file's name and tensors.

    A file has at most ``max_bytes`` of elements, and a header that readers accept, or one tensor.  Without tensors
    there is one empty file.
    """
    contents = [*batches(tensors, tensor_bytes, max_bytes)] or [[]]
    files = [*chain.from_iterable(_cut_by_header(content, provenance) for content in contents)]
    name = f"model-{{:05d}}-of-{len(files):05d}.safetensors"
    return [(name.format(number), content) for number, content in enumerate(files, 1)]


def _cut_by_header(tensors: Sequence[StateRecord], provenance: Mapping[str, Any]) -> Iterator[Sequence[StateRecord]]:
    """Yield the tensors of a file, or halves of them, until readers accept each header: see `read_header`."""
    max_bytes = min(MAX_HEADER_BYTES, limits.SMALL_DESCRIPTION + sum(map(tensor_bytes, tensors)))
    middle = len(tensors) // 2
    if not middle or len(encode_front(tensors, provenance)) - 8 <= max_bytes:
        yield tensors
        return
    yield from _cut_by_header(tensors[:middle], provenance)
    yield from _cut_by_header(tensors[middle:], provenance)


def write_shard_index(manifest: Manifest, names: Sequence[str], directory: Location) -> None:
    """Write the index of finished shards, and wait until it is on disk.

    The digests of their headers, which have the tensors' digests, bind the files together.
    """
    # Read again what was written: the index describes files, not plans.
    headers = {}
    for name in names:
        with open_regular(directory / name) as opened:
            _, _, headers[name] = read_header(opened)
    files = {tensor.key: tensor.chunks[0].item.file for tensor in manifest.tensors}
    sizes = {"total_size": sum(map(tensor_bytes, manifest.tensors))}
    entry = {"version": 1, "headers": headers}
    seal = digest_of([sizes, entry, files])
    index = {"metadata": {**sizes, MANIFEST_KEY: {**entry, "digest": seal}}, "weight_map": files}
    write_synced(directory / INDEX_FILE, json.dumps(index, indent=1, ensure_ascii=False).encode())


def _read_file(
    folder: Location, name: str, header_digest: str | None, has_no_index: bool
) -> tuple[Mapping[str, Any], list[StateRecord]]:
    """Return the provenance and the tensors of a file, whose header has to have this digest, if there is one."""
    with open_regular(folder / name) as opened:
        file_header, start, digest = read_header(opened)
    if header_digest and digest != header_digest:
        raise DamageError(
            f"its header has digest {digest}, the index expects {header_digest}: it is damaged, or of another save"
        )
    if _SHARDING_KEY in file_header.metadata and has_no_index:
        raise SourceError(
            "expected whole tensors, found what one rank had of them (by DCP's HuggingFaceStorageWriter with "
            "save_distributed): consolidate the files of all ranks with torch first"
        )
    # Our manifest and the header have to say the same.
    text = file_header.metadata.get(MANIFEST_KEY)
    manifest = Manifest(()) if text is None else Manifest.from_json(text)
    records = by_key(manifest.tensors)
    missing_keys = sorted(records.keys() - file_header.entries.keys())
    if missing_keys:
        raise DamageError(f"expected tensor {missing_keys[0]!r}, which {METADATA_KEY} describes; found none")
    chunks = []
    for key, entry in file_header.entries.items():
        place, box = Extent(name, start + entry.start, entry.stop - entry.start), Box.of(entry.shape)
        tensor = records.get(key)
        if tensor and (tensor.dtype, tensor.shape, [*tensor.boxes]) != (entry.dtype, entry.shape, [box]):
            raise DamageError(
                f"tensor {key!r}: {entry.dtype} of shape {entry.shape}, but {METADATA_KEY} says otherwise"
            )
        chunk_digest = None if tensor is None else tensor.chunks[0].digest
        chunks.append(([Chunk(box, item=place, payload=place, digest=chunk_digest)], len(entry.shape)))
    tensors = []
    for (key, entry), stored in zip(file_header.entries.items(), in_columns(chunks), strict=True):
        unnamed = StateRecord(key, path=(key,), shape=entry.shape, dtype=entry.dtype, chunks=stored)
        tensors.append(dataclasses.replace(records.get(key, unnamed), chunks=stored))
    return manifest.provenance, tensors


_STEP_FOLDER = re.compile(r"(iter_|checkpoint-|step-|global_step)[0-9]+(\.[0-9]+)?")
"""Folders in which programs keep the checkpoints of a run: Megatron, Hugging Face, ours, DeepSpeed."""


def refuse_stray(path: Location) -> None:
    """Refuse a folder of checkpoints by step that also has one file of tensors, hardly the one that was meant.

    A model of several files can only be named by its folder, so for one there is a warning.

    Raises:
        SourceError: the folder has one file of tensors, and checkpoints.
    """
    if not is_folder(path):
        return
    entries = entries_of(path)
    steps = sorted(entry.name for entry in entries if _STEP_FOLDER.fullmatch(entry.name) and is_folder(entry))
    files = sorted(entry.name for entry in entries if entry.name.endswith((".safetensors", ".safetensors.index.json")))
    if not (steps and files):
        return
    content = f"{path} holds the checkpoints {listed(steps, 4)} of a run, and {files[0]}"
    if len(files) == 1:
        raise SourceError(f"{content}: name the checkpoint that you mean, or {path / files[0]}")
    warnings.warn(f"{content}, which is read; name a checkpoint of the run if you mean that", stacklevel=2)
