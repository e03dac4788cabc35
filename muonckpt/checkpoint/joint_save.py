"""One save of all ranks: they agree on a plan, each writes its file, and the coordinator describes and publishes it.

Ranks plan together when they save something for the first time.  After that a rank says only which plan fits what it
has, and if all say the same one, nothing else is exchanged before they write.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from ..errors import ArgumentError, DestinationError
from ..store.formats import native_writer
from ..store.io import publish
from ..store.io.location import Location, location
from ..version import PROGRAM
from .all_ranks import dealt, judged, refuse_differing
from .dcp_writer import SaveProgress, witness, write_items
from .offer import Offer
from .receipt import packed
from .save_planner import CoveringSavePlanner, LocalPlan
from .whole_plan import RankItems, WholePlan, rank_file

_MOST_PLANS = 2
"""So that a run which saves two things in turn plans each once."""


@dataclass(frozen=True, slots=True)
class _Agreed:
    """A plan that all ranks have agreed on, as one of them keeps it.

    Attributes:
        name: the same on all ranks, and of no other plan.
        local: what this rank had when it was made.
        share: of ``local``, what this rank writes and compares.
    """

    name: bytes
    local: LocalPlan
    share: RankItems


class AgreedPlans:
    """What one rank keeps from save to save: the plans that it has last agreed on with the other ranks."""

    def __init__(self) -> None:
        self._plans: dict[bytes, _Agreed] = {}
        self._whole: dict[bytes, WholePlan] = {}
        """On the coordinator."""

    def fitting(self, local: LocalPlan) -> list[bytes]:
        """The names of plans that were made of the same, the newest first."""
        return [plan.name for plan in reversed(self._plans.values()) if plan.local == local]

    def __getitem__(self, name: bytes) -> _Agreed:
        return self._plans[name]

    def whole(self, name: bytes) -> WholePlan:
        """The plan of all ranks, on the coordinator."""
        return self._whole[name]

    def keep(self, plan: _Agreed, whole: WholePlan | None) -> None:
        """Keep a plan, and forget the oldest."""
        self._plans[plan.name] = plan
        if whole is not None:
            self._whole[plan.name] = whole
        for name in list(self._plans)[:-_MOST_PLANS]:
            del self._plans[name]
            self._whole.pop(name, None)


def _refuse_strays(path: str | os.PathLike[str]) -> None:
    """Refuse to save for this process alone where its siblings would do so too, at the same place."""
    world = os.environ.get("WORLD_SIZE", "1")
    if dist.is_torchelastic_launched() and world != "1" and not dist.is_initialized():
        raise DestinationError(
            f"torchrun started {world} processes, but this one has no process group, so each of them would save alone, "
            f"and all at {os.fspath(path)}: call torch.distributed.init_process_group() at the start of the program"
        )


class JointSave:
    """One save.

    Args:
        path: where nothing may exist; the same on all ranks.
        provenance: goes into the manifest as the first rank gives it.
        plans: kept from save to save, by each rank for the same process group.
        progress: follows this rank's file.

    Raises:
        DestinationError: torchrun started several processes, and this one has no process group.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        provenance: Mapping[str, Any],
        process_group: dist.ProcessGroup | None,
        plans: AgreedPlans,
        progress: SaveProgress,
    ) -> None:
        _refuse_strays(path)
        self._path = path
        self._provenance = provenance
        self._group = process_group
        self._plans = plans
        self._progress = progress
        self._planner = CoveringSavePlanner()
        self._rank = dist.get_rank(process_group) if dist.is_initialized() else 0
        self._destination: Location
        self._details: Mapping[str, Any]
        """The provenance, as it will be read."""
        self._staged: Location | None = None
        """On the coordinator: what has to be removed if the save fails."""

    def run(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Save, or fail on all ranks with one error, of which nothing is left.

        Args:
            state: gives this rank's state dict, or raises why there is none.

        Raises:
            MuonckptError: what made it fail.
        """
        try:
            local, plan, staged = self._begin(state)
            if plan is None:
                plan, staged = self._plan_together(local)
            file = staged / rank_file(self._rank)

            def write() -> bytes:
                written, seen = ([local.items[number] for number in numbers] for numbers in plan.share)
                sums = write_items(self._planner, written, file, self._progress)
                return packed([*sums, *(witness(self._planner, item) for item in seen)])

            judged(self._group, DestinationError, write, lambda receipts: self._publish(plan, staged, receipts))
        except BaseException:
            if self._staged is not None:
                publish.discard(self._staged)
            raise

    def _begin(self, state: Callable[[], Mapping[str, Any]]) -> tuple[LocalPlan, _Agreed | None, Location]:
        """What this rank has, the plan for it if all ranks have kept one, and then where files are written."""
        made: list[LocalPlan] = []

        def fitting() -> tuple[Mapping[str, object], list[bytes]]:
            self._destination, self._details = location(self._path, DestinationError), as_json(self._provenance)
            current = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state().items()}
            made.append(self._planner.local_plan(current))
            return {"path": str(self._destination)}, self._plans.fitting(made[0])

        def choose(ranks: list[tuple[Mapping[str, object], list[bytes]]]) -> tuple[bytes, Location] | None:
            refuse_differing(self._group, "save", [said for said, _ in ranks])
            known = [names for _, names in ranks]
            name = next((name for name in known[0] if all(name in names for names in known)), None)
            return None if name is None else (name, self._reserve())

        chosen = judged(self._group, DestinationError, fitting, choose)
        [local] = made
        if chosen is None:
            return local, None, self._destination
        name, staged = chosen
        return local, self._plans[name], staged

    def _plan_together(self, local: LocalPlan) -> tuple[_Agreed, Location]:
        made: list[WholePlan] = []

        def deal(ranks: list[Offer]) -> list[tuple[bytes, RankItems, Location]]:
            made.append(WholePlan.of(ranks))
            name, staged = secrets.token_bytes(16), self._reserve()
            return [(name, share, staged) for share in made[0].shares]

        name, share, staged = dealt(self._group, DestinationError, lambda: local.offer, deal)
        plan = _Agreed(name, local, share)
        self._plans.keep(plan, made[0] if made else None)
        return plan, staged

    def _reserve(self) -> Location:
        try:
            self._staged = publish.reserve(self._destination)
        except OSError as error:
            raise DestinationError(f"cannot write {self._destination}: {error}") from error
        return self._staged

    def _publish(self, plan: _Agreed, staged: Location, receipts: list[bytes]) -> None:
        provenance = {**_provenance(self._group), **self._details}
        native_writer.write_native(self._plans.whole(plan.name).manifest(receipts, provenance), staged)
        publish.publish(staged, self._destination)
        self._staged = None  # whatever happens now, it is there


def as_json(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance as it will be read.

    Raises:
        ArgumentError: it is not JSON.
    """
    try:
        details: dict[str, Any] = json.loads(json.dumps(dict(provenance), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the provenance is not JSON: {error}") from error
    return details


def _provenance(process_group: dist.ProcessGroup | None) -> dict[str, Any]:
    return {
        "program": PROGRAM,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "world": dist.get_world_size(process_group) if dist.is_initialized() else 1,
    }
