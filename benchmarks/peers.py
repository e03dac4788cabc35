"""What one step of Muon costs in other projects, by their formulas, and what it must cost at least.

The source of each formula is the project's file named at its function (XTuner b934f4620, dion 0a059a4, VeOmni
d9774494, torchtitan b5bcd76c6, Megatron-LM d98e8a64dd).  The figures say what the algorithm there does on these
matrices, not what anybody measured on a cluster.  `tests/benchmarks/test_benchmark_models.py` holds them against byte
counts of real runs of the same code and against an independent simulation.

All functions are pure.  They take the matrices of a model layer by layer, in forward order, the number of ranks W and
of expert-parallel groups EP.  Dense parameters are sharded by rows over all ranks.  Routed experts (a `Matrix` of E
copies) are shared out over EP; then ``g = W / EP`` ranks share ``L = E / EP`` experts of each parameter.  Fused pieces
count as matrices of their own, which is kinder to the peers than most of them are.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from models import Matrix

from muonckpt.layouts.buffers.algorithms import decoupled_total_order, padded_nscost
from muonckpt.layouts.buffers.buffer_layout import BufferLayout
from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter

HALF, FULL = 2, 4
"""Bytes of an element: of what Newton-Schulz needs (bfloat16), and of a float32 parameter."""

Layers = Sequence[Sequence[Matrix]]


@dataclass(frozen=True, slots=True)
class Cost:
    """``flops``: critical path of Newton-Schulz, rounds one after the other.  ``sent``: bytes per rank, both ways, mean
    over ranks, bandwidth-optimal collectives.  ``calls``: collectives."""

    flops: int = 0
    sent: float = 0.0
    calls: int = 0

    def __add__(self, other_cost: Cost) -> Cost:
        return Cost(self.flops + other_cost.flops, self.sent + other_cost.sent, self.calls + other_cost.calls)


class Block(NamedTuple):
    """What one rank orthogonalises at a time: a matrix, or all local experts of a parameter."""

    rows: int
    columns: int
    flops: int


def rest_whole(experts: int, ranks: int, ep: int) -> bool:
    """Whether each rank can hold whole experts, the same number on all; else their rows are cut over the g ranks."""
    return experts // ep % (ranks // ep) == 0


def lower_bound(layers: Layers, ranks: int, ep: int = 1) -> Cost:
    """The least that whole-matrix Newton-Schulz can cost, with 16 bits an element on the wire.

    Work: ``max(sum F / W, max F)``.  Bytes: all of a matrix that its best-placed rank does not hold goes there and
    back, ``2 N b (W - 1) / W²`` for even rows.  The two bounds need not be attainable together.
    """
    work = sum(matrix.copies * matrix.flops for layer in layers for matrix in layer)
    largest = max(matrix.flops for layer in layers for matrix in layer)
    moved_matrices = sum(matrix.copies * _must_move(matrix, ranks, ep) for layer in layers for matrix in layer)
    return Cost(max(math.ceil(work / ranks), largest), 2 * HALF * moved_matrices / ranks)


def undivided_bound(layers: Layers, ranks: int) -> int:
    """Newton-Schulz of the busiest rank if no matrix is shared: of k W + 1 matrices, some rank has k + 1.

    At least `lower_bound`, and more where matrices are few; still no plan need attain it.
    """
    kinds: Counter[int] = Counter()
    for matrix in (matrix for layer in layers for matrix in layer):
        kinds[matrix.flops] += matrix.copies
    falling = sorted(kinds, reverse=True)
    every_round = np.repeat(falling, [kinds[flops] for flops in falling])[::ranks]
    rounds = max((turn * int(flops) for turn, flops in enumerate(every_round, start=1)), default=0)
    return max(rounds, lower_bound(layers, ranks).flops)


def busiest_bound(layers: Layers, ranks: int, ep: int = 1) -> float:
    """The least bytes that the busiest rank sends, if every rank holds an even share of what must move.

    The owner of the largest such matrix, of n elements, returns it and gives away its share of all others:
    ``n b (W - 1) / W + (N - n) b / W``.
    """
    moving = [matrix for layer in layers for matrix in layer if _must_move(matrix, ranks, ep)]
    if not moving:
        return 0.0
    top = max(moving, key=lambda matrix: _must_move(matrix, ranks, ep))
    other_numel = sum(matrix.copies * matrix.numel for matrix in moving) - top.numel
    return max(HALF * (_must_move(top, ranks, ep) + other_numel / ranks), lower_bound(layers, ranks, ep).sent)


def _must_move(matrix: Matrix, ranks: int, ep: int) -> int:
    """Elements of one copy that the rank which holds most of it does not hold."""
    if matrix.copies > 1 and rest_whole(matrix.copies, ranks, ep):
        return 0
    size = math.ceil(matrix.total / (ranks // ep if matrix.copies > 1 else ranks))
    stop = matrix.first + matrix.rows
    chunks = {matrix.first // size, matrix.first // size + 1, (stop - 1) // size}
    held_numel = max(min(stop, (chunk + 1) * size) - max(matrix.first, chunk * size) for chunk in chunks)
    return (matrix.rows - held_numel) * matrix.columns


def xtuner(layers: Layers, ranks: int, ep: int = 1, *, pad: bool = False) -> Cost:
    """xtuner/v1/optim/muon.py: rounds of W equal shapes by all-to-all; a shorter last round by all-gather and
    reduce-scatter of whole matrices (:739-769, 975-1091) or, if ``pad``, filled up with zeros.

    Experts are one matrix ``[L m, n]`` a parameter: local where ranks hold whole ones (:677-682), gathered in
    sub-groups of ``g / L`` ranks that all repeat the work where parameters are few (:684-692), else as dense ones.
    """
    cost = _xtuner_rounds((_block(matrix) for matrix in _dense(layers)), ranks, pad)
    stacks = _experts(layers)
    if not stacks:
        return cost
    local, group = stacks[0].copies // ep, ranks // ep
    work = sum(stack.flops for stack in stacks)
    if local % group == 0:
        return cost + Cost(work * (local // group))
    if local > 1 and group % local == 0 and len(stacks) < group:
        share = group // local
        gathered = sum(stack.numel for stack in stacks) * HALF * (share - 1) / share
        return cost + Cost(work, gathered, len(stacks))
    return cost + _xtuner_rounds((_block(stack, local) for stack in stacks), group, pad)


def _xtuner_rounds(blocks: Iterable[Block], ranks: int, pad: bool) -> Cost:
    cost = Cost()
    for block, count in Counter(blocks).items():
        full, remainder = divmod(count, ranks)
        cost += Cost(full * block.flops, full * _both_ways(_padded(block, ranks), ranks), 2 * full)
        if remainder:
            numel = _padded(block, ranks) if pad else remainder * block.rows * block.columns
            cost += Cost(block.flops, _both_ways(numel, ranks), 2)
    return cost


def dion(layers: Layers, ranks: int, ep: int = 1) -> Cost:
    """dion/megabatch_base.py:704-834: all matrices of a shape in one batch, count and rows padded to W, two
    all-to-alls a shape.  Experts sharded by experts stay where they are: ``ceil(L / g)`` of each parameter a rank."""
    cost = Cost()
    for block, count in Counter(map(_block, _dense(layers))).items():
        rounds = math.ceil(count / ranks)
        cost += Cost(rounds * block.flops, rounds * _both_ways(_padded(block, ranks), ranks), 2)
    return cost + _whole_experts(layers, ranks, ep)


def veomni(layers: Layers, ranks: int, ep: int = 1) -> Cost:
    """veomni/optim/muon.py:955-1052: W parameters at a time in model order, the n-th to rank n, exact lists in the
    parameter's dtype.  Whatever is not 2-D is gathered whole and repeated by every rank of its group (:636-654)."""
    dense = _dense(layers)
    chunks = [dense[start : start + ranks] for start in range(0, len(dense), ranks)]
    cost = Cost(
        sum(max(matrix.flops for matrix in chunk) for chunk in chunks),
        _exact(dense, ranks, FULL),
        2 * len(chunks),
    )
    return cost + _gathered(_experts(layers), ranks // ep, ep, FULL)


def gather_all(layers: Layers, ranks: int, ep: int = 1) -> Cost:
    """Megatron-FSDP draft #4486: every matrix is gathered by, and repeated on, every rank that has a part of it."""
    return _gathered(_dense(layers), ranks, 1, HALF) + _gathered(_experts(layers), ranks // ep, ep, HALF)


def titan(layers: Layers, ranks: int, ep: int = 1, *, together: int | None = None) -> Cost:
    """torchtitan/distributed/flex_shard/dist_muon.py:954-1087: exact splits in the parameter's dtype, longest first
    within a bucket of ``together`` layers (None: all), buckets one after the other; its two slots may hide up to half.

    Routed experts have buckets of their own (models/kimi_k2_7/config_registry.py:395-420) and are distributed evenly,
    ``ceil(L / g)`` of each parameter a rank, even where other parameters would fill the gaps.
    """
    step = together or len(layers)
    buckets = [layers[start : start + step] for start in range(0, len(layers), step)]
    dense = [matrices for bucket in buckets if (matrices := _dense(bucket))]
    cost = Cost(
        sum(max(_longest_first((matrix.flops for matrix in bucket), ranks)) for bucket in dense),
        sum(_exact(bucket, ranks, FULL) for bucket in dense),
        2 * len(dense),
    )
    stacks, group = _experts(layers), ranks // ep
    if not stacks or rest_whole(stacks[0].copies, ranks, ep):
        return cost + _whole_experts(layers, ranks, ep)
    moved_matrices = _exact(stacks, group, FULL) * stacks[0].copies / ep
    return (
        cost + _whole_experts(layers, ranks, ep) + Cost(0, moved_matrices, 2 * sum(bool(_experts(b)) for b in buckets))
    )


def megatron_padded(layers: Layers, ranks: int, ep: int = 1) -> Cost:
    """megatron/core/optimizer/layer_wise_optimizer.py:195-444: whole matrices per owner, packed into the shards of
    padded gradient buckets.  Training reduces gradients and gathers parameters anyway (W times the bytes of the bound);
    what counts here is what the padding adds to it."""
    return _megatron(layers, ranks, ep, padded_nscost, lambda buffer: 2 * buffer.padding)


def megatron_compact(layers: Layers, ranks: int, ep: int = 1) -> Cost:
    """The same file on its development branch (#5388): owners to and fro by size (:671-761), no padding; but gradients
    are all-reduced, and what counts here is what that sends beyond a reduce-scatter."""
    return _megatron(layers, ranks, ep, decoupled_total_order, lambda buffer: buffer.numel)


Rule = Callable[[list[Parameter], GroupSizes, int], tuple[BufferLayout, ...]]


def _megatron(layers: Layers, ranks: int, ep: int, rule: Rule, extra: Callable[[BufferLayout], int]) -> Cost:
    """One buffer for dense matrices, one for experts, in buckets of a million elements a rank, at least 40."""
    owned_matrices = [
        *_dense(layers),
        *(expert for stack in _experts(layers) for expert in [stack] * (stack.copies // ep)),
    ]
    named = [Parameter(f"{n}", (m.rows, m.columns), expert=m.copies > 1) for n, m in enumerate(owned_matrices)]
    loads, sent = np.zeros(ranks, np.int64), 0.0
    for buffer in rule(named, GroupSizes(ranks, ranks // ep), max(40_000_000, 1_000_000 * ranks)):
        work = np.zeros(buffer.ranks, np.int64)
        for name, owner in buffer.owners.items():
            work[owner] += owned_matrices[int(name)].flops
        loads += work.repeat(ranks // buffer.ranks)
        sent += extra(buffer) * HALF * (buffer.ranks - 1) / buffer.ranks
    return Cost(int(loads.max()), sent)


def _dense(layers: Layers) -> list[Matrix]:
    return [matrix for layer in layers for matrix in layer if matrix.copies == 1]


def _experts(layers: Layers) -> list[Matrix]:
    return [matrix for layer in layers for matrix in layer if matrix.copies > 1]


def _block(matrix: Matrix, local: int = 1) -> Block:
    return Block(local * matrix.rows, matrix.columns, local * matrix.flops)


def _padded(block: Block, ranks: int) -> int:
    """Elements of a matrix with its rows padded to a multiple of the ranks."""
    return math.ceil(block.rows / ranks) * ranks * block.columns


def _both_ways(numel: int, ranks: int) -> float:
    """Bytes a rank sends when it gives away all but a W-th of ``numel`` elements, and as much comes back."""
    return 2 * numel * HALF * (ranks - 1) / ranks


def _exact(matrices: Sequence[Matrix], ranks: int, width: int) -> float:
    """Bytes of exact splits to single owners and back: ``2 N b (W - 1) / W²``, of one copy each."""
    return 2 * sum(matrix.numel for matrix in matrices) * width * (ranks - 1) / ranks**2


def _gathered(matrices: Sequence[Matrix], ranks: int, ep: int, width: int) -> Cost:
    """Whole on every rank, nothing back: ``N b (W - 1) / W`` bytes, all of the work."""
    work = sum(matrix.copies // ep * matrix.flops for matrix in matrices)
    numel = sum(matrix.copies // ep * matrix.numel for matrix in matrices)
    return Cost(work, numel * width * (ranks - 1) / ranks, len(matrices) if ranks > 1 else 0)


def _whole_experts(layers: Layers, ranks: int, ep: int) -> Cost:
    """Each rank orthogonalises ``ceil(L / g)`` experts of each parameter, or idles if there are fewer experts."""
    return Cost(sum(math.ceil(stack.copies // ep / (ranks // ep)) * stack.flops for stack in _experts(layers)))


def _longest_first(costs: Iterable[int], ranks: int) -> list[int]:
    """Load of each rank when the longest job left always goes to the least loaded rank (Graham 1969)."""
    loads = [0] * ranks
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return loads


PEERS: dict[str, Callable[[Layers, int, int], Cost]] = {
    "XTuner": xtuner,
    "XTuner, padded": partial(xtuner, pad=True),
    "dion": dion,
    "VeOmni": veomni,
    "titan, 2 layers": partial(titan, together=2),
    "titan, 1 bucket": titan,
    "Megatron padded": megatron_padded,
    "Megatron compact": megatron_compact,
    "gather all": gather_all,
}
