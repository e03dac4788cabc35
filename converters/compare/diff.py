"""Differences between two checkpoints of any formats, topologies and, if both are translated, programs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

from ...names.collector import gc_paused
from ...names.errors import MuonckptError, SourceError
from ...names.wording import fields_of
from ...programs.model_view import ModelView, Role
from ...programs.quantised import describe_quantised, scales_of_quantised
from ...programs.registry import program
from ...record.record import by_key, entry_keys, match_keys, names_of
from ...store.formats.torch_save.plain_item import plain_value
from ...store.io.location import Remote, location
from ...store.open_checkpoint import OpenCheckpoint, checked_blob
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Progress
from ...store.verify.diagnosis import open_whole
from ...store.verify.verification import unless_removed
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from ..look.contents import FirstLook, first_look, recorded_step
from ..translate.request import Request
from .elements import (
    CHANGED,
    CLOSE,
    MOVED,
    SAME,
    StoredSide,
    TensorDifference,
    Tolerance,
    compare_elements,
    known_to_be_equal,
)

DIFF_MEMORY = 256 << 20

Look = Callable[[], FirstLook]


@dataclass(frozen=True, slots=True)
class ItemDifference:
    """An item that is not a tensor and differs: both values as plain data, or a sentence."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two checkpoints, ``a`` and ``b``.

    Attributes:
        a, b: where they are.
        steps: of both, None where unknown.
        tensors: one for each tensor that both have.
        only_a, only_b: the keys of tensors and items that one has.
        items: items that differ; ``same_items`` is the number of equal ones.
        unmoved: state, and weights that have state, with the same elements although the steps differ.
        read: bytes of elements that were read.
        unread: the number of tensors and items that are equal by both records, and were not read.
        notes: sentences about translations.
    """

    a: str
    b: str
    steps: tuple[int | float | None, int | float | None]
    tensors: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    items: tuple[ItemDifference, ...]
    same_items: int
    unmoved: tuple[str, ...]
    read: int
    unread: int
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        counts = Counter(tensor.status for tensor in self.tensors)
        return {status: counts[status] for status in (SAME, MOVED, CLOSE, CHANGED)}

    @property
    def differs(self) -> bool:
        """Return whether anything differs but where elements lie, and by more than the tolerance."""
        return bool(self.counts[CHANGED] or self.only_a or self.only_b or self.items)

    def to_json(self) -> dict[str, Any]:
        return {**fields_of(self), "differs": self.differs, "counts": self.counts}


def diff(
    a: str | os.PathLike[str] | Remote,
    b: str | os.PathLike[str] | Remote,
    *,
    select: Sequence[str] = (),
    to_dialect: str | None = None,
    from_a: str | None = None,
    from_b: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    read: bool = False,
    memory: int = DIFF_MEMORY,
    jobs: int = 2,
    progress: Progress = lambda count, total: None,
) -> Difference:
    """Compare two checkpoints, as ``muonckpt diff`` prints it; needs no torch.

    The presence and the size of every file are looked at.  Tensors whose recorded fingerprints are equal, and items
    whose recorded digests are, are read only with ``read``.  For the others all elements are compared, in
    bounded memory, after a check of their checksums.

    Args:
        a, b: paths or URLs, of any formats, meshes and layouts.
        select: shell patterns; only tensors and items whose key matches one are compared.
        to_dialect: the program in whose keys and momentum convention both are compared; None means as they are.
        from_a, from_b: the programs that wrote them, if ``to_dialect`` is given and their keys do not tell.
        rtol, atol: numbers are close if they differ by at most ``atol + rtol * max(|a|, |b|)``; by default bits have
            to be equal.
        read: whether to read both whole first, and to compare everything with what was recorded of it, as `verify`
            does; then all that is compared is what the files hold.
        memory: bytes that the elements under comparison may take.
        jobs: threads.
        progress: called with the bytes compared since the last call, and with the total.

    Raises:
        SourceError: one is damaged, or was removed meanwhile.
        UnavailableError: one cannot be read now, or not by this user.
        LayoutError: a tensor has a hole or an overlap.
        TargetError: a program is unknown, or a pattern matches nothing.
    """
    with ExitStack() as stack:
        sides: list[_Side] = []
        with gc_paused():
            for place, from_dialect in ((a, from_a), (b, from_b)):
                stack.enter_context(unless_removed(location(place, SourceError)))
                opened = stack.enter_context(open_whole(place))
                look = cache(partial(first_look, opened))
                sides.append(_Side.of(opened, look, to_dialect, from_dialect))
        if select:
            selected_keys = _selected_keys(sides, select)
            sides = [side.selected(selected_keys) for side in sides]
        verified_bytes = None
        if read:
            from ...store.verify.audit import audit  # imports what nothing else of `diff` needs

            verified_bytes = 0
            for side in sides:
                report = audit(side.opened, progress, jobs)
                if report.diagnosis.has_loss:
                    raise report.diagnosis.error
                verified_bytes += report.payload_bytes
        return _compare_sides(sides[0], sides[1], Tolerance(rtol, atol), memory, jobs, progress, verified_bytes)


def diff_of(
    a: tuple[OpenCheckpoint, FirstLook],
    b: tuple[OpenCheckpoint, FirstLook],
    *,
    without: Collection[str] = (),
    memory: int,
    jobs: int,
    progress: Progress,
) -> Difference:
    """Compare two checkpoints that are open and sorted already, ``without`` the tensors and items with the keys."""

    def side(opened: OpenCheckpoint, look: FirstLook) -> _Side:
        return _Side.of(opened, lambda: look, None, None, without)

    return _compare_sides(side(*a), side(*b), Tolerance(), memory, jobs, progress)


def _selected_keys(sides: Sequence[_Side], patterns: Sequence[str]) -> Collection[str]:
    """Return the keys of both sides that the patterns match, as keys or as names of parameters.

    Where a key has one name as compared and another as stored, the stored one counts.
    """
    keys: dict[str, None] = {}
    names: dict[str, tuple[str, str]] = {}
    for side in sides:
        keys |= dict.fromkeys((*side.tensors, *side.items))
        names.update(names_of(tensor.record for tensor in side.tensors.values()))
    for side in sides:
        names.update(names_of(side.look().manifest.tensors))
    where = " in " + " or ".join(side.place for side in sides)
    return match_keys(patterns, list(keys), names, "tensor or item", where)


def _compare_sides(
    a: _Side,
    b: _Side,
    tolerance: Tolerance,
    memory: int,
    jobs: int,
    progress: Progress,
    verified_bytes: int | None = None,
) -> Difference:
    """Compare two sides; ``verified_bytes`` are those of both if all was read before and is as recorded."""
    tensors, compared_bytes = _compare_tensors(a, b, tolerance, memory, jobs, progress)
    common_items = [key for key in a.items if key in b.items]
    items_to_read = [key for key in common_items if not _has_equal_digest(a.items[key], b.items[key])]
    changed_items = _changed_items(a, b, items_to_read)
    num_unread = sum(tensor.by == "fingerprint" for tensor in tensors) + len(common_items) - len(items_to_read)
    steps = a.step, b.step
    has_moved_on = None not in steps and steps[0] != steps[1]
    return Difference(
        a=a.place,
        b=b.place,
        steps=steps,
        tensors=tensors,
        only_a=a.keys_without(b),
        only_b=b.keys_without(a),
        items=changed_items,
        same_items=len(common_items) - len(changed_items),
        unmoved=_unmoved_keys(a.look().view, tensors) if has_moved_on else (),
        read=compared_bytes + (verified_bytes or 0),
        unread=num_unread if verified_bytes is None else 0,
        notes=(*(f"{a.place}: {note}" for note in a.notes), *(f"{b.place}: {note}" for note in b.notes)),
    )


def _has_equal_digest(a: OutputItem, b: OutputItem) -> bool:
    """Return whether both items are stored with one recorded digest, so that neither has to be read."""
    return bool(a.source and b.source and a.source.digest is not None and a.source.digest == b.source.digest)


def _changed_items(a: _Side, b: _Side, keys: Sequence[str]) -> tuple[ItemDifference, ...]:
    """Read the items with these keys; return the ones whose values differ."""
    changed_items: list[ItemDifference] = []
    for key in keys:
        bytes_a, bytes_b = a.read_item(key), b.read_item(key)
        if bytes_a != bytes_b:
            # Other bytes may be plain data with the same value.
            value_a, value_b = value_of(bytes_a), value_of(bytes_b)
            if OPAQUE in (value_a, value_b) or repr(value_a) != repr(value_b):
                changed_items.append(ItemDifference(key, value_a, value_b))
    return tuple(changed_items)


def _unmoved_keys(view: ModelView, tensors: Sequence[TensorDifference]) -> tuple[str, ...]:
    """Return the keys of equal tensors that training changes in every step, and that therefore may be stale."""
    moving = {*entry_keys(view.tensors_of(Role.MOMENTUM, Role.MOMENTS, Role.MASTERS))}
    moving |= {p.weight.key for p in view.parameters.values() if p.weight and p.state}
    return tuple(tensor.key for tensor in tensors if tensor.key in moving and tensor.status in (SAME, MOVED))


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints, perhaps translated; ``is_located`` says whether the places of all elements are known.

    ``look`` sorts its metadata, which takes time and is not always needed.  ``quantised`` has the keys of quantised
    weights, each with that of its scales.
    """

    opened: OpenCheckpoint
    look: Look
    tensors: Mapping[str, OutputTensor]
    items: Mapping[str, OutputItem]
    is_located: bool
    quantised: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        opened: OpenCheckpoint,
        look: Look,
        to_dialect: str | None,
        from_dialect: str | None,
        without: Collection[str] = (),
    ) -> _Side:
        # Without a translation places of elements are looked up only for tensors that have to be read.
        if to_dialect is None:
            records = [t.without_empty_chunks() for t in opened.outline.tensors if t.key not in without]
            tensors = [OutputTensor(t, t.chunk_layout()) for t in records]
            blobs = [blob for blob in opened.outline.blobs if blob.key not in without]
            outputs = Outputs(tensors, [OutputItem(blob.key, blob.path, blob) for blob in blobs])
        else:
            from ..translate.translator import requested_outputs  # not needed without a program

            outputs = requested_outputs(opened, Request(program(from_dialect), program(to_dialect)))
        tensors_by_key, notes = by_key(outputs.tensors), outputs.notes
        quantised = scales_of_quantised(tensor.record for tensor in outputs.tensors)
        if quantised:
            notes = (*notes, f"note: {describe_quantised(quantised)}: compared bit by bit, not as numbers")
        is_located = to_dialect is not None
        return cls(opened, look, tensors_by_key, by_key(outputs.items), is_located, quantised, notes)

    @property
    def place(self) -> str:
        return str(self.opened.path)

    @property
    def step(self) -> int | float | None:
        # Counters are read only where the step was not recorded.
        recorded = recorded_step(self.opened.outline)
        return self.look().step if recorded is None else recorded

    def selected(self, keys: Collection[str]) -> _Side:
        tensors = {key: tensor for key, tensor in self.tensors.items() if key in keys}
        return replace(self, tensors=tensors, items={key: item for key, item in self.items.items() if key in keys})

    def keys_without(self, other: _Side) -> tuple[str, ...]:
        keys = (*self.tensors, *self.items)
        return tuple(key for key in keys if key not in other.tensors and key not in other.items)

    def stored(self, keys: Sequence[str]) -> list[StoredSide]:
        # A translated tensor knows the places of its elements already.
        tensors = [self.tensors[key] for key in keys]
        if not self.is_located:
            records = self.opened.locate([tensor.record for tensor in tensors])
            tensors = list(map(OutputTensor.copy_of, records))
        return [StoredSide(tensor, self.opened.payloads) for tensor in tensors]

    def read_item(self, key: str) -> bytes:
        item = self.items[key]
        return item.data if item.source is None else checked_blob(self.opened.payloads, item.source)


def _compare_tensors(
    a: _Side, b: _Side, tolerance: Tolerance, memory: int, jobs: int, progress: Progress
) -> tuple[tuple[TensorDifference, ...], int]:
    """Compare the common tensors; return what became of each, and the bytes that were read."""
    # Shapes and recorded fingerprints tell without reading.
    differences: dict[str, TensorDifference] = {}
    unread_keys: list[str] = []
    for key, tensor_a in a.tensors.items():
        if key not in b.tensors:
            continue
        tensor_b = b.tensors[key]
        kinds = (tensor_a.record.shape, tensor_b.record.shape), (tensor_a.record.dtype, tensor_b.record.dtype)
        if tensor_a.record.shape != tensor_b.record.shape:
            differences[key] = TensorDifference(key, CHANGED, "shape", *kinds)
        elif known_to_be_equal(tensor_a, tensor_b):
            is_same = tensor_a.layout is tensor_b.layout or tensor_a.boxes == tensor_b.boxes
            differences[key] = TensorDifference(key, SAME if is_same else MOVED, "fingerprint", *kinds)
        else:
            unread_keys.append(key)
    # The elements of all others are read.
    pairs = list(zip(a.stored(unread_keys), b.stored(unread_keys), strict=True))
    total = 0
    for record in (side.tensor.record for side in chain.from_iterable(pairs)):
        total += itemsize(record.dtype) * math.prod(record.shape)

    def compare(pair: tuple[StoredSide, StoredSide]) -> TensorDifference:
        are_codes = pair[0].tensor.record.key in a.quantised.keys() | b.quantised.keys()
        return compare_elements(*pair, tolerance, memory // jobs, lambda count: progress(count, total), are_codes)

    with ThreadPoolExecutor(jobs) as pool:
        differences.update(zip(unread_keys, pool.map(compare, pairs), strict=True))
    return tuple(differences[key] for key in a.tensors if key in differences), total


OPAQUE = "(not plain data)"


def value_of(raw: bytes) -> Any:
    """Return the value of an item from its bytes; `OPAQUE` if they are not plain data."""
    try:
        return plain_value(raw)
    except MuonckptError:
        return OPAQUE
