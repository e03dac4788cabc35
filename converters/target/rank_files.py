"""Files of ranks: every rank of a target has one, which holds what is the rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...box import Box, Index
from ...layout import Buffer
from ...plan import Copy
from ...record import Chunk, Extent
from ...store.reading.dtypes import itemsize
from ...version import PROGRAM
from ..engine.output_files import Arrange, Arranged, Frame, Item, TargetFile, Task, aligned, entries_in
from ..engine.outputs import Entry, Wanted
from .topology import Laid

if TYPE_CHECKING:
    from ...layouts.buffers.group_buffer import GroupBuffer

Part = tuple[Wanted, Box, tuple[Copy, ...]]
"""A box of a tensor that some rank has, and the copies that make it."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The files to write, and the flat buffers used, as the manifest records them."""

    files: tuple[TargetFile, ...]
    buffers: tuple[Mapping[str, Any], ...]


Fill = Callable[[Sequence["GroupBuffer"], Sequence[Entry], Sequence[Sequence[Part]]], Filled]
"""Makes files of the flat buffers that ranks share, if the layout has any, of items that are no tensors, and of what
each rank has."""


def over_ranks(fill: Fill) -> Arrange:
    """Everything where the target says, in files that ``fill`` makes."""

    def arrange(task: Task) -> Arranged:
        content = task.content
        laid = task.target.lay_out([each.record for each in content.tensors], task.provenance)
        filled = fill(laid.buffers, content.entries, _parts(content.tensors, laid, task.target.ranks))
        return Arranged(filled.files, laid.words, _provenance(task, filled.buffers))

    return arrange


def framed(name_of: Callable[[int], str], frame_of: Callable[[str, Index], Frame]) -> Fill:
    """One file a rank, every item in a frame, made for its dtype and shape; items that are no tensors in the first."""

    def fill(buffers: Sequence[GroupBuffer], entries: Sequence[Entry], parts: Sequence[Sequence[Part]]) -> Filled:
        first = [entries, *[()] * (len(parts) - 1)]
        files = (_file(name_of(rank), first[rank], mine, frame_of) for rank, mine in enumerate(parts))
        return Filled(tuple(file for file in files if file.length), tuple(each.to_json() for each in buffers))

    return fill


def _file(
    name: str, entries: Sequence[Entry], parts: Sequence[Part], frame_of: Callable[[str, Index], Frame]
) -> TargetFile:
    """Items end to end, each aligned; those that are no tensors first, as DCP does."""
    placed, at = entries_in(name, entries)
    items = []
    for wanted, box, copies in parts:
        frame = frame_of(wanted.record.dtype, box.shape)
        item = Extent(name, at, frame.length)
        payload = Extent(name, at + frame.payload_offset, frame.payload_length)
        items.append(Item(wanted, Chunk(box, item, payload), frame, copies))
        at = aligned(item.end)
    return TargetFile(name, placed, tuple(items), at)


def _parts(tensors: Sequence[Wanted], laid: Laid, ranks: int) -> list[list[Part]]:
    """What each rank has.  Of replicas, that of the rank that has the least to write so far is written."""
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    written = [0] * ranks
    for each in tensors:
        holders = laid.layouts[each.record.key].holders
        copies = each.copies([replicas[0].box for replicas in holders])
        for replicas, mine in zip(holders, copies, strict=True):
            rank = min((written[_rank(f.place.buffer)], _rank(f.place.buffer)) for f in replicas)[1]
            written[rank] += replicas[0].box.numel * itemsize(each.record.dtype)
            parts[rank].append((each, replicas[0].box, mine))
    return parts


def _rank(buffer: Buffer) -> int:
    assert isinstance(buffer, int), "the buffers of a target are ranks"
    return buffer


def _provenance(task: Task, buffers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """That of the source, with what is done now; flat buffers are those of this layout."""
    content, target = task.content, task.target
    step = {
        "program": PROGRAM,
        "source": task.source,
        "mesh": dict(target.mesh),
        "layout": target.layout,
        "shard": list(map(str, target.rules)),
        "select": list(task.select),
        **({"notes": list(content.notes)} if content.notes else {}),
        **({"left_out": list(content.left_out)} if content.left_out else {}),
    }
    found = {**task.provenance, "resharded": [*task.provenance.get("resharded", []), step]}
    found.pop("buffers", None)
    return {**found, "buffers": list(buffers)} if buffers else found
