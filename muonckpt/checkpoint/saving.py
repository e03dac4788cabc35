"""Saving a training run: DCP's formats and keys, with every element accounted for.

`save` writes a directory that stock ``torch.distributed.checkpoint.load`` reads, plus the manifest ``muonckpt.json``.
Each rank describes what it holds, the coordinator plans who writes what, each rank writes its file, and the coordinator
describes and publishes all.  Ranks plan together when they save something for the first time.  Later each says only
which plan fits what it has, and if all say the same, nothing else is exchanged before they write.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import json_fields
from ..errors import ArgumentError, DestinationError
from ..store.formats import native
from ..store.io import lock, publish
from ..store.io.location import Location, location
from ..version import PROGRAM
from .all_ranks import decide_on_first, refuse_crossed, refuse_differing, scatter_from_first
from .live_state import LiveState, RankState
from .rank_file import SaveProgress, packed, witness, write_items
from .storable import refuse_unstorable
from .whole_plan import RankItems, WholePlan, rank_file

_MOST_PLANS = 2
"""So that a run which saves two things in turn plans each once."""


@dataclass(frozen=True, slots=True)
class _Agreed:
    """A plan that all ranks know by one name: this rank's share, and what it held when the plan was made."""

    name: bytes
    held: RankState
    share: RankItems


class AgreedPlans:
    """The plans that one rank has last agreed on with the others, which it keeps from save to save."""

    def __init__(self) -> None:
        self._plans: dict[bytes, _Agreed] = {}
        self._whole: dict[bytes, WholePlan] = {}
        """On the coordinator."""

    def fitting(self, held: RankState) -> list[bytes]:
        """Return the names of plans that were made of the same, the newest first."""
        return [plan.name for plan in reversed(self._plans.values()) if plan.held == held]

    def __getitem__(self, name: bytes) -> _Agreed:
        return self._plans[name]

    def whole(self, name: bytes) -> WholePlan:
        """Return the plan of all ranks, on the coordinator."""
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
        self._rank = dist.get_rank(process_group) if dist.is_initialized() else 0
        self._destination: Location
        self._details: Mapping[str, Any]
        """The provenance, as it will be read."""
        self._staged: Location | None = None
        """On the coordinator: what has to be removed if the save fails."""
        self._held: int | None = None
        """Its lock, which tells other saves that this one lives."""

    def run(self, state: Callable[[], LiveState]) -> None:
        """Save, or fail on all ranks with one error, and leave nothing.

        Args:
            state: gives what this rank holds, or raises why that cannot be had.
        """
        try:
            live, plan, staged = self._begin(state)
            if plan is None:
                plan, staged = self._plan_together(live.described)
            file = staged / rank_file(self._rank)

            def write() -> bytes:
                written, seen = ([live.items[number] for number in numbers] for numbers in plan.share)
                sums = write_items(live, written, file, self._progress)
                return packed([*sums, *(witness(live, item) for item in seen)])

            decide_on_first(
                self._group, DestinationError, write, lambda receipts: self._publish(plan, staged, receipts)
            )
        except BaseException:
            if self._staged is not None:
                publish.discard(self._staged)
            raise
        finally:
            if self._held is not None:
                os.close(self._held)

    def _begin(self, state: Callable[[], LiveState]) -> tuple[LiveState, _Agreed | None, Location]:
        """Return what this rank has, the plan for it if all ranks have kept one, and then where files are written."""
        held: list[LiveState] = []

        def fitting() -> tuple[Mapping[str, object], list[bytes]]:
            held.append(state())
            self._destination, self._details = location(self._path, DestinationError), as_json(self._provenance)
            refuse_unstorable(held[0].flat)
            return {"path": str(self._destination)}, self._plans.fitting(held[0].described)

        def choose(ranks: list[tuple[Mapping[str, object], list[bytes]]]) -> tuple[bytes, Location] | None:
            refuse_differing(self._group, "save", [arguments for arguments, _ in ranks])
            known = [names for _, names in ranks]
            name = next((name for name in known[0] if all(name in names for names in known)), None)
            return None if name is None else (name, self._reserve())

        chosen = decide_on_first(self._group, DestinationError, fitting, choose)
        [live] = held
        if chosen is None:
            return live, None, self._destination
        name, staged = chosen
        return live, self._plans[name], staged

    def _plan_together(self, held: RankState) -> tuple[_Agreed, Location]:
        whole: list[WholePlan] = []

        def deal(ranks: list[RankState]) -> list[tuple[bytes, RankItems, Location]]:
            whole.append(WholePlan.of(ranks))
            name, staged = secrets.token_bytes(16), self._reserve()
            return [(name, share, staged) for share in whole[0].shares]

        name, share, staged = scatter_from_first(self._group, DestinationError, lambda: held, deal)
        plan = _Agreed(name, held, share)
        self._plans.keep(plan, whole[0] if whole else None)
        return plan, staged

    def _reserve(self) -> Location:
        try:
            publish.remove_abandoned(self._destination)
            self._staged = publish.reserve(self._destination)
            if isinstance(self._staged, Path):
                self._held = lock.holding(self._staged)
        except lock.InUse:
            raise DestinationError(f"{self._destination} is being written by another save; choose another") from None
        except OSError as error:
            raise DestinationError(f"cannot write {self._destination}: {error}") from error
        return self._staged

    def _publish(self, plan: _Agreed, staged: Location, receipts: list[bytes]) -> None:
        provenance = {**_provenance(self._group), **self._details}
        native.write_native(self._plans.whole(plan.name).manifest(receipts, provenance), staged)
        publish.publish(staged, self._destination)
        self._staged = None  # whatever happens now, it is there


def as_json(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance as it will be read.

    Raises:
        ArgumentError: it is not JSON, or an entry that has a meaning has another form.
    """
    try:
        return json_fields.provenance(json.loads(json.dumps(dict(provenance), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the provenance is not JSON that a manifest can keep: {error}") from error


def _provenance(process_group: dist.ProcessGroup | None) -> dict[str, Any]:
    return {
        "program": PROGRAM,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "world": dist.get_world_size(process_group) if dist.is_initialized() else 1,
    }


def save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a state dict as a new checkpoint, in a directory that all ranks see or in an object store.  Collective.

    A directory appears whole, by one rename, after everything in it has been synced and checked; in a store the
    descriptions of the checkpoint are written last (docs/guide/object_stores.md).  If anything fails on any rank,
    nothing appears.

    Args:
        state_dict: nested, as for ``dcp.save``; for example
            ``{"model": get_model_state_dict(m), "optimizer": get_optimizer_state_dict(m, opt)}``.
        path: a path or a URL, where nothing may exist yet.
        provenance: JSON data to keep in the manifest, such as ``{"step": 100}``; the first rank's is kept.

    Raises:
        DestinationError: the path exists, or cannot be written.
        LayoutError: a tensor has a hole or an overlap, or replicas differ.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
        ArgumentError: the provenance is not JSON, or the path is not the same on all ranks.
    """
    refuse_crossed(process_group, "save")
    JointSave(path, provenance or {}, process_group, _plans_of(process_group), SaveProgress()).run(
        lambda: LiveState.of(state_dict, "to save")
    )


_plans: WeakKeyDictionary[dist.ProcessGroup, AgreedPlans] = WeakKeyDictionary()
"""Kept as long as the process group."""

_alone = AgreedPlans()
"""The plans of a process without a process group."""


def _plans_of(process_group: dist.ProcessGroup | None) -> AgreedPlans:
    group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    return _alone if group is None else _plans.setdefault(group, AgreedPlans())
