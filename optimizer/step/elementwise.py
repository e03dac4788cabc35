"""What the element-wise parts of a step do, whichever backend does them.

Gradients are taken into momenta; updates go from where they rest to their owners, on a wire or within this rank, and
lie end to end there; results go back along the same boxes, and are applied where the parameters rest.  Backends give
the same bits: `operators` by torch, strip by strip, and `kernels` by Triton, in a few launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from .resting import Resting

Sizes = Mapping[int, int]
"""Numbers of matrices that lie end to end in one memory, and how many elements each has there."""


class Elementwise(Protocol):
    """A backend, made for one schedule on one rank.  Wires are bytes, laid out as the schedule's routes say."""

    def begin(self, resting: Resting) -> None:
        """A step begins; momenta are as they were."""
        ...

    def send_ahead(self, resting: Resting, stage: int, wire: Tensor) -> None:
        """Write updates that leave this rank in a stage, as if momenta had taken the gradients in already."""
        ...

    def take_in(self, resting: Resting) -> None:
        """Take the gradients that there are into momenta, or see to it that what comes after does."""
        ...

    def send(self, resting: Resting, stage: int, wire: Tensor) -> None:
        """Write updates that leave this rank in a stage."""
        ...

    def assemble(self, resting: Resting, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        """Updates of matrices that this rank owns: those that have arrived, and its own.

        A fresh buffer: dense and aligned alike on every topology, as the bits of a product may depend on it.
        """
        ...

    def release(self, resting: Resting, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        """Write results to the wire, and apply what of them rests on this rank."""
        ...

    def apply(self, resting: Resting, stage: int, wire: Tensor) -> None:
        """Apply the results of a stage that have arrived."""
        ...
