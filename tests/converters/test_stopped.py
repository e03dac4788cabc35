"""An offline reshard that is stopped: nothing half done is seen, and the next run begins again."""

from __future__ import annotations

import json

import pytest
import torch
from support import stopped
from support.forked import printed
from support.resharded import nothing_but, once, reshard, saved
from support.sharded import elements_of

import muonckpt
from muonckpt import DestinationError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


RANKS = "--format dcp --mesh dp=3"
STOPPED = {
    "kill": RANKS,
    "interrupt": RANKS,
    "error": RANKS,
    "kill file": "--format safetensors --tensors-only",
    "kill items": "--format safetensors",
    "kill zarr": "--format zarr --select w",
}


@pytest.mark.parametrize("case", STOPPED)
def test_stopped_at_any_step_nothing_half_done_is_seen_and_the_next_run_gives_the_same_bytes(case, tmp_path):
    muonckpt.save({"w": torch.arange(15.0).reshape(5, 3), "n": torch.tensor(7), "lr": 0.1}, tmp_path / "source")
    (tmp_path / "here").mkdir()
    how, options = case.split()[0], [tmp_path / "source", tmp_path / "here", *STOPPED[case].split()]
    seen = json.loads(printed(tmp_path, stopped.__file__, how, *options).splitlines()[-1])
    assert len(seen) >= 10
    for step in enumerate(seen):
        status, nothing_or_all, staged, again, same, left = step[1]
        assert nothing_or_all and same and again in (None, 0), step
        strays = [name for name in left if name not in ("out", "whole", "out.items.json", "whole.items.json")]
        assert not strays or (case in ("kill file", "kill items") and again is None), step  # a file is linked before
        assert ("out.items.json" in left) == (case == "kill items"), step  # never the one without the other
        assert status == {"kill": -9, "interrupt": 130, "error": 4}[how] or (status, again) == (0, None), step
        assert how == "kill" or not staged, step  # the disk may be full: it is given back
    assert how != "kill" or sum(staged for _, _, staged, *_ in seen) > len(seen) / 2


def test_of_two_runs_at_one_destination_one_publishes(tmp_path):
    def second() -> None:
        reshard(saved("own rows4"), tmp_path / "out", 3)

    with pytest.raises(DestinationError, match="exists already"):
        reshard(saved("own rows4"), tmp_path / "out", 2, progress=once(second))
    assert elements_of(tmp_path / "out") == elements_of(saved("own rows4"))
    assert (tmp_path / "out" / "__2_0.distcp").exists() and nothing_but(tmp_path, "out")
