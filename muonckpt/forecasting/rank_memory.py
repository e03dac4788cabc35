"""What each rank holds between steps, and what it writes to a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..box import Index
from ..layout import TensorLayout
from ..store.reading.dtypes import itemsize
from .model_tensors import ModelParameter

Shares = NDArray[np.float64]
LayoutOf = Callable[[ModelParameter, Index], TensorLayout]
"""The layout of a tensor of this shape that is cut like this parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class RankBytes:
    """Bytes by rank.  Replicas hold the same and share the writing of it evenly."""

    weights: Shares
    gradients: Shares
    state: Shares
    written: Shares

    @property
    def held(self) -> Shares:
        """Weights, gradients and state together."""
        return self.weights + self.gradients + self.state


def bytes_on_ranks(parameters: Sequence[ModelParameter], layout_of: LayoutOf, ranks: int) -> RankBytes:
    """What every rank holds of parameters, gradients in the parameters' dtype, and state; and what it saves of them."""
    times: Counter[tuple[str, TensorLayout, int]] = Counter()
    for parameter in parameters:
        times["weights", layout_of(parameter, parameter.shape), itemsize(parameter.dtype)] += 1
        for tensor in parameter.state:
            times["state", layout_of(parameter, tensor.shape), itemsize(tensor.dtype)] += 1
    totals = {"weights": np.zeros(ranks), "state": np.zeros(ranks)}
    written = np.zeros(ranks)
    for (what, layout, size), count in times.items():
        held, share = np.zeros(ranks), np.zeros(ranks)
        rows, first = layout.by_box
        numel, replicas = (layout.stops - layout.starts).prod(axis=1), np.diff(first)
        holders, box = np.array(layout.buffers, np.int64)[layout.buffer[rows]], layout.box[rows]
        np.add.at(held, holders, numel[box])
        np.add.at(share, holders, numel[box] / replicas[box])
        totals[what] += held * size * count
        written += share * size * count
    return RankBytes(totals["weights"], totals["weights"], totals["state"], written)
