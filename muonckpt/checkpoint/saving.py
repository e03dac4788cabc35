"""Saving a training run: DCP's formats and keys, with every element accounted for.

`save` writes a directory that stock ``torch.distributed.checkpoint.load`` reads, plus the manifest ``muonckpt.json``.
Each rank describes what it holds, the coordinator plans who writes what, each rank writes its file and returns a
receipt, and the coordinator publishes all.  Later saves of the same structure reuse the plan.
"""

from __future__ import annotations

import io
import json
import os
import platform
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from ..algebra.box import Index
from ..algebra.fingerprint import box_shares
from ..algebra.grouping import neighbours
from ..names.collector import gc_paused
from ..names.errors import ArgumentError, DestinationError, called_like, unwritable
from ..names.version import PROGRAM
from ..record import json_fields
from ..store.formats import native
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from ..store.io import publish
from ..store.io.checksums import Frame, Sums, crc32_of, xxh3_128
from ..store.io.location import Location, location, refuse_unseen
from ..store.io.new_file import Writing, create_file
from .all_ranks import JointWork, group_ranks, place_in, refuse_differing, refuse_mixed_calls, scatter_from_first
from .bits import bits_of, dtype_name, integer_view
from .live_state import Item, LiveState, RankState
from .storable import refuse_unstorable
from .whole_plan import AlikeItems, RankItems, WholePlan, rank_file, receipt_row

_MOST_PLANS = 2
"""Enough for a run that saves two things in turn."""


@dataclass(slots=True)
class SaveProgress:
    """The bytes of one rank's file, for another thread to read."""

    written: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """A plan that all ranks know by one name.

    Attributes:
        state: what this rank held when the plan was made.
        share: the items that this rank writes and compares.
        common_items: those that have to be as on other ranks.
        joint_plan: the plan of all ranks, on the coordinator.
    """

    state: RankState
    share: RankItems
    common_items: AlikeItems
    joint_plan: WholePlan | None


AgreedPlans = dict[bytes, AgreedPlan]
"""The last plans that a rank has agreed on with the others, by name; all ranks keep them in one order."""


def refuse_lone_process(path: str | os.PathLike[str]) -> None:
    """Refuse a process of several that has no process group: each would take itself for the only one.

    Raises:
        DestinationError: torchrun started several processes, and this one has no process group.
    """
    # Processes that do not know of each other would publish over one another.
    world = os.environ.get("WORLD_SIZE", "1")
    if dist.is_torchelastic_launched() and world != "1" and not dist.is_initialized():
        raise DestinationError(
            f"torchrun started {world} processes, but this one has no process group, so each of them would save "
            f"alone, and all at {os.fspath(path)}: call torch.distributed.init_process_group() at the start of the "
            "program"
        )


@gc_paused()
def run_save(
    state: Callable[[], LiveState],
    path: str | os.PathLike[str],
    provenance: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    plans: AgreedPlans,
    progress: SaveProgress,
) -> None:
    """Save what ``state`` returns, or fail on all ranks with one error and leave nothing.

    Args:
        plans: those that each rank keeps for the process group; a new one is added.
        progress: is kept up to date for this rank's file.

    Raises:
        DestinationError: torchrun started several processes, and this one has no process group.
    """
    refuse_lone_process(path)
    with ExitStack() as unpublished:  # a failed save leaves nothing behind, whatever ended it
        # 1. All ranks hear where they write, and which plan serves again: one exchange while the structure stays.
        staging, decision = None, None
        with JointWork(group, DestinationError) as work:
            live, destination, details = state(), location(path, DestinationError), as_json(provenance)
            refuse_unstorable(live.flat)
            answers = work.gather((str(destination), _fitting_plans(plans, live)))
            if answers is not None:
                refuse_differing(group, "save", [{"path": path} for path, _ in answers])
                staging = unpublished.enter_context(publish.Staging(destination))
                decision = _common_plan([digests for _, digests in answers]), staging.place
            name, place = work.broadcast(decision)
        # 2. Where no plan serves, the coordinator makes one, and each rank gets its share of it alone.
        plan = _agree(group, plans, live) if name is None else plans[name]
        # 3. Each rank writes its file.  The coordinator publishes only when the receipts of all are there.
        with JointWork(group, DestinationError) as work:
            receipts = work.gather(_write_share(live, plan, place, group, progress))
            if staging is not None and plan.joint_plan is not None and receipts is not None:
                programs = {"program": PROGRAM, "torch": torch.__version__, "python": platform.python_version()}
                origin = {**programs, "platform": sys.platform, "world": len(receipts), **details}
                manifest = plan.joint_plan.manifest(receipts, origin)
                # The description comes last, and then the one rename: a reader finds all of it or nothing.
                native.write_native(manifest, staging.place)
                staging.publish()


_Digests = dict[int, int]
"""Digests of what ranks have alike, by the number that its holders have."""


def _fitting_plans(plans: AgreedPlans, live: LiveState) -> dict[bytes, _Digests]:
    """Return the names of plans that were made when the rank held the same, newest first, with present digests."""
    fitting: dict[bytes, _Digests] = {}
    for name, plan in reversed(plans.items()):
        if plan.state == live.described:
            fitting[name] = digest_of_holders = {}
            for holders, items in plan.common_items.items():
                digest_of_holders[holders] = xxh3_64_intdigest(b"".join(map(live.digests.__getitem__, items)))
    return fitting


def _common_plan(ranks: Sequence[Mapping[bytes, _Digests]]) -> bytes | None:
    """Return the name of the newest plan that every rank has kept, and whose equal objects are equal still."""
    for name in ranks[0]:
        if all(name in plans for plans in ranks):
            digest_of_holders: _Digests = {}
            entries = chain.from_iterable(plans[name].items() for plans in ranks)
            if all(digest_of_holders.setdefault(holders, digest) == digest for holders, digest in entries):
                return name
    return None


def _agree(group: dist.ProcessGroup | None, plans: AgreedPlans, live: LiveState) -> AgreedPlan:
    """Make a plan of what all ranks hold, on the coordinator, and keep this rank's share of it."""
    joint_plan, shares = None, None
    with JointWork(group, DestinationError) as work:
        answers = work.gather((live.described, live.digests))
        if answers is not None:
            states, digests = [state for state, _ in answers], [digests for _, digests in answers]
            joint_plan = WholePlan.of(states, digests, group_ranks(group))
            name = secrets.token_bytes(16)
            shares = [(name, *items) for items in zip(joint_plan.shares, joint_plan.common_items, strict=True)]
    name, share, common_items = scatter_from_first(group, shares)
    plans[name] = AgreedPlan(live.described, share, common_items, joint_plan)
    # Every rank drops the same ones, as all keep plans in one order.
    for former in list(plans)[:-_MOST_PLANS]:
        del plans[former]
    return plans[name]


def as_json(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return provenance as it will be read.

    Raises:
        ArgumentError: it is not JSON, or an entry that has a meaning has another form.
    """
    try:
        return json_fields.provenance(json.loads(json.dumps(dict(provenance), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the provenance is not JSON that a manifest can keep: {error}") from error


_plans: WeakKeyDictionary[dist.ProcessGroup, AgreedPlans] = WeakKeyDictionary()
"""The plans for each process group, kept as long as that."""

_ungrouped_plans: AgreedPlans = {}
"""The plans of a process without a process group."""


@called_like("muonckpt.save({'model': weights, 'optimizer': state}, path)")
def save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a state dict as a new checkpoint, in a directory that all ranks see or in an object store.  Collective.

    A directory appears whole, by one rename, after everything in it has been synced and checked; in a store the
    files that describe the checkpoint are written last (docs/guide/object_stores.md).  If any rank fails, nothing
    appears.

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
    refuse_mixed_calls(process_group, "save")
    save_together(state_dict, path, provenance or {}, process_group)


def save_together(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    provenance: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
) -> None:
    """Save as `save` does, once all ranks are known to have made the same call."""
    group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    plans = _ungrouped_plans if group is None else _plans.setdefault(group, {})
    run_save(lambda: LiveState.of(state_dict, "to save"), path, provenance, process_group, plans, SaveProgress())


# --- The file of one rank: stock items end to end, digested in the pass that writes them ------------------------------


def _write_share(
    live: LiveState, plan: AgreedPlan, place: Location, group: dist.ProcessGroup | None, progress: SaveProgress
) -> bytes:
    """Write a rank's file, digest what it holds as a witness, and return its receipt."""
    if plan.joint_plan is None:  # another rank has made the folder
        refuse_unseen(place, f"rank {dist.get_rank()}", DestinationError)
    stored_numbers, witness_numbers = plan.share
    file = place / rank_file(place_in(group)[0])
    rows = write_items(live, [live.items[number] for number in stored_numbers], file, progress)
    # The coordinator compares replicas by their digests, so that each byte is written by one rank alone.
    for number in witness_numbers:
        key, lo = live.items[number]
        assert lo is not None, "objects were compared before"
        words = bits_of(_resolved(live.parts[key][lo]).cpu().contiguous())
        rows.append(receipt_row(xxh3_128([words.reshape(-1).view(np.uint8).data])))
    return b"".join(rows)


def write_items(live: LiveState, items: Sequence[Item], file: Location, progress: SaveProgress) -> list[bytes]:
    """Write a rank's file, and return its rows of the receipt when it is on the disk or in the store.

    Args:
        items: objects first.  No items, no file.
        progress: is kept up to date.

    Raises:
        DestinationError: it cannot be written.
    """
    if not items:
        return []
    # Lengths are known before a byte is written, so the file gets its full size at once.
    blobs, boxes, end = list[tuple[memoryview, int]](), list[_BoxItem](), 0
    for key, lo in items:
        start = aligned(end)
        if lo is None:
            stream = io.BytesIO()
            torch.save(live.flat[key], stream)  # as DCP stores an object
            blobs.append((stream.getbuffer(), start))
            end = start + len(blobs[-1][0])
        else:
            part = live.parts[key][lo]
            boxes.append(_BoxItem(part, lo, tensor_item.frame(dtype_name(part.dtype), tuple(part.shape)), start))
            end = boxes[-1].end
    progress.total = end

    # Each element is read once: digests, share and checksum are taken in the pass that writes it.
    rows = []
    try:
        with create_file(file, end) as output:
            for blob, start in blobs:
                progress.written = output.write(blob, start)
                rows.append(receipt_row(xxh3_128([blob]), length=len(blob)))
            # Small items that lie beside each other are written at once.
            for run in neighbours(boxes, _are_written_at_once):
                rows += _write_small(run, output) if run[0].is_small else [_write_bands(run[0], output, progress)]
                progress.written = run[-1].end
    except OSError as error:
        raise unwritable(file, error) from error
    return rows


_SMALL_BYTES = 1 << 14
"""Bytes of the largest item that is written together with others: of such, calls cost more than bytes."""

_RUN_BYTES = 1 << 20
"""Most bytes of small items that are written at once: they stay in cache until then."""


class _BoxItem(NamedTuple):
    """A box of a tensor, and its item in a rank's file from byte ``start`` on."""

    part: torch.Tensor
    lo: Index
    frame: Frame
    start: int

    @property
    def end(self) -> int:
        return self.start + self.frame.length

    @property
    def is_small(self) -> bool:
        return self.frame.length <= _SMALL_BYTES


def _are_written_at_once(run: Sequence[_BoxItem], item: _BoxItem) -> bool:
    return item.is_small and run[0].is_small and item.end - run[0].start <= _RUN_BYTES


def _write_small(items: Sequence[_BoxItem], output: Writing) -> list[bytes]:
    """Write small items by one call, and return their rows of the receipt."""
    start = items[0].start
    buffer, rows = memoryview(bytearray(items[-1].end - start)), [b""] * len(items)
    # Boxes that are cut alike are one array, so torch and numpy are called once for all of them.
    numbers_by_cut: defaultdict[object, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        numbers_by_cut[item.frame.head, item.lo, item.part.device].append(number)
    for numbers in numbers_by_cut.values():
        _, lo, frame, _ = items[numbers[0]]
        parts = [integer_view(_resolved(items[number].part)) for number in numbers]
        words = bits_of(torch.stack(parts).cpu())
        shares = box_shares(words, lo + (0,) * (words.ndim - 1 - len(lo)))  # halves of 16 bytes have a dim
        for number, share, payload in zip(numbers, shares, words.reshape(len(numbers), -1), strict=True):
            raw = payload.view(np.uint8).data
            checksum, place = crc32_of(raw, 0), items[number].start - start
            buffer[place : place + frame.length] = b"".join((frame.head, raw, frame.tail(checksum)))
            rows[number] = receipt_row(xxh3_128([raw]), share, frame.length, checksum)
    output.write(buffer, start)
    return rows


def _write_bands(item: _BoxItem, output: Writing, progress: SaveProgress) -> bytes:
    """Write an item band by band, and return its row of the receipt."""
    part, lo, frame, start = item
    sums, end = Sums(), output.write(frame.head, start)
    for band in sums.add_chunk(bits_of(_resolved(part).cpu().contiguous()), lo):
        end = progress.written = output.write(band, end)
    output.write(frame.tail(sums.checksum), end)
    return receipt_row(sums.digest, sums.share, frame.length, sums.checksum)


def _resolved(part: torch.Tensor) -> torch.Tensor:
    """Return a part whose memory has the values that it shows."""
    return part.detach().resolve_conj().resolve_neg()
