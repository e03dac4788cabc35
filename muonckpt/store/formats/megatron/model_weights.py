"""The weights of a model beside the files of its optimizer: names, order, shapes, and bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....box import Box, Index
from ....errors import SourceError
from ....record import Chunk, Chunks, StateRecord
from ....vocabulary import MASTER
from ...io.location import Location
from ...reading.payloads import Payloads, as_words, elements
from ..dcp.directory import DcpReader
from ..torch_save import torch_file
from ..torch_save.inert_pickle import Record
from ..torch_save.torch_file import SavedTensor
from .rank_file import ParameterState

_COMPARED_ELEMENTS = 1 << 14
"""Elements of a parameter that are compared."""

_OF_OPTIMIZER = re.compile(r"(chained_[0-9]+\.)*optimizer\.")
"""Keys of DCP and `torch_dist` checkpoints that belong to the optimizer."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights by name, in the order in which they are listed; their chunks are in files of ``folder``."""

    folder: Location
    weights: Mapping[str, StateRecord]

    @property
    def listed(self) -> tuple[tuple[str, Index, str], ...]:
        """Name, shape and dtype of each."""
        return tuple((name, weight.shape, weight.dtype) for name, weight in self.weights.items())

    def check_masters(self, path: Location, states: Mapping[str, ParameterState]) -> None:
        """Compare the first rows of each fp32 master (in files of ``path``), rounded, with the weight.

        Raises:
            SourceError: a weight is missing, has another shape, or differs from its rounded master.
        """
        with Payloads(path) as payloads, Payloads(self.folder) as weight_payloads:
            for name, state in states.items():
                master, weight = state.get(MASTER), self.weights.get(name)
                if not isinstance(master, SavedTensor):
                    continue
                chunks = [chunk for chunk in weight.chunks if chunk.box.numel] if weight else []
                if weight is None or (weight.shape, master.dtype) != (master.shape, "float32") or not chunks:
                    stored = "none" if weight is None else f"shape {weight.shape} in {len(chunks)} chunks"
                    raise SourceError(
                        f"expected a weight {name!r} of shape {master.shape} in {self.folder}, and a float32 master; "
                        f"found {stored}, and {master.dtype}"
                    )
                box = chunks[0].box
                rows = slice(max(1, _COMPARED_ELEMENTS * box.shape[0] // box.numel)) if box.shape else ()
                words = as_words(payloads.view(master.payload), master.dtype, master.shape)
                part = words[tuple(map(slice, box.lo, box.hi))][rows]
                if not np.array_equal(_rounded(part, weight.dtype), elements(weight_payloads, weight, chunks[0])[rows]):
                    raise SourceError(
                        f"the master of {name!r} in {master.payload.file} does not round to that in {self.folder}: "
                        "another algorithm, another order of the parameters, or weights of another step"
                    )


def read_weights(path: Location, where: str) -> ModelWeights:
    """The weights under ``model`` in a file of ``torch.save``, or those in a DCP checkpoint, inside the directory.

    Raises:
        SourceError: neither exists, or it is damaged.
    """
    if (path / where).is_dir():
        stored = DcpReader(path / where)
        for fault in stored.faults:
            raise fault
        of_model = [tensor for tensor in stored.outline.tensors if not _OF_OPTIMIZER.match(tensor.key)]
        return ModelWeights(path / where, {tensor.key: tensor for tensor in stored.locate(of_model)})
    file = torch_file.read_torch_file(path, where)
    content = file.content.get("model") if isinstance(file.content, dict) else None
    named = content.items if isinstance(content, Record) else content
    if not isinstance(named, dict):
        raise SourceError(f"{path / where}: expected weights by name under 'model'")
    weights = {}
    for name, value in named.items():  # among them `_extra_state`s of modules, which are not tensors
        if isinstance(name, str) and isinstance(value, Record) and value.kind.startswith("torch._"):
            weights[name] = whole_tensor(("model", name), file.tensor(value))
    return ModelWeights(path, weights)


def whole_tensor(path: tuple[str, ...], tensor: SavedTensor) -> StateRecord:
    """The record of a tensor that is stored as one chunk."""
    box = Box((0,) * len(tensor.shape), tensor.shape)
    chunk = Chunk(box, tensor.payload, tensor.payload, crc32=tensor.crc32)
    return StateRecord(".".join(path), path, tensor.shape, tensor.dtype, Chunks.of([chunk], box.ndim))


def _rounded(words: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float32 elements, as bits, rounded to nearest even in a dtype of weights, as bits."""
    match dtype:
        case "float32":
            return words
        case "float16":
            return np.ascontiguousarray(words).view("<f4").astype("<f2").view("<u2")
        case "bfloat16":
            wide = words.astype(np.uint64)
            return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2")
        case _:
            raise SourceError(f"expected weights of float32, float16 or bfloat16, found {dtype}")
