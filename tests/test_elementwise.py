"""The element-wise kernels have the bits of the torch form in `pipeline`, for strips of any shape, in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from interpreted import DEVICE, kernels
from torch import Tensor

from muonckpt.optimizer.coding import Plain, ScaledHalf
from muonckpt.optimizer.route import Strip
from muonckpt.optimizer.scalar import decay

e = kernels("elementwise")

BF16, FP32 = torch.bfloat16, torch.float32
# Local tensors, and boxes that cut them: (sizes, strides, offset).  The last is not covered as a whole.
CUTS: list[tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], int]]]] = [
    ((50, 37), [((50, 20), (37, 1), 0), ((50, 17), (37, 1), 20)]),
    ((3, 8, 100), [((3, 8, 100), (800, 100, 1), 0)]),
    ((4, 5, 6, 7), [((4, 5, 3, 7), (210, 42, 7, 1), 0), ((4, 5, 3, 7), (210, 42, 7, 1), 21)]),
    ((), [((), (), 0)]),
    ((30, 11), [((11, 29), (1, 11), 11)]),
]


def strips(dtype: torch.dtype) -> tuple[list[tuple[int, Strip]], int]:
    """Every box with the number of its tensor, at places on a wire of so many bytes."""
    found, at = [], 8
    for number, (_, boxes) in enumerate(CUTS):
        for sizes, strides, offset in boxes:
            found.append((number, Strip(sizes, strides, offset, at, Plain(dtype))))
            at += math.prod(sizes) * dtype.itemsize + 8
    return found, at


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).to(DEVICE) for shape, _ in CUTS]


def wire(size: int) -> Tensor:
    return torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)  # NaN, of any dtype


def table(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(
    ("momentum", "gradient", "sent"), [(FP32, FP32, BF16), (BF16, FP32, FP32), (FP32, BF16, BF16), (BF16, BF16, BF16)]
)
def test_send_is_lerp_lerp_and_copy(
    momentum: torch.dtype, gradient: torch.dtype, sent: torch.dtype, accumulate: bool
) -> None:
    cut, size = strips(sent)
    momenta, gradients = tensors(momentum), [*tensors(gradient)[:-1], None]
    betas, nesterov = [0.95, 0.3, 0.9, 0.5, 0.95], [True, False, True, True, True]
    want_momenta, want, found = [m.clone() for m in momenta], wire(size), wire(size)
    for (number, strip), m in ((pair, want_momenta[pair[0]]) for pair in cut):
        g, beta = gradients[number], betas[number]
        if g is not None:
            part, fresh = strip.of(m), strip.of(g).to(momentum)
            if accumulate:
                part.lerp_(fresh, 1 - beta)
            strip.on(want)[0].copy_(torch.lerp(fresh, part, beta) if nesterov[number] else part)
    weights = table([(1 - b, b if n else 1) for b, n in zip(betas, nesterov, strict=True)])
    segments = e.Segments.of(cut, len(CUTS), DEVICE)
    e.send(segments, momenta, gradients, weights, found, sent, accumulate=accumulate)
    assert torch.equal(found, want)
    assert all(torch.equal(m, w) for m, w in zip(momenta, want_momenta, strict=True))


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize(("kind", "sent"), [(FP32, BF16), (BF16, BF16), (FP32, FP32), (FP32, torch.float16)])
def test_apply_is_decay_and_add(kind: torch.dtype, sent: torch.dtype, cautious: bool) -> None:
    cut, size = strips(sent)
    params: list[Any] = [*tensors(kind)[:3], None, tensors(kind)[4]]
    arrived = wire(size)
    for _, strip in cut:
        strip.on(arrived)[0].copy_(torch.randn(strip.sizes))
    want = [None if p is None else p.clone() for p in params]
    scales = [0.7, 1.0, 0.2, 1.0, 3.0]
    for number, strip in cut:
        if (p := want[number]) is not None:
            part, change = strip.of(p), strip.on(arrived)[0].float()
            exact = part.float()
            decay([exact], [change], 0.02 * 0.1, cautious)
            part.copy_(exact.add_(change, alpha=-0.02 * scales[number]))
    segments = e.Segments.of(cut, len(CUTS), DEVICE)
    e.apply(segments, params, table([e.rates(0.02, s, 0.1, cautious) for s in scales]), arrived, sent)
    for p, w in zip(params, want, strict=True):
        assert p is w is None or torch.equal(p, w)


def test_long_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, size = strips(FP32)
    momenta, whole, pieces = tensors(FP32), wire(size), wire(size)
    weights = table([(0.0, 1.0)] * len(CUTS))
    for found, longest in ((whole, 1 << 30), (pieces, 9)):
        monkeypatch.setattr(e, "LONGEST", longest)
        segments = e.Segments.of(cut, len(CUTS), DEVICE)
        e.send(segments, momenta, momenta, weights, found, FP32, accumulate=False)
    assert torch.equal(whole, pieces)
    for number, strip in cut:
        assert torch.equal(strip.on(whole)[0], strip.of(momenta[number]))


def test_launches_do_not_grow_with_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid)
            return self.kernel[grid]

    monkeypatch.setattr(e, "_send", Counted(e._send))
    monkeypatch.setattr(e, "_apply", Counted(e._apply))
    for count in (1, 12):
        launched.clear()
        some = [torch.ones(3, 4, device=DEVICE) for _ in range(count)]
        cut = [(n, Strip((3, 4), (4, 1), 0, 48 * n, Plain(FP32))) for n in range(count)]
        segments, on_wire = e.Segments.of(cut, count, DEVICE), wire(48 * count)
        e.send(segments, some, some, table([(0.1, 0.9)] * count), on_wire, FP32, accumulate=True)
        e.apply(segments, some, table([e.rates(0.5, 1.0, 0.0, False)] * count), on_wire, FP32)
        assert len(launched) == 2
        assert all((tensor == 0.5).all() for tensor in some)


def test_nothing_is_launched_for_nothing() -> None:
    segments = e.Segments.of([], 1, DEVICE)
    e.send(segments, [torch.ones(2, device=DEVICE)], [None], table([(0.1, 1.0)]), wire(0), FP32, accumulate=True)
    e.apply(segments, [None], table([(0.0, 1.0, 0.0)]), wire(0), FP32)


def test_refusals() -> None:
    strip = Strip((3,), (1,), 0, 0, Plain(FP32))
    with pytest.raises(ValueError, match="not written in one pass"):
        e.Segments.of([(0, Strip((3,), (1,), 0, 0, ScaledHalf()))], 1, DEVICE)
    with pytest.raises(ValueError, match="tensor 1, of 1"):
        e.Segments.of([(1, strip)], 1, DEVICE)
    segments = e.Segments.of([(0, strip), (1, strip)], 2, DEVICE)
    ones = [torch.ones(3, device=DEVICE), torch.ones(3, dtype=BF16, device=DEVICE)]
    with pytest.raises(ValueError, match="one dtype"):
        e.apply(segments, ones, table([(0.0, 1.0, 0.0)] * 2), wire(12), FP32)
    with pytest.raises(ValueError, match="tables of"):
        e.apply(segments, ones[:1], table([(0.0, 1.0, 0.0)] * 2), wire(12), FP32)
    with pytest.raises(ValueError, match="contiguous"):
        e.apply(segments, [torch.ones(6, device=DEVICE)[::2], None], table([(0.0, 1.0, 0.0)] * 2), wire(12), FP32)
