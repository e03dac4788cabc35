"""A state dict in a file of ``torch.save``, as tensors and plain data by their paths.

What dicts and lists share with each other is found as often as it is reached, so everything is counted: a hostile file
costs no more than in proportion to its own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ....errors import SourceError, about
from ....record import Blob, Chunk, Chunks, Extent, StateRecord
from ....vocabulary import KeyPath
from ...io import limits
from ..torch_save.inert_pickle import Record, expect
from ..torch_save.plain_item import PlainParts, plain_item
from ..torch_save.torch_file import TorchFile, is_tensor

HELD_ITEMS = "items-in-memory"
"""The name, in extents, of items that are decoded parts of files."""

_MAPPINGS = frozenset({"collections OrderedDict", "collections defaultdict"})
_DEEPEST = 32


class HeldItems:
    """Items that are made of plain data in files, one after the other in memory."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.blobs: list[Blob] = []

    def add(self, path: KeyPath, value: object) -> None:
        """Add plain data under a path."""
        item = plain_item(value)
        self.blobs.append(Blob(key_of_path(path), path, Extent(HELD_ITEMS, len(self._data), len(item))))
        self._data += item

    @property
    def in_memory(self) -> dict[str, bytes]:
        """The bytes of all items, by the name of their file."""
        return {HELD_ITEMS: bytes(self._data)}


def key_of_path(path: KeyPath) -> str:
    """The flat key of a path, as DCP joins it."""
    return ".".join(map(str, path))


def whole_record(path: KeyPath, dtype: str, chunk: Chunk) -> StateRecord:
    """A tensor in one chunk."""
    return StateRecord(key_of_path(path), path, chunk.box.shape, dtype, Chunks.of([chunk], chunk.box.ndim))


def leaves(file: TorchFile, content: object, root: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """The tensors, as the pickle has them, and the plain data in a state dict, each with its path.

    Keys of dicts are strings in paths, positions in lists are integers, as in DCP.

    Raises:
        LimitError: there is more than in proportion to the file.
        SourceError: there is something else; it is not run.
    """
    plain = PlainParts(file.described)
    for path, value in _Walk(limits.FEW + file.described // limits.PICKLE_BYTES).below(content, root):
        if is_tensor(value):
            yield path, value
        else:
            with about(key_of_path(path)):
                yield path, plain.part(value)


class _Walk:
    """Walks through nested dicts and lists, and counts all that it meets."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._met = 0

    def below(self, value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
        """What is not a dict or a list of dicts and tensors, with its path."""
        self._met += 1
        limits.check_limit(self._met, self._most, "values in dicts that a file's pickle uses more than once")
        limits.check_limit(len(path), _DEEPEST, "dicts and lists in each other")
        if is_mapping(value):
            for key, part in mapping(value).items():
                if type(key) not in (str, int):
                    raise SourceError(f"expected strings or integers as dict keys, found {type(key).__name__}")
                yield from self.below(part, (*path, str(key)))
        elif type(value) is list and any(is_tensor(part) or is_mapping(part) for part in value):
            for number, part in enumerate(value):
                yield from self.below(part, (*path, number))
        else:
            yield path, value


def is_mapping(value: object) -> bool:
    """Whether a part of a pickle is a dict, or one that keeps its order."""
    return type(value) is dict or (isinstance(value, Record) and value.kind in _MAPPINGS)


def mapping(value: object) -> Mapping[object, object]:
    """The items of such a dict.

    Raises:
        SourceError: it is something else.
    """
    if isinstance(value, Record) and value.kind in _MAPPINGS:
        return value.items or {}
    return expect(dict, value)


def check_shared(file: TorchFile, chunks: Iterator[Chunk]) -> None:
    """Compare what the tensors of a file have together with what is stored, since tensors can share storages.

    Raises:
        LimitError: it is out of proportion.
    """
    stored = sum(member.length for member in file.members.values())
    shown = sum(chunk.payload.length for chunk in chunks if chunk.payload)
    limits.check_limit(
        shown,
        limits.SMALL_DESCRIPTION + limits.UNFOLDED * stored,
        f"bytes of tensors in {file.name}, which share storages",
    )
