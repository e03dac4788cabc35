"""A copy of this rank's state in host memory, in buffers that the next copy uses again.

Torch's stager copies storages, and whatever hangs on a tensor, as Python would.  Around it: what a lazy tensor stands
for is made first, attributes of tensors stay behind, and of a tensor that declares its boxes by DCP's hooks the boxes
are copied, because its hooks may know the live tensor alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ..box import Index
from ..layouts.boxed_tensor import BoxedTensor, parts_of, whole_shape
from ..layouts.tensors import declares_boxes


@dataclass(frozen=True)
class _Boxes:
    """A `BoxedTensor` in parts, which the stager copies as it copies any object."""

    shape: Index
    parts: dict[Index, Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Boxes:
        parts = {lo: _bare_tensor(part) for lo, part in parts_of(tensor).items()}
        return cls(whole_shape(tensor), parts, tensor.dtype)


class HostCopy:
    """Buffers, pinned if there is a GPU, and the state that was copied to them last."""

    def __init__(self) -> None:
        self._stager = _stager()

    @torch.no_grad()
    def of(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a nested state dict; every tensor has arrived when this returns.

        Raises:
            TypeError: a tensor of a class that cannot be copied.
        """
        bare = {key: _mapped(value, _bare) for key, value in state_dict.items()}
        given = list(_tensors(bare))
        state = self._staged(bare)
        for device in {tensor.device for tensor in given if tensor.is_cuda}:  # the stager waits for the current one
            torch.cuda.synchronize(device)
        for tensor, copy in zip(given, _tensors(state), strict=True):
            if type(copy) is not type(tensor) and tensor.data_ptr() == 0 and tensor.numel():
                raise TypeError(f"cannot copy a tensor of class {type(tensor).__name__}: save a plain tensor")
        return {key: _mapped(value, _joined) for key, value in state.items()}

    def _staged(self, state: Any) -> Any:
        try:
            return self._stager.stage(state)
        except AssertionError:  # buffers go by storage, and one was resized since the last copy
            self.close()
            self._stager = _stager()
            return self._stager.stage(state)

    def close(self) -> None:
        """Give the buffers back."""
        self._stager.close()


def _stager() -> DefaultStager:
    cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
    )


def _mapped(node: Any, function: Callable[[Any], Any]) -> Any:
    """The same nested state with ``function`` of its leaves.

    What it does not change is passed on as it is: a container without tensors is saved with its type.
    """
    if isinstance(node, Mapping):
        changed = {key: _mapped(value, function) for key, value in node.items()}
        return node if all(changed[key] is value for key, value in node.items()) else changed
    if isinstance(node, list | tuple):
        made = [_mapped(value, function) for value in node]
        return node if all(new is old for new, old in zip(made, node, strict=True)) else made
    return function(node)


def _bare(leaf: Any) -> Any:
    """A tensor without attributes, conjugation, negation and collectives not yet done; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    if declares_boxes(leaf):
        return _Boxes.of(leaf)
    return _bare_dtensor(leaf) if isinstance(leaf, DTensor) else _bare_tensor(leaf)


def _joined(leaf: Any) -> Any:
    return BoxedTensor(leaf.shape, leaf.parts, leaf.dtype, "cpu") if isinstance(leaf, _Boxes) else leaf


def _bare_tensor(tensor: Tensor) -> Tensor:
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor.detach() if tensor.__dict__ else tensor


def _bare_dtensor(tensor: DTensor) -> DTensor:
    local = tensor._local_tensor
    bare = _bare_tensor(local)
    if bare is local and not tensor.__dict__:
        return tensor
    return DTensor.from_local(
        bare, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _tensors(node: Any) -> Iterator[Tensor]:
    """The tensors of nested state, in its order."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _tensors(value)
