"""State from copies in the memory of nodes: a load whose files are seen by some ranks only.

Nobody sees all files of a copy, so each is read by one rank of a node that has it, and a file that is damaged on one
node is read on another.  Nothing is used before all of it has been compared with its digests.
"""

from __future__ import annotations

import zlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..names.errors import AttestError, DamageError, SourceError, warn_on_rank
from ..names.keys import PARAM_GROUPS
from ..names.resumption import LoadReport
from ..record.record import MANIFEST_FILE, Blob, Manifest, StateRecord
from ..store.formats.registry import OWN
from ..store.formats.torch_save.plain_item import plain_value
from ..store.io.regular import read_text_file
from ..store.open_checkpoint import OpenCheckpoint, checked_blob
from ..store.reading.payloads import Payloads, Reader
from .all_ranks import broadcast_from_first, decide_on_first, gather_on_all, group_ranks
from .loading import JointLoad
from .node_copies import CopyOnNodes, Nodes
from .resume_check import LoadedState
from .storable import refuse_code


class NodeFiles:
    """The files of one copy, of which each node has some.

    A chunk is read by one rank, so that damage to it is known to be that node's.
    """

    divides_chunks = False

    def __init__(self, copy: CopyOnNodes, nodes: Nodes, process_group: dist.ProcessGroup | None) -> None:
        self._copy = copy
        self._nodes = nodes
        self._group = process_group
        self._refused: set[tuple[int, str]] = set()
        """Nodes, and files that are damaged there."""
        self._values: Mapping[str, float] = {}
        self.raw_items: Mapping[str, bytes] = {}

    @property
    def place(self) -> Path:
        return self._copy.place

    @property
    def identity(self) -> str:
        return str(self._copy.name)

    def of(self, file: str) -> Sequence[int]:
        node_of = self._nodes.numbers
        nodes = {node_of[holder] for holder, sizes in self._copy.holders.items() if file in sizes}
        whole = {node for node in nodes if (node, file) not in self._refused}
        if not whole:
            raise DamageError(f"{file} of the copy of step {self._copy.step} is whole in the memory of no node")
        return tuple(place for place, node in enumerate(node_of) if node in whole)

    def open_together(
        self, process_group: dist.ProcessGroup | None, check_arguments: Callable[[], None]
    ) -> Callable[[], OpenCheckpoint]:
        def read_manifest() -> bytes:
            check_arguments()
            return zlib.compress(read_text_file(self.place / MANIFEST_FILE), 1)

        opened: list[OpenCheckpoint] = []

        def open_sent() -> None:
            try:
                manifest = Manifest.from_json(zlib.decompress(packed))
            except SourceError as error:
                raise DamageError(
                    f"{MANIFEST_FILE} of the copy of step {self._copy.step} is damaged: {error}"
                ) from error
            opened.append(OpenCheckpoint(self.place, OWN, Reader(manifest, Payloads(self.place))))

        packed = broadcast_from_first(process_group, SourceError, read_manifest, self._copy.describer)
        gather_on_all(process_group, DamageError, open_sent)
        self._read_small_values(opened[0])
        return lambda: opened[0]

    def _read_small_values(self, checkpoint: OpenCheckpoint) -> None:
        """Read items, and options that are tensors, and give them to all ranks, who match their state dicts by them."""
        outline = checkpoint.outline
        options = [tensor for tensor in outline.tensors if PARAM_GROUPS in tensor.path and tensor.boxes.elements == 1]

        def read() -> tuple[dict[str, bytes], dict[str, float], dict[str, str]]:
            """Read this rank's share, each file on the first rank that can: items, values, and faults by file."""
            items, values, faults = dict[str, bytes](), dict[str, float](), dict[str, str]()
            entries: list[Blob | StateRecord] = [*outline.blobs, *options]
            for entry in entries:
                file = entry.item.file if isinstance(entry, Blob) else entry.chunks[0].item.file
                first_reader = self.of(file)[0]
                if first_reader != self._nodes.place:
                    continue
                try:
                    if isinstance(entry, Blob):
                        items[entry.key] = checked_blob(checkpoint.payloads, entry)
                        refuse_code(entry.key, items[entry.key])
                    else:
                        values[entry.key] = checkpoint.values.scalar(entry)
                except SourceError as error:
                    faults.setdefault(file, str(error))
            return items, values, faults

        def join(ranks: list[tuple[dict[str, bytes], dict[str, float], dict[str, str]]]) -> Any:
            """Join the items and values of all ranks; faults stay by rank, as a file is damaged on one node."""
            items, values, faults = zip(*ranks, strict=True)
            return dict(ChainMap(*items)), dict(ChainMap(*values)), faults

        # Files that are damaged on a node are read on another one, until all are read or one is on no node any more.
        while True:
            self.raw_items, self._values, faults = decide_on_first(self._group, SourceError, read, join)
            if not any(faults):
                return
            self.refuse(faults)

    def outline_digest(self, checkpoint: OpenCheckpoint) -> str:
        return ""  # it was sent

    def value_of(self, checkpoint: OpenCheckpoint, entry: StateRecord | Blob) -> Any:
        return plain_value(self.raw_items[entry.key]) if isinstance(entry, Blob) else self._values[entry.key]

    def report(self, faults: Mapping[str, SourceError]) -> Mapping[str, str]:
        return {file: str(error) for file, error in faults.items()}

    def refuse(self, faults: Sequence[Mapping[str, str]]) -> None:
        ranks = group_ranks(self._group)
        for place, of_rank in enumerate(faults):
            for file, fault in of_rank.items():
                self._refused.add((self._nodes.numbers[place], file))
                warn_on_rank(
                    f"the copy of step {self._copy.step} on the node of rank {ranks[place]} is damaged: {fault}; "
                    "another node's is taken, if there is one",
                    RuntimeWarning,
                )
                self.of(file)  # raises if no node is left


def load_copy(
    state_dict: dict[str, Any],
    copy: CopyOnNodes,
    nodes: Nodes,
    process_group: dist.ProcessGroup | None,
    *,
    allow_extra: bool | Iterable[str],
    fresh: Iterable[str],
) -> tuple[LoadReport, LoadedState]:
    """Load a copy as `load` loads a checkpoint, whatever ranks have made it.  Collective.

    Raises:
        DamageError: a part of it is on no node, or damaged on each, or it is not what its fingerprints say; or the
            state dict does not hold what was sent, and is unusable.
        SourceError, LayoutError, ArgumentError, LostRankError: as `load`.
    """
    files = NodeFiles(copy, nodes, process_group)
    load = JointLoad(state_dict, files, allow_extra, fresh, True, "before", process_group)
    try:
        return load.run(), load.loaded_state
    except AttestError as error:
        raise DamageError(str(error)) from error
