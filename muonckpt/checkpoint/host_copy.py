"""A copy of this rank's state in host memory, in buffers that the next copy uses again.

Torch's stager copies storages, and whatever hangs on a tensor, as Python would.  Around it: what a lazy tensor stands
for is made first, attributes of tensors stay behind, and DCP's hooks are pointed at the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ..box import Index


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
        bare = {key: _bare(value) for key, value in state_dict.items()}
        given = list(_tensors(bare))
        state, shards = self._staged((bare, [_shards(tensor) for tensor in given]))
        for device in {tensor.device for tensor in given if tensor.is_cuda}:  # the stager waits for the current one
            torch.cuda.synchronize(device)
        for tensor, copy, views in zip(given, _tensors(state), shards, strict=True):
            if type(copy) is not type(tensor) and tensor.data_ptr() == 0 and tensor.numel():
                raise TypeError(f"cannot copy a tensor of class {type(tensor).__name__}: save a plain tensor")
            if views and isinstance(copy, DTensor):
                _point_at(copy._local_tensor, views)
        return dict(state)

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


def _bare(node: Any) -> Any:
    """The same state without attributes of its tensors, conjugations, negations and collectives that are not done yet.

    What needs no change is passed on as it is: a container without tensors is saved with its type.
    """
    if isinstance(node, Tensor):
        return _bare_dtensor(node) if isinstance(node, DTensor) else _bare_tensor(node)
    if isinstance(node, Mapping):
        changed = {key: _bare(value) for key, value in node.items()}
        return node if all(changed[key] is value for key, value in node.items()) else changed
    if isinstance(node, list | tuple):
        made = [_bare(value) for value in node]
        return node if all(new is old for new, old in zip(made, node, strict=True)) else made
    return node


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
    bare = local if hasattr(local, "__create_write_items__") else _bare_tensor(local)
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


def _shards(tensor: Tensor) -> dict[Index, Tensor]:
    """By offsets, what the hook of a local tensor says that its boxes are: it may know the live tensors alone."""
    if not isinstance(tensor, DTensor) or not hasattr(tensor._local_tensor, "__get_tensor_shard__"):
        return {}
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    find = tensor._local_tensor.__get_tensor_shard__
    return {tuple(chunk.offsets): find(MetadataIndex("", chunk.offsets)) for chunk in chunks}


def _point_at(local: Any, views: Mapping[Index, Tensor]) -> None:
    local.__get_tensor_shard__ = lambda index: views[tuple(index.offset)]
