"""The offers that ranks make each other of state in memory: tensors and objects, as entries like a checkpoint's."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..names.errors import LayoutError
from ..names.keys import is_of_optimizer, optimizers_of, rank_key
from ..names.vocabulary import KeyPath
from ..record.record import Blob, Extent, StateRecord
from ..store.io.checksums import xxh3_128
from .live_state import Digests, LiveState, RankState, other_options, refuse_other_groups, with_joint_groups
from .template import Stored


@dataclass(frozen=True, slots=True)
class Offer:
    """A rank's source, as it tells the others.

    Attributes:
        arguments: those that have to be the same on all ranks.
        pickled, options: objects that are not tensors, and options that are, by key.
        digests: those of these objects, by the numbers of items.
    """

    arguments: Mapping[str, object]
    state: RankState
    pickled: Mapping[str, bytes]
    options: Mapping[str, float]
    digests: Digests
    devices: frozenset[str]

    @classmethod
    def of(cls, live: LiveState, arguments: Mapping[str, object]) -> Offer:
        pickled, options = {}, {}
        for key, value in live.flat.items():
            if key not in live.parts:
                pickled[key] = pickle.dumps(value)
            elif type(value) is Tensor and value.numel() == 1 and "param_groups" in key:
                options[key] = float(value)
        return cls(arguments, live.described, pickled, options, live.digests, live.devices)

    def known_as(self, state: RankState) -> Offer:
        """Return the same with the keys of a state, which is this one with other numbers of groups."""
        keys = dict(zip(self.state.keys, state.keys, strict=True))
        pickled = {keys[key]: value for key, value in self.pickled.items()}
        options = {keys[key]: value for key, value in self.options.items()}
        return replace(self, state=state, pickled=pickled, options=options)

    def objects(self) -> Iterator[tuple[Blob, bytes]]:
        """Yield the objects, and what tells them apart."""
        for key, path, item in zip(self.state.keys, self.state.paths, self.state.first_items(), strict=False):
            if key in self.pickled:
                yield _blob(key, path, self.pickled[key]), self.digests[item]


def _blob(key: str, path: KeyPath, pickled: bytes) -> Blob:
    return Blob(key, path, Extent("live", 0, len(pickled)), xxh3_128([pickled]))


def known_jointly(offers: Sequence[Offer]) -> list[Offer]:
    """Return offers with one number for each parameter group; raises as `refuse_other_groups`."""
    states = [offer.state for offer in offers]
    refuse_other_groups(states, [offer.digests for offer in offers])
    return [offer.known_as(state) for offer, state in zip(offers, with_joint_groups(states), strict=True)]


def stored_of(ranks: Sequence[int], offers: Sequence[Offer], place: tuple[int, int]) -> tuple[dict[str, bytes], Stored]:
    """Return what ranks offer: objects by key, and all entries; objects that differ for each rank, as `save` has them.

    Raises:
        LayoutError: a key stands for a tensor and for something else, or an option differs from rank to rank.
    """
    entries: dict[str, tuple[StateRecord | Blob, int]] = {}
    items: dict[str, bytes] = {}
    options: dict[str, Any] = {}
    digests: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
    # Of a key that several ranks have, the first one's value counts; all have to say the same kind of thing.
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
