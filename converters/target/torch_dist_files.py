"""How the files of Megatron's ``torch_dist`` differ from those of DCP: ``common.pt`` stays a file of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...record import Extent
from ...store.formats.dcp.directory import COMMON_FILE
from ..engine.output_files import TargetFile
from ..engine.outputs import Entry
from .rank_files import Fill, Filled, Part

if TYPE_CHECKING:
    from ...layouts.buffers.group_buffer import GroupBuffer


def beside(fill: Fill) -> Fill:
    """As ``fill`` does, with the common state where Megatron looks for it, if the source had it in a file."""

    def filled(buffers: Sequence[GroupBuffer], entries: Sequence[Entry], parts: Sequence[Sequence[Part]]) -> Filled:
        inside = fill(buffers, [entry for entry in entries if entry.target.key != COMMON_FILE], parts)
        files = [_alone(entry) for entry in entries if entry.target.key == COMMON_FILE]
        return Filled((*inside.files, *files), inside.buffers)

    return filled


def _alone(entry: Entry) -> TargetFile:
    item = Extent(COMMON_FILE, 0, entry.target.item.length)
    target = dataclasses.replace(entry.target, item=item)
    return TargetFile(COMMON_FILE, (dataclasses.replace(entry, target=target),), (), item.length)
