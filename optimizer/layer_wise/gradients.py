"""When gradients are reduced: bucket by bucket as the backward pass fills them, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...errors import lost_ranks


class Collective(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Reducible(Protocol):
    """What one reduction moves: gradient views by parameter name, and what begins it."""

    @property
    def gradient_of(self) -> Mapping[str, Tensor]: ...

    def reduce(self) -> Sequence[Collective]: ...


class Gradients:
    """Takes gradients out of autograd into the buckets' memory, and reduces each bucket once it is full.

    A bucket waits for those before it, full or not: ranks whose graphs differ must not reduce in different orders.

    Args:
        params: by name; each in one bucket.
        buckets: in the order in which they are reduced.

    Attributes:
        seen: names of the parameters that have got a gradient since the last `forget`.
    """

    def __init__(self, params: Mapping[str, Tensor], buckets: Sequence[Reducible]) -> None:
        self.seen: set[str] = set()
        self._buckets = tuple(buckets)
        self._number_of = {name: number for number, bucket in enumerate(buckets) for name in bucket.gradient_of}
        self._last_pass = True
        self._begin()
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(partial(self._take, name))  # type: ignore[no-untyped-call]
            for name, param in params.items()
        ]

    def _begin(self) -> None:
        self._awaited = [set(bucket.gradient_of) for bucket in self._buckets]
        self._reduced = 0
        self._works: list[Collective] = []

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside reduce nothing."""
        before, self._last_pass = self._last_pass, False
        try:
            yield
        finally:
            self._last_pass = before

    def finish(self) -> None:
        """Reduce what is left, and wait for everything."""
        while self._reduced < len(self._buckets):
            self._reduce_next()
        self._wait()

    def forget(self) -> None:
        """Begin anew, and forget what has been reduced or accumulated."""
        self._wait()
        self.seen.clear()
        self._begin()

    def close(self) -> None:
        """Leave gradients to autograd again."""
        self._wait()
        for handle in self._handles:
            handle.remove()

    def _take(self, name: str, param: Tensor) -> None:
        """The hook: ``param`` has a gradient."""
        number = self._number_of[name]
        assert param.grad is not None
        if number < self._reduced:
            raise RuntimeError(
                f"a gradient of {name!r} after its bucket was reduced: run all backward passes of a step but the last "
                "under no_sync(), and call step() or zero_grad() before the next"
            )
        home = self._buckets[number].gradient_of[name]
        if name in self.seen:
            home.add_(param.grad)
        else:
            home.copy_(param.grad)
            self.seen.add(name)
        param.grad = None
        if self._last_pass:
            self._awaited[number].discard(name)
            while self._reduced < len(self._buckets) and not self._awaited[self._reduced]:
                self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._reduced]
        for name in bucket.gradient_of.keys() - self.seen:
            bucket.gradient_of[name].zero_()  # or the last step's
        self._works += bucket.reduce()
        self._reduced += 1

    def _wait(self) -> None:
        for work in self._works:
            with lost_ranks():
                work.wait()
        self._works = []


Gather = Callable[[], Sequence[Collective]]


class Gathers:
    """Gathers that `start` has begun, by their number; `wait` for one before its parameters are used."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self._gathers = tuple(gathers)
        self._under_way: dict[int, Sequence[Collective]] = {}

    def start(self) -> None:
        """Begin all, those of the first layers first: the last bucket of the backward pass is the first of these."""
        for number in reversed(range(len(self._gathers))):
            self._under_way[number] = self._gathers[number]()

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """For some, or for all."""
        for number in list(self._under_way) if numbers is None else numbers:
            for work in self._under_way.pop(number, ()):
                with lost_ranks():
                    work.wait()

    def awaited_by(
        self, model: nn.Module, name_of: Mapping[Tensor, str], buckets: Sequence[Reducible]
    ) -> list[RemovableHandle]:
        """Let every module wait for its own parameters before its forward, and the model for all before it is saved.

        Args:
            buckets: what each gather brings.
        """
        numbers = {name: number for number, bucket in enumerate(buckets) for name in bucket.gradient_of}
        handles: list[RemovableHandle] = []
        for module in model.modules():
            own = [numbers[name_of[param]] for param in module.parameters(recurse=False) if param in name_of]
            handles.append(module.register_forward_pre_hook(partial(self._before, own)))
        before_saving = model.register_state_dict_pre_hook(partial(self._before, None))  # type: ignore[no-untyped-call]
        return [*handles, before_saving]

    def _before(self, numbers: Sequence[int] | None, *_: object) -> None:
        self.wait(numbers)
