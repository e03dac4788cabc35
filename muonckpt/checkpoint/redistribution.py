"""Live state from one mesh to another, between the ranks of one process group, without a disk.

Every rank tells all others what it has, then what it asks for.  From that each derives the same moves and stages.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..algebra.box import Box
from ..algebra.fingerprint import as_hex, combine
from ..names.errors import AttestError, LayoutError, SourceError, TargetError, about, warn_on_rank
from ..names.keys import is_of_optimizer, optimizers_of, rank_key
from ..names.resumption import Choices, LoadReport
from ..names.vocabulary import KeyPath
from ..names.wording import fitted
from ..record.record import Blob, Extent, StateRecord
from ..store.io.checksums import xxh3_128
from ..store.reading.dtypes import itemsize
from .all_ranks import (
    JointWork,
    broadcast_from_first,
    gather_on_all,
    group_ranks,
    place_in,
    refuse_differing,
    refuse_mixed_calls,
    unusable,
    wire_device,
)
from .attestation import held_together, shares_of
from .bits import share_of, unsigned
from .joint_state import layout_on_ranks, other_options, refuse_other_groups, with_joint_groups
from .live_state import Digests, LiveState, RankState
from .matching import judge, match
from .reading_plan import AskedTensor, JointRequest
from .refusal import REDISTRIBUTE, Refusal
from .shared_memory import check_apart, differing_ties, tied_origins
from .stored import Matching, Stored
from .transfer import Transfer, views
from .transfer_plan import Move, RankSides, divide_in_stages, make_copies


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The result of `redistribute`.

    Attributes:
        report: as `load` gives it.
        tensors: how many were filled.
        sent, received: bytes that this rank exchanged with others.
        stages: how many exchanges there were.
        buffers: bytes of this rank's largest exchange, both ways.
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
    """A rank's request; ``tied`` are pairs of tensors of the source that would come into one memory."""

    matching: Matching
    state: RankState
    devices: frozenset[str]
    tied: frozenset[tuple[str, str]]


def redistribute(
    source_state_dict: Mapping[str, Any],
    target_state_dict: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    memory: int = 256 << 20,
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
    attest: bool = False,
) -> Redistribution:
    """Fill the tensors of one state dict from those of another, whatever meshes they are on.  Collective; no disk.

    Like `save` of the source and `load` into the target, in memory: each element that a rank asks for comes from a rank
    that holds it, if possible itself, and travels once.  A rank without a source or a target gives ``{}``.

    Args:
        source_state_dict: nested as for `save`; not changed.
        target_state_dict: the template, as for `load`; filled in place.  Its tensors have memory of their own.
        group: the ranks that take part; all of them call this.
        memory: bytes of a rank's exchange buffers, both ways together; the least that any rank gives counts.
        allow_extra, fresh: as for `load`; the same on every rank.
        attest: compare fingerprints of the source's replicas, and of what has arrived with what was sent.

    Raises:
        SourceError: source and target do not fit each other; lists what differs.
        LayoutError: no rank holds some elements of the source, boxes overlap in part, source and target share memory,
            tensors that differ would come into one memory, or elements of the target share memory otherwise.
        TargetError: one element does not fit into the memory.
        AttestError: replicas of the source differ, or what has arrived is not what was sent.
        ArgumentError: an argument is not as described, or differs between ranks.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
    """
    refuse_mixed_calls(group, "redistribute")
    ranks, (place, _) = group_ranks(group), place_in(group)
    # 1. All ranks hear what each has, and match their targets with it.
    with JointWork(group, SourceError) as work:
        if memory < 1:
            raise TargetError(f"expected memory of at least 1 byte, found {memory}")
        choices, source = Choices.of(allow_extra, fresh), LiveState.of(source_state_dict, "to redistribute from")
        offer = _Offer.of(source, memory, {**choices.as_arguments(), "attest": attest})
        offers = work.broadcast(work.gather(offer))
    refuse_differing(group, "redistribute", [offer.arguments for offer in offers])
    states = [offer.state for offer in offers]
    refuse_other_groups(states, [offer.digests for offer in offers], ranks)
    offers = [offer.known_as(state) for offer, state in zip(offers, with_joint_groups(states), strict=True)]
    items, stored = _stored_of(ranks, offers, (place, len(ranks)))
    source = source.known_as(offers[place].state)
    with JointWork(group, SourceError) as work:
        target = LiveState.of(target_state_dict, "to redistribute into")
        requests = work.broadcast(work.gather(_ask(source, target, stored, choices)))
    matching, report = judge([request.matching for request in requests], stored, choices)
    if not matching.fits:
        refusal = Refusal(matching, choices, stored, target, None, REDISTRIBUTE)
        raise SourceError(broadcast_from_first(group, lambda: str(refusal)))
    # 2. All ranks derive the same moves; nothing has been overwritten yet.
    _refuse_overwriting(source, frozenset().union(*(request.tied for request in requests)), group)
    with JointWork(group, TargetError):
        moves = _moves_of(ranks, offers, requests, stored)
        stages = divide_in_stages(moves, len(ranks), min(offer.memory for offer in offers))
        transfer = Transfer(moves, stages, group)
        devices_of_ranks = [offer.devices | request.devices for offer, request in zip(offers, requests, strict=True)]
        devices = frozenset[str]().union(*devices_of_ranks)
        wire = torch.empty(transfer.wire_bytes, dtype=torch.uint8, device=wire_device(group, devices))
    box_shares = _prove_replicas(source, moves, ranks, group) if attest else {}
    # 3. Elements move; then everything else is set, and what has arrived is compared with what was sent.
    failure = transfer.run({move.source: source.local(move.source) for move in moves}, target.local, wire)
    own_matching = requests[place].matching
    with unusable(), JointWork(group, TargetError) as work:
        if failure is not None:
            raise failure
        target.zero(own_matching.zeros)
        origins = {key: origin for key, origin in own_matching.sources.items() if origin in items}
        target.put({key: pickle.loads(items[origin]) for key, origin in origins.items()}, own_matching.added)
        own_shares = _Shares.of(moves, transfer.sides, source, target, box_shares) if attest else _Shares({}, {})
        if (shares := work.gather(own_shares)) is not None:
            _compare(ranks, moves, shares)
    if own_matching.own_options:
        options = "; ".join(own_matching.own_options)
        warn_on_rank(f"the source did not say options, which stay as the running optimizer's: {options}")
    num_tensors = len({move.target for move in moves})
    return Redistribution(
        report, num_tensors, transfer.sent_bytes, transfer.received_bytes, len(stages), transfer.wire_bytes
    )


def _ask(source: LiveState, target: LiveState, stored: Stored, choices: Choices) -> _Request:
    """Return what this rank asks for, after checking that it would overwrite nothing that it has to give."""
    matching = match(target, stored, choices)
    keys = {key: origin for key, origin in matching.sources.items() if key in target.parts}
    tied = tied_origins(target, keys, matching.zeros)
    check_apart(source.parts, {key: target.parts[key] for key in (*keys, *matching.zeros)}, keys)
    return _Request(matching, target.described.boxes(keys), target.devices, tied)


def _refuse_overwriting(source: LiveState, pairs: Collection[tuple[str, str]], group: dist.ProcessGroup | None) -> None:
    """Refuse tensors that differ where the target has one memory for both: what arrives last would be left of them."""
    if not pairs:
        return
    keys = {key for pair in pairs for key in pair}
    shares = gather_on_all(group, LayoutError, lambda: shares_of(source, keys))
    prints = held_together(group_ranks(group), shares).tensors
    for key, other_key in sorted(pairs):
        if prints.get(key) != prints.get(other_key):
            raise LayoutError(differing_ties(key, other_key, "the source"))


def _moves_of(
    ranks: Sequence[int], offers: Sequence[_Offer], requests: Sequence[_Request], stored: Stored
) -> list[Move]:
    """Return what has to move, after proving that the source is whole."""
    offered = JointRequest.of([(offer.state, {key: key for key in offer.state.form.keys}) for offer in offers]).tensors
    asked = JointRequest.of([(request.state, request.matching.sources) for request in requests]).tensors
    moves: list[Move] = []
    for key, targets in sorted(asked.items()):
        record = stored.entries[key]
        assert isinstance(record, StateRecord), "others are not requested by boxes"
        with about(f"tensor {key!r} of the source"):
            [(_, holders)] = offered.get(key, [AskedTensor(key, ())])
            layout = layout_on_ranks(record.shape, holders, tuple(ranks))
            for target, asking in targets:
                size = itemsize(record.dtype)
                moves += (Move(key, target, size, record.shape, copies) for copies in make_copies(layout, asking))
    return moves


# --- What ranks offer: tensors and objects, as entries like a checkpoint's ------------------------------------------


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rank's source, as it tells the others.

    Attributes:
        memory: bytes of the exchange buffers.
        arguments: those that have to be the same on all ranks.
        pickled, options: objects that are not tensors, and options that are, by key.
        digests: the objects' digests, by the numbers of items.
    """

    memory: int
    arguments: Mapping[str, object]
    state: RankState
    pickled: Mapping[str, bytes]
    options: Mapping[str, float]
    digests: Digests
    devices: frozenset[str]

    @classmethod
    def of(cls, live: LiveState, memory: int, arguments: Mapping[str, object]) -> _Offer:
        pickled, options = {}, {}
        for key, value in live.flat.items():
            if key not in live.parts:
                pickled[key] = pickle.dumps(value)
            elif type(value) is Tensor and value.numel() == 1 and "param_groups" in key:
                options[key] = float(value)
        return cls(memory, arguments, live.described, pickled, options, live.digests, live.devices)

    def known_as(self, state: RankState) -> _Offer:
        """Return the same with the keys of a state, which is this one with other numbers of groups."""
        keys = dict(zip(self.state.form.keys, state.form.keys, strict=True))
        pickled = {keys[key]: value for key, value in self.pickled.items()}
        options = {keys[key]: value for key, value in self.options.items()}
        return replace(self, state=state, pickled=pickled, options=options)

    def objects(self) -> Iterator[tuple[Blob, bytes]]:
        """Yield the objects, and what tells them apart."""
        form = self.state.form
        for key, path, item in zip(form.keys, form.paths, self.state.first_items(), strict=False):
            if key in self.pickled:
                yield _blob(key, path, self.pickled[key]), self.digests[item]


def _blob(key: str, path: KeyPath, pickled: bytes) -> Blob:
    return Blob(key, path, Extent("live", 0, len(pickled)), xxh3_128([pickled]))


def _stored_of(
    ranks: Sequence[int], offers: Sequence[_Offer], place: tuple[int, int]
) -> tuple[dict[str, bytes], Stored]:
    """Return what ranks offer: objects by key, and all entries; objects that differ for each rank, as `save` has them.

    Raises:
        LayoutError: a key names a tensor and something else, or an option differs from rank to rank.
    """
    entries: dict[str, tuple[StateRecord | Blob, int]] = {}
    items: dict[str, bytes] = {}
    options: dict[str, Any] = {}
    digests: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
    # Where several ranks have a key, the first one's value counts; all must have the same kind of value.
    for number, (rank, offer) in enumerate(zip(ranks, offers, strict=True)):
        objects = [*offer.objects()]
        rank_entries: list[StateRecord | Blob] = [*offer.state.records(), *(blob for blob, _ in objects)]
        for entry in rank_entries:
            first_entry, first = entries.setdefault(entry.key, (entry, rank))
            if _kind(first_entry) != _kind(entry):
                raise LayoutError(
                    f"{entry.key!r} is {_kind(first_entry)} in the source of rank {first}, and {_kind(entry)} in that "
                    f"of rank {rank}"
                )
        for blob, digest in objects:
            digests[blob.key][number] = digest
        items = {**offer.pickled, **items}
        options = {**offer.options, **options}
    # Objects that differ become a value for each rank, but options of parameters have to be the same.
    optimizers = optimizers_of(entry.path for entry, _ in entries.values())
    for key, digest_by_number in digests.items():
        path, first = entries[key][0].path, next(iter(digest_by_number))
        differing_numbers = [n for n, digest in digest_by_number.items() if digest != digest_by_number[first]]
        if not differing_numbers:
            continue
        if is_of_optimizer(path, optimizers):
            raise other_options(repr(key), ranks[first], ranks[differing_numbers[0]])
        for number in digest_by_number:
            pickled = offers[number].pickled[key]
            value = _blob(*rank_key(key, path, number, len(ranks)), pickled)
            entries[value.key], items[value.key] = (value, ranks[number]), pickled

    def read(entry: StateRecord | Blob) -> Any:
        return pickle.loads(items[entry.key]) if isinstance(entry, Blob) else options.get(entry.key, str(entry))

    return items, Stored((entry for entry, _ in entries.values()), read, place)


def _kind(entry: StateRecord | Blob) -> str:
    return f"{entry.dtype} of shape {entry.shape}" if isinstance(entry, StateRecord) else "no tensor"


# --- Attesting what moves ---------------------------------------------------------------------------------------------

BoxShares = dict[tuple[str, Box], int]
"""Shares of boxes in the fingerprints of their tensors, by the tensor's key."""


def _prove_replicas(
    source: LiveState, moves: Sequence[Move], ranks: Sequence[int], group: dist.ProcessGroup | None
) -> BoxShares:
    """Prove that replicas of tensors that move are equal, and return the shares of this rank's boxes.

    Raises:
        AttestError: they differ; names the tensors.
    """
    keys = {move.source for move in moves}
    shares = gather_on_all(group, AttestError, lambda: shares_of(source, keys))
    if faults := held_together(ranks, shares).faults:
        failure = "the source differs from rank to rank"
        raise AttestError(f"{failure}: {fitted(faults, '; ', failure)}")
    place, _ = place_in(group)
    state, numbers = shares[place]
    boxes = [(key, box) for key, boxes_of_key in state.boxes_by_key.items() for box in boxes_of_key]
    return dict(zip(boxes, numbers, strict=True))


@dataclass(frozen=True, slots=True)
class _Shares:
    """The shares in fingerprints of what a rank has sent, by move and receiver, and of what it has received, by move.

    Copies of a rank to itself count as sent and received.
    """

    sent: Mapping[tuple[int, int], int]
    received: Mapping[int, int]

    @classmethod
    def of(
        cls,
        moves: Sequence[Move],
        sides_of_moves: Sequence[RankSides],
        source: LiveState,
        target: LiveState,
        box_shares: BoxShares,
    ) -> _Shares:
        """Take the shares of a finished transfer; ``box_shares`` gains those of boxes that were sent in part."""
        sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        received: dict[int, int] = {}
        for number, (move, sides) in enumerate(zip(moves, sides_of_moves, strict=True)):
            held, filled = source.local(move.source), target.local(move.target)
            for side in (sides.outgoing, sides.local_source):
                corners = zip(side.lo.tolist(), side.hi.tolist(), strict=True)
                for elements, (lo, hi), receiver in zip(views(held, side), corners, side.other.tolist(), strict=True):
                    box = Box(tuple(lo), tuple(hi))
                    if (move.source, box) not in box_shares:
                        box_shares[move.source, box] = _share(elements, box)
                    sent[number, receiver] = combine(sent[number, receiver], box_shares[move.source, box])
            if len(sides.incoming.other) or len(sides.local_target.other):
                received[number] = combine(*map(_share, filled.parts, filled.boxes))
        return cls(dict(sent), received)


def _compare(ranks: Sequence[int], moves: Sequence[Move], shares: Sequence[_Shares]) -> None:
    """Compare what each rank has received with what was sent to it.

    Raises:
        AttestError: it differs; names the tensor and the rank.
    """
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for of_rank in shares:
        for receiver, share in of_rank.sent.items():
            sent[receiver].append(share)
    for place, of_rank in enumerate(shares):
        for number, actual in of_rank.received.items():
            expected = combine(*sent[number, place])
            if actual != expected:
                raise AttestError(
                    f"tensor {moves[number].target!r}: rank {ranks[place]} holds {as_hex(actual)}, sent was "
                    f"{as_hex(expected)}"
                )


def _share(elements: Tensor, box: Box) -> int:
    return unsigned(int(share_of(elements, box.lo)))
