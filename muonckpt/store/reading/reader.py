"""Formats: the value by which one reads an open checkpoint, and the value that registers it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ...names.errors import SourceError
from ...record.record import Manifest, StateRecord
from ..io.location import Location
from .payloads import Payloads


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one checkpoint, whose metadata were read when it was made.

    Attributes:
        outline: the manifest in the metadata, in which the places of elements may still be unknown.
        payloads: the bytes of its files.
        faults: the damage that shows without reading data, such as missing files.
        locate: returns tensors of the outline, or some of their chunks, with the places of elements.  It opens
            the items of chunks whose place is unknown, and raises `SourceError` if one is not as promised.
    """

    outline: Manifest
    payloads: Payloads
    faults: tuple[SourceError, ...] = ()
    locate: Callable[[Sequence[StateRecord]], tuple[StateRecord, ...]] = tuple


@dataclass(frozen=True, slots=True)
class Format:
    """Registers one format, built in or of a plug-in.

    What is slow to import may be named as in an entry point, ``"package.module:attribute"``; it is imported when used.

    Attributes:
        name: for users.
        reader: reads a checkpoint's metadata: a function of its `Location` that returns a `Reader`, or its import path.
        signs: shell patterns of file names by which a directory, or a file, shows the format.
        weaker_signs: more such patterns, which count only where no format shows a stronger sign; strongest first.
        written_as: the word for ``--format``, if the format is written too.
        writer: a function that returns a `Container` (``converters/engine/container.py``), or its import path.  It is
            called without arguments, or with ``shard_bytes`` if the container is not of ranks and a size was given.
        remains: reads what is left of a damaged checkpoint without the files of some names, where ``reader`` needs them
            all or knows one replica of each box only: a function like it with a set of names, or its import path.
    """

    name: str
    reader: Callable[[Location], Reader] | str
    signs: tuple[str, ...] = ()
    weaker_signs: tuple[tuple[str, ...], ...] = ()
    written_as: str | None = None
    writer: Callable[..., Any] | str | None = None
    remains: Callable[[Location, Collection[str]], Reader] | str | None = None

    def without(self, files: Collection[str]) -> Format | None:
        """Return the format that reads what is left without these files; None if ``reader`` does so itself."""
        if self.remains is None:
            return None
        return replace(self, reader=lambda path: import_named(self.remains)(path, files), remains=None)

    def read(self, path: Location) -> Reader:
        """Read a checkpoint's metadata.

        Raises:
            SourceError: they are missing or damaged, or the operating system cannot read them.
        """
        reader: Callable[[Location], Reader] = import_named(self.reader)
        try:
            return reader(path)
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error}") from error


def import_named(value: Any) -> Any:
    """Import what a path names; return other values as they are."""
    if not isinstance(value, str):
        return value
    module, _, attribute = value.partition(":")
    return getattr(import_module(module), attribute)
