"""The memory of nodes, as a series uses it: copies of its run, and nobody else's."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoint.all_ranks import is_coordinator
from ...checkpoint.async_saving import AsyncSave, Lane, OnError
from ...checkpoint.node_copies import FoundCopy, NodeCopy, Nodes, folders_in, found_copies, remove_copies
from ...checkpoint.node_recovery import load_copy
from ...checkpoint.resume_check import LoadedState
from ...names.errors import warn_on_rank
from ...names.resumption import LoadReport
from ...store.verify.run import StepName


class NodeMemory:
    """A folder in shared memory on each node; in it, one for each run.

    Args:
        folder: on this rank's node.
    """

    def __init__(self, folder: Path, process_group: dist.ProcessGroup | None) -> None:
        self._folder = folder
        self._group = process_group
        self._used: Path | None = None
        """The folder of this run, once it was looked at or written to."""

    @cached_property
    def _nodes(self) -> Nodes:
        """Asked for once, by all ranks."""
        return Nodes.sharing(self._folder, self._group)

    @staticmethod
    def new_name(step: int) -> StepName:
        """Return a name that no copy had before, so that parts of two copies are never taken for one."""
        return StepName(step, 2 + secrets.randbelow(2**48 - 2))

    def copy(
        self,
        lane: Lane,
        run: str,
        name: StepName,
        state_dict: Mapping[str, Any],
        provenance: Mapping[str, Any],
        on_error: OnError,
    ) -> AsyncSave:
        """Copy a state in the thread of a lane that is free; ``run`` and ``name`` are the same on all ranks."""
        if self._used is None and None in self._nodes.partners and is_coordinator(self._group):
            warn_on_rank(
                f"all ranks are on one node, or have one folder, {self._folder}: copies outlive the processes that "
                "train, but not the node",
                RuntimeWarning,
                stacklevel=3,
            )
        self._used = self._folder / run
        write = partial(NodeCopy, self._used, name, self._nodes)
        return lane.submit(state_dict, str(self._used / str(name)), provenance, on_error, write, lambda: None)

    def found(self, run: str) -> list[FoundCopy]:
        """Return the copies of a run, newest first.  Collective; raises as `found_copies`."""
        self._used = self._folder / run
        return found_copies(self._used, self._nodes, self._group)

    def load(
        self, copy: FoundCopy, state_dict: dict[str, Any], allow_extra: bool | Iterable[str], fresh: Iterable[str]
    ) -> tuple[LoadReport, LoadedState]:
        """Load a copy.  Collective; raises as `load_copy`."""
        return load_copy(state_dict, copy, self._nodes, self._group, allow_extra=allow_extra, fresh=fresh)

    def end(self, saved: int) -> None:
        """Remove copies that are no newer than a saved step; on this node, without asking others."""
        if self._used is None or not self._nodes.leads:
            return
        remove_copies(self._used, lambda name: name is None or name.step <= saved)
        left = sorted(folders_in(self._used))
        if left and is_coordinator(self._group):
            warn_on_rank(
                f"{left[-1]} is newer than all that was saved: started again on these nodes, the run goes on from "
                "there; else save the last step, so that it is removed",
                RuntimeWarning,
                stacklevel=4,
            )
        if self._used.is_dir() and not any(self._used.iterdir()):
            self._used.rmdir()
