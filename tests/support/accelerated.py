"""accelerate's state in a worker: fresh for every job, and with FSDP2 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from support.pages import as_launched


@contextmanager
def accelerated(rank: int, world: int, fsdp: bool) -> Iterator[None]:
    """An environment in which accelerate starts anew.

    Args:
        fsdp: accelerate looks at its FSDP plugin only on devices such as GPUs, and drops it silently on a CPU; let its
            state be what it is there.
    """
    from accelerate import state
    from accelerate.utils import DistributedType

    begin = state.AcceleratorState.__init__

    def begin_sharded(self, *arguments, fsdp_plugin=None, **options) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    with as_launched(rank, world), patch.object(state.AcceleratorState, "__init__", begin_sharded if fsdp else begin):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        yield
