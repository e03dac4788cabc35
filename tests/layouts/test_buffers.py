"""Flat buffers of every algorithm on random models, element by element, and the description of one in JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from support.foreign_buffers import compact, cut_rows, fsdp_v1, fsdp_v2, replicated
from support.oracle import arange, execute, scatter

from muonckpt import LayoutError, SourceError
from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import dense
from muonckpt.algebra.plan import make_plan
from muonckpt.layouts.buffers.algorithms import (
    balanced,
    decoupled_total_order,
    distributed_optimizer,
    legacy_pingpong,
    padded_nscost,
    padded_numel,
)
from muonckpt.layouts.buffers.buffer_layout import BufferLayout, PlacedParameter, bucket_shards, owner_shards
from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter, split
from muonckpt.layouts.buffers.records import GroupBuffer, from_json, recorded_buffers, run_buffers, to_json
from muonckpt.layouts.flat import Cuts, FlatShard, flat_layout
from muonckpt.layouts.mesh import Mesh

FREE = -1


def fsdp_v2_on_a_mesh(parameters, ranks, bucket_size=None):
    """Ranks in two axes where they divide, of which the first holds replicas."""
    outer = 2 if ranks.dense % 2 == 0 else 1
    return fsdp_v2(parameters, Cuts(Mesh.of(outer, ranks.dense // outer), (1,)))


IN_BACKPROP_ORDER = [padded_numel, padded_nscost, distributed_optimizer, compact, decoupled_total_order, balanced]
ALGORITHMS = [*IN_BACKPROP_ORDER, legacy_pingpong, fsdp_v1, fsdp_v2_on_a_mesh]


def random_model(rng):
    """Few small shapes, so that many are equal; experts, model chunks, units and tied parameters among them."""
    shapes = [tuple(int(n) for n in rng.integers(1, 14, size=rng.integers(1, 4))) for _ in range(4)]
    return [
        Parameter(
            f"p{number}",
            shapes[rng.integers(len(shapes))],
            dtype=str(rng.choice(["bfloat16", "bfloat16", "uint8"])),
            expert=bool(rng.random() < 0.3),
            tied=bool(rng.random() < 0.05),
            chunk=int(rng.integers(2)),
            unit=[None, 0, 1][rng.integers(3)],
            fold=int(rng.integers(1, 3)),
        )
        for number in range(rng.integers(1, 20))
    ]


def random_buffers(algorithm, seed, count=40):
    """(parameters, ranks, bucket size, the algorithm's buffers) of random models."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        parameters, ranks = random_model(rng), GroupSizes(int(rng.integers(1, 9)), int(rng.integers(1, 5)))
        size = [None, 1, int(rng.integers(1, 2000))][rng.integers(3)]
        yield parameters, ranks, size, algorithm(parameters, ranks, size)


def contents(layout: BufferLayout) -> np.ndarray:
    """For each element of the buffer the number of its parameter, or FREE."""
    elements = np.full(layout.numel, FREE)
    for number, placed in enumerate(layout.parameters):
        assert (elements[placed.start : placed.stop] == FREE).all()
        elements[placed.start : placed.stop] = number
    return elements


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_element_has_one_place(algorithm):
    for parameters, ranks, _, buffers in random_buffers(algorithm, seed=0):
        placed = [placed.parameter for layout in buffers for placed in layout.parameters]
        assert sorted(placed, key=lambda p: p.name) == sorted(parameters, key=lambda p: p.name)
        for layout in buffers:
            own = [placed.parameter for placed in layout.parameters]
            assert own == [parameter for parameter in parameters if parameter in own]
            assert len({(p.dtype, p.expert) for p in own}) == 1 or algorithm is fsdp_v2_on_a_mesh
            assert layout.ranks == (ranks.dense if algorithm is fsdp_v2_on_a_mesh else ranks.of(own[0]))
            found = contents(layout)
            assert layout.padding == (found == FREE).sum()
            for number, (start, stop) in enumerate(layout.buckets):
                here = {n for n in found[start:stop].tolist() if n != FREE}
                assert here == {n for n, placed in enumerate(layout.parameters) if placed.bucket == number}
                assert layout.filled[number] == (found[start:stop] != FREE).sum()
            assert all(placed.start % layout.alignment == 0 for placed in layout.parameters)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shards_hold_every_element_and_owners_follow(algorithm):
    for _, _, _, buffers in random_buffers(algorithm, seed=1):
        for layout in buffers:
            held = np.zeros((layout.ranks, layout.numel), bool)
            for shard in layout.shards:
                held[shard.buffer, shard.start : shard.stop] = True
            assert held.any(axis=0).all()
            for placed in layout.parameters:
                part = held[:, placed.start : placed.stop]
                uncut = (part == part[:, :1]).all()
                assert uncut or not layout.whole
                (holders,) = part[:, 0].nonzero()
                expected = int(holders[0]) if uncut and len(holders) == 1 else None
                assert layout.owners[placed.name] == expected
            sizes = [shard.stop - shard.start for shard in layout.shards]
            per_bucket = [
                [s.buffer for s in layout.shards if start <= s.start and s.stop <= stop]
                for start, stop in layout.buckets
            ]
            equal = all(held == list(range(layout.ranks)) for held in per_bucket) and all(
                size * layout.ranks == stop - start
                for (start, stop), first in zip(layout.buckets, range(0, len(sizes), layout.ranks), strict=True)
                for size in sizes[first : first + layout.ranks]
            )
            assert layout.even == equal


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_layouts_say_what_the_ranks_hold(algorithm):
    """The buffer as an array, cut by hand into what each rank holds, against the layouts of its parameters."""
    for _, _, _, buffers in random_buffers(algorithm, seed=2, count=15):
        for layout in buffers:
            names = [f"rank {rank}" for rank in range(layout.ranks)]
            held = layout.tensor_layouts(names)
            for placed in layout.parameters:
                values, name = arange(placed.parameter.shape), placed.name
                dump = np.full(layout.numel, FREE)
                dump[placed.start : placed.stop] = values.flatten()
                parts = {
                    names[rank]: np.concatenate([dump[s.start : s.stop] for s in layout.shards if s.buffer == rank])
                    for rank in {shard.buffer for shard in layout.shards}
                }
                assert scatter(values, held[name]) == {rank: f for rank, part in parts.items() if (f := full(part))}


def full(part: np.ndarray) -> dict[int, int]:
    return {offset: value for offset, value in enumerate(part.tolist()) if value != FREE}


def test_a_whole_parameter_lies_dense_at_its_owner():
    for _, _, _, buffers in random_buffers(padded_nscost, seed=3):
        for layout in buffers:
            for placed in layout.parameters:
                (shard,) = layout.shards_of(placed)
                rank, offset = layout.owners[placed.name], shard.offset + placed.start - shard.start
                whole = dense(Box.of(placed.parameter.shape), rank, offset)
                assert layout.tensor_layouts()[placed.name].fragments == (whole,)


@pytest.mark.parametrize("target", [padded_numel, balanced, fsdp_v1])
@pytest.mark.parametrize("source", [padded_nscost, decoupled_total_order, distributed_optimizer])
def test_buffers_convert_into_each_other(source, target):
    """Any layout into any other, at another size: a plan per parameter, every element at its place."""
    rng = np.random.default_rng(4)
    for _ in range(5):
        parameters = random_model(rng)
        before, after = ({}, {})
        for layouts, algorithm in ((before, source), (after, target)):
            for layout in algorithm(parameters, GroupSizes(int(rng.integers(1, 6)), 2), 500):
                layouts |= layout.tensor_layouts()
        for parameter in parameters:
            values, old, new = arange(parameter.shape), before[parameter.name], after[parameter.name]
            assert execute(make_plan(old, new), scatter(values, old)) == scatter(values, new)


@pytest.mark.parametrize("algorithm", IN_BACKPROP_ORDER)
def test_buckets_follow_the_backward_pass(algorithm):
    """So that a bucket can be reduced as soon as its last gradient is there; tied parameters are alone in theirs."""
    for _, _, size, buffers in random_buffers(algorithm, seed=5):
        for layout in buffers:
            numbers = [placed.bucket for placed in reversed(layout.parameters)]
            assert numbers == sorted(numbers)
            if size is not None:
                assert all(filled >= size for filled in untied(layout)[:-1])
            if algorithm not in (compact, decoupled_total_order):
                assert all(numbers.count(placed.bucket) == 1 for placed in layout.parameters if placed.parameter.tied)


def untied(layout):
    """Elements of the buckets, alignment included, up to the first that a tied parameter cut short."""
    tied = [placed.bucket for placed in layout.parameters if placed.parameter.tied]
    sizes = [stop - start for start, stop in layout.buckets]
    return sizes[: min(tied)] if tied else sizes


def test_buffers_keep_chunks_experts_and_types_apart_in_order():
    keys = [(1, True, "a"), (0, False, "b"), (1, False, "a"), (0, True, "b"), (0, False, "a"), (0, False, "b")]
    parameters = [
        Parameter(str(i), (2,), dtype=dtype, expert=expert, chunk=chunk)
        for i, (chunk, expert, dtype) in enumerate(keys)
    ]
    assert [[p.name for p in group] for group in split(parameters)] == [["1", "5"], ["4"], ["3"], ["2"], ["0"]]
    with pytest.raises(LayoutError, match="more than once: \\['x'\\]"):
        split([Parameter("x", (2,)), Parameter("x", (3,), expert=True)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_description_survives_json(algorithm):
    for _, _, _, buffers in random_buffers(algorithm, seed=6):
        for layout in buffers:
            assert from_json(json.loads(json.dumps(to_json(layout)))) == layout


def test_json_says_everything_that_a_reader_needs():
    parameters = [Parameter("a", (8, 16)), Parameter("b", (3, 5)), Parameter("c", (8, 16))]
    (layout,) = padded_numel(parameters, GroupSizes(2))
    data = to_json(layout)
    assert (data["algorithm"], data["version"], data["ranks"], data["numel"]) == ("padded-numel", 1, 2, 384)
    assert data["padding"] == 384 - 2 * 128 - 15
    assert data["buckets"] == [[0, 384]] and data["shards"] == [[0, 192, 0], [192, 384, 1]]
    placed = [[given[key] for key in ("name", "start", "stop", "bucket", "owner")] for given in data["parameters"]]
    assert placed == [["a", 192, 320, 0, 1], ["b", 128, 143, 0, 0], ["c", 0, 128, 0, 0]]


UNRELATED = {"algorithm", "version", "ranks", "whole", "name", "dtype", "expert", "tied", "chunk", "unit", "fold"}
"""Fields on which no other depends: only their type can be wrong."""


def edits(value, key=None):
    """The description with one value of a wrong type or off by one, one item left out, or one added."""
    match value:
        case dict():
            yield {**value, "more": 1}
            for name in value:
                yield {other: value[other] for other in value if other != name}
                yield from ({**value, name: edited} for edited in edits(value[name], name))
        case list():
            yield [*value, 2]
            for index in range(len(value)):
                yield value[:index] + value[index + 1 :]
                yield from ([*value[:index], edited, *value[index + 1 :]] for edited in edits(value[index], key))
        case bool():
            yield int(value)
        case int():
            yield from (str(value), float(value), True)
            yield from () if key in UNRELATED else (value + 1, value - 1)
        case _:
            yield 0.5


def test_a_damaged_description_is_refused():
    (layout,) = padded_numel([Parameter("a", (8, 16)), Parameter("b", (3, 5)), Parameter("c", (5,))], GroupSizes(2), 1)
    data = to_json(layout)
    options = data.pop("options")  # free-form
    damaged = [data, {**data, "options": None}, *({**edited, "options": options} for edited in edits(data))]
    assert len(damaged) > 200
    for edited in damaged:
        with pytest.raises(SourceError, match="damaged buffer layout"):
            from_json(edited)
    assert from_json({**data, "options": options}) == layout


def a_buffer(**changes) -> BufferLayout:
    """Two parameters of 4 in two buckets of 8, each bucket cut in two."""
    parameters = (PlacedParameter(Parameter("a", (4,)), 8, 1), PlacedParameter(Parameter("b", (2, 2)), 4, 0))
    buckets = ((0, 8), (8, 16))
    given = {
        "parameters": parameters,
        "buckets": buckets,
        "shards": bucket_shards(buckets, 2),
        "alignment": 4,
        "whole": True,
    }
    return BufferLayout("by hand", 1, 2, **{**given, **changes})


A, B = (Parameter("a", (4,)), Parameter("b", (4,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": ((0, 8), (9, 16))}, r"bucket \[9, 16\) does not follow.*ends at 8"),
        ({"buckets": ((0, 8), (8, 8))}, r"bucket \[8, 8\) does not follow"),
        ({"parameters": (PlacedParameter(A, 0, 0), PlacedParameter(B, 0, 0))}, "'b' at.*overlaps"),
        ({"parameters": (PlacedParameter(A, 0, 0), PlacedParameter(A, 4, 0))}, "two parameters of one name"),
        ({"parameters": (PlacedParameter(A, 2, 0),)}, "does not begin at a multiple of 4"),
        ({"parameters": (PlacedParameter(A, 2, 0),), "alignment": 2}, "'a' at.*is cut into 2"),
        ({"parameters": (PlacedParameter(A, 8, 0),)}, "is not inside bucket 0"),
        ({"parameters": (PlacedParameter(A, 8, 2),)}, "in no bucket"),
        ({"parameters": (PlacedParameter(A, 8, -1),)}, "in no bucket"),
        ({"shards": ()}, "the last shard ends at 0 of 16"),
        ({"shards": (FlatShard(0, 0, 8),)}, "the last shard ends at 8 of 16"),
        ({"shards": (FlatShard(0, -4, 8), FlatShard(1, 8, 16))}, "does not follow.*ends at 0"),
        ({"shards": (FlatShard(0, 0, 8), FlatShard(1, 12, 16))}, "does not follow.*ends at 8"),
        ({"shards": (FlatShard(0, 0, 8), FlatShard(1, 4, 16))}, "does not follow.*ends at 8"),
        ({"shards": (FlatShard(0, 0, 16),)}, r"crosses an end of bucket \(0, 8\)"),
        ({"shards": (FlatShard(0, 0, 8), FlatShard(2, 8, 16))}, "held by none of 2 ranks"),
        ({"shards": (FlatShard(0, 0, 8), FlatShard(0, 8, 16))}, "should follow at 8"),
        ({"shards": (FlatShard(1, 0, 8), FlatShard(0, 0, 8), FlatShard(0, 8, 16, 8))}, "not in the order"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    assert a_buffer().padding == 8
    with pytest.raises(LayoutError, match=message):
        a_buffer(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": (3,)}, "expected 2 ranks that share a buffer"),
        ({"group": (3, 3)}, "expected 2 ranks that share a buffer"),
        ({"group": (-1, 3)}, "expected 2 ranks that share a buffer"),
        ({"origins": ((0,),)}, "not those of the buffer's parameters"),
        ({"origins": ((0,), (0,))}, "not those of the buffer's parameters"),
        ({"layout": lambda: a_buffer(parameters=()), "origins": ()}, "expected a buffer with parameters"),
    ],
)
def test_a_buffer_that_no_group_can_share_is_refused(changes, message):
    given = {"slot": "momentum_buffer", "part": 0, "group": (5, 3), "origins": ((0,), (4, 0)), "layout": a_buffer}
    given = {**given, **changes}
    given["layout"] = given["layout"]()
    with pytest.raises(LayoutError, match=message):
        GroupBuffer(**given)


def test_what_a_checkpoint_records_of_its_buffers_is_read_back():
    """Those that its tensors lie in, and those of the run that saved it, which are of no slot and have no origins."""
    buffer = GroupBuffer("momentum_buffer", 1, (5, 3), ((0,), (4, 0)), a_buffer())
    assert [(key, fragment.box.lo, fragment.place.buffer) for key, fragment in buffer.fragments()] == [
        ("a", (0,), 5),
        ("b", (4, 0), 3),
    ]
    run = {"layout": "balanced", "buffers": [to_json(a_buffer())], "ranks": [[5, 3]]}
    provenance = json.loads(json.dumps({"buffers": [buffer.to_json()], "layer_wise": run}))
    assert recorded_buffers(provenance) == (buffer,)
    assert run_buffers(provenance) == (GroupBuffer(None, 0, (5, 3), ((0,), (0, 0)), a_buffer()),)
    assert recorded_buffers({}) == run_buffers({}) == ()
    for damaged in ({"buffers": 3}, {"buffers": [{}]}, {"buffers": [3]}):
        with pytest.raises(SourceError, match="damaged"):
            recorded_buffers(damaged)
    for damaged in ({"ranks": []}, {"ranks": [[5]]}, {"ranks": 5}, {"buffers": []}, {"buffers": [{}]}):
        with pytest.raises(SourceError, match="damaged"):
            run_buffers({"layer_wise": {**run, **damaged}})


def test_replicas_and_owners_by_hand():
    buckets = a_buffer().buckets
    both = a_buffer(shards=replicated(buckets, 2))
    assert both.owners == {"a": None, "b": None} and not both.even
    at_start = tuple(replace(placed, start=placed.start // 8 * 8) for placed in a_buffer().parameters)
    shards = owner_shards(at_start, 16, {"a": 1, "b": 0})
    assert shards == (FlatShard(0, 0, 8), FlatShard(1, 8, 16))
    assert a_buffer(shards=shards).owners == {"a": 1, "b": 0}


def test_a_rank_finds_its_shard_at_an_offset():
    layout = flat_layout((2, 3), 4, (FlatShard("x", 0, 7, 10), FlatShard("y", 7, 12, 1)))
    assert scatter(arange((2, 3)), layout) == {"x": {14: 0, 15: 1, 16: 2}, "y": {1: 3, 2: 4, 3: 5}}


def test_rows_that_a_shard_cuts_are_named():
    """Vector B of Megatron-FSDP version 1: a shard ends two elements into row 6 of the last parameter."""
    parameters = [Parameter("p0", (1, 80)), Parameter("p1", (13, 6)), Parameter("p2", (13, 6))]
    (first,) = fsdp_v1(parameters, GroupSizes(4))
    (second,) = fsdp_v2(parameters, Cuts(Mesh.of(4), (0,)))
    assert (cut_rows(first), cut_rows(second)) == (("p2",), ())


@pytest.mark.parametrize("shape", [(0,), (4, 0)])
def test_parameters_need_elements_and_groups_ranks(shape):
    assert math.prod(shape) == 0
    with pytest.raises(LayoutError, match="no elements"):
        Parameter("empty", shape)
    with pytest.raises(LayoutError, match="no elements"):
        replace(A, fold=0)
    with pytest.raises(LayoutError, match="needs ranks"):
        GroupSizes(4, 0)
