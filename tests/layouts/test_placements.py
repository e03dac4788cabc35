"""Placements of whole matrices: what their one name is good for."""

from __future__ import annotations

import pytest

from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter
from muonckpt.layouts.buffers.placements import PlacementRequest, place_parameters
from muonckpt.names.vocabulary import PLACEMENTS

MATRICES = [Parameter(f"layers.{n}.w", (8 + n, 16), expert=n == 3) for n in range(12)]
REST = [Parameter("embedding", (37, 16)), Parameter("norm", (16,))]


def to_place(**changes) -> PlacementRequest:
    parameters = (*REST, *MATRICES)
    return PlacementRequest(parameters, frozenset(p.name for p in MATRICES), GroupSizes(4, 2), **changes)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_name_of_a_placement_is_the_algorithm_that_its_buffers_record(name):
    buffers = place_parameters(name, to_place())
    algorithm_of = {placed.name: buffer.algorithm for buffer in buffers for placed in buffer.parameters}
    rest = name if name == "legacy-pingpong" else "distributed-optimizer"
    assert algorithm_of == {**{p.name: name for p in MATRICES}, **{p.name: rest for p in REST}}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_matrices_have_owners_and_only_padding_keeps_equal_shards(name):
    buffers = place_parameters(name, to_place(bucket_size=100))
    owners = {owned: owner for buffer in buffers for owned, owner in buffer.owners.items()}
    assert all(owners[p.name] is not None for p in MATRICES)
    assert all(buffer.even for buffer in buffers if buffer.algorithm == name) == name.startswith("padded")


def test_what_a_run_was_told_reaches_the_rules():
    def places(name, **changes):
        return place_parameters(name, to_place(**changes))

    for name in PLACEMENTS:
        assert len(places(name, bucket_size=1)[0].buckets) > len(places(name)[0].buckets) == 1
    for name in ("padded-nscost", "padded-numel"):
        assert places(name, busbw=True)[0].numel > places(name)[0].numel
    equal = PlacementRequest((Parameter("a", (4, 4)), Parameter("b", (4, 4))), frozenset("ab"), GroupSizes(2))
    turned = PlacementRequest(equal.parameters, equal.matrices, equal.sizes, groups=(("b",), ("a",)))
    owners = [place_parameters("legacy-pingpong", model)[0].owners for model in (equal, turned)]
    assert owners == [{"a": 0, "b": 1}, {"a": 1, "b": 0}]
    layouts = place_parameters(
        "balanced", PlacementRequest(equal.parameters, equal.matrices, equal.sizes, previous={"a": 1})
    )
    assert layouts[0].owners == {"a": 1, "b": 0}
