"""Proving that memory equals the checkpoint, the replicas, or another process.

Every rank takes the share of the fingerprint of each box that it holds, where the box lies.  The first rank gathers
them, compares those of equal boxes, adds up one of each, and compares the sums.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..algebra.box import Index
from ..algebra.fingerprint import as_hex, combine
from ..names.errors import AttestError, SourceError, about
from ..names.wording import fitted, listed
from ..store.io.location import location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import check_chunk, chunk_share
from ..store.verify.diagnosis import open_whole
from .all_ranks import JointWork, group_ranks, refuse_mixed_calls
from .bits import share_of, unsigned
from .joint_state import HeldBoxes, holders_by_key, with_joint_groups
from .live_state import LiveState, RankState
from .storable import refuse_unwritable

K = TypeVar("K")

_FORMAT, _VERSION = "muonckpt fingerprints", 1
_HEX = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """Shape, dtype (torch's name without the prefix) and fingerprint (16 hex digits) of a tensor."""

    shape: Index
    dtype: str
    fingerprint: str

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.fingerprint):
            raise ValueError(f"expected a fingerprint of 16 hex digits, found {self.fingerprint!r}")

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprints of tensors, by the keys that a manifest has."""

    tensors: Mapping[str, TensorPrint]

    def as_json(self) -> str:
        """Return JSON text with one line for each tensor, about 100 bytes."""
        lines = []
        for key, tensor in self.tensors.items():
            shape, dtype = list(tensor.shape), json.dumps(tensor.dtype)
            fields = f'{{"shape": {shape}, "dtype": {dtype}, "fingerprint": "{tensor.fingerprint}"}}'
            lines.append(f"{json.dumps(key)}: {fields}")
        head, entries = f'{{"format": "{_FORMAT}", "version": {_VERSION},\n', ",\n  ".join(lines)
        return f'{head} "tensors": {{\n  {entries}\n }}}}\n'

    @classmethod
    def from_json(cls, text: str) -> Fingerprints:
        """Read what `as_json` wrote.

        Raises:
            SourceError: it is something else, of another version, or damaged.
        """
        try:
            data = json.loads(text)
            # The format is asked first: another version may mean other things by the same fields.
            if (data["format"], data["version"]) != (_FORMAT, _VERSION):
                raise SourceError(
                    f"expected {_FORMAT!r} version {_VERSION}, found {data['format']!r} version {data['version']!r}"
                )
            tensors = {}
            for key, entry in data["tensors"].items():
                shape, dtype = tuple(entry["shape"]), entry["dtype"]
                if not isinstance(dtype, str) or not all(type(size) is int and size >= 0 for size in shape):
                    raise TypeError(f"expected a shape and the name of a dtype, found {entry!r}")
                tensors[key] = TensorPrint(shape, dtype, entry["fingerprint"])
            return cls(tensors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SourceError(f"damaged fingerprints: {type(error).__name__}: {error}") from error


Prints = Mapping[str, TensorPrint]

Compared = Callable[[Prints], tuple[Prints, Prints]]
"""A function of the live tensors that returns, on the first rank, those to compare, and what they have to be."""


@dataclass(frozen=True, slots=True)
class Attestation:
    """The result of an attestation, the same on every rank.

    Attributes:
        compared: tensors that are equal to what they were compared with.
        compared_bytes: their bytes, each tensor counted once.
        replicated: boxes that several ranks hold, all of them alike.
        fingerprints: of all live tensors.
    """

    compared: int
    compared_bytes: int
    replicated: int
    fingerprints: Fingerprints

    def __str__(self) -> str:
        return (
            f"{self.compared} tensors ({self.compared_bytes / 1e9:.3g} GB) are equal; "
            f"{self.replicated} boxes that several ranks hold agree"
        )


def fingerprints(state_dict: Mapping[str, Any], *, process_group: dist.ProcessGroup | None = None) -> Fingerprints:
    """Take the fingerprints of all tensors of a state dict, whatever mesh they are on.  Collective; changes nothing.

    They are those that `save` would write into the manifest.  Each rank reads what it holds in place: of a tensor on a
    GPU only one number for each box is copied to the host.

    Args:
        state_dict: nested as for `save`.

    Raises:
        AttestError: ranks that hold the same box of a tensor hold different elements; names tensor, box and ranks.
        LayoutError: no rank holds some elements of a tensor, or boxes overlap in part.
    """
    refuse_mixed_calls(process_group, "fingerprints")
    return _attested(state_dict, {}, lambda live: ({}, {}), "", process_group).fingerprints


def attest(
    state_dict: Mapping[str, Any],
    other: str | os.PathLike[str] | Fingerprints,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Attestation:
    """Prove that the tensors of a state dict are those of a checkpoint, or of another process.  Collective.

    Keys, shapes, dtypes and fingerprints have to be equal, and replicas have to agree; other objects are not compared.
    docs/guide/live_state.md says what this costs and what it does not prove.

    Args:
        state_dict: nested as for `save`.
        other: a path or URL of a checkpoint of any format whose keys are those of the state dict; or fingerprints, of
            which the first rank's count.  Where a checkpoint records none, the first rank reads the tensor.

    Raises:
        AttestError: something differs; lists the keys.
        SourceError: the checkpoint cannot be read.
        LayoutError: no rank holds some elements of a tensor, or boxes overlap in part.
    """
    refuse_mixed_calls(process_group, "attest")
    if isinstance(other, Fingerprints):
        unequal = " is not what the fingerprints say"
        return _attested(state_dict, {}, lambda live: (live, other.tensors), unequal, process_group)
    place = location(other, SourceError)

    def recorded(live: Prints) -> tuple[Prints, Prints]:
        with open_whole(place) as checkpoint:
            return live, {key: _recorded(checkpoint, key) for key in checkpoint.tensors}

    return _attested(state_dict, {}, recorded, f" is not that of {place}", process_group)


def attest_loaded(
    state_dict: Mapping[str, Any],
    checkpoint: OpenCheckpoint,
    sources: Mapping[str, str],
    rows: Mapping[str, int],
    process_group: dist.ProcessGroup | None,
) -> Attestation:
    """Attest what was just loaded; fresh and kept tensors are compared among replicas only.

    Args:
        sources: the keys of the checkpoint by those of the state dict; the first rank's count.
        rows: how many rows of a tensor were loaded, by key, where it has more.

    Raises:
        AttestError: as `attest`.
    """

    def recorded(live: Prints) -> tuple[Prints, Prints]:
        loaded, expected = {}, {}
        for key, source in sources.items():
            if source in checkpoint.tensors:
                expected[key] = _recorded(checkpoint, source)
                if key in live:
                    loaded[key] = live[key]
        return loaded, expected

    unequal = f" is not that of {checkpoint.path}, from which it was loaded"
    return _attested(state_dict, rows, recorded, unequal, process_group)


def _attested(
    state_dict: Mapping[str, Any],
    rows: Mapping[str, int],
    compared: Compared,
    unequal: str,
    process_group: dist.ProcessGroup | None,
) -> Attestation:
    """Compare what ranks hold with each other and with what they should; ``unequal`` begins the error."""

    attestation: Attestation | None = None
    with JointWork(process_group, AttestError) as work:
        live = LiveState.of(state_dict, "to attest").cut_to(rows)
        for key, value in live.flat.items():
            if isinstance(value, Tensor):
                refuse_unwritable(key, value)
        ranks = work.gather(shares_of(live, live.parts))
        if ranks is not None:
            # Replicas are compared even where nothing else is, as a checkpoint keeps one of them alone.
            joint = held_together(group_ranks(process_group), ranks)
            subject, expected = compared(joint.tensors)
            if faults := [*joint.faults, *differing(subject, expected)]:
                failure = f"live state{unequal or ' differs from rank to rank'}"
                raise AttestError(f"{failure}: {fitted(faults, '; ', failure)}")
            nbytes = sum(prod(tensor.shape) * itemsize(tensor.dtype) for tensor in subject.values())
            attestation = Attestation(len(subject), nbytes, joint.replicated, Fingerprints(joint.tensors))
        return work.broadcast(attestation)


def _recorded(checkpoint: OpenCheckpoint, key: str) -> TensorPrint:
    tensor = checkpoint.tensors[key].record
    recorded = tensor.fingerprint
    # Foreign checkpoints record none: it is taken from the elements, once their digests are right.
    if recorded is None:
        tensor.chunk_layout()
        [located] = checkpoint.locate([tensor])
        chunk_shares = []
        for chunk in located.chunks:
            if chunk.box.numel:
                check_chunk(checkpoint.payloads, located, chunk)
                chunk_shares.append(chunk_share(checkpoint.payloads, located, chunk))
        recorded = as_hex(combine(*chunk_shares))
    return TensorPrint(tensor.shape, tensor.dtype, recorded)


# --- What ranks hold, with its share of fingerprints ------------------------------------------------------------------

SharesOfRank = tuple[RankState, list[int]]
"""A rank's tensors, and the share of each of their boxes in a fingerprint."""


@dataclass(frozen=True, slots=True)
class HeldTogether:
    """The tensors that all ranks hold together.

    Attributes:
        tensors: by key; where replicas differ, the lowest rank's counts.
        replicated: how many boxes several ranks hold, all alike.
        disputes: where ranks disagree, a phrase each, by key.
    """

    tensors: Prints
    replicated: int
    disputes: tuple[tuple[str, str], ...]

    @property
    def faults(self) -> list[str]:
        return [f"{key!r}{phrase}" for key, phrase in self.disputes]


def shares_of(live: LiveState, keys: Collection[str]) -> SharesOfRank:
    """Return the tensors of some keys with their shares: taken on their devices, and fetched from each at once.

    Raises:
        LayoutError: a checkpoint cannot describe this rank's part of a tensor; names the tensor.
    """
    # Shares stay on their devices until all are under way.
    boxes = live.described.boxes(keys)
    shares: list[Tensor] = []
    for key in boxes.form.keys:
        shares += [share_of(part, lo) for lo, part in live.parts[key].items()]
    # One fetch for each device, as each of them waits for the device.
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for place, share in enumerate(shares):
        by_device[share.device].append(place)
    numbers = [0] * len(shares)
    for places in by_device.values():
        for place, number in zip(places, torch.stack([shares[place] for place in places]).tolist(), strict=True):
            numbers[place] = unsigned(number)
    return boxes, numbers


def held_together(ranks: Sequence[int], shares: Sequence[SharesOfRank]) -> HeldTogether:
    """Join what ranks hold; every element counts once.

    Args:
        ranks: the global ranks that the ``shares`` come from.

    Raises:
        LayoutError: no rank holds some elements of a tensor, or boxes overlap in part; names tensor and box.
    """
    states = with_joint_groups([state for state, _ in shares])
    tensors, disputes, replicated = {}, list[tuple[str, str]](), 0
    for key, holders in holders_by_key(states).items():
        # Boxes can be compared only where ranks speak of one tensor.
        forms = []
        for each in holders:
            assert each.kind is not None, "fingerprints are of tensors"
            forms += [(place, (each.kind.dtype, each.kind.shape)) for place in each.places.tolist()]
        ranks_by_form = _ranks_by((form, ranks[place]) for place, form in sorted(forms))
        if len(ranks_by_form) > 1:
            disputes.append((key, f": {_says(ranks_by_form, lambda form: f'{form[0]} of shape {form[1]}')}"))
            continue
        # The layout proves that nothing is missing, and its rows are the holders' boxes in their order.
        [(dtype, shape)] = ranks_by_form
        held = HeldBoxes.of(holders)
        with about(f"tensor {key!r}"):
            layout = held.layout(shape, ranks)
        shares_of_boxes = []
        for place, index, number in zip(*(column.tolist() for column in held[:3]), strict=True):
            shares_of_boxes.append(shares[place][1][holders[index].item + number])
        # One share of each box counts, and its replicas must have the same.
        counted = []
        rows, begin = layout.by_box
        for replicas in np.split(rows, begin[1:-1]) if len(rows) else ():
            holding_ranks = [int(layout.buffers[number]) for number in layout.buffer[replicas].tolist()]
            replica_shares = [shares_of_boxes[row] for row in replicas.tolist()]
            ranks_by_share = _ranks_by(zip(replica_shares, holding_ranks, strict=True))
            if len(ranks_by_share) > 1:
                box = layout.fragments[replicas[0]].box
                disputes.append((key, f" box {box}: replicas differ: {_says(ranks_by_share, as_hex)}"))
            else:
                replicated += len(replicas) > 1
            counted.append(replica_shares[0])
        tensors[key] = TensorPrint(shape, dtype, as_hex(combine(*counted)))
    return HeldTogether(tensors, replicated, tuple(disputes))


def _ranks_by(values: Iterable[tuple[K, int]]) -> dict[K, list[int]]:
    """Return the ranks of each value, first the most common."""
    ranks: defaultdict[K, list[int]] = defaultdict(list)
    for value, rank in values:
        if rank not in ranks[value][-1:]:
            ranks[value].append(rank)
    return dict(sorted(ranks.items(), key=lambda entry: -len(entry[1])))


def _says(ranks: Mapping[K, Sequence[int]], shown: Callable[[K], str]) -> str:
    phrases = []
    for value, holders in ranks.items():
        subject, verb = ("ranks", "hold") if len(holders) > 1 else ("rank", "holds")
        phrases.append(f"{subject} {listed(holders)} {verb} {shown(value)}")
    return ", ".join(phrases)


def differing(live: Mapping[str, TensorPrint], expected: Mapping[str, TensorPrint]) -> Iterator[str]:
    """Yield a phrase for each key that differs."""
    for key in sorted(live.keys() | expected.keys()):
        live_print, expected_print = live.get(key), expected.get(key)
        if live_print is None:
            yield f"{key!r} is missing"
        elif expected_print is None:
            yield f"{key!r} is not expected"
        elif live_print.shape != expected_print.shape:
            yield f"{key!r} has shape {live_print.shape}, expected {expected_print.shape}"
        elif live_print.dtype != expected_print.dtype:
            yield f"{key!r} is {live_print.dtype}, expected {expected_print.dtype}"
        elif live_print.fingerprint != expected_print.fingerprint:
            yield f"{key!r} has fingerprint {live_print.fingerprint}, expected {expected_print.fingerprint}"
