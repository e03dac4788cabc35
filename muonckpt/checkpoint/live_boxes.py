"""The boxes of tensors that ranks hold, each with its share of the fingerprint; and what they are together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from ..box import Box, Index
from ..errors import about
from ..fingerprint import as_hex, combine
from ..layout import TensorLayout, dense
from .bits import dtype_name
from .device_fingerprint import share_of, unsigned
from .save_planner import CoveringSavePlanner, planned_tensor
from .tensor_prints import TensorPrint

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of the tensor ``key``, of this logical shape and dtype, as a rank holds it."""

    rank: int
    key: str
    shape: Index
    dtype: str
    box: Box
    share: int


@dataclass(frozen=True, slots=True)
class BoxesOfAll:
    """What all ranks hold.

    Attributes:
        tensors: by key; of replicas that differ, the fingerprint is that of the lowest rank's.
        replicated: boxes that several ranks hold, all alike.
        faults: where ranks disagree, a phrase each.
    """

    tensors: Mapping[str, TensorPrint]
    replicated: int
    faults: tuple[str, ...]


def held_boxes(state_dict: Mapping[str, Any]) -> list[HeldBox]:
    """What this rank holds of the tensors of a state dict, as DCP plans to save it.

    The shares are taken where the tensors are, and fetched from each device at once.

    Raises:
        LayoutError: a checkpoint cannot describe this rank's part of a tensor; names the tensor.
    """
    planner = CoveringSavePlanner()
    planner.set_up_planner({key: _state_of(value) for key, value in state_dict.items()})
    items = [item for item in planner.create_local_plan().items if item.tensor_data is not None]
    shares: list[Tensor] = []
    boxes: list[tuple[str, Index, str, Box]] = []
    for item in items:
        assert item.tensor_data is not None
        tensor, lo = planned_tensor(planner, item), tuple(item.tensor_data.chunk.offsets)
        box = Box.of(tuple(item.tensor_data.chunk.sizes)).shift(lo)
        boxes.append((item.index.fqn, tuple(item.tensor_data.size), dtype_name(tensor.dtype), box))
        shares.append(share_of(tensor, lo))
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [HeldBox(rank, *box, share) for box, share in zip(boxes, _fetched(shares), strict=True)]


def boxes_of_all(ranks: Iterable[Sequence[HeldBox]]) -> BoxesOfAll:
    """What the ranks hold together; every element counts once.

    Raises:
        LayoutError: nobody holds some elements of a tensor, or boxes overlap in part; names tensor and box.
    """
    by_key: defaultdict[str, list[HeldBox]] = defaultdict(list)
    for held in (held for of_rank in ranks for held in of_rank):
        by_key[held.key].append(held)
    tensors, faults, replicated = {}, [], 0
    for key, holders in by_key.items():
        kinds = _ranks_by(((held.dtype, held.shape), held.rank) for held in holders)
        if len(kinds) > 1:
            faults.append(f"{key!r}: {_says(kinds, lambda kind: f'{kind[0]} of shape {kind[1]}')}")
            continue
        by_box: defaultdict[Box, list[HeldBox]] = defaultdict(list)
        for held in holders:
            if held.box.numel:
                by_box[held.box].append(held)
        for box, copies in by_box.items():
            shares = _ranks_by((held.share, held.rank) for held in copies)
            if len(shares) > 1:
                faults.append(f"{key!r} box {box}: replicas differ: {_says(shares, as_hex)}")
            else:
                replicated += len(copies) > 1
        with about(f"tensor {key!r}"):
            TensorLayout.of(
                holders[0].shape, tuple(dense(box, f"rank {copies[0].rank}") for box, copies in by_box.items())
            )
        share = combine(*(copies[0].share for copies in by_box.values()))
        tensors[key] = TensorPrint(holders[0].shape, holders[0].dtype, as_hex(share))
    return BoxesOfAll(tensors, replicated, tuple(faults))


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _fetched(shares: Sequence[Tensor]) -> list[int]:
    """The numbers of tensors of one element, with one copy from each device."""
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for place, share in enumerate(shares):
        by_device[share.device].append(place)
    numbers = [0] * len(shares)
    for places in by_device.values():
        for place, number in zip(places, torch.stack([shares[place] for place in places]).tolist(), strict=True):
            numbers[place] = unsigned(number)
    return numbers


def _ranks_by(said: Iterable[tuple[K, int]]) -> dict[K, list[int]]:
    """The ranks that have each value; those that most ranks have first."""
    ranks: defaultdict[K, list[int]] = defaultdict(list)
    for value, rank in said:
        if rank not in ranks[value][-1:]:
            ranks[value].append(rank)
    return dict(sorted(ranks.items(), key=lambda entry: -len(entry[1])))


def _says(ranks: Mapping[K, Sequence[int]], shown: Callable[[K], str]) -> str:
    return ", ".join(
        f"rank{'s' * (len(of_value) > 1)} {', '.join(map(str, of_value))} {'hold' if len(of_value) > 1 else 'holds'} "
        f"{shown(value)}"
        for value, of_value in ranks.items()
    )
