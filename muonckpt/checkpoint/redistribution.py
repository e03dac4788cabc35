"""Live state from one mesh to another, between the ranks of one process group, without a disk.

Every rank tells all others once what it has, then once what it asks for.  From that each derives the same plans and the
same stages, and in each stage sends exactly what others ask of it, and receives exactly what it asks for.
"""

from __future__ import annotations

import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..box import Box
from ..errors import ArgumentError, AttestError, LayoutError, SourceError, TargetError, about
from ..fingerprint import as_hex, combine
from ..layouts.boxed_tensor import whole_shape
from ..record import Blob, StateRecord
from ..resumption import Extra, Globs, LoadReport
from ..store.reading.dtypes import itemsize
from .all_ranks import group_ranks, refuse_differing, told_all, unusable, wire_device
from .bits import dtype_name
from .carrier import Carrier, share
from .live_boxes import HeldBox, boxes_of_all
from .live_state import LiveState, RankState
from .load_template import template_of
from .matching import RankRequest, judge, match, misfit
from .named_optimizer import Stored
from .shared_memory import check_apart
from .transfers import RankBoxes, Transfer, stages_of, transfers_of

DEFAULT_MEMORY = 256 << 20
"""Bytes of a rank's exchange buffers."""


@dataclass(frozen=True, slots=True)
class Redistribution:
    """What `redistribute` has done.

    Attributes:
        report: of parameters, as `load` gives it.
        tensors: that were filled, each counted once.
        sent, received: bytes that this rank exchanged with others.
        stages: exchanges.
        buffers: bytes of the largest exchange of this rank, both ways.
    """

    report: LoadReport
    tensors: int
    sent: int
    received: int
    stages: int
    buffers: int

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors in {self.stages} stages; this rank sent {self.sent / 1e6:.3g} MB and received "
            f"{self.received / 1e6:.3g} MB, {self.buffers / 1e6:.3g} MB at a time"
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """What a rank asks for.

    Attributes:
        boxes: by key of its target, of tensors that are filled.
    """

    rank: RankRequest
    boxes: Mapping[str, tuple[Box, ...]]
    devices: frozenset[str]
    memory: int


def redistribute(
    source_state_dict: Mapping[str, Any],
    target_state_dict: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    memory: int = DEFAULT_MEMORY,
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
    attest: bool = False,
) -> Redistribution:
    """Fill the tensors of one state dict from those of another, whatever meshes they are on.  Collective; no disk.

    It does what `save` of the source and `load` into the target would do, in memory: each element that a rank asks for
    comes from a rank that holds it, from itself if it is one of them, and travels once.  Ranks may have only a source,
    only a target or neither: they give ``{}``.  What is not a tensor is taken over as by `load`.

    Args:
        source_state_dict: nested as for `save`; not changed.
        target_state_dict: the template, as for `load`; filled in place.  Its tensors lie in other memory.
        group: the ranks that take part; all of them call this.
        memory: bytes of exchange buffers that a rank has at a time, both ways together; the least that any rank gives.
        allow_extra: True: the source may have keys that no target asks for.  Or globs of those, as for `load`.
        fresh: as for `load`; the same on every rank.
        attest: compare replicas of the source with each other, and what has arrived with what was sent (fingerprints).

    Raises:
        SourceError: keys, shapes, dtypes or optimizers of source and target do not fit each other; lists what differs.
        LayoutError: nobody holds some elements of the source, boxes overlap in part, or source and target share memory;
            names tensor, box and holder.
        TargetError: the memory does not do for one element.
        AttestError: replicas of the source differ, or what has arrived is not what was sent.
        ArgumentError: ``fresh`` or ``allow_extra`` is no list of strings, or the latter or ``attest`` is not the same
            on all ranks.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
    """
    held: list[LiveState] = []
    globs_of: list[tuple[Globs, Extra]] = []

    def described() -> tuple[Mapping[str, object], RankState]:
        if memory < 1:
            raise TargetError(f"expected memory of at least 1 byte, found {memory}")
        try:
            globs_of.append((Globs.of(fresh), Extra.of(allow_extra)))
        except TypeError as error:
            raise ArgumentError(str(error)) from error
        held.append(LiveState.of(source_state_dict))
        return {"allow_extra": globs_of[0][1].patterns, "attest": attest}, held[0].described()

    answers = told_all(group, SourceError, described)
    refuse_differing(group, "redistribute", [said for said, _ in answers])
    states = dict(zip(group_ranks(group), (state for _, state in answers), strict=True))
    items, stored = _stored(states)
    [(globs, extra)] = globs_of

    def asked() -> _Request:
        held.append(LiveState.of(target_state_dict))
        return _asked(held[0], held[1], stored, globs, extra, memory)

    requests = dict(zip(states, told_all(group, SourceError, asked), strict=True))
    matching, report = judge([each.rank for each in requests.values()], stored, extra)
    if not matching.fits:
        cure = "muonckpt.redistribute(..., {})"
        raise SourceError(f"the source does not fit the target: {misfit(matching, cure)}")
    moves = _moves(states, requests)
    budget = min(each.memory for each in requests.values())
    stages = stages_of(moves, list(states), budget)
    source, target = held
    kinds = frozenset().union(
        *(state.devices for state in states.values()), *(each.devices for each in requests.values())
    )
    carrier = Carrier(source.parts, target.parts, moves, stages, list(states), group)
    told_all(group, TargetError, lambda: carrier.make_buffers(wire_device(group, kinds)))
    if attest:
        _check_replicas(told_all(group, AttestError, lambda: _held_boxes(source, carrier.rank, moves)))
    carrier.run()
    mine = requests[carrier.rank].rank.matching

    def finish() -> tuple[Mapping[tuple[int, int], int], Mapping[int, int]]:
        if carrier.failure is not None:
            raise carrier.failure
        for key in mine.zeros:
            for part in target.parts[key].values():
                part.zero_()
        target.put({key: items[origin] for key, origin in mine.sources.items() if origin in items}, mine.added)
        return (carrier.departed(), carrier.arrived()) if attest else ({}, {})

    with unusable():
        _compare(moves, dict(zip(states, told_all(group, TargetError, finish), strict=True)))
    if mine.own_options:
        own = "; ".join(mine.own_options)
        warnings.warn(f"the source does not say options, which stay as the running optimizer's: {own}", stacklevel=2)
    filled = len({move.target for move in moves})
    return Redistribution(report, filled, carrier.sent, carrier.received, len(stages), carrier.largest)


def _stored(states: Mapping[int, RankState]) -> tuple[dict[str, bytes], Stored]:
    """Of all ranks together: what is not a tensor, pickled, by key; and the entries that targets are matched with.

    Raises:
        LayoutError: ranks have tensors of other shapes or dtypes under one key.
    """
    entries: dict[str, StateRecord | Blob] = {}
    holder: dict[str, int] = {}
    items: dict[str, bytes] = {}
    options: dict[str, Any] = {}
    for rank, state in states.items():
        mine: list[StateRecord | Blob] = [tensor.record for tensor in state.tensors]
        for entry in (*mine, *(item.entry for item in state.items)):
            known = entries.setdefault(entry.key, entry)
            first = holder.setdefault(entry.key, rank)
            if _kind(known) != _kind(entry):
                raise LayoutError(
                    f"{entry.key!r} is {_kind(known)} in the source of rank {first}, and {_kind(entry)} in that of "
                    f"rank {rank}"
                )
            if isinstance(entry, Blob) and isinstance(known, Blob) and entry.digest != known.digest:
                warnings.warn(
                    f"{entry.key!r}: ranks {first} and {rank} hold different data that is not a tensor; the copy of "
                    f"rank {first} is taken",
                    stacklevel=3,
                )
        for item in state.items:
            items.setdefault(item.entry.key, item.pickled)
        options = {**state.options, **options}

    def read(entry: StateRecord | Blob) -> Any:
        return pickle.loads(items[entry.key]) if isinstance(entry, Blob) else options.get(entry.key, str(entry))

    return items, Stored(entries.values(), read)


def _kind(entry: StateRecord | Blob) -> str:
    return f"{entry.dtype} of shape {entry.shape}" if isinstance(entry, StateRecord) else "no tensor"


def _asked(source: LiveState, target: LiveState, stored: Stored, globs: Globs, extra: Extra, memory: int) -> _Request:
    """What this rank asks for.

    Raises:
        LayoutError: it would overwrite what it has to give.
    """
    template = template_of(target.nested, target.flat, target.paths, target.annotations, extra.everything)
    matching = match(template, stored, globs)
    keys = {key: origin for key, origin in matching.sources.items() if key in target.parts}
    check_apart(source.parts, {key: target.parts[key] for key in (*keys, *matching.zeros)}, keys)
    return _Request(
        RankRequest(matching, template.optimizers, globs),
        {key: target.boxes(key) for key in keys},
        frozenset(part.device.type for parts in target.parts.values() for part in parts.values()),
        memory,
    )


def _moves(states: Mapping[int, RankState], requests: Mapping[int, _Request]) -> list[Transfer]:
    """What has to move, from what all ranks have and ask for.

    Raises:
        LayoutError: the source has a hole or an overlap; names tensor, box and holders.
    """
    records: dict[str, StateRecord] = {}
    given: defaultdict[str, list[RankBoxes]] = defaultdict(list)
    for rank, state in states.items():
        for tensor in state.tensors:
            records.setdefault(tensor.record.key, tensor.record)
            if tensor.boxes:
                given[tensor.record.key].append(RankBoxes(rank, tensor.boxes))
    asked: defaultdict[tuple[str, str], list[RankBoxes]] = defaultdict(list)
    for rank, request in requests.items():
        for key, boxes in request.boxes.items():
            asked[request.rank.matching.sources[key], key].append(RankBoxes(rank, boxes))
    moves: list[Transfer] = []
    for (source, target), wanted in sorted(asked.items()):
        record, takers = records[source], tuple(each for each in wanted if each.boxes)
        with about(f"tensor {source!r} of the source"):
            size = itemsize(record.dtype)
            moves += transfers_of(source, target, size, record.shape, tuple(given[source]), takers)
    return moves


def _held_boxes(source: LiveState, rank: int, moves: Sequence[Transfer]) -> list[HeldBox]:
    """What a rank holds of the tensors that move, with fingerprints."""
    found = []
    for key in sorted({move.source for move in moves} & source.parts.keys()):
        shape, dtype, memory = whole_shape(source.flat[key]), dtype_name(source.flat[key].dtype), source.parts[key]
        for box, part in zip(source.boxes(key), memory.values(), strict=True):
            found.append(HeldBox(rank, key, shape, dtype, box, share(part, box)))
    return found


def _check_replicas(ranks: Sequence[Sequence[HeldBox]]) -> None:
    """Check that ranks agree.

    Raises:
        AttestError: names tensor, box and ranks.
    """
    faults = boxes_of_all(ranks).faults
    if faults:
        raise AttestError(f"the source differs from rank to rank: {'; '.join(faults[:12])}")


def _compare(
    moves: Sequence[Transfer], shares: Mapping[int, tuple[Mapping[tuple[int, int], int], Mapping[int, int]]]
) -> None:
    """Compare what ranks have sent with what has arrived.

    Raises:
        AttestError: names tensor and rank.
    """
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for departed, _ in shares.values():
        for taker, each in departed.items():
            sent[taker].append(each)
    for rank, (_, arrived) in shares.items():
        for number, found in arrived.items():
            expected = combine(*sent[number, rank])
            if found != expected:
                raise AttestError(
                    f"tensor {moves[number].target!r}: rank {rank} holds {as_hex(found)}, sent was {as_hex(expected)}"
                )
