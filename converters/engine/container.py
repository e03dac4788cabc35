"""A kind of destination: its files, the places of tensors and items in them, and the files that describe the others.

Non-tensor items of a destination that holds tensors only are beside it, in ``NAME.items.json``: plain data as JSON,
decoded without running anything, and the others listed with the reason (docs/formats/safetensors.md).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ...names.errors import SourceError, TargetError
from ...names.version import PROGRAM
from ...record.json_fields import sealed_text
from ...record.record import Manifest
from ...store.formats.registry import BUILT_IN, format_written_as, import_named
from ...store.formats.torch_save.plain_item import plain_value
from ...store.io.location import Location
from ...store.open_checkpoint import checked_blob
from ...store.reading.payloads import Payloads
from ..target.topology import Target
from .output_files import OutputFile
from .outputs import OutputItem, Outputs


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A request to a container: write ``outputs``, made from the source of this name, for ``target``."""

    source: str
    provenance: Mapping[str, Any]
    payloads: Payloads
    outputs: Outputs
    target: Target
    select: tuple[str, ...]


_ITEMS_VERSION = 1

_MAX_JSON = 32 << 20
"""The longest JSON text of one item: a small pickle can refer to the same part a million times."""


@dataclass(frozen=True, slots=True)
class ItemFile:
    """The bytes of a file of items, the keys of the values in it, and the keys that it only lists."""

    data: bytes
    decoded: tuple[str, ...]
    undecoded: tuple[str, ...]

    @classmethod
    def of(cls, items: Iterable[OutputItem], payloads: Payloads, source: str) -> ItemFile:
        """Make the file of items of the checkpoint called ``source``.

        Raises:
            SourceError: an item is damaged.
        """
        # Each entry is a line of text, so that the values of all items are never in memory together.
        decoded, undecoded = dict[str, str](), dict[str, str]()
        for item in items:
            raw = item.data if item.source is None else checked_blob(payloads, item.source)
            entry = {"key": item.key, "path": list(item.path)}
            try:
                decoded[item.key] = _text({**entry, "value": _plain(plain_value(raw), {})})
            except (RecursionError, SourceError) as error:
                reason = str(error) if isinstance(error, SourceError) else "it is nested too deeply"
                undecoded[item.key] = _text({**entry, "bytes": len(raw), "reason": reason})
        # The seal is a digest of the text before it.
        head = _text({"format": "muonckpt items", "version": _ITEMS_VERSION, "source": source})[:-1]
        lists = (",\n  ".join(texts.values()) for texts in (decoded, undecoded))
        text = sealed_text('{},\n "items": [\n  {}\n ],\n "undecoded": [\n  {}\n ]'.format(head, *lists))
        return cls(text.encode(), tuple(decoded), tuple(undecoded))


def _text(value: object) -> str:
    """Return a value as JSON of bounded length.

    Raises:
        SourceError: it would be longer.
    """
    text = StringIO()
    for part in json.JSONEncoder(allow_nan=False).iterencode(value):
        text.write(part)
        if text.tell() > _MAX_JSON:
            raise SourceError(f"expected at most {_MAX_JSON >> 20} MiB of JSON, found more")
    return text.getvalue()


def _plain(value: Any, converted: dict[int, Any]) -> Any:
    """Return plain data in JSON's types: numbers that JSON lacks become strings, integer keys become text.

    ``converted`` has parts by id, because they may be shared.

    Raises:
        SourceError: two keys of a dict would become one, or there are bytes, which JSON lacks.
    """
    # A pickle can refer to one part so often that to convert it each time would take forever.
    if id(value) in converted:
        return converted[id(value)]
    plain = value
    match value:
        case float() if not math.isfinite(value):
            plain = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case list() | tuple():
            plain = [_plain(part, converted) for part in value]
        case bytes():
            raise SourceError(f"expected values that JSON has, found {len(value)} bytes")
        case dict():
            plain = {str(key): _plain(part, converted) for key, part in value.items()}
            if len(plain) != len(value):
                raise SourceError(f"expected keys that differ as text, found {sorted(map(repr, value))[:8]}")
    converted[id(value)] = plain
    return plain


@dataclass(frozen=True, slots=True)
class Arranged:
    """The files to write, and what the manifest says about them: layouts of tensors as JSON data, by key.

    ``items`` is a file beside the destination for the non-tensor items, if the other files cannot hold them.
    """

    files: tuple[OutputFile, ...]
    recorded_layouts: Mapping[str, Mapping[str, Any] | None]
    provenance: Mapping[str, Any]
    items: ItemFile | None = None


class Container(ABC):
    """A kind of destination.

    Attributes:
        name: the name of the format.
        of_ranks: whether each rank of a mesh has a file of its own; otherwise tensors are written whole.
        root: the name of the file that becomes the destination; empty if that is the directory of all files.
    """

    name: str
    of_ranks: bool
    root: str = ""

    @abstractmethod
    def arrange(self, request: WriteRequest) -> Arranged:
        """Decide what goes where in which file.

        Raises:
            SourceError: the format cannot hold a tensor or an item.
            TargetError: the target does not fit the tensors.
        """

    @abstractmethod
    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Write and sync what else readers need, such as a manifest, into the finished directory."""


def extended_provenance(
    request: WriteRequest, name: str, step: Mapping[str, Any], earlier: Sequence[Any] | None, buffers: Sequence[Any]
) -> dict[str, Any]:
    """Return the source's provenance with an entry ``name`` for this conversion, and with these flat buffers if any.

    Args:
        step: details of this conversion; the program and the source are added.
        earlier: the entries to which this one is appended; None to keep only this one.
    """
    # Buffers are those of this destination, whatever the source recorded.
    outputs = request.outputs
    entry = {"program": PROGRAM, "source": request.source, **step}
    entry |= {"notes": list(outputs.notes)} if outputs.notes else {}
    entry |= {"left_out": list(outputs.left_out)} if outputs.left_out else {}
    extended = {**request.provenance, **outputs.provenance}
    extended.pop("buffers", None)
    extended[name] = entry if earlier is None else [*earlier, entry]
    return {**extended, "buffers": list(buffers)} if buffers else extended


FORMATS = tuple(format.written_as for format in BUILT_IN if format.written_as)
"""The names of the built-in formats that can be written."""


def container_of(name: str, shard_bytes: int | None = None) -> Container:
    """Return the container of the format that is ``written_as`` this name.

    Raises:
        TargetError: there is no such format; or each rank has a file in it, and ``shard_bytes`` is given.
        SourceError: a plug-in for formats is broken.
    """
    format = format_written_as(name)
    if format is None:
        raise TargetError(f"unknown format {name!r}; expected one of {', '.join(FORMATS)}, or of a plug-in")
    make: Callable[..., Container] = import_named(format.writer)
    container = make()
    if shard_bytes is None:
        return container
    if container.of_ranks:
        raise TargetError(f"`shard_size=` has no meaning for format {name}; leave it out")
    return make(shard_bytes=shard_bytes)
