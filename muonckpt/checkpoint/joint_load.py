"""One load of all ranks: they agree on what to load, each checks what it is to read, and then reads it.

An error on one rank, wherever it is raised, is the error of all.  Up to the reading it leaves all tensors as they were.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from ..errors import ArgumentError, SourceError
from ..resumption import Extra, Globs, LoadReport
from ..store.io.location import location
from ..store.open_checkpoint import OpenCheckpoint
from ..vocabulary import KeyPath
from .all_ranks import coordinates, judged, refuse_differing, unusable
from .attestation import attest_loaded
from .dcp_reader import CheckingReader, StrictLoadPlanner, WhenChecked, Where
from .matching import RankRequest
from .shared_check import PartlyRead
from .shared_opening import opened_together


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """What a rank was asked to load, and how: as `save_load.load` has it."""

    path: str | os.PathLike[str]
    allow_extra: bool | Iterable[str]
    fresh: Iterable[str]
    attest: bool
    check: WhenChecked | None


class JointLoad:
    """One load.

    Attributes:
        planner: what this rank takes; exists once the load is planned.
    """

    planner: StrictLoadPlanner

    def __init__(self, arguments: LoadArguments, process_group: dist.ProcessGroup | None) -> None:
        self._arguments, self._group = arguments, process_group
        self._reader: CheckingReader

    def run(self, state_dict: dict[str, Any]) -> LoadReport:
        """Load in place, or fail on all ranks with one error.

        Raises:
            MuonckptError: what made it fail.
        """
        nested: dict[str, Any] = {}
        opened = opened_together(self._group, lambda: self._begin(None).place)

        def ask() -> tuple[Mapping[str, object], RankRequest]:
            self._reader, extra = self._begin(opened()), Extra.of(self._arguments.allow_extra)
            self.planner = StrictLoadPlanner(self._reader, extra, Globs.of(self._arguments.fresh))
            for key in sorted(state_dict):  # in one order on all ranks: some objects communicate when they are asked
                each = state_dict[key]
                nested[key] = each.state_dict() if isinstance(each, Stateful) else each
            self.planner.set_up_planner(nested, Metadata({}), coordinates(self._group))
            return self._said(extra), self.planner.request()

        def answer(ranks: list[tuple[Mapping[str, object], RankRequest]]) -> None:
            refuse_differing(self._group, "load", [said for said, _ in ranks])
            self.planner.judge([request for _, request in ranks])

        judged(self._group, SourceError, ask, answer)
        mine = self.planner.plan

        def check() -> Mapping[Where, PartlyRead]:
            return self._reader.check(mine)

        def read() -> Mapping[Where, PartlyRead]:
            runs = self._reader.read(mine, self.planner)
            for key, value in nested.items():
                each = state_dict[key]
                if isinstance(each, Stateful):
                    each.load_state_dict(value)
                else:
                    state_dict[key] = value
            for place, value in self.planner.matching.added.items():
                _add(state_dict, place, value)
            return runs

        def judge(ranks: list[Mapping[Where, PartlyRead]]) -> LoadReport:
            self._reader.judge(ranks)
            return self.planner.report

        # All ranks hear of it before any of them writes.
        judged(self._group, SourceError, check, self._reader.judge)
        with unusable('; check="before" finds damage before any tensor is touched'):
            report = judged(self._group, SourceError, read, judge)
        if self._arguments.attest:
            with unusable():
                attest_loaded(state_dict, self._reader.checkpoint, lambda: self.planner.sources, self._group)
        self._reader.checkpoint.close()
        return report

    def _begin(self, opened: OpenCheckpoint | None) -> CheckingReader:
        """What reads the checkpoint, after the arguments have been checked.

        Args:
            opened: the checkpoint, if it has been.

        Raises:
            ArgumentError: an argument is not what it may be.
        """
        given = self._arguments
        if given.check not in (None, "before", "while"):
            raise ArgumentError(f"check is 'before', 'while' or None; got {given.check!r}")
        try:
            Globs.of(given.fresh), Extra.of(given.allow_extra)
        except TypeError as error:
            raise ArgumentError(str(error)) from error
        return CheckingReader(location(given.path, SourceError), given.check, opened)

    def _said(self, extra: Extra) -> Mapping[str, object]:
        """What must be the same on all ranks."""
        given = self._arguments
        return {
            "path": str(self._reader.place),
            "allow_extra": extra.patterns,
            "attest": given.attest,
            "check": given.check,
        }


def _add(state_dict: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Add what only the checkpoint has to a state dict."""
    *above, last = path
    place: Any = state_dict
    for part in above:
        place = place[part]
    place[last] = value
