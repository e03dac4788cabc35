"""Ranks that train other parameters, as stages of a pipeline: parameter groups are known by names, not by numbers."""

from __future__ import annotations

import ast
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import sweep
from support.leaves import leaves
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import ExponentialLR

import muonckpt
from muonckpt import LayoutError, SourceError
from muonckpt.optimizer import Muon

OPTIONS: dict[str, dict[str, Any]] = {
    "matrices": {"lr": 0.02, "momentum": 0.9},
    "embedding": {"algorithm": "adamw", "lr": 0.003, "weight_decay": 0.0},
    "head": {"algorithm": "adamw", "lr": 0.0001, "weight_decay": 0.3},
}


def options(kind: str, **changes: Any) -> dict[str, Any]:
    return {**OPTIONS[kind], **changes}


LAYERS = ["embed", "a", "b", "head"]

Stage = list[tuple[tuple[str, ...], dict[str, Any]]]
"""The groups of a stage: names of layers, and options."""

STAGES: dict[str, list[Stage]] = {
    "one has an embedding, one a head": [
        [(("a",), options("matrices")), (("embed",), options("embedding"))],
        [(("b",), options("matrices")), (("head",), options("head"))],
    ],
    "other rates": [
        [(("a",), options("matrices")), (("embed",), options("head"))],
        [(("b",), options("matrices", lr=0.04, momentum=0.8)), (("head",), options("head", lr=0.0002))],
    ],
    "another order": [
        [(("embed",), options("embedding")), (("a",), options("matrices"))],
        [(("b",), options("matrices")), (("head",), options("head"))],
    ],
    "groups on some ranks only": [
        [(("a",), options("matrices"))],
        [(("b",), options("matrices", lr=0.04)), (("embed",), options("embedding")), (("head",), options("head"))],
    ],
    "groups without parameters": [
        [((), options("head", lr=7.0)), (("a",), options("matrices")), (("embed",), options("embedding"))],
        [(("b",), options("matrices", lr=0.04)), ((), options("embedding")), (("head",), options("head"))],
    ],
    "the same options": [
        [(("a",), options("matrices")), (("embed",), options("head"))],
        [(("b",), options("matrices")), (("head",), options("head"))],
    ],
    "rates in tensors": [
        [(("a",), {"lr": torch.tensor(0.02)}), (("embed",), {"lr": torch.tensor(0.1), "weight_decay": 0.3})],
        [(("b",), {"lr": torch.tensor(0.04)}), (("head",), {"lr": torch.tensor(0.2)})],
    ],
    "a layer is frozen": [
        [(("a", "embed"), options("matrices", lr=0.01))],
        [(("b",), options("matrices")), (("head",), options("head"))],
    ],
}


class Part:
    """The layers of a stage and its optimizer."""

    def __init__(self, stage: Stage, kind: str, rates: float | None = None) -> None:
        names = [name for names, _ in stage for name in names]
        self.model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
        for name in names:
            draw = torch.Generator().manual_seed(LAYERS.index(name))
            self.model[name].weight.data = torch.randn(4, 4, generator=draw)
            self.model[name].weight.requires_grad_(kind != "a layer is frozen" or name != "embed")
        groups = [{"params": [self.model[name].weight for name in names], **of} for names, of in stage]
        in_tensors = kind == "rates in tensors"
        for group in groups if rates is not None else ():
            group |= {"lr": torch.tensor(rates) if in_tensors else rates, "weight_decay": 0.11}
        self.optimizer = torch.optim.AdamW(groups, foreach=False) if in_tensors else Muon(groups)

    def step(self) -> None:
        for weight in self.model.parameters():
            weight.grad = weight.detach() + 1 if weight.requires_grad else None
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def set(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # code's rates are others on purpose
            weights, of_optimizer = state["model"], state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=of_optimizer)

    def told(self) -> dict[str, Any]:
        """By layer all options of its group and all state."""
        names = {layer.weight: name for name, layer in self.model.items()}
        hidden = ("params", "param_names")
        return {
            names[param]: (
                {
                    option: str(value)
                    for option, value in group.items()
                    if option not in hidden and "given" not in option
                },
                {slot: value.tolist() for slot, value in self.optimizer.state[param].items()},
            )
            for group in self.optimizer.param_groups
            for param in group["params"]
        }


def trained(kind: str, stage: Stage, steps: int) -> Part:
    part = Part(stage, kind)
    for _ in range(steps):
        part.step()
    for group in part.optimizer.param_groups:
        group["lr"] = group["lr"] / 2  # as a schedule does
    return part


def whole(kind: str, reverse: bool = False) -> Stage:
    groups = [group for stage in STAGES[kind] for group in stage if group[0]]
    return groups[::-1] if reverse else groups


WAYS = ("save", "async_save", "Series", "redistribute")


def moved(way: str, source: dict[str, Any], target: dict[str, Any], folder: str) -> None:
    match way:
        case "save":
            muonckpt.save(source, f"{folder}/c")
            muonckpt.load(target, f"{folder}/c", attest=True)
        case "async_save":
            muonckpt.async_save(source, f"{folder}/a").result()
            muonckpt.load(target, f"{folder}/a")
        case "Series":
            muonckpt.Series(f"{folder}/run").save(3, source)
            muonckpt.Series(f"{folder}/run").restore(target)
        case "redistribute":
            muonckpt.redistribute(source, target, attest=True)


def stages(rank: int, world: int, kind: str, folder: str) -> list[str]:
    """Resume stages on the same ranks and on the other ones, by each way; return what is wrong."""
    part, wrong = trained(kind, STAGES[kind][rank], rank + 1), []
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, part.told())
    expected = everything[0] | everything[1]
    for way in WAYS:
        for swapped in (False, True) if way in ("save", "redistribute") else (False,):
            other = Part(STAGES[kind][1 - rank if swapped else rank], kind, rates=9.0)
            state = other.state()
            moved(way, part.state(), state, f"{folder}/{swapped}")
            other.set(state)
            wrong += [f"{way} {swapped}: {n}: {t} {expected[n]}" for n, t in other.told().items() if t != expected[n]]
    return [*wrong, expected]


KEPT = ("another order", "groups without parameters", "rates in tensors", "a layer is frozen")


@pytest.mark.parametrize("kind", sweep(STAGES, *KEPT))
def test_each_parameter_is_resumed_with_the_options_and_the_state_it_had(kind, tmp_path):
    (*wrong, expected), (*also, _) = run(2, stages, kind, str(tmp_path))
    assert not wrong and not also
    for reverse in (False, True):
        part = Part(whole(kind, reverse), kind, rates=9.0)
        state = part.state()
        muonckpt.load(state, tmp_path / "False" / "c", attest=True)
        part.set(state)
        assert part.told() == expected
    with muonckpt.open(tmp_path / "False" / "c") as checkpoint:
        groups = [group["params"] for group in checkpoint.groups.values()]
    assert sorted(name for names in groups for name in names) == sorted(f"{name}.weight" for name in expected)
    assert muonckpt.verify(tmp_path / "False" / "c").verdict == "whole"
    template = {"optimizer": {"param_groups": [dict.fromkeys(("params", "weight_decay")) for _ in groups]}}
    dcp.load(template, checkpoint_id=tmp_path / "False" / "c", no_dist=True)
    assert [group["params"] for group in template["optimizer"]["param_groups"]] == groups


# --- any groups, on any ranks -----------------------------------------------------------------------------------------

NAMES = [f"p{number}" for number in range(9)]


def options_of(name: str) -> dict[str, Any]:
    number = int(name[1:])
    return {"lr": 0.5 / (1 + number % 3), "weight_decay": number % 2 / 10, "betas": (0.9, 0.99 - number % 3 / 100)}


def drawn(seed: str, rank: int, world: int) -> list[list[str]]:
    """The names of a rank in groups whose options are the same: on one rank, on some or all of them."""
    dice = random.Random(seed)
    holders = {name: dice.sample(range(world), dice.choice([1, 1, 1, min(2, world), world])) for name in NAMES}
    dice = random.Random(f"{seed} {rank}")
    groups: dict[tuple[str, int], list[str]] = {}
    for name in dice.sample(NAMES, len(NAMES)):
        if rank in holders[name]:
            groups.setdefault((str(options_of(name)), dice.randrange(2)), []).append(name)
    listed = dice.sample([*groups.values()], len(groups))
    return [*listed, []][:: dice.choice((1, -1))]


def as_state(groups: list[list[str]], is_template: bool) -> dict[str, Any]:
    """State of some of them; a template has none of the values."""
    slots = {
        name: {"momentum_buffer": torch.full((2, 2), 0.0 if is_template else float(name[1:]) + 1)}
        for group in groups
        for name in group
        if int(name[1:]) % 4
    }
    listed = [{"params": names, **options_of(names[0] if names else "p0")} for names in groups]
    for group in listed if is_template else ():
        group |= {"lr": None, "weight_decay": None, "betas": (None, None)}
    return {"state": slots, "param_groups": listed}


def saves(rank: int, world: int, seeds: list[int], folder: str) -> None:
    for seed in seeds:
        source = drawn(f"{seed} from", rank, world)
        muonckpt.save({"optimizer": as_state(source, False), "position": rank}, f"{folder}/{seed}")


def regrouped(rank: int, world: int, seeds: list[int], folder: str) -> list[str]:
    """Load into other groups on these ranks, or, without a folder, move live state to them; return what is wrong."""
    wrong = []
    for seed in seeds:
        groups = drawn(f"{seed} to", rank, world)
        state: dict[str, Any] = {"optimizer": as_state(groups, True)}
        if folder:
            muonckpt.load(state, f"{folder}/{seed}", allow_extra=["position", "by_rank.*"])
        else:
            source = drawn(f"{seed} from", rank, world)
            muonckpt.redistribute({"optimizer": as_state(source, False)}, state)
        expected = as_state(groups, False)
        for group, of_names in zip(state["optimizer"]["param_groups"], expected["param_groups"], strict=True):
            wrong += [f"{seed}: {group}"] if group["params"] and group != of_names else []
        wrong += [f"{seed}: state"] if leaves(state["optimizer"]["state"]) != leaves(expected["state"]) else []
    return wrong


@pytest.mark.parametrize("seeds", sweep((range(3), range(3, 60)), range(3)))
def test_any_groups_of_any_ranks_go_into_any_other(seeds, tmp_path):
    for world in (2, 3):
        folder = tmp_path / str(world)
        run(world, saves, [*seeds], str(folder))
        assert [run(other, regrouped, [*seeds], str(folder)) for other in (1, 2, 4)] == [[[]], [[]] * 2, [[]] * 4]
        assert run(world, regrouped, [*seeds], "") == [[]] * world


# --- what cannot be told ----------------------------------------------------------------------------------------------


def test_a_parameter_that_is_in_no_saved_group_is_refused(tmp_path):
    """As an earlier version saved stages, of whose groups it kept those of one."""
    kind = "one has an embedding, one a head"
    state = trained(kind, whole(kind), 1).state()
    groups = state["optimizer"]["param_groups"]
    state["optimizer"]["param_groups"] = groups[:2]
    muonckpt.save(state, tmp_path / "c")
    part = Part(whole(kind), kind)
    template = part.state()
    before = leaves(template)
    with pytest.raises(
        SourceError, match=r"in no parameter group of the checkpoint, .*: b\.weight, head\.weight"
    ) as told:
        muonckpt.load(template, tmp_path / "c")
    assert leaves(template) == before
    ungrouped = ast.literal_eval(str(told.value).partition("muonckpt.load(..., ungrouped=")[2].rstrip(")"))
    assert ungrouped == ["b.weight", "head.weight"]
    part = Part(whole(kind), kind, rates=9.0)
    state_dict = part.state()
    with pytest.warns(UserWarning, match="did not say options, .*: all of b.weight, which has those of group"):
        report = muonckpt.load(state_dict, tmp_path / "c", ungrouped=ungrouped)
    assert len(report.loaded) == 4 and not report.fresh
    part.set(state_dict)
    saved = trained(kind, whole(kind), 1).told()
    assert {name: (slots, of["lr"]) for name, (of, slots) in part.told().items()} == {
        name: (slots, "9.0" if f"{name}.weight" in ungrouped else of["lr"]) for name, (of, slots) in saved.items()
    }


def refused(rank: int, world: int, path: str, case: str) -> str:
    weight = torch.ones(2, 2)
    state: dict[str, Any] = {"x": {"momentum_buffer": weight}}
    groups: list[dict[str, Any]] = [{"params": ["x"], "lr": 0.5 + rank}]
    match case:
        case "a parameter in other groups":
            name = f"of {rank}"
            state |= {name: {"momentum_buffer": weight}}
            groups[0]["params"] = ["x", name]
        case "numbers":
            groups[0]["params"] = [0]
            state = {0: state["x"]}
        case "flat":
            state, groups = {"state.x.momentum_buffer": weight, "param_groups.x.lr": 0.5 + rank}, []
        case "a step":
            state["x"]["step"] = rank
            groups[0]["lr"] = 0.5
    optimizer = state if case == "flat" else {"state": state, "param_groups": groups}
    told = []
    for act in (
        lambda: muonckpt.save({"optimizer": optimizer}, path),
        lambda: muonckpt.redistribute({"optimizer": optimizer}, {}, allow_extra=True),
    ):
        try:
            act()
            told.append("no error")
        except LayoutError as error:
            told.append(str(error))
    return "\n".join(told)


CASES = {
    "replicas": "'optimizer.param_groups.0.lr': ",
    "a parameter in other groups": "lr of x: ",
    "numbers": "'optimizer.param_groups.0.lr': ",
    "flat": "'optimizer.param_groups.x.lr': ",
    "a step": "'optimizer.state.x.step': ",
}


@pytest.mark.parametrize("case", CASES)
def test_options_of_a_parameter_that_differ_from_rank_to_rank_are_refused_by_name(case, tmp_path):
    words = f"{CASES[case]}ranks 0 and 1 have different values for the same parameters"
    for told in run(2, refused, str(tmp_path / "c"), case):
        assert [line.startswith(words) and "get_optimizer_state_dict" in line for line in told.split("\n")] == [
            True
        ] * 2
    assert not [*tmp_path.iterdir()]


# --- schedulers -------------------------------------------------------------------------------------------------------


MERGED: Stage = [(("a", "b"), options("matrices")), (("embed", "head"), options("head"))]
"""Stages with the same options, as one."""


def scheduled(rank: int, world: int, kind: str, path: str, begin: bool, before: bool) -> dict[str, Any]:
    """A stage with a scheduler of its own: its rates after two steps, or after a resume and one more."""
    part = Part(STAGES[kind][rank] if world == 2 else MERGED, kind, rates=None if begin else 9.0)
    schedule = ExponentialLR(part.optimizer, 0.5) if begin or before else None
    if begin:
        for _ in range(2):
            part.step()
            schedule.step()
        muonckpt.save({**part.state(), "schedule": schedule.state_dict()}, path)
    else:
        state = {**part.state(), **({"schedule": schedule.state_dict()} if schedule else {})}
        muonckpt.load(state, path, allow_extra=[] if schedule else ["schedule.*", "by_rank.*"])
        part.set(state)
        if schedule:
            schedule.load_state_dict(state["schedule"])
        else:
            schedule = ExponentialLR(part.optimizer, 0.5, last_epoch=1)
    part.step()
    schedule.step()
    return {name: (float(of["lr"]), of.get("initial_lr")) for name, (of, _) in part.told().items()}


@pytest.mark.parametrize("kind", [kind for kind in STAGES if kind != "rates in tensors"])
def test_a_scheduler_for_each_stage_goes_on(kind, tmp_path):
    went_on = run(2, scheduled, kind, str(tmp_path / "c"), True, True)
    assert run(2, scheduled, kind, str(tmp_path / "c"), False, True) == went_on
    if kind == "groups without parameters":  # nothing says what initial_lr these had
        return
    made_anew = run(2, scheduled, kind, str(tmp_path / "c"), False, False)
    assert [{name: rate for name, (rate, _) in each.items()} for each in made_anew] == [
        {name: rate for name, (rate, _) in each.items()} for each in went_on
    ]


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
def test_a_scheduler_goes_on_with_another_number_of_stages(worlds, tmp_path):
    kind, (before, now) = "the same options", worlds
    went_on = run(before, scheduled, kind, str(tmp_path / "c"), True, True)
    resumed = run(now, scheduled, kind, str(tmp_path / "c"), False, True)
    joined = [{name: rates for each in ranks for name, rates in each.items()} for ranks in (went_on, resumed)]
    assert joined[0] == joined[1] and len(joined[0]) == 4


def test_a_scheduler_of_other_groups_is_refused(tmp_path):
    """One process had four groups, of which each stage has two."""
    kind = "one has an embedding, one a head"
    part = Part(whole(kind), kind)
    schedule = ExponentialLR(part.optimizer, 0.5)
    part.step()
    schedule.step()
    muonckpt.save({**part.state(), "schedule": schedule.state_dict()}, tmp_path / "c")
    stage = Part(STAGES[kind][1], kind)
    state = {**stage.state(), "schedule": ExponentialLR(stage.optimizer, 0.5).state_dict()}
    words = r"has groups with initial_lr \[0.02, 0.003, 0.02, 0.0001\], this optimizer \[0.02, 0.0001\]"
    with pytest.raises(SourceError, match=words):
        muonckpt.load(state, tmp_path / "c", allow_extra=True)
    del state["schedule"]
    muonckpt.load(state, tmp_path / "c", allow_extra=True)


def proved(rank: int, world: int, folder: str) -> list[str]:
    """A resume is proved; with another rate on one stage it is not."""
    kind = "one has an embedding, one a head"
    series = muonckpt.Series(folder)
    series.save(1, {**trained(kind, STAGES[kind][rank], 1).state(), "position": rank})
    part = Part(STAGES[kind][rank], kind, rates=9.0)
    state = {**part.state(), "position": None}
    restored = series.restore(state)
    part.set(state)
    told = [str(restored.compare({**part.state(), "position": rank}))]
    part.optimizer.param_groups[1]["lr"] *= 1 + 2 * rank
    return [*told, str(restored.compare({**part.state(), "position": 5}))]


def test_the_proof_of_a_resume_knows_stages_and_what_ranks_have_of_their_own(tmp_path):
    (fine, wrong), other = run(2, proved, str(tmp_path))
    assert [fine, wrong] == other and ", proved: " in fine
    assert "lr 5e-05 -> " in wrong and "group 1 (head.weight)" in wrong and "position: " in wrong
