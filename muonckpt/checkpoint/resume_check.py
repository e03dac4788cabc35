"""The proof that a resumed run goes on from what was saved: what will run, compared with what was loaded, exactly.

`resume_proof` has what a load took from the checkpoint, `live_parts` finds the same in a live model, and `compare`
compares both on all ranks: tensors by fingerprint, everything else by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts.tensors import local_of
from ..names.errors import AttestError
from ..names.keys import OptimizerKey, key_of, largest_parts
from ..names.resumption import in_short
from ..names.vocabulary import GIVEN_KEYS, HISTORY_OPTIONS, KeyPath
from .all_ranks import JointWork, group_ranks, refuse_mixed_calls
from .attestation import SharesOfRank, held_together, shares_of
from .live_parts import LiveParts
from .live_state import LiveState
from .resume_proof import (
    ABSENT,
    Dispute,
    LoadedState,
    ResumeDifference,
    ResumeProof,
    TensorElement,
    item_of,
    same_value,
)
from .storable import refuse_unwritable


@dataclass(frozen=True, slots=True)
class _RankAnswer:
    """A rank's part of the comparison.

    Attributes:
        loaded: what the comparison is with.
        shares, buffers: of the fingerprints of its tensors, and of the model's buffers that are in no state dict.
        differences: between values that are no tensors.
        equal_items: how many of them are as they were saved.
        template_keys, covered_keys: all keys of the template, and those of parts that are compared.
        unchecked: parts of the template that are not compared.
        unloaded_items: keys of values that are compared, and were not loaded.
        unloaded_options: those of them that are options of groups.
        unrestored: names of weights that were not restored.
    """

    loaded: LoadedState
    shares: SharesOfRank
    buffers: SharesOfRank
    differences: tuple[ResumeDifference, ...]
    equal_items: int
    template_keys: frozenset[str]
    covered_keys: frozenset[str]
    unchecked: frozenset[str]
    unloaded_items: frozenset[str]
    unloaded_options: frozenset[str]
    unrestored: frozenset[str]


def compare(
    take_parts: Callable[[], LiveParts],
    step: int,
    process_group: dist.ProcessGroup | None,
) -> ResumeProof:
    """Compare what will run with what was loaded, on all ranks.  Collective; changes nothing.

    Args:
        take_parts: returns this rank's part of what will run; its errors are raised on all ranks.

    Raises:
        ArgumentError, AttestError: what will run cannot be told, or read.
        LayoutError: no rank holds some elements of a tensor.
    """
    refuse_mixed_calls(process_group, "Restored.check")
    with JointWork(process_group, AttestError) as work:
        answers = work.gather(_make_rank_answer(take_parts()))
        return work.broadcast(None if answers is None else _prove(step, group_ranks(process_group), answers))


def _make_rank_answer(parts: LiveParts) -> _RankAnswer:
    """Return the differences of this rank's values that are no tensors, and what `_prove` compares tensors by.

    A tensor may be cut over the ranks, so each takes its shares of the fingerprints, and the first rank joins them.
    """
    # Tensors that have no fingerprint are refused by name, before work is spent.
    loaded, live = parts.loaded, LiveState.of(parts.state_dict, "to check")
    for key, value in live.flat.items():
        if isinstance(value, Tensor):
            refuse_unwritable(key, value)
    # Tensors: only their shares.  Other values: compared here, with those that this rank has loaded.
    shares = shares_of(live, live.parts)
    differences = {difference.key: difference for difference in (*_item_differences(live, parts), *parts.faults)}
    # The proof counts equal values, an option once for a group; those of tensors without dims count there as tensors.
    equal_items = set[str]()
    for key, saved in loaded.items.items():
        if key in live.flat and key not in differences and not isinstance(saved, TensorElement):
            equal_items.add(loaded.origins[key])
    # Buffers that are in no state dict: nothing was saved, so ranks are compared with each other.
    buffers = LiveState.of(dict(parts.buffers), "to check")
    shares_of_buffers = shares_of(buffers, buffers.parts)
    buffer_faults = [*_buffer_faults(parts.buffers)]
    # Values that the load left as the template had them: the proof names them, as it has nothing to compare them with.
    # Options that schedulers write for themselves are left out, as they change no step.
    unloaded_items = set[str]()
    for key in live.flat.keys() & loaded.paths.keys() - loaded.items.keys():
        if not isinstance(live.flat[key], Tensor) and _option_of(live.paths[key]) not in HISTORY_OPTIONS:
            unloaded_items.add(key)
    # The largest parts of the template in which nothing is compared.
    covered_paths = map(loaded.paths.__getitem__, parts.covered_keys)
    absent_paths = [path for key, path in loaded.paths.items() if key not in parts.covered_keys]
    unchecked_parts = map(key_of, largest_parts(absent_paths, covered_paths))
    return _RankAnswer(
        loaded=loaded,
        shares=shares,
        buffers=shares_of_buffers,
        differences=(*differences.values(), *buffer_faults),
        equal_items=len(equal_items),
        template_keys=frozenset(loaded.paths),
        covered_keys=parts.covered_keys,
        unchecked=frozenset((*unchecked_parts, *parts.unchecked)),
        unloaded_items=frozenset(unloaded_items),
        unloaded_options=frozenset(key for key in unloaded_items if any(OptimizerKey.of_option(live.paths[key]))),
        unrestored=frozenset(parts.unrestored),
    )


def _prove(step: int, ranks: Sequence[int], answers: Sequence[_RankAnswer]) -> ResumeProof:
    """Join the answers of all ranks to the proof, on the first one."""
    loaded = answers[0].loaded
    # Values differ on whichever rank has them; sets are those of any rank.
    differences: dict[str, ResumeDifference] = {}
    template_keys, covered_keys, unloaded_items, unloaded_options = set[str](), set[str](), set[str](), set[str]()
    unchecked_parts, unrestored_names = set[str](), set[str]()
    for answer in answers:
        for difference in answer.differences:
            differences[difference.key] = difference
        template_keys |= answer.template_keys
        covered_keys |= answer.covered_keys
        unloaded_items |= answer.unloaded_items
        unloaded_options |= answer.unloaded_options
        unchecked_parts |= answer.unchecked
        unrestored_names |= answer.unrestored
    # Tensors that ranks should hold alike.
    live_tensors = held_together(ranks, [answer.shares for answer in answers])
    for key, phrase in live_tensors.disputes:
        dispute = Dispute(phrase.lstrip(": "))
        differences.setdefault(key, ResumeDifference(key, loaded.prints.get(key, ABSENT), dispute))
    # Tensors: those that were loaded have to be there, with the elements that they had.
    for key, saved in loaded.prints.items():
        live = live_tensors.tensors.get(key, ABSENT)
        if live != saved and (live is not ABSENT or key in covered_keys or key not in template_keys):
            differences.setdefault(key, ResumeDifference(key, saved, live))
    # Tensors that were not loaded: they began from zero, or belong to no restored state.
    new_keys = live_tensors.tensors.keys() - loaded.prints.keys() - differences.keys() - {*loaded.initialised}
    for key in new_keys - template_keys:
        differences[key] = ResumeDifference(key, ABSENT, live_tensors.tensors[key])
    # Buffers that nothing saved: ranks hold the same, or they differ.
    live_buffers = held_together(ranks, [answer.buffers for answer in answers])
    for name, phrase in live_buffers.disputes:
        differences.setdefault(name, ResumeDifference(name, ABSENT, Dispute(f"a buffer{phrase or ' differs'}")))
    # The proof names what it leaves out, so that it is not taken for more than it is.
    unchecked = sorted(unchecked_parts)
    if names := sorted(live_buffers.tensors.keys() - differences.keys()):
        unchecked.append(f"{in_short(names)}, which no state dict has")
    grown = new_keys & {*loaded.grown}
    if grown:
        unchecked.append(f"{in_short(sorted(grown))}, which have grown")
    unloaded_items -= differences.keys()
    if code_options := sorted(unloaded_items & unloaded_options):
        unchecked.append(f"{in_short(code_options)}, which are the code's")
    if new_items := sorted((new_keys & template_keys - grown) | (unloaded_items - unloaded_options)):
        unchecked.append(f"{in_short(new_items)}, which began from zero, or have no recorded fingerprint")
    if unrestored_names:
        unchecked.append(f"{in_short(sorted(unrestored_names))}, which the checkpoint does not have")
    if loaded.unloaded_keys:
        unchecked.append(f"{in_short(loaded.unloaded_keys)}, which stay in the checkpoint")
    equal_keys = loaded.prints.keys() & live_tensors.tensors.keys() - differences.keys()
    equal_tensors = {loaded.origins.get(key, key) for key in equal_keys}
    equal_items = max(answer.equal_items for answer in answers)
    all_differences = tuple(map(differences.__getitem__, sorted(differences)))
    return ResumeProof(
        step,
        len(equal_tensors),
        equal_items,
        all_differences,
        tuple(unchecked),
        loaded.world_size,
        len(ranks),
        loaded.initialised,
    )


def _option_of(path: KeyPath) -> str:
    """Return the option that a key of a group ends with, nested or flat; of other keys the last part."""
    return str(path[-1]).rpartition(".")[2]


def _item_differences(live: LiveState, parts: LiveParts) -> Iterator[ResumeDifference]:
    """Yield the values that are no tensors, on one side at least, and not the same on this rank."""
    # Every loaded value must be there, but for parts that were not given to the check, and for values that code
    # gave to an option at first, which torch's flat form loses.
    loaded = parts.loaded
    for key, saved in loaded.items.items():
        if key in live.flat:
            value = item_of(live.flat[key])
            if isinstance(value, Tensor):
                value = f"a tensor, {value.dtype}"
            if not same_value(saved, value):
                yield _difference(parts, key, loaded.paths[key], saved, value)
        elif key in parts.covered_keys and _option_of(loaded.paths[key]) not in GIVEN_KEYS.values():
            yield _difference(parts, key, loaded.paths[key], saved, ABSENT)
    # A value that the template never had is new, unless a scheduler wrote it, or the code gave it at first.
    for key, value in live.flat.items():
        path = live.paths[key]
        if key not in loaded.paths and not isinstance(value, Tensor) and _option_of(path) not in HISTORY_OPTIONS:
            yield _difference(parts, key, path, ABSENT, value)


def _difference(parts: LiveParts, key: str, path: KeyPath, saved: Any, value: Any) -> ResumeDifference:
    """Return a difference with the parameter whose option it is, and its group."""
    option = next(OptimizerKey.of_option(path), None)
    if option is None:
        return ResumeDifference(key, saved, value)
    return ResumeDifference(key, saved, value, option.name, parts.groups.get((path[:-1], option.name)))


def _buffer_faults(buffers: Mapping[str, Tensor]) -> Iterator[ResumeDifference]:
    """Yield the buffers that are not finite, as memory that was never written may be.

    A buffer of zeros and minus infinity alone is a mask.
    """
    for name, buffer in buffers.items():
        local = local_of(buffer)
        is_mask = bool(((local == 0) | (local == -torch.inf)).all())
        if local.is_floating_point() and not local.isfinite().all() and not is_mask:
            yield ResumeDifference(name, ABSENT, Dispute("a buffer that no state dict has is not finite"))
