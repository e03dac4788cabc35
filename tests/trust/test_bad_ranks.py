"""One rank behaves badly, all end: it raises, is killed or stopped, or passes other arguments.  Real gloo processes."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support import bad_ranks, last_saves, trials, workers
from support.failing import raised
from support.trials import SCALE, count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt
from muonckpt.optimizer import Muon, clip_grad_norm_

ODD = 1
"""The rank that behaves otherwise."""

IN_SUITE = ("step", "load")


class Travels(Exception):
    """It cannot: unpickled, it lacks an argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Broken:
    """An object of a state dict that raises when it is asked, or told."""

    def __init__(self, method: str) -> None:
        self.method = method

    def state_dict(self) -> dict[str, int]:
        return self._do("state_dict")

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._do("load_state_dict")

    def _do(self, method: str) -> dict[str, int]:
        if method == self.method:
            raise Travels(1, 2)
        return {"n": 1}


def rows(value: float = 1.0) -> dict[str, object]:
    """A tensor of which each of three ranks has one row."""
    mesh = init_device_mesh("cpu", (3,))
    return {"w": distribute_tensor(torch.full((3, 8), value), mesh, [Shard(0)], src_data_rank=None), "n": 1}


def cells(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """Of each call, the errors that it ends with on this rank because one has other arguments."""
    odd, told, whole = rank == ODD, defaultdict[str, list[str]](list), f"{folder}/whole"

    def other(name: str, usual: object, wrong: object) -> dict[str, object]:
        return {name: wrong if odd else usual}

    def attempt(call: str, function, *arguments, **options) -> None:
        told[call].append(raised(lambda: function(*arguments, **options)))
        dist.barrier()  # the process group can be used

    muonckpt.save(rows(), whole)
    muonckpt.save(rows(), f"{folder}/twin")
    for call, function in (
        ("save", muonckpt.save),
        ("async_save", lambda *given, **options: muonckpt.async_save(*given, **options).result()),
    ):
        attempt(call, function, rows(), f"{folder}/{'there' if odd else 'here'}")
        attempt(call, function, rows(), f"{folder}/new", **other("provenance", {"step": 1}, {"step": torch}))
        attempt(call, function, rows() | other("extra", 1, Broken("state_dict")), f"{folder}/new")
    series = muonckpt.Series(f"{folder}/series")
    attempt("save", series.save, 2 if odd else 1, rows())
    attempt("save", series.save, -1 if odd else 1, rows())
    template = rows(0.0)
    attempt("load", muonckpt.load, template, f"{folder}/twin" if odd else whole)
    attempt("load", muonckpt.load, template, whole, **other("attest", False, True))
    attempt("load", muonckpt.load, template, whole, **other("check", "before", "while"))
    attempt("load", muonckpt.load, template, whole, **other("check", "before", "never"))
    attempt("load", muonckpt.load, template, whole, **other("allow_extra", False, True))
    attempt("load", muonckpt.load, template, whole, **other("fresh", (), "w"))
    attempt("load", muonckpt.load, template | ({"more": torch.ones(1)} if odd else {}), whole)
    attempt("load", muonckpt.load, template | {"n": Broken("state_dict" if odd else "")}, whole)
    told["touched"].append(str(bool(template["w"].to_local().any())))
    muonckpt.save(rows() | {"n": Broken("")}, f"{folder}/object")
    attempt("loaded", muonckpt.load, rows(0.0) | {"n": Broken("load_state_dict" if odd else "")}, f"{folder}/object")
    for name, usual, wrong in (
        ("attest", False, True),
        ("allow_extra", False, True),
        ("fresh", (), "w"),
        ("memory", 64, 0),
    ):
        attempt("redistribute", muonckpt.redistribute, rows(), template, **other(name, usual, wrong))
    told["touched"].append(str(bool(template["w"].to_local().any())))
    return dict(told)


def test_arguments_that_differ_are_refused_on_all_ranks_alike_and_at_once(tmp_path):
    ranks = workers.run(3, cells, str(tmp_path), timeout=200)
    assert ranks[0] == ranks[1] == ranks[2]
    told = ranks[0]
    assert told["touched"] == ["False", "False"]
    path, no_json, broken, step, negative = told["save"]
    assert [path, no_json, broken] == told["async_save"]
    assert path.startswith("ArgumentError: save was called with path=") and "there' on rank 1" in path
    assert no_json.startswith("ArgumentError: the provenance is not JSON") and no_json.endswith("(rank 1)")
    assert broken == "DestinationError: Travels: 1 and 2 (rank 1)"
    assert "step=1 on rank 0, and with step=2 on rank 1" in step
    assert negative.startswith("ArgumentError: a step is an integer, 0 or more") and negative.endswith(
        "found -1 (rank 1)"
    )
    twin, attest, check, never, extra, fresh, more, asked = told["load"]
    assert "path=" in twin and "twin' on rank 1" in twin
    for name, error in (("attest", attest), ("check", check), ("allow_extra", extra)):
        assert error.startswith("ArgumentError: load was called with") and f"{name}=" in error
    assert never.startswith("ArgumentError: check is") and fresh.startswith("ArgumentError: fresh='w'")
    assert more.startswith("SourceError") and "more" in more
    assert asked == "SourceError: Travels: 1 and 2 (rank 1)"
    assert "Travels: 1 and 2 (rank 1). THE STATE DICT IS UNUSABLE NOW" in told["loaded"][0]
    attest, extra, fresh, memory = told["redistribute"]
    assert "attest=False on rank 0, and with attest=True on rank 1" in attest and "allow_extra=" in extra
    assert "fresh='w'" in fresh and memory.startswith("TargetError") and memory.endswith("(rank 1)")


def crossed(rank: int, world: int, folder: str, seeds: list[str]) -> list[tuple[str, str, str]]:
    """Each trial's calls by rank, the error of this rank, and that of a call that all ranks make afterwards."""
    state, template, series = {"w": torch.ones(3), "n": 1}, {"w": torch.zeros(3), "n": 0}, f"{folder}/series"
    muonckpt.save(state, f"{folder}/whole")
    muonckpt.Series(series).save(1, state)
    calls = {
        "save": lambda to: muonckpt.save(state, to),
        "async_save": lambda to: muonckpt.async_save(state, to).result(),
        "load": lambda _: muonckpt.load(template, f"{folder}/whole"),
        "attest": lambda _: muonckpt.attest(state, f"{folder}/whole"),
        "fingerprints": lambda _: muonckpt.fingerprints(state),
        "redistribute": lambda _: muonckpt.redistribute(state, template),
        "Series.save": lambda to: muonckpt.Series(to).save(1, state),
        "Series.latest": lambda _: muonckpt.Series(series).latest(),
        "Series.restore": lambda _: muonckpt.Series(series).restore(template),
    }
    trials_made = []
    for number, seed in enumerate(seeds):
        dice = random.Random(seed)
        chosen = dice.choices(list(calls), k=world)
        if len({*chosen}) == 1:
            chosen[dice.randrange(world)] = dice.choice([call for call in calls if call != chosen[0]])
        error = raised(calls[chosen[rank]], f"{folder}/refused-{number}")
        after = dice.choice(list(calls))
        trials_made.append((" ".join(chosen), error, raised(calls[after], f"{folder}/after-{number}")))
    return trials_made


def test_ranks_that_make_different_calls_are_all_told_and_can_make_the_next_one(tmp_path):
    with trials.tally("crossed calls") as row:
        for world in (3,) if SCALE == 0 else (2, 3, 4):
            seeds = [f"{trials.SEED} {world} {number}" for number in range(count(20, 200))]
            for ranks in zip(*workers.run(world, crossed, str(tmp_path / str(world)), seeds), strict=True):
                [calls, error, after] = ranks[0]
                told = error.startswith("ArgumentError: rank 0 called") and "make the same calls" in error
                well = told and after == "no error" and len({*ranks}) == 1
                row.add(calls, None if well else f"{ranks}")
            assert not [*(tmp_path / str(world)).glob("refused-*")]


def damaged(rank: int, world: int, folder: str, check: str) -> tuple[str, bool]:
    template = rows(0.0)
    error = raised(partial(muonckpt.load, check=check), template, folder)
    return error, bool(template["w"].to_local().any())


def save_rows(rank: int, world: int, folder: str) -> None:
    muonckpt.save(rows(), folder)


def test_damage_that_one_rank_finds_is_one_error_and_tensors_are_untouched_or_said_to_be_unusable(tmp_path):
    """Each rank reads a file of its own; one is damaged."""
    workers.run(3, save_rows, str(tmp_path / "c"))
    [file] = [chunk.payload.file for chunk in muonckpt.open(tmp_path / "c").tensors["w"].record.chunks
              if chunk.box.lo[0] == ODD]  # fmt: skip
    raw = (tmp_path / "c" / file).read_bytes()
    (tmp_path / "c" / file).write_bytes(raw.replace(torch.ones(8).numpy().tobytes(), bytes(32)))
    for check in ("before", "while"):
        for error, touched in workers.run(3, damaged, str(tmp_path / "c"), check):
            assert error.startswith("DamageError") and f"(rank {ODD})" in error and f"box [{ODD}:" in error
            assert ("UNUSABLE" in error) == (check == "while") and not (touched and check == "before")


def test_a_rank_that_raises_is_killed_or_stopped_ends_all_with_a_clear_error(tmp_path):
    calls = IN_SUITE if SCALE == 0 else tuple(bad_ranks.CALLS)
    told = trials.script(bad_ranks.__file__, tmp_path / "trials", count(1, 40), *calls)
    assert trials.tallied("a bad rank", told) == {*calls}


@pytest.mark.skipif(SCALE == 0, reason="tests/checkpoint/test_async_saving.py has one end of a program in the suite")
def test_the_last_save_is_finished_or_missed_aloud_however_the_program_ends(tmp_path):
    told = trials.script(last_saves.__file__, tmp_path / "trials", count(1, 20), forked=False)
    assert trials.tallied("the last save", told) == {*last_saves.WAYS}


def meeting_nobody(rank: int, world: int, folder: str, how: str) -> str:
    both = dist.new_group(range(world), timeout=timedelta(seconds=12))  # torch gives it 30 minutes else
    saving = {"state_dict": {"w": torch.ones(3)}, "path": f"{folder}/{how}"}
    if how == "when_busy":
        return raised(lambda: muonckpt.async_save(**saving, when_busy="refuse" if rank == ODD else "wait").result())
    call = {
        "save": lambda **group: muonckpt.save(**saving, **group),
        "load": lambda **group: muonckpt.load({"w": torch.zeros(3)}, f"{folder}/whole", **group),
        "redistribute": lambda process_group: muonckpt.redistribute(
            {"w": torch.ones(3)}, {"w": torch.ones(3)}, group=process_group
        ),
    }[how]
    return raised(lambda: call(process_group=both if rank == ODD else None))


DISAGREEMENTS = (
    "rate",
    "momentum dtype",
    "left out",
    "dropped",
    "max_norm",
    "other first",
)


def disagreeing(rank: int, world: int, seeds: list[str]) -> list[tuple[str, str]]:
    """What each trial did, and what this rank was told: one rank steps otherwise than the others, at some step."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for seed in seeds:
        dice = random.Random(seed)
        kind, odd, last = dice.choice(DISAGREEMENTS), rank == dice.randrange(world), dice.randrange(1, 4)
        values = [torch.ones(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(dice.randint(1, 4))]
        placed = [[distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None) for v in values] for _ in range(2)]
        pair = [Muon([torch.nn.Parameter(value) for value in each]) for each in placed]
        told = "no error"
        for step in range(last + 1):
            now = odd and step == last
            for opt in pair[::-1] if now and kind == "other first" else pair:
                params = opt.param_groups[0]["params"]
                for times in range(2 if now and kind in ("left out", "dropped") else 1):
                    opt.zero_grad()
                    for param in params:
                        param.grad = torch.full_like(param, 1.0 + step + times)
                if now and kind == "rate":
                    opt.param_groups[0]["lr"] = 0.5
                if now and kind == "momentum dtype":
                    opt.state[params[0]]["momentum_buffer"] = opt.state[params[0]]["momentum_buffer"].double()
                if kind == "max_norm" and told == "no error":
                    told = raised(clip_grad_norm_, params, 0.5 if now else 1.0)
                told = raised(opt.step) if told == "no error" else told
                if told != "no error":
                    break
            if told != "no error":
                break
        found.append((f"{kind}, step {last}", told))
    return found


def test_a_rank_that_disagrees_is_told_on_all_ranks_in_that_step():
    with trials.tally("disagreeing ranks") as row:
        for number in range(count(1, 10)):
            seeds = [f"{trials.SEED} {number} {each}" for each in range(20)]
            for ranks in zip(*workers.run(3, disagreeing, seeds), strict=True):
                silent = [rank for rank, (_, told) in enumerate(ranks) if not told.startswith("RuntimeError: ")]
                row.add(ranks[0][0], f"ranks {silent} went on: {ranks}" if silent else None)


@pytest.mark.skipif(SCALE == 0, reason="it waits for time-outs")
@pytest.mark.parametrize("how", ["when_busy", "save", "load", "redistribute"])
def test_ranks_that_wait_in_different_process_groups_are_lost_to_each_other_when_the_time_is_out(how, tmp_path):
    muonckpt.save({"w": torch.ones(3)}, tmp_path / "whole")
    for error in workers.run(2, meeting_nobody, str(tmp_path), how, timeout=30):
        assert error.startswith("LostRankError"), error
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]
