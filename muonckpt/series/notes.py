"""Notes a run's steps: what this rank adds to the numbers of the whole model, in a line of a file of its own.

Once, ranks tell each other what they hold, so that each element is noted by one of them.  A step then needs no
collective and waits for no device: where there is one, a step's line is written with the next step's.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..box import Box
from ..checkpoint.all_ranks import gather_on_all, group_ranks, is_coordinator, refuse_crossed, scatter_from_first
from ..checkpoint.bits import unsigned
from ..checkpoint.live_state import LiveState, RankBoxes, RankState, held_layout, holders_by_key
from ..errors import ArgumentError, DestinationError, about
from ..fingerprint import MIX, weights_of
from ..layouts.boxed_tensor import parts_of, whole_shape
from ..store.io.location import Location
from ..store.trail import (
    FOLDER,
    SIGNS,
    SUMS,
    WATCHED,
    ObjectLines,
    ResumedRun,
    Steps,
    attempts_in,
    before,
    judge,
    new_lines,
    steps_of_attempt,
)
from ..vocabulary import EXP_AVG, MOMENTUM, Convention

_MOST = (16, 16, 4)
"""Indices that are sampled along the last dim of a tensor, the one before, and any other, evenly spaced."""

_TOLD_WITHIN = 64
"""Notes after a restore in which the comparison is sought: the lines of other ranks may come later than the first's."""

Counted = Mapping[str, Sequence[int]]
"""The numbers of those boxes of a tensor, by key, that this rank notes; the others have no elements of these."""

Noted = tuple[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The sampled elements of the boxes that this rank notes, and what they are summed with.

    Attributes:
        cuts: by key and number of a box, where they are in it, and how many.
        weights: their weights in the fingerprint, as ``int64``.
        signs: -1 or 1, `SIGNS` for each.
    """

    cuts: Mapping[Noted, tuple[tuple[slice, ...], int]]
    weights: Tensor
    signs: Tensor

    def of(self, parts: Mapping[Noted, Tensor]) -> Tensor:
        """Return the elements, as float32; zeros for a box that has no part."""
        zeros = partial(torch.zeros, device=self.weights.device)
        cut = [parts[box][cut].reshape(-1) if box in parts else zeros(n) for box, (cut, n) in self.cuts.items()]
        return torch.cat(cut).to(self.weights.device, torch.float32, non_blocking=True) if cut else zeros(0)

    def spread(self, values: Mapping[str, float]) -> Tensor:
        """Return the value of each element's parameter; zero for one that is no more noted."""
        each = [torch.full((n,), values.get(key.partition(".")[2], 0.0)) for (key, _), (_, n) in self.cuts.items()]
        return torch.cat([torch.zeros(0), *each]).to(self.weights.device)


class TrailWriter:
    """The notes of one process on a run; see `Series.note`.

    Attributes:
        continuation: on the first rank, whether a restored run goes on as it did; None until that is known.
    """

    def __init__(self, folder: Location, process_group: dist.ProcessGroup | None) -> None:
        self._folder, self._group = folder, process_group
        self._restored: int | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.continuation: ResumedRun | None = None
        self._keys: tuple[str, ...] = ()
        """What is noted; empty until the ranks have agreed."""
        self._grown = False
        """True if this rank holds something else by now."""
        self._attempt = 0
        self._past: Steps | None = None
        self._counted: Counted = {}
        self._parameters_sum = 0
        """This rank's share of `TrailStep.parameters`."""
        self._samples: Mapping[str, Sample] = {}
        self._coefficients: Mapping[str, tuple[float, float]] = {}
        self._factors = torch.zeros(0), torch.zeros(0)
        self._file: FileIO | ObjectLines | None = None
        self._noted = 0
        self._pending: Pending | None = None

    def restored(self, step: int) -> None:
        """Begin a new attempt with the next note, behind the step that was restored."""
        self.close()
        self._restored = step
        self._begin_anew()

    @torch.no_grad()
    def note(self, step: int, optimizers: Sequence[Optimizer], loss: float | Tensor | None) -> None:
        parameters = [*_parameters(optimizers)]
        held = {f"{part}.{one.name}": tensor for one in parameters for part, tensor in one.held.items()}
        self._grown = self._keys != tuple(held)
        if not self._keys or (self._grown and len(group_ranks(self._group)) == 1):
            self.close()
            self._agree(held)
            self._keys, self._grown = tuple(held), False
        if self._file is not None:
            self._write()
            self._pending = self._line(step, parameters, loss)
            self._noted += 1
            if self._pending.copied is None:
                self._write()
            if self._restored is not None and self._noted <= WATCHED + 1:
                self.flush()  # others compare them
            self._compare()

    def flush(self) -> None:
        """Write what is not written yet, where a program that is killed would lose it."""
        self._write()
        self._do("write", lambda file: file.flush())

    def settle(self) -> None:
        """Have the next note agree anew if a rank has got parameters, or state of them, that are not noted.

        Collective if there are notes.  A note itself cannot ask: perhaps this rank alone knows that something is new,
        as in a pipeline of which one stage was unfrozen.
        """
        self.flush()
        if self._keys and any(gather_on_all(self._group, DestinationError, lambda: self._grown)):
            self._keys = ()

    def close(self) -> None:
        """Write what is not written yet, and close the file."""
        self.flush()
        self._compare()
        self._do("close", lambda file: file.close())
        self._file = None

    def _agree(self, held: Mapping[str, Tensor]) -> None:
        """Have the ranks agree on who notes what, and on the number of the attempt."""
        refuse_crossed(self._group, "Series.note")
        folder = self._folder

        def described() -> RankState:
            return LiveState.of(held, "to note").described

        def deal(ranks: list[RankState]) -> list[tuple[int, Counted, int]]:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            attempt = max(attempts_in(folder), default=0) + 1
            dims = min(2, max((len(kind.shape) for state in ranks for _, kind in state.tensors()), default=0))
            return [(attempt, counted, dims) for counted in counted_by(ranks)]

        self._attempt, self._counted, dims = scatter_from_first(self._group, DestinationError, described, deal)
        self._parameters_sum, self._coefficients = parameters_sum(held, self._counted), {}
        device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
        self._samples = {
            part: sample_of(
                held, {key: own for key, own in self._counted.items() if key.startswith(part)}, dims, device
            )
            for part in SUMS
        }
        rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        self._file = new_lines(folder, self._attempt, rank)

    def _line(self, step: int, parameters: Sequence[NotedParameter], loss: float | Tensor | None) -> Pending:
        parts: defaultdict[str, dict[Noted, Tensor]] = defaultdict(dict)
        coefficients = {one.name: _coefficients(one.group) for one in parameters}
        rates = [one.group["lr"] for one in parameters]
        unknown = all(one.gradient is None for one in parameters)
        for one in parameters:
            for part, lies in one.held.items():
                tensor = one.gradient if part == "gradient" and not unknown else lies
                if tensor is not None and (own := self._counted.get(key := f"{part}.{one.name}")):
                    boxes = [*parts_of(tensor).values()]
                    parts[part] |= {(key, number): boxes[number] for number in own}
        if unknown:
            parts["gradient"] = {box: torch.full_like(own, math.nan) for box, own in parts["gradient"].items()}
        elements = {part: self._samples[part].of(parts[part]) for part in SUMS}
        kept, added = self._factors_of(coefficients)
        signs = {part: self._samples[part].signs for part in SUMS}
        signed = [signs[part] @ elements[part] for part in SUMS]
        signed.append(
            signs["momentum"] @ (elements["momentum"] * kept) - signs["gradient"] @ (elements["gradient"] * added)
        )
        share = (
            elements["weights"].view(torch.int32).long().bitwise_and_(0xFFFFFFFF) * self._samples["weights"].weights
        ).sum()
        line = {
            "step": step,
            "world": len(group_ranks(self._group)),
            "loss": loss,
            "lr": _largest(rates),
            "mu": max(mu for mu, _ in coefficients.values()),
            "parameters": self._parameters_sum,
        }
        late = {name: value for name, value in line.items() if isinstance(value, Tensor)}
        numbers = [*map(_square, (parts[part].values() for part in SUMS)), *signed, *late.values()]
        wide = [number.detach().reshape(-1).to(share.device, torch.float64, non_blocking=True) for number in numbers]
        packed = torch.cat([*wide, share.reshape(1).view(torch.float64)])
        if packed.is_cpu:
            return Pending(line, [*late], packed, None)
        host = torch.empty_like(packed, device="cpu", pin_memory=True).copy_(packed, non_blocking=True)
        copied = torch.Event(packed.device)
        copied.record()
        return Pending(line, [*late], host, copied)

    def _factors_of(self, coefficients: Mapping[str, tuple[float, float]]) -> tuple[Tensor, Tensor]:
        """Return the factors of momentum and gradients, as sampled, in ``(m - gain * g) / mu``: what momentum was."""
        if coefficients != self._coefficients:
            kept = {name: 1 / mu if mu else 0.0 for name, (mu, _) in coefficients.items()}
            added = {name: gain * kept[name] for name, (_, gain) in coefficients.items()}
            self._factors = self._samples["momentum"].spread(kept), self._samples["gradient"].spread(added)
            self._coefficients = coefficients
        return self._factors

    def _write(self) -> None:
        """Write the line that was made last, once its numbers are here."""
        if (pending := self._pending) is not None:
            self._pending = None
            self._do("write", lambda file: file.write(pending.line()))

    def _do(self, what: str, act: Callable[[FileIO | ObjectLines], object]) -> None:
        """Do something with the file, if there is one; if that fails, warn, and go on without a file."""
        if self._file is None:
            return
        try:
            act(self._file)
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            self._file = None
            warnings.warn(f"cannot {what} the trail; training goes on without: {error}", RuntimeWarning, stacklevel=6)

    def _compare(self) -> None:
        """On the first rank, tell whether a restored run goes on, as soon as enough ranks have written enough."""
        restored = self._restored
        if restored is None or self.continuation is not None or not is_coordinator(self._group):
            return
        if not 0 < self._noted <= _TOLD_WITHIN:
            return
        if self._past is None:
            self._past = before(self._folder, self._attempt, restored)
        if not self._past:
            return
        behind = range(restored + 1, restored + WATCHED + 1)
        own = steps_of_attempt(self._folder, self._attempt, behind)
        self.continuation = judge(own, self._past, restored)
        if self.continuation is not None and not self.continuation.same:
            warnings.warn(str(self.continuation), RuntimeWarning, stacklevel=5)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A line whose numbers are on their way.

    Attributes:
        fields: those that are known, and ``late`` the names of those that are among ``numbers``, behind the sums.
        copied: None if the numbers are here.
    """

    fields: Mapping[str, Any]
    late: Sequence[str]
    numbers: Tensor
    copied: torch.Event | None

    def line(self) -> bytes:
        if self.copied is not None:
            self.copied.synchronize()
        *values, _ = (float(f"{value:.9g}") for value in self.numbers.tolist())
        squares, rest = values[: len(SUMS)], values[len(SUMS) :]
        sums = len(SUMS) + 1
        signed = [rest[number * SIGNS : (number + 1) * SIGNS] for number in range(sums)]
        late = dict(zip(self.late, rest[sums * SIGNS :], strict=True))
        share = unsigned(int(self.numbers[-1:].view(torch.int64)))
        return (
            json.dumps({**self.fields, **late, "squares": squares, "signed": signed, "fingerprint": share}) + "\n"
        ).encode()


@runtime_checkable
class ReducesGradients(Protocol):
    """An optimizer that keeps gradients itself, as `LayerWise`."""

    reduced_gradients: Mapping[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class NotedParameter:
    """A parameter that is noted, with the options of its group.

    Attributes:
        held: by `SUMS`, what lies as these do: gradients as themselves, or as weights where there may be none.
        gradient: None if there is none.
    """

    name: str
    group: Mapping[str, Any]
    held: Mapping[str, Tensor]
    gradient: Tensor | None


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[NotedParameter]:
    """Yield all parameters, with a name for each: its number where it has none, or another parameter has the same."""
    names_so_far = set[str]()
    for place, optimizer in enumerate(optimizers):
        reduced = optimizer.reduced_gradients if isinstance(optimizer, ReducesGradients) else {}
        for number, group in enumerate(optimizer.param_groups):
            numbers = [f"{place}.{number}.{index}" for index in range(len(group["params"]))]
            names = group.get("param_names") or numbers
            for name, label, param in zip(names, numbers, group["params"], strict=True):
                name = label if name in names_so_far else name
                names_so_far.add(name)
                held = {"weights": param, "gradient": reduced.get(param, param)}
                slots = optimizer.state.get(param, {})
                momentum = next((slots[slot] for slot in (MOMENTUM, EXP_AVG) if slot in slots), None)
                if isinstance(momentum, Tensor) and momentum.is_floating_point():
                    held["momentum"] = momentum
                yield NotedParameter(name, group, held, reduced.get(param, param.grad))


def _square(parts: Collection[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, without waiting."""
    norms = torch._foreach_norm([*parts], 2, dtype=torch.float32) if parts else [torch.zeros(())]
    return torch.stack(norms).double().square().sum()


def _largest(rates: Sequence[float | Tensor]) -> float | Tensor:
    if any(isinstance(rate, Tensor) for rate in rates):
        return torch.stack([torch.as_tensor(rate).reshape(()) for rate in rates]).amax()
    return max(map(float, rates))


def _coefficients(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return ``mu`` and the gradient's factor in ``m = mu * m + gain * g``, which is NaN if the group does not tell."""
    if "betas" in group:
        mu = float(group["betas"][group.get("algorithm") == "lion"])
        return mu, 1 - mu
    mu = float(group.get("momentum") or 0.0)
    if group.get("convention") == Convention.EMA:
        return mu, 1 - mu
    return mu, 1 - float(group.get("dampening", math.nan))


def counted_by(ranks: Sequence[RankState]) -> list[Counted]:
    """Return the boxes that each rank counts: those that no rank before it holds.

    Raises:
        LayoutError: nobody holds some elements of a tensor, or boxes overlap in part.
        ArgumentError: two ranks hold tensors of one name and of other shapes.
    """
    counted = [defaultdict[str, list[int]](list) for _ in ranks]
    for key, holders in holders_by_key(ranks).items():
        kinds = [(holder.place, holder.kind) for holder in holders if holder.kind is not None]
        shapes = {kind.shape for _, kind in kinds}
        if len(shapes) > 1:
            raise ArgumentError(
                f"{key!r} has other shapes on other ranks, {' and '.join(map(str, shapes))}: give optimizers the names "
                "of parameters, as named_parameters() has them"
            )
        with about(f"tensor {key!r}"):
            held_layout(*shapes, tuple(RankBoxes(place, kind.boxes) for place, kind in kinds))
        seen = set[Box]()
        for place, kind in kinds:
            for number, box in enumerate(kind.boxes):
                if box not in seen:
                    seen.add(box)
                    counted[place][key].append(number)
    return [dict(own) for own in counted]


def parameters_sum(held: Mapping[str, Tensor], counted: Counted) -> int:
    """Return a number that adds up over ranks to one of the names of weights and their numbers of elements."""
    total = 0
    for key, numbers in counted.items():
        if key.startswith("weights."):
            boxes = [*parts_of(held[key]).values()]
            total += _hash_of(key) * sum(boxes[number].numel() for number in numbers)
    return total % 2**64


def _hash_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) | 1


def sample_of(held: Mapping[str, Tensor], counted: Counted, dims: int, device: torch.device) -> Sample:
    """Return the evenly spaced elements of tensors of so many dims or more; which these are depends on shapes only."""
    cuts: dict[Noted, tuple[tuple[slice, ...], int]] = {}
    weights = [np.zeros(0, np.uint64)]
    for key, numbers in counted.items():
        if held[key].ndim < dims:
            continue
        name = key.partition(".")[2]  # weights and momentum have the same signs
        shape, boxes = whole_shape(held[key]), [*parts_of(held[key]).items()]
        strides = [-(-size // _MOST[min(after, 2)]) for after, size in enumerate(reversed(shape))][::-1]
        factor = np.uint64(_hash_of(name))
        for number in numbers:
            lo, part = boxes[number]
            cut = tuple(slice(-first % stride, None, stride) for first, stride in zip(lo, strides, strict=True))
            box = tuple(len(range(size)[own]) for size, own in zip(part.shape, cut, strict=True))
            if math.prod(box):
                cuts[key, number] = cut, math.prod(box)
                weights.append(
                    weights_of(box, tuple(-(-a // stride) for a, stride in zip(lo, strides, strict=True))) * factor
                )
    own = np.concatenate(weights)
    mixed = (own ^ (own >> np.uint64(30))) * MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * MIX[1]
    bits = (mixed >> np.arange(32, 32 + SIGNS, dtype=np.uint64)[:, None]) & np.uint64(1)
    signs = torch.from_numpy(bits.astype(np.float32)).mul_(2).sub_(1)
    return Sample(cuts, torch.from_numpy(own.view(np.int64)).to(device), signs.to(device))
