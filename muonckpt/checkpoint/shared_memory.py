"""Tensors that share memory, element by element: what would be lost of several values that come into one place.

Tied weights are whole tensors in one memory, which is legal as long as their values are the same.  Elements that share
memory in any other way keep only the last write, so they are refused before anything is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algebra.box import Index
from ..algebra.overlap import IntArray
from ..layouts.boxed_tensor import Parts, whole_shape
from ..names.errors import LayoutError
from .live_state import LiveState


class Elements(NamedTuple):
    """The memory of a part's elements, in their order: equal ones are the same elements, read in the same way."""

    device: torch.device
    start: int
    form: ElementForm

    @classmethod
    def of(cls, part: Tensor) -> Elements:
        form = _form(part.shape, part.stride(), part.dtype, part.is_conj(), part.is_neg())
        return cls(part.device, part.data_ptr(), form)

    @property
    def stop(self) -> int:
        """The address after the last element."""
        return self.start + self.form.geometry.extent


@dataclass(frozen=True, eq=False)
class ElementForm:
    """The way in which elements lie from the first one on; parts in memory of one form share it, as layers repeat."""

    shape: Index
    strides: Index
    itemsize: int
    is_lazy: bool

    @cached_property
    def geometry(self) -> Geometry:
        return _geometry(self.shape, self.strides, self.itemsize)


@cache
def _form(shape: Index, strides: Index, dtype: torch.dtype, is_conj: bool, is_neg: bool) -> ElementForm:
    # The stride of a dim of one element moves nothing, so equal elements would differ by it.
    plain = tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    if plain != strides:
        return _form(shape, plain, dtype, is_conj, is_neg)
    return ElementForm(tuple(shape), strides, dtype.itemsize, is_conj or is_neg)


class Geometry(NamedTuple):
    """Places of elements relative to the first one, in bytes, without an order.

    Attributes:
        extent: from the first byte to the end of the last element.
        run: the length of runs.
        steps: from run to run, in bytes, and how many runs there are in each direction.
        overlaps: whether two elements share memory, as those of an expanded tensor do.
    """

    extent: int
    run: int
    steps: tuple[tuple[int, int], ...]
    overlaps: bool

    def runs(self) -> IntArray:
        """Return where runs begin."""
        starts = np.zeros(1, np.int64)
        for step, count in self.steps:
            starts = np.add.outer(np.arange(count, dtype=np.int64) * step, starts).reshape(-1)
        return starts


def _geometry(shape: Index, strides: Index, itemsize: int) -> Geometry:
    """Merge dims into runs."""
    # From the smallest step up: dims that continue a run without a gap become one run.
    run, steps = itemsize, list[tuple[int, int]]()
    for step, count in sorted((stride * itemsize, size) for size, stride in zip(shape, strides, strict=True)):
        if step == run:
            run *= count
        elif count > 1:
            steps.append((step, count))
    # Steps that pass over all that came before cannot meet; mostly that is proof enough.
    extent, numel, nested = run, run, True
    for step, count in steps:
        nested &= step >= extent
        extent, numel = extent + step * (count - 1), numel * count
    geometry = Geometry(extent, run, tuple(steps), not nested)
    if nested or numel > extent:
        return geometry
    # Interleaved dims, which are rare: compare the runs themselves.
    return geometry._replace(overlaps=bool((np.diff(np.sort(geometry.runs())) < run).any()))


def tied_keys(live: LiveState, keys: Collection[str]) -> set[str]:
    """Return the keys of all tensors that are, element by element, in the memory of one with a given key."""

    # Tensors are tied where the same boxes have the same memory, and cover all of a tensor of one shape.
    def places(key: str) -> tuple[Index, frozenset[tuple[Index, Elements]]]:
        elements = {lo: Elements.of(part) for lo, part in live.parts[key].items()}
        return whole_shape(live.flat[key]), frozenset(elements.items())

    memory = set(map(places, live.parts.keys() & keys))
    return {key for key in live.parts if places(key) in memory}


def tied_origins(target: LiveState, origins: Mapping[str, str], zeros: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return pairs of tensors of a source for which a target has one memory, as for tied weights: they must be equal.

    Args:
        origins: keys of the source, by keys of the target; those of objects that are not tensors do not count.
        zeros: keys of the target that become zeros.

    Raises:
        LayoutError: elements of the target share memory otherwise, or are conjugate or negative views; names them.
    """
    places: dict[Elements, tuple[str, Index]] = {}
    tied = set()
    for key in (*origins, *zeros):
        for lo, part in target.parts.get(key, {}).items():
            # The first tensor in a place represents it; another one there must be the same whole tensor.
            elements, place = Elements.of(part), (key, lo)
            if not part.numel() or not elements.start:  # of a class that has no memory of its own
                continue
            if elements.form.is_lazy or elements.form.geometry.overlaps:
                raise _losing(key, elements.form)
            first_key, first_lo = places.setdefault(elements, place)
            if (first_key, first_lo) == place:
                continue
            origin, other_origin = origins.get(key), origins.get(first_key)
            whole = whole_shape(target.flat[key]) == whole_shape(target.flat[first_key])
            if first_key == key or lo != first_lo or not whole or (origin is None) != (other_origin is None):
                raise _losing_both(first_key, key)
            if origin != other_origin and origin is not None and other_origin is not None:
                tied.add((other_origin, origin))
    # Places that are not the same may still have bytes in common.
    if pair := _first_clash([*places], [True] * len(places)):
        keys = [key for key, _ in places.values()]
        raise _losing_both(*(keys[number] for number in sorted(pair)))
    return frozenset(tied)


def _losing(key: str, form: ElementForm) -> LayoutError:
    if form.is_lazy:
        return LayoutError(
            f"tensor {key!r} is a conjugate or negative view, whose memory has other values than it shows: give a "
            "tensor with memory of its own (tensor.resolve_conj().resolve_neg()), and copy from it afterwards"
        )
    return LayoutError(
        f"elements of tensor {key!r} share memory with each other, as those of an expanded tensor do, so that one "
        "value would be left of several: give a tensor with memory for each (tensor.contiguous())"
    )


def _losing_both(key: str, other_key: str) -> LayoutError:
    return LayoutError(
        f"tensors {key!r} and {other_key!r} share memory, and are not one whole tensor, as tied weights are, so that "
        "only the values of one of them would be left there: give memory of its own to each (tensor.clone()), "
        "or leave one "
        "out of the state dict and name it in allow_extra"
    )


def differing_ties(key: str, other_key: str, source: object) -> str:
    """Return the words for two tensors of a source that differ, and come into one memory."""
    return (
        f"tensors {key!r} and {other_key!r} differ in {source}, and share their memory here, as tied weights do, "
        "so that only one of them would be left: load them into a model whose weights are not tied, or leave "
        "one out of "
        "the state dict and name it in allow_extra"
    )


def check_apart(source: Mapping[str, Parts], target: Mapping[str, Parts], origins: Mapping[str, str]) -> None:
    """Check that no element of the target is in memory of the source, unless it is in the place of its source.

    Args:
        origins: keys of the source, by keys of the target.

    Raises:
        LayoutError: names the tensors.
    """
    # Places that are read come first, so that a number shows whether a place is written.
    places: list[tuple[str, Elements]] = []
    for key, parts in source.items():
        places += [(key, Elements.of(part)) for part in parts.values()]
    num_read, target_places = len(places), dict[Elements, str]()
    for key, parts in target.items():
        source_parts = source.get(origins.get(key, ""), {})
        for lo, part in parts.items():
            place = Elements.of(part)
            if lo not in source_parts or place != Elements.of(source_parts[lo]):
                target_places.setdefault(place, key)
    places += ((key, place) for place, key in target_places.items())
    if pair := _first_clash([place for _, place in places], [number >= num_read for number in range(len(places))]):
        overwritten, read = (places[number][0] for number in pair)
        raise LayoutError(
            f"tensor {overwritten!r} of the target shares memory with {read!r} of the source, which would "
            "be overwritten before all of it is read: give the target memory of its own"
        )


def _first_clash(places: Sequence[Elements], is_target: Sequence[bool]) -> tuple[int, int] | None:
    """Return the numbers of two places that have a byte in common; the first one is written.

    Written places share no byte with each other.
    """
    # Almost all places are alone in their span, so runs are made only of the others.
    for cluster in _clusters(places):
        geometries = [places[number].form.geometry for number in cluster]
        runs = [places[number].start + of.runs() for number, of in zip(cluster, geometries, strict=True)]
        counts, start = [len(starts) for starts in runs], np.concatenate(runs)
        order = np.argsort(start, kind="stable")
        owner = np.repeat(cluster, counts)[order]
        start, stop = start[order], start[order] + np.repeat([of.run for of in geometries], counts)[order]
        is_written = np.array(is_target)[owner]
        # Sorted by their beginnings, a run clashes if one before it has not ended.
        reach, written_reach = (np.maximum.accumulate(ends)[:-1] for ends in (stop, np.where(is_written, stop, 0)))
        clashes = (start[1:] < written_reach) | (is_written[1:] & (start[1:] < reach))
        # The first clash is enough for an error; the place that is written is named first.
        if clashes.any():
            later = int(clashes.argmax()) + 1
            earlier = (stop[:later] > start[later]) & (is_written[:later] | is_written[later])
            pair = int(owner[later]), int(owner[int(earlier.argmax())])
            return pair if is_target[pair[0]] else pair[::-1]
    return None


def _clusters(places: Sequence[Elements]) -> Iterator[list[int]]:
    """Yield the numbers of places whose spans overlap, several at a time: almost all places are alone."""
    spans: defaultdict[torch.device, list[tuple[int, int, int]]] = defaultdict(list)
    for number, place in enumerate(places):
        if place.start and 0 not in place.form.shape:
            spans[place.device].append((place.start, place.stop, number))
    # In the order of their beginnings, a span that begins where all before it have ended begins a cluster.
    for of_device in spans.values():
        cluster, reach = list[int](), 0
        for start, stop, number in sorted(of_device):
            if start >= reach:
                if len(cluster) > 1:
                    yield cluster
                cluster = []
            cluster.append(number)
            reach = max(reach, stop)
        if len(cluster) > 1:
            yield cluster
