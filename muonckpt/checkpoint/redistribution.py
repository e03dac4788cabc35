"""Live state from one mesh to another, between the ranks of one process group, without a disk.

Every rank tells all others what it has, then what it asks for.  From that each derives the same plans and stages, and
in each stage sends exactly what others ask of it, and receives exactly what it asks for.
"""

from __future__ import annotations

import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, AttestError, LayoutError, SourceError, TargetError, about
from ..fingerprint import as_hex, combine
from ..layouts.boxed_tensor import Parts
from ..record import Blob, Extent, StateRecord
from ..resumption import Extra, Globs, LoadReport
from ..store.io.checksums import xxh3_128
from ..store.reading.dtypes import itemsize
from .all_ranks import gather_on_all, group_ranks, refuse_crossed, refuse_differing, unusable, wire_device
from .attestation import held_together, shares_of
from .live_state import HeldTensor, LiveState, RankBoxes, RankState
from .load_template import Stored, template_of
from .matching import RankRequest, judge, match, misfit
from .transfers import Carrier, Transfer, stages_of, transfers_of

DEFAULT_MEMORY = 256 << 20
"""Bytes of a rank's exchange buffers."""


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The result of `redistribute`.

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
class _Source:
    """A rank's source, as it tells the others.

    Attributes:
        pickled: what is not a tensor, by key.
        options: values of options that are tensors, by key.
        devices: types of the devices that have its tensors.
    """

    state: RankState
    pickled: Mapping[str, bytes]
    options: Mapping[str, float]
    devices: frozenset[str]

    @classmethod
    def of(cls, live: LiveState) -> _Source:
        options = {
            key: float(live.flat[key])
            for key in live.parts
            if type(live.flat[key]) is Tensor and live.flat[key].numel() == 1 and "param_groups" in key
        }
        pickled = {key: pickle.dumps(value) for key, value in live.flat.items() if key not in live.parts}
        return cls(live.described, pickled, options, live.devices)

    def entries(self) -> Iterator[StateRecord | Blob]:
        yield from self.state.records()
        for key, path in zip(self.state.keys, self.state.paths, strict=True):
            if (pickled := self.pickled.get(key)) is not None:
                yield Blob(key, path, Extent("live", 0, len(pickled)), xxh3_128([pickled]))


@dataclass(frozen=True, slots=True)
class _Request:
    rank: RankRequest
    state: RankState
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

    As `save` of the source and `load` into the target, in memory: each element that a rank asks for comes from a rank
    that holds it, if possible itself, and travels once.  A rank without a source or a target gives ``{}``.

    Args:
        source_state_dict: nested as for `save`; not changed.
        target_state_dict: the template, as for `load`; filled in place.  Its tensors lie in other memory.
        group: the ranks that take part; all of them call this.
        memory: bytes of exchange buffers that a rank has at a time, both ways together; the least that any rank gives.
        allow_extra: True: the source may have keys that no target asks for.  Or globs of those, as for `load`.
        fresh: as for `load`; the same on every rank.
        attest: compare replicas of the source with each other, and what has arrived with what was sent (fingerprints).

    Raises:
        SourceError: source and target do not fit each other; lists what differs.
        LayoutError: nobody holds some elements of the source, boxes overlap in part, or source and target share memory.
        TargetError: the memory does not do for one element.
        AttestError: replicas of the source differ, or what has arrived is not what was sent.
        ArgumentError: an argument is none of these, or not the same on all ranks.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
    """
    held: list[LiveState] = []
    globs_of: list[tuple[Globs, Extra]] = []

    def described() -> tuple[Mapping[str, object], _Source]:
        if memory < 1:
            raise TargetError(f"expected memory of at least 1 byte, found {memory}")
        try:
            globs_of.append((Globs.of(fresh), Extra.of(allow_extra)))
        except TypeError as error:
            raise ArgumentError(str(error)) from error
        held.append(LiveState.of(source_state_dict, "to redistribute from"))
        return {"allow_extra": globs_of[0][1].patterns, "attest": attest}, _Source.of(held[0])

    refuse_crossed(group, "redistribute")
    answers = gather_on_all(group, SourceError, described)
    refuse_differing(group, "redistribute", [arguments for arguments, _ in answers])
    sources = dict(zip(group_ranks(group), (source for _, source in answers), strict=True))
    items, stored = _stored(sources)
    [(globs, extra)] = globs_of

    def asked() -> _Request:
        held.append(LiveState.of(target_state_dict, "to redistribute into"))
        return _asked(held[0], held[1], stored, globs, extra, memory)

    requests = dict(zip(sources, gather_on_all(group, SourceError, asked), strict=True))
    matching, report = judge([request.rank for request in requests.values()], stored, extra)
    if not matching.fits:
        cure = "muonckpt.redistribute(..., {})"
        raise SourceError(f"the source does not fit the target: {misfit(matching, cure)}")
    moves = _moves(sources, requests)
    budget = min(request.memory for request in requests.values())
    stages = stages_of(moves, list(sources), budget)
    source, target = held
    kinds = frozenset().union(
        *(source.devices for source in sources.values()), *(request.devices for request in requests.values())
    )
    carrier = Carrier(source.parts, target.parts, moves, stages, list(sources), group)
    gather_on_all(group, TargetError, lambda: carrier.make_buffers(wire_device(group, kinds)))
    if attest:
        moving = {move.source for move in moves}
        held_by_rank = gather_on_all(group, AttestError, lambda: shares_of(source, moving))
        if faults := held_together(list(sources), held_by_rank).faults:
            raise AttestError(f"the source differs from rank to rank: {'; '.join(faults[:12])}")
    carrier.run()
    mine = requests[carrier.rank].rank.matching

    def finish() -> tuple[Mapping[tuple[int, int], int], Mapping[int, int]]:
        if carrier.failure is not None:
            raise carrier.failure
        for key in mine.zeros:
            for part in target.parts[key].values():
                part.zero_()
        target.put(
            {key: pickle.loads(items[origin]) for key, origin in mine.sources.items() if origin in items}, mine.added
        )
        return (carrier.departed(), carrier.arrived()) if attest else ({}, {})

    with unusable():
        _compare(moves, dict(zip(sources, gather_on_all(group, TargetError, finish), strict=True)))
    if mine.own_options:
        own = "; ".join(mine.own_options)
        warnings.warn(f"the source does not say options, which stay as the running optimizer's: {own}", stacklevel=2)
    filled = len({move.target for move in moves})
    return Redistribution(report, filled, carrier.sent, carrier.received, len(stages), carrier.largest)


def _stored(sources: Mapping[int, _Source]) -> tuple[dict[str, bytes], Stored]:
    entries: dict[str, StateRecord | Blob] = {}
    holder: dict[str, int] = {}
    items: dict[str, bytes] = {}
    options: dict[str, Any] = {}
    for rank, source in sources.items():
        for entry in source.entries():
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
        items = {**source.pickled, **items}
        options = {**source.options, **options}

    def read(entry: StateRecord | Blob) -> Any:
        return pickle.loads(items[entry.key]) if isinstance(entry, Blob) else options.get(entry.key, str(entry))

    return items, Stored(entries.values(), read)


def _kind(entry: StateRecord | Blob) -> str:
    return f"{entry.dtype} of shape {entry.shape}" if isinstance(entry, StateRecord) else "no tensor"


def _asked(source: LiveState, target: LiveState, stored: Stored, globs: Globs, extra: Extra, memory: int) -> _Request:
    """Return what this rank asks for, after checking that it overwrites nothing that it has to give."""
    template = template_of(target, extra.everything)
    matching = match(template, stored, globs)
    keys = {key: origin for key, origin in matching.sources.items() if key in target.parts}
    check_apart(source.parts, {key: target.parts[key] for key in (*keys, *matching.zeros)}, keys)
    request = RankRequest(matching, template.optimizers, globs)
    return _Request(request, target.described.boxes(keys), target.devices, memory)


def _moves(sources: Mapping[int, _Source], requests: Mapping[int, _Request]) -> list[Transfer]:
    """Return what has to move, after proving that the source has neither hole nor overlap."""
    kinds: dict[str, HeldTensor] = {}
    given: defaultdict[str, list[RankBoxes]] = defaultdict(list)
    for rank, source in sources.items():
        for key, kind in source.state.tensors():
            kinds.setdefault(key, kind)
            if kind.boxes:
                given[key].append(RankBoxes(rank, kind.boxes))
    asked: defaultdict[tuple[str, str], list[RankBoxes]] = defaultdict(list)
    for rank, request in requests.items():
        for key, kind in request.state.tensors():
            asked[request.rank.matching.sources[key], key].append(RankBoxes(rank, kind.boxes))
    moves: list[Transfer] = []
    for (origin, target), wanted in sorted(asked.items()):
        kind, takers = kinds[origin], tuple(taker for taker in wanted if taker.boxes)
        with about(f"tensor {origin!r} of the source"):
            moves += transfers_of(origin, target, itemsize(kind.dtype), kind.shape, tuple(given[origin]), takers)
    return moves


def _compare(
    moves: Sequence[Transfer], shares: Mapping[int, tuple[Mapping[tuple[int, int], int], Mapping[int, int]]]
) -> None:
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for departed, _ in shares.values():
        for taker, part in departed.items():
            sent[taker].append(part)
    for rank, (_, arrived) in shares.items():
        for number, actual in arrived.items():
            expected = combine(*sent[number, rank])
            if actual != expected:
                raise AttestError(
                    f"tensor {moves[number].target!r}: rank {rank} holds {as_hex(actual)}, sent was {as_hex(expected)}"
                )


# --- Tensors that share memory ----------------------------------------------------------------------------------------


class _Range(NamedTuple):
    """The addresses of a part in bytes, from its first element to its last."""

    device: str
    start: int
    stop: int
    written: bool
    key: str

    @classmethod
    def of(cls, key: str, part: Tensor, written: bool) -> _Range:
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        start = part.data_ptr()
        return cls(str(part.device), start, start + (last + 1) * part.itemsize, written, key)


def check_apart(source: Mapping[str, Parts], target: Mapping[str, Parts], origins: Mapping[str, str]) -> None:
    """Check that no part of the target lies in memory of the source, unless it is what it will be filled with.

    Args:
        origins: keys of the source, by those of the target that are filled from them.

    Raises:
        LayoutError: names the tensors.
    """
    ranges = [_Range.of(key, part, False) for key, parts in source.items() for part in parts.values()]
    for key, parts in target.items():
        same = source.get(origins.get(key, ""), {})
        ranges += [_Range.of(key, part, True) for lo, part in parts.items() if not _identical(part, same.get(lo))]
    read = written = _Range("", 0, 0, False, "")
    for span in sorted(ranges):
        other = read if span.written else written
        if other.device == span.device and span.start < other.stop:
            mine, theirs = (span.key, other.key) if span.written else (other.key, span.key)
            raise LayoutError(
                f"tensor {mine!r} of the target shares memory with {theirs!r} of the source, which would be "
                "overwritten before all of it is read: give the target memory of its own"
            )
        if span.written and (written.device, written.stop) < (span.device, span.stop):
            written = span
        elif not span.written and (read.device, read.stop) < (span.device, span.stop):
            read = span


def _identical(part: Tensor, other: Tensor | None) -> bool:
    return other is not None and _elements(part) == _elements(other)


def _elements(part: Tensor) -> tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype]:
    return part.device, part.data_ptr(), part.shape, part.stride(), part.dtype
