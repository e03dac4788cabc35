"""The state of all ranks together: which rank holds which part of a tensor, and layouts that prove it whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..algebra.box import Box, Index
from ..algebra.layout import Buffer, Fragment, TensorLayout, corners_of, dense, holes_in
from ..algebra.overlap import IntArray, overlaps
from ..layouts.mesh import MeshPlacement
from ..names.errors import LayoutError
from ..names.resumption import NAMES_OF_GROUPS
from .live_state import Digests, RankForm, RankState, ShardSpec, corners_by_kind

NO_RANK = "no rank"
"""The buffer of elements that no rank has, or asks for."""


class RankBoxes(NamedTuple):
    rank: int
    boxes: tuple[Box, ...]


class AlikeHolders(NamedTuple):
    """Ranks that hold a tensor or an object alike, as many boxes each.

    Attributes:
        identity: of the ranks together with the kind: equal ones hold equal boxes.
        places: of the ranks among all, ascending.
        item: the number of the first item, the same on each.
        kind: None for an object.
        lo, hi: the corners of boxes, ``[ranks, boxes, ndim]``.
    """

    identity: tuple[int, int]
    places: IntArray
    item: int
    kind: ShardSpec | None
    lo: IntArray
    hi: IntArray


class HeldBoxes(NamedTuple):
    """The boxes of a tensor on all its holders, a row each: the rank's place, the number of the holders, and the box.

    Attributes:
        number: counts boxes on a rank.
        lo, hi: corners, ``[rows, ndim]``.
    """

    place: IntArray
    holders: IntArray
    number: IntArray
    lo: IntArray
    hi: IntArray

    @classmethod
    def of(cls, holders: Sequence[AlikeHolders]) -> HeldBoxes:
        """Return all boxes, rank by rank."""
        tables = []
        for index, each in enumerate(holders):
            num_ranks, num_boxes, ndim = each.lo.shape
            numbers = np.tile(np.arange(num_boxes), num_ranks)
            corners = (corner.reshape(num_ranks * num_boxes, ndim) for corner in (each.lo, each.hi))
            tables.append((np.repeat(each.places, num_boxes), np.full_like(numbers, index), numbers, *corners))
        columns = [np.concatenate(column) for column in zip(*tables, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))

    def layout(self, shape: Index, names: Sequence[Buffer]) -> TensorLayout:
        """Return the layout of the tensor in buffers with the names by place; rows of boxes are fragments in order.

        Raises:
            LayoutError: no rank holds some elements, or boxes overlap in part.
        """
        sizes = self.hi - self.lo
        strides = np.ones_like(sizes)
        for dim in reversed(range(len(shape) - 1)):
            strides[:, dim] = strides[:, dim + 1] * sizes[:, dim + 1]
        # Offsets are as if a rank's boxes lay end to end.
        ends = np.cumsum(sizes.prod(axis=1))
        heads = np.flatnonzero(np.diff(self.place, prepend=-1))
        starts = np.append(0, ends)[:-1]
        buffer = np.cumsum(np.diff(self.place, prepend=-1) != 0) - 1
        offset = starts - starts[heads][buffer]
        corners = (
            (self.lo, self.hi) if shape else (np.zeros((len(ends), 1), np.int64), np.ones((len(ends), 1), np.int64))
        )
        buffers = tuple(names[place] for place in self.place[heads].tolist())
        try:
            return TensorLayout.of_columns(shape, corners, buffers, buffer, offset, strides)
        except LayoutError:
            in_words = tuple(f"rank {name}" for name in buffers)
            return TensorLayout.of_columns(shape, corners, in_words, buffer, offset, strides)  # raises the same


def with_joint_groups(ranks: Sequence[RankState]) -> list[RankState]:
    """Return the states of ranks with one number for each parameter group: groups are the same by the names in them.

    Where all ranks have the same groups, these are their own numbers; stages of a pipeline have groups of their own.
    """
    if all(state.form.optimizers == ranks[0].form.optimizers for state in ranks):
        return list(ranks)
    # A group gets its number with the first rank that has it; the order of ranks is the same everywhere.
    numbers: defaultdict[str, dict[object, int]] = defaultdict(dict)
    joint, forms = list[RankState](), dict[object, RankForm]()
    for state in ranks:
        rank_numbers: defaultdict[str, list[int]] = defaultdict(list)
        for optimizer in state.form.optimizers:
            groups, joint_numbers = optimizer.groups or (), numbers[optimizer.key]
            for place, names in enumerate(groups):
                identity = names or (groups, place)  # one without parameters is that of ranks with the same groups
                rank_numbers[optimizer.options].append(joint_numbers.setdefault(identity, len(joint_numbers)))
        renumbering = id(state.form), tuple(chain.from_iterable(rank_numbers.values()))
        if renumbering not in forms:
            forms[renumbering] = state.form.renumbered(rank_numbers)
        joint.append(replace(state, form=forms[renumbering]))
    return joint


def refuse_other_groups(ranks: Sequence[RankState], digests: Sequence[Digests], global_ranks: Sequence[int]) -> None:
    """Refuse a parameter that ranks have in groups with other options: a resume could take either's."""
    # Where all ranks have the same groups, equal keys are compared anyway, so there is nothing to look for.
    if all(state.form.optimizers == ranks[0].form.optimizers for state in ranks):
        return
    homes: dict[tuple[str, str], tuple[int, Mapping[str, bytes | None]]] = {}
    for rank, state in enumerate(ranks):
        items = dict(zip(state.form.keys, state.first_items(), strict=False))
        for optimizer in state.form.optimizers:
            keys = optimizer.options_of_groups(state.form.keys)
            for number, names in enumerate(optimizer.groups or ()):
                values = {}
                for option, key in keys.get(number, {}).items():
                    if option not in NAMES_OF_GROUPS:
                        values[option] = digests[rank].get(items[key])
                # The first rank that has a parameter says what its options are; others have to say the same.
                for name in names:
                    first, first_values = homes.setdefault((optimizer.key, name), (rank, values))
                    for option in sorted(values.keys() | first_values.keys()):
                        if values.get(option) != first_values.get(option):
                            raise other_options(f"{option} of {name}", global_ranks[first], global_ranks[rank])


def other_options(option: str, first: int, other_rank: int) -> LayoutError:
    return LayoutError(
        f"{option}: ranks {first} and {other_rank} have different values for the same parameters, and only one "
        "can be kept: set options alike on all ranks that hold a parameter; and where ranks train other parameters, as "
        "stages of a pipeline do, save get_optimizer_state_dict(model, optimizer), which names them, in place "
        "of optimizer or optimizer.state_dict()"
    )


def forms_of(ranks: Sequence[RankState]) -> list[RankForm]:
    """Return the forms of ranks, each once, in the order of the ranks."""
    return list({id(state.form): state.form for state in ranks}.values())


def holders_by_key(ranks: Sequence[RankState]) -> dict[str, list[AlikeHolders]]:
    """Return the holders of each tensor or object, by key; those with the first rank come first.

    Raises:
        LayoutError: no rank holds any element of a tensor.
    """
    # Ranks are alike that have one form and as many boxes of each kind.
    places_by_state: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for place, state in enumerate(ranks):
        places_by_state[id(state.form), state.counts].append(place)
    # A rank that has the tensor without any of its elements is no holder.
    holders: defaultdict[str, list[AlikeHolders]] = defaultdict(list)
    for group, places in enumerate(places_by_state.values()):
        first = ranks[places[0]]
        corners = [*corners_by_kind([ranks[place] for place in places])]
        ranks_alike = np.array(places, np.int64)
        for key, number, item in zip(first.form.keys, first.form.numbers, first.first_items(), strict=False):
            kind, (lo, hi) = first.form.kinds[number], corners[number]
            if kind is None or lo.shape[1] or 0 in kind.shape:
                holders[key].append(AlikeHolders((group, number), ranks_alike, item, kind, lo, hi))
    for form in forms_of(ranks):
        for key in form.keys:
            if key not in holders:
                raise LayoutError(f"tensor {key!r}: no rank holds any of its elements")
    return holders


@lru_cache(maxsize=65536)
def layout_on_ranks(shape: Index, rank_boxes: tuple[RankBoxes, ...], ranks: tuple[int, ...] = ()) -> TensorLayout:
    """Return the layout of a tensor on its ranks, with offsets as if a rank's boxes lay dense and end to end.

    Args:
        ranks: the global ranks of a group, if boxes are named by places in it: for errors.

    Raises:
        LayoutError: no rank holds some elements, or boxes overlap in part.
    """
    try:
        return TensorLayout.of(shape, _dense_fragments(rank_boxes))
    except LayoutError:
        # The same error with the names of ranks instead of their places.
        names = [(f"rank {ranks[rank] if ranks else rank}", boxes) for rank, boxes in rank_boxes]
        return TensorLayout.of(shape, _dense_fragments(names))


def _dense_fragments(boxes_by_buffer: Iterable[tuple[Buffer, Sequence[Box]]]) -> Iterator[Fragment]:
    """Yield the fragments of boxes that lie end to end in each buffer."""
    for buffer, boxes in boxes_by_buffer:
        start = 0
        for box in boxes:
            yield dense(box, buffer, start)
            start += box.numel


def unheld(shape: Index, boxes: Iterable[Box]) -> list[Box]:
    """Return boxes of the elements that are in none of the given boxes, which may overlap."""
    distinct = sorted(set(boxes), key=lambda box: box.lo)
    return [] if 0 in shape else holes_in(Box.of(shape), distinct)


@lru_cache(maxsize=65536)
def request_layouts(shape: Index, rank_boxes: tuple[RankBoxes, ...]) -> tuple[TensorLayout, ...]:
    """Return the layouts in which ranks want a tensor, each rank in one of them.

    There is one, unless boxes overlap in part, as when two inference engines cut tensors differently.

    Raises:
        LayoutError: the boxes of one rank overlap, or reach outside the tensor.
    """
    return tuple(filled_layout(shape, ranks) for ranks in _group_disjoint(shape, rank_boxes))


def filled_layout(shape: Index, ranks: Iterable[RankBoxes]) -> TensorLayout:
    """Return the layout of a tensor on ranks, as `layout_on_ranks`, with all other elements at `NO_RANK`."""
    fragments = [*_dense_fragments(ranks)]
    holes = unheld(shape, (fragment.box for fragment in fragments))
    return TensorLayout.of(shape, [*fragments, *_dense_fragments([(NO_RANK, holes)])])


def _group_disjoint(shape: Index, rank_boxes: tuple[RankBoxes, ...]) -> list[list[RankBoxes]]:
    """Distribute ranks to few lists; within each, boxes are equal or disjoint."""
    # Equal boxes have one number, as replicas do not stand against each other.
    numbers: dict[Box, int] = {}
    for _, boxes in rank_boxes:
        for box in boxes:
            numbers.setdefault(box, len(numbers))
    lo, hi = corners_of(shape, list(numbers))
    # Boxes that overlap in part can be in no list together.
    overlapping: defaultdict[int, set[int]] = defaultdict(set)
    for i, j in zip(*overlaps(lo, hi, lo, hi), strict=True):
        if i != j:
            overlapping[int(i)].add(int(j))
    # Each rank goes into the first list where nothing stands against it: mostly there is one.
    lists: list[tuple[list[RankBoxes], set[int]]] = []
    for request in rank_boxes:
        box_numbers, barred_numbers = set[int](), set[int]()
        for box in request.boxes:
            box_numbers.add(numbers[box])
            barred_numbers |= overlapping.get(numbers[box], set())
        for members, numbers_in_list in lists:
            if not (barred_numbers - box_numbers) & numbers_in_list:
                members.append(request)
                numbers_in_list |= box_numbers
                break
        else:
            lists.append(([request], box_numbers))
    return [members for members, _ in lists]


def prove_asked_whole(ranks: Mapping[int, RankState], attest: bool) -> None:
    """Prove that no rank's template lacks a tensor that the rank holds in part: it would stay unloaded, unnoticed.

    Where only boxes say who holds what, and some rank lacks the tensor, the others' have to be all of it.  Where all
    ranks have it, their boxes may be a part of it.

    Args:
        ranks: what each global rank asks for.
        attest: True if ranks together have to ask for all of each tensor, as fingerprints are of whole tensors.

    Raises:
        LayoutError: names the tensor, and the rank or the box that is missing.
    """
    # Layers repeat, so each combination of kinds on ranks is proved once.
    kinds_of: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank, state in ranks.items():
        for key, number in zip(state.form.keys, state.form.numbers, strict=True):
            kinds_of[key][rank] = number
    proved = set()
    for key, numbers in kinds_of.items():
        name = tuple(numbers.items())
        if name in proved:
            continue
        proved.add(name)
        # Placements say which ranks hold a part: each of them must request it.
        shape: Index = ()
        boxes = list[Box]()
        placements: dict[int, tuple[MeshPlacement, int]] = {}
        for rank, number in numbers.items():
            kind = ranks[rank].form.kinds[number]
            assert kind is not None, "only tensors are requested by boxes"
            shape = kind.shape
            boxes += ranks[rank].boxes_by_kind[number]
            if kind.placement is not None:
                placements.setdefault(id(kind.placement), (kind.placement, rank))
        for placement, rank in placements.values() if len(numbers) < len(ranks) else ():
            for rank_without in placement.holders(shape):
                if rank_without not in ranks or rank_without in numbers:
                    continue
                raise LayoutError(
                    f"tensor {key!r} is in the state dict of rank {rank}, whose placements give a part of it to rank "
                    f"{rank_without}, but not in that of rank {rank_without}, where that part would stay as it was: "
                    "load with the same keys on all ranks that hold the tensor"
                )
        # Boxes say nothing of ranks that lack the tensor: only a whole one leaves them nothing.
        if placements or (len(numbers) == len(ranks) and not attest):
            continue
        for hole in unheld(shape, boxes):
            if attest:
                raise LayoutError(
                    f"tensor {key!r}: attest=True compares fingerprints of whole tensors, and no rank's state dict has "
                    f"box {hole} of it, of shape {shape}. Nothing was loaded. Load without attest=True"
                )
            raise LayoutError(
                f"tensor {key!r}: no rank's state dict asks for box {hole} of it, of shape {shape}, so whoever "
                "holds that would keep it as it was: load with the same keys on all ranks that hold the tensor"
            )
