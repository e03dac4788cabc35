"""Parsers get inputs that were changed at random: each gives a value or an error of ours, and costs little.

The suite tries a few, always the same.  ``make fuzz`` tries new ones for `MUONCKPT_FUZZ` seconds, and keeps what finds
something in ``tests/data/fuzz``.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from support import fuzzed

SECONDS = float(os.environ.get("MUONCKPT_FUZZ", "0"))
"""How long to try, all parsers together; 0 is the short run."""

NAMES = ("manifest", "metadata", "items", "pickle", "zip", "torch_save", "safetensors", "safetensors_header", "zarr",
         "flat_buffers", "layer_wise", "layer_wise_toml", "name_rules", "mesh_rules")  # fmt: skip

FEW = 12
"""Inputs of a parser in the short run."""


@pytest.fixture(scope="module")
def parsers(tmp_path_factory) -> dict[str, fuzzed.Fuzzed]:
    return fuzzed.parsers(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_parser_gives_a_value_or_an_error_of_ours(name, parsers):
    assert set(parsers) == set(NAMES)
    parser = parsers[name]
    for seed_data in parser.seeds:
        parser.parse(seed_data)  # accepted; and whatever is imported on first use has been
    most = peak() + fuzzed.MEBIBYTES
    for data in parser.inputs(name):
        fuzzed.check(parser, data)
    end, number, count = time.monotonic() + SECONDS / len(NAMES), 0, 200 if SECONDS else FEW
    while number == 0 or time.monotonic() < end:
        tried(name, parser, int.from_bytes(os.urandom(4)) if SECONDS else 0, count)
        number += 1
    assert peak() < most
    print(f"{name}: {number * count} inputs")


def tried(name: str, parser: fuzzed.Fuzzed, start: int, count: int) -> None:
    last = [b""]

    @seed(start)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fuzzed.changed(parser.inputs(name)))
    def one(data):
        last[0] = data
        fuzzed.check(parser, data)

    try:
        one()
    except BaseException:
        if SECONDS:
            folder = fuzzed.DATA / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / hashlib.sha256(last[0]).hexdigest()[:16]).write_bytes(last[0])
        raise


def peak() -> int:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def test_the_check_sees_what_must_not_happen():
    def runs(data: bytes) -> None:
        exec("1 + 1")

    def fails(data: bytes) -> None:
        raise KeyError(data)

    with pytest.raises(AssertionError, match="exec"):
        fuzzed.check(fuzzed.Fuzzed(runs, ()), b"")
    with pytest.raises(KeyError):
        fuzzed.check(fuzzed.Fuzzed(fails, ()), b"")
