"""The protocol by which a format reads an open checkpoint; every format implements all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import SourceError
from ...record import Manifest, StateRecord
from ..io.location import Location
from .payloads import Payloads


class Reader(Protocol):
    """One checkpoint, read by its format.  Its metadata are read once, when the reader is made."""

    @property
    def outline(self) -> Manifest:
        """The manifest in the metadata.  The places of a chunk's elements in its item may still be unknown."""
        ...

    @property
    def payloads(self) -> Payloads:
        """The bytes of the checkpoint's files."""
        ...

    @property
    def faults(self) -> Sequence[SourceError]:
        """Damage that shows without reading data, such as missing files, and that did not prevent the outline."""
        ...

    def locate(self, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
        """These tensors of the outline with the place of each chunk's elements; chunks may have been left out.

        Opens the items of the chunks whose place is unknown.

        Raises:
            SourceError: an item is damaged, or not what the metadata promise; names the tensor, the box and the file.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocatedReader:
    """The reader of a format whose metadata say where every element is."""

    outline: Manifest
    payloads: Payloads
    faults: tuple[SourceError, ...] = ()

    def locate(self, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
        """The tensors themselves."""
        return tuple(tensors)


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: for users.
        reader: reads a checkpoint's metadata.
        signs: of a format that is a plug-in, shell patterns of file names by which a directory, or a file, shows it.
    """

    name: str
    reader: Callable[[Location], Reader]
    signs: tuple[str, ...] = ()
