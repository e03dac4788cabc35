"""The element-wise kernels have the bits of the torch form in `operators`, for strips of any shape, in one launch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.interpreted import DEVICE, kernels
from support.launches import launches
from torch import Tensor, nn

from muonckpt.algebra.box import Index, row_major
from muonckpt.algebra.plan import NO_COPIES, Copies
from muonckpt.optimizer import Muon
from muonckpt.optimizer.methods.scalar import decay

e = kernels("triton.updates")

BF16, FP32 = torch.bfloat16, torch.float32
# Local tensors, and boxes that cut them: (sizes, strides, offset).  The last is not covered as a whole.
CUTS: list[tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], int]]]] = [
    ((50, 37), [((50, 20), (37, 1), 0), ((50, 17), (37, 1), 20)]),
    ((3, 8, 100), [((3, 8, 100), (800, 100, 1), 0)]),
    ((4, 5, 6, 7), [((4, 5, 3, 7), (210, 42, 7, 1), 0), ((4, 5, 3, 7), (210, 42, 7, 1), 21)]),
    ((), [((), (), 0)]),
    ((30, 11), [((11, 29), (1, 11), 11)]),
]


@dataclass(frozen=True)
class Strip:
    """A box in a tensor's memory and, dense, on a wire, where it begins at a byte and is of ``dtype``."""

    sizes: Index
    strides: Index
    offset: int
    wire_offset: int
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)

    def on(self, wire: Tensor) -> Tensor:
        nbytes = math.prod(self.sizes) * self.dtype.itemsize
        return wire.narrow(0, self.wire_offset, nbytes).view(self.dtype).view(self.sizes)


def strips(dtype: torch.dtype) -> tuple[list[tuple[int, Strip]], int]:
    """Every box with the number of its tensor, at places on a wire of so many bytes."""
    found, at = [], 8
    for number, (_, boxes) in enumerate(CUTS):
        for sizes, strides, offset in boxes:
            found.append((number, Strip(sizes, strides, offset, at, dtype)))
            at += math.prod(sizes) * dtype.itemsize + 8
    return found, at


def on_wire(cut: Sequence[tuple[int, Strip]], dtype: torch.dtype, count: int = len(CUTS)) -> Any:
    tables = [
        table(number, strip.sizes, (strip.offset, strip.strides), (strip.wire_offset, row_major(strip.sizes)))
        for number, strip in cut
    ]
    return e.Segments.of(Copies.joined([NO_COPIES, *tables]), count, dtype, DEVICE)


def table(number: int, sizes: Index, near: tuple[int, Index], far: tuple[int, Index]) -> Copies:
    """One copy from a tensor to a buffer."""
    (at, along), (begin, strides) = near, far
    columns = [sizes], number, at, [along], 0, begin, [strides]
    return Copies(*(np.array(c if isinstance(c, list) else [c], np.int64) for c in columns))


def listed(some: Sequence[Tensor | None]) -> Any:
    dtype = next((tensor.dtype for tensor in some if tensor is not None), FP32)
    return e.TensorTable(torch.tensor(e.addresses(some, DEVICE), dtype=torch.int64, device=DEVICE), dtype)


def rates(lr: float, scales: Sequence[float], weight_decay: float, cautious: bool) -> Any:
    options = {"lr": lr, "weight_decay": weight_decay, "cautious": cautious}
    exact = torch.tensor(scales, dtype=torch.float64, device=DEVICE)
    return e.rate_table(lambda name: torch.full_like(exact, options[name]), exact)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).to(DEVICE) for shape, _ in CUTS]


def wire(size: int) -> Tensor:
    return torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)  # NaN, of any dtype


def numbers(rows: Sequence[Sequence[float]]) -> Tensor:
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
            part, fresh = strip.of(m), strip.of(g).float()
            if accumulate:
                part.copy_(part.float().lerp_(fresh, 1 - beta))
            strip.on(want).copy_(torch.lerp(fresh, part.float(), beta) if nesterov[number] else part)
    weights = numbers([(1 - b, b if n else 1) for b, n in zip(betas, nesterov, strict=True)])
    segments = on_wire(cut, sent)
    e.send(segments, listed(momenta), listed(gradients), weights, found, sent, accumulate=accumulate)
    assert torch.equal(found, want)
    assert all(torch.equal(m, w) for m, w in zip(momenta, want_momenta, strict=True))


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize(("kind", "sent"), [(FP32, BF16), (BF16, BF16), (FP32, FP32), (FP32, torch.float16)])
def test_apply_is_decay_and_add(kind: torch.dtype, sent: torch.dtype, cautious: bool) -> None:
    cut, size = strips(sent)
    params: list[Any] = [*tensors(kind)[:3], None, tensors(kind)[4]]
    arrived = wire(size)
    for _, strip in cut:
        strip.on(arrived).copy_(torch.randn(strip.sizes))
    want = [None if p is None else p.clone() for p in params]
    scales = [0.7, 1.0, 0.2, 1.0, 3.0]
    for number, strip in cut:
        if (p := want[number]) is not None:
            part, change = strip.of(p), strip.on(arrived).float()
            exact = part.float()
            decay([exact], [change], {"lr": 0.02, "weight_decay": 0.1, "cautious": cautious})
            part.copy_(exact.add_(change, alpha=-0.02 * scales[number]))
    segments = on_wire(cut, sent)
    e.apply(segments, listed(params), rates(0.02, scales, 0.1, cautious), arrived, sent)
    for p, w in zip(params, want, strict=True):
        assert p is w is None or torch.equal(p, w)


def test_long_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, size = strips(FP32)
    momenta, whole, pieces = tensors(FP32), wire(size), wire(size)
    weights = numbers([(0.0, 1.0)] * len(CUTS))
    for found, longest in ((whole, 1 << 30), (pieces, 9)):
        monkeypatch.setattr(e, "LONGEST_SEGMENT", longest)
        segments = on_wire(cut, FP32)
        e.send(segments, listed(momenta), listed(momenta), weights, found, FP32, accumulate=False)
    assert torch.equal(whole, pieces)
    for number, strip in cut:
        assert torch.equal(strip.on(whole), strip.of(momenta[number]))


def test_launches_do_not_grow_with_the_number_of_tensors() -> None:
    for count in (1, 12):
        some = [torch.ones(3, 4, device=DEVICE) for _ in range(count)]
        cut = [(n, Strip((3, 4), (4, 1), 0, 48 * n, FP32)) for n in range(count)]
        segments, buffer, where = on_wire(cut, FP32, count), wire(48 * count), listed(some)
        with launches() as launched:
            e.send(segments, where, where, numbers([(0.1, 0.9)] * count), buffer, FP32, accumulate=True)
            e.apply(segments, where, rates(0.5, [1.0] * count, 0.0, False), buffer, FP32)
        assert len(launched) == 2
        assert all((tensor == 0.5).all() for tensor in some)


def test_carry_puts_strips_into_memories_and_takes_them_back() -> None:
    """What a rank has for itself: from where it rests to another order in a memory that begins anywhere, bit by bit."""
    sources = [torch.randn(6, 10, device=DEVICE).to(BF16), torch.full((4,), torch.nan, device=DEVICE, dtype=BF16)]
    near, far = Strip((5, 2), (10, 1), 13, 0, BF16), Strip((5, 2), (1, 7), 3, 0, BF16)
    whole = Strip((4,), (1,), 0, 0, BF16)
    copies = [
        table(0, near.sizes, (near.offset, near.strides), (8 + 2 * far.offset, far.strides)),
        table(1, whole.sizes, (whole.offset, whole.strides), (0, whole.strides)),
    ]
    segments = e.Segments.of(Copies.joined(copies), 2, BF16, DEVICE)
    buffer = wire(8 + 2 * 20)
    e.carry(segments, listed(sources), buffer, back=False)
    assert torch.equal(far.of(buffer[8:].view(BF16)), near.of(sources[0]))
    assert torch.equal(buffer[:8].view(torch.int16), sources[1].view(torch.int16))
    emptied = [torch.zeros_like(source) for source in sources]
    e.carry(segments, listed(emptied), buffer, back=True)
    assert torch.equal(near.of(emptied[0]), near.of(sources[0]))
    assert emptied[0].count_nonzero() == 10 and emptied[1].isnan().all()


def test_nothing_is_launched_for_nothing() -> None:
    segments, none, momentum = on_wire([], FP32, 1), listed([None]), torch.ones(2, device=DEVICE)
    with launches() as launched:
        e.send(segments, listed([momentum]), none, numbers([(0.1, 1.0)]), wire(0), FP32, accumulate=True)
        e.apply(segments, none, numbers([(0.0, 1.0, 0.0)]), wire(0), FP32)
        e.carry(segments, none, wire(0), back=True)
    assert not launched and (momentum == 1).all()


def test_refusals() -> None:
    strip = Strip((3,), (1,), 0, 0, FP32)
    with pytest.raises(ValueError, match="tensor 1, of 1"):
        on_wire([(1, strip)], FP32, 1)
    segments = on_wire([(0, strip), (1, strip)], FP32, 2)
    with pytest.raises(ValueError, match="tables of"):
        e.apply(segments, listed([torch.ones(3, device=DEVICE)]), numbers([(0.0, 1.0, 0.0)] * 2), wire(12), FP32)
    with pytest.raises(ValueError, match="contiguous"):
        listed([torch.ones(6, device=DEVICE)[::2], None])


COMPILED = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature
from muonckpt.optimizer.triton import kernel_products, multiply, updates

# What Triton makes to look at a launch's arguments has variables of its own, which arguments of the same names hide.
backend = CUDABackend(GPUTarget("cuda", 90, 32))
named = {**vars(multiply), **vars(kernel_products), **vars(updates)}
for kernel in [one for one in named.values() if isinstance(one, JITFunction)]:
    values = range(2, 2 + len(kernel.arg_names))
    bound, *_ = create_function_from_signature(kernel.signature, kernel.params, backend)(*values)
    assert bound == dict(zip(kernel.arg_names, values)), kernel

def compiled(kernel, **fixed):
    names, kinds = kernel.arg_names, {"weights": "*fp32", "rate_table": "*fp32", "buffer": "*u8"}
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*i64") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]

kinds = dict(MOMENTUM=tl.float32, GRADIENT=tl.bfloat16, FAR=tl.bfloat16)
send = compiled(updates._send, ACCUMULATE=True, BLOCK=1024, **kinds)
apply = compiled(updates._apply, PARAM=tl.bfloat16, FAR=tl.float16, BLOCK=1024)
compiled(updates._carry, KIND=tl.bfloat16, BACK=True, BLOCK=1024)
assert "fma.rn.f32" in send and "fma.rn.f32" in apply  # as in torch's kernels
"""


@pytest.mark.exhaustive  # it starts a process that compiles them all
def test_each_kernel_can_be_launched_and_compiles_for_hopper(tmp_path: Path) -> None:
    """Without a GPU."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "slot"),
    [
        ({"momentum": 0.0}, "momentum_buffer"),
        ({"algorithm": "adamw", "betas": (0.0, 0.9)}, "exp_avg"),
        ({"algorithm": "lion", "betas": (0.9, 0.0)}, "exp_avg"),
    ],
)
def test_without_memory_the_average_is_the_gradient_with_the_signs_of_its_zeros(options, slot, dtype):
    """A vector loop and the loop after it give zeros other signs, and a shard begins anywhere."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 7, dtype=dtype))
    optimizer = Muon([{"params": [param], "lr": 0.1, **options}])
    for sign in (1, -1):
        param.grad = torch.randn(6, 7, dtype=dtype).relu_() * sign
        optimizer.step()
    average, expected = optimizer.state[param][slot], param.grad.to(optimizer.state[param][slot].dtype)
    assert torch.equal(average.view(torch.uint8), expected.view(torch.uint8))
