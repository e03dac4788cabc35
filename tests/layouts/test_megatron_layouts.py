"""Megatron's flat buffers, element for element: what its own code computed, stored or run here on random models."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.foreign_buffers import cut_rows, fsdp_v1, fsdp_v2
from support.golden import golden

from muonckpt import LayoutError
from muonckpt.layouts.buffers.algorithms import (
    decoupled_total_order,
    distributed_optimizer,
    legacy_pingpong,
    padded_nscost,
    padded_numel,
)
from muonckpt.layouts.buffers.buffer_layout import BufferLayout
from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter
from muonckpt.layouts.flat import Cuts
from muonckpt.layouts.mesh import Mesh

PADDED = {"padded_numel": padded_numel, "padded_ns_cost": padded_nscost}


def stored() -> dict[str, list]:
    files = (golden(f"megatron/{name}_shared.json") for name in ("layouts", "flat_buffers"))
    return {key: value for file in files for key, value in json.loads(file.read_text()).items() if "version" not in key}


def live() -> dict[str, list]:
    if not find_spec("megatron"):  # before a program is started for it
        pytest.skip("megatron-core is not installed")
    program = Path(__file__).parents[1] / "support" / "upstream.py"
    done = subprocess.run([sys.executable, "-P", program, "0", "150"], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(f"megatron-core cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=[stored, live])
def published(request):
    """Cases of ``layouts_shared.json`` and ``flat_buffers_shared.json``, or such cases from the installed package."""
    actual = request.param()
    assert actual.keys() == {"cases", "v1", "v2"} and all(actual.values())
    return actual


def names(indices) -> list[str]:
    return [str(index) for index in indices]


def of_case(case: dict) -> tuple[list[Parameter], GroupSizes]:
    """Parameters are named by their number in the case."""
    parameters = [
        Parameter(
            str(index),
            tuple(given["shape"]),
            expert=given.get("expert", "groups" in case and ".experts." in given["name"]),
            tied=given.get("shared_embedding", False),
            chunk=given.get("chunk", 0),
            unit=given.get("unit"),
            fold=given.get("fold", 1),
        )
        for index, given in enumerate(case["params"])
    ]
    return parameters, GroupSizes(case["dp"], case.get("expert_dp", 1))


def owners_by_name(layouts) -> dict[str, int | None]:
    return {name: owner for layout in layouts for name, owner in layout.owners.items()}


def assert_buffers(case, expected, layouts):
    for own, theirs, layout in zip(case["buffers"], expected["buffers"], layouts, strict=True):
        assert layout.ranks == own["dp"]
        assert [placed.name for placed in layout.parameters] == names(own["params"])
        assert [[placed.start, placed.stop, placed.bucket] for placed in layout.parameters] == theirs["index_map"]
        assert list(map(list, layout.buckets)) == theirs["buckets"]


def assert_filled(expected, layouts):
    for theirs, layout in zip(expected["buffers"], layouts, strict=True):
        assert list(layout.filled) == theirs["unpadded"]
        assert layout.padding == theirs["buckets"][-1][1] - sum(theirs["unpadded"])


def assert_owners(case, expected, layouts):
    actual = owners_by_name(layouts)
    assert [actual[str(index)] for index in range(len(case["params"]))] == expected["owner"]


def test_padded_buffers_and_their_owners(published):
    checked = 0
    for case in published["cases"]:
        for key in PADDED.keys() & case.keys():
            layouts = PADDED[key](*of_case(case), case["bucket_size"], case.get("busbw", False))
            assert_buffers(case, case[key], layouts)
            assert_filled(case[key], layouts)
            assert_owners(case, case[key], layouts)
            assert all(layout.even for layout in layouts)
            checked += 1
    assert checked >= len(published["cases"])


def test_compact_buffers_and_ping_pong_owners(published):
    for case in published["cases"]:
        parameters, ranks = of_case(case)
        groups = [names(group) for group in case["param_groups"]] if "param_groups" in case else None
        legacy = legacy_pingpong(parameters, ranks, case["bucket_size"], groups)
        total = decoupled_total_order(parameters, ranks, case["bucket_size"])
        for layouts in (legacy, total):
            assert_buffers(case, case["compact_buffer"], layouts)
            assert_filled(case["compact_buffer"], layouts)
        assert_owners(case, case["pingpong_legacy"], legacy)
        if "pingpong_total_order" in case:  # a live package of the main branch does not have it
            assert_owners(case, case["pingpong_total_order"], total)


def test_byte_sharded_buffers(published):
    """Not in the stored cases, which have a vector below."""
    for case in published["cases"]:
        if "distributed_optimizer" in case:
            layouts = distributed_optimizer(*of_case(case), case["bucket_size"], case["busbw"])
            assert_buffers(case, case["distributed_optimizer"], layouts)
            assert all(layout.even for layout in layouts)


def held_by(layout: BufferLayout, rank: int) -> int:
    return sum(shard.stop - shard.start for shard in layout.shards if shard.buffer == rank)


def slices(layout: BufferLayout, rank: int) -> dict[str, list[int] | None]:
    """What each parameter has on the rank: [start, stop) of its own elements, or None."""
    held: dict[str, list[int] | None] = {placed.name: None for placed in layout.parameters}
    for placed in layout.parameters:
        for shard in layout.shards_of(placed):
            if shard.buffer == rank:
                first, last = max(shard.start, placed.start), min(shard.stop, placed.stop)
                held[placed.name] = [first - placed.start, last - placed.start]
    return held


def test_fsdp_v1_buffers(published):
    for case in published["v1"]:
        layouts = fsdp_v1(*of_case(case), case["bucket_size"])
        for group, layout in zip(case["groups"], layouts, strict=True):
            own = names(group["params"])
            assert (layout.ranks, layout.options["factor"]) == (group["dp"], group["chunk_size_factor"])
            starts = {placed.name: placed.start for placed in layout.parameters}
            assert starts == dict(zip(own, group["offsets"], strict=True))
            assert (layout.numel, held_by(layout, 0)) == (group["size"], group["shard_size"])
            assert (not cut_rows(layout)) == group["row_aligned"]
            for rank, expected in enumerate(group["slices"]):
                assert slices(layout, rank) == dict(zip(own, expected, strict=True))


def test_fsdp_v2_buffers(published):
    for case in published["v2"]:
        parameters = [Parameter(str(index), tuple(shape)) for index, shape in enumerate(case["shapes"])]
        flat = [axis for axis, placement in enumerate(case["placements"]) if placement == "flat"]
        (layout,) = fsdp_v2(parameters, Cuts(Mesh.of(*case["mesh"]), tuple(reversed(flat))))
        assert [placed.start for placed in layout.parameters] == case["tensor_to_offset"]
        assert layout.numel == case["size"]
        ranges = {shard.buffer: [shard.start, shard.stop - shard.start] for shard in layout.shards}
        assert [ranges[rank] for rank in range(layout.ranks)] == case["local_ranges"]
        for rank, expected in enumerate(case["slices"]):
            assert list(slices(layout, rank).values()) == expected
        assert not cut_rows(layout)


@pytest.mark.parametrize("run", ["ws4_padded", "ws4_pingpong"])
def test_owners_of_a_real_run(run):
    """What a checkpoint of megatron-core 0.19.2 says of its own parameters."""
    meta = json.loads((golden(f"megatron/layer_wise/{run}") / "meta.json").read_text())
    parameters = [Parameter(name, tuple(shape)) for name, shape in meta["model_params"]]
    algorithm = padded_numel if meta["layout"] == "padded" else legacy_pingpong
    (layout,) = algorithm(parameters, GroupSizes(meta["world"]))
    assert owners_by_name([layout]) == meta["owner"]
    if "padded_layout" in meta:
        actual = {placed.name: [placed.start, placed.stop, placed.bucket] for placed in layout.parameters}
        assert actual == meta["padded_layout"]["index_map"]
        assert list(map(list, layout.buckets)) == meta["padded_layout"]["buckets"]


def drawn(layout: BufferLayout) -> str:
    """Buckets, their shards, and ``name@start`` in them."""
    ranges = sorted(layout.parameters, key=lambda placed: placed.start)
    lines = []
    for start, stop in layout.buckets:
        shards = [shard for shard in layout.shards if start <= shard.start < stop]
        inside = [
            " ".join(f"{placed.name}@{placed.start}" for placed in ranges if shard.start <= placed.start < shard.stop)
            for shard in shards
        ]
        lines.append(f"[{start},{stop}) {' | '.join(inside)}")
    return "\n".join(lines)


def test_a_tied_parameter_starts_the_count_afresh():
    """Computed with main's own function; what lies before a tied parameter no longer says which bucket has room."""
    shapes = [(16, 8), (32, 8), (32, 8), (32, 8), (8, 16), (16, 16)]
    parameters = [Parameter(str(i), shape, tied=i == 3) for i, shape in enumerate(shapes)]
    (layout,) = padded_nscost(parameters, GroupSizes(2), 400)
    assert (
        drawn(layout) == "[0,512) 5@0 | 4@256\n[512,1024) 3@512 | \n[1024,1536) 1@1024 | 2@1280\n[1536,1792) 0@1536 | "
    )


@pytest.mark.parametrize("dp", [2, 4])
def test_byte_sharded_vector(dp):
    """Two norms of 16 and an embedding of 37 x 16, in front of them: computed with Megatron-LM's own function."""
    parameters = [Parameter("embedding", (37, 16)), Parameter("l0.ln", (16,)), Parameter("l1.ln", (16,))]
    (layout,) = distributed_optimizer(parameters, GroupSizes(dp))
    assert [(placed.start, placed.stop) for placed in layout.parameters] == [(128, 720), (64, 80), (0, 16)]
    assert layout.buckets == ((0, 768),)


@pytest.mark.parametrize(
    ("fold", "starts", "numel"),
    [(1, [28672, 12288, 16384, 24576, 0, 8192], 32768), (4, [0, 8192, 28672, 36864, 20480, 4096], 40960)],
)
def test_rows_that_are_gathered_count_in_the_cost(fold, starts, numel):
    """Rematerialised groups (``gtp_remat_size``), not in the stored cases: computed with main's own function."""
    shapes = [(64, 64), (64, 64), (64, 128), (64, 64), (128, 64), (64, 64)]
    parameters = [Parameter(str(i), shape, fold=1 if i else fold) for i, shape in enumerate(shapes)]
    (layout,) = padded_nscost(parameters, GroupSizes(2))
    assert ([placed.start for placed in layout.parameters], layout.numel) == (starts, numel)


def test_refusals():
    dense = [Parameter("a", (4, 4)), Parameter("b", (4, 4))]
    for groups in ([["a"]], [["a", "b"], ["a"]], [["a", "b", "c"]]):
        with pytest.raises(LayoutError, match="every parameter exactly once"):
            legacy_pingpong(dense, GroupSizes(2), groups=groups)
    with pytest.raises(LayoutError, match="'s' is a scalar"):
        fsdp_v2([Parameter("s", ())], Cuts(Mesh.of(2), (0,)))
