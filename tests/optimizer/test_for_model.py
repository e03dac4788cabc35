"""`Muon.for_model`: the optimizer of a whole model in one line."""

from __future__ import annotations

import ast
import copy
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.failing import raised
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import muonckpt
from muonckpt.optimizer import Muon, StepExecution
from muonckpt.optimizer.groups import MODULE_TYPES, Rule


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 10, bias=False))


HEAD = [Rule("head", "3.weight")]


def algorithms(model: nn.Module, optimizer: Muon) -> dict[str, tuple[str, float]]:
    """The algorithm and the rate of every parameter."""
    stepped = {id(p): (g["algorithm"], g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: stepped[id(parameter)] for name, parameter in model.named_parameters()}


def test_matrices_have_one_rate_and_the_rest_another():
    model = net()
    optimizer = Muon.for_model(model, lr=0.02, adamw_lr=3e-4, rules=[HEAD, MODULE_TYPES], weight_decay=0.0)
    rest = ("adamw", 3e-4)
    assert algorithms(model, optimizer) == {
        "0.weight": rest,
        "1.weight": ("muon", 0.02),
        "1.bias": rest,
        "2.weight": rest,
        "2.bias": rest,
        "3.weight": rest,
    }
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}


def test_one_rate_serves_both_only_if_it_is_said():
    with pytest.raises(ValueError, match=r"adamw_lr=3e-4 of Muon.for_model.*match_rms_adamw"):
        Muon.for_model(net(), lr=0.02, rules=[HEAD, MODULE_TYPES])
    model = net()
    optimizer = Muon.for_model(model, lr=3e-4, rules=[HEAD, MODULE_TYPES], adjust_lr_fn="match_rms_adamw")
    assert {rate for _, rate in algorithms(model, optimizer).values()} == {3e-4}


def language_model() -> nn.ModuleDict:
    """With an untied head of as many rows as the embedding, and a fused projection."""
    parts = {
        "embed": nn.Embedding(20, 8),
        "qkv_proj": nn.Linear(8, 16),
        "out": nn.Linear(8, 8),
        "lm_head": nn.Linear(8, 20),
    }
    return nn.ModuleDict(parts)


def test_a_model_without_rules_is_asked_for_its_head_and_its_fused_projections_alone():
    with pytest.raises(ValueError) as refused:
        Muon.for_model(language_model(), lr=0.02, adamw_lr=3e-4)
    lines = str(refused.value).splitlines()
    assert lines[1].startswith("- qkv_proj.weight [16, 8] holds q, k, v by its name")
    assert lines[2].startswith("- lm_head.weight [20, 8] has as many rows as an embedding")
    assert lines[3] == "Write head='lm_head', split={'qkv_proj': (q, k, v)}"
    assert len(str(refused.value).split()) <= 60


@pytest.mark.parametrize("head", ["lm_head", "lm_head.weight", ["lm_head"], nn.Module], ids=str)
def test_the_head_is_a_module_or_its_name_and_its_bias_a_vector(head):
    model = language_model()
    given = model["lm_head"] if head is nn.Module else head
    optimizer = Muon.for_model(model, lr=0.02, adamw_lr=3e-4, head=given, split={"qkv_proj": (8, 4, 4)})
    kinds = {decision.names[0]: decision.kind for decision in optimizer.decisions()}
    assert kinds == {
        "embed.weight": "embedding", "qkv_proj.weight": "matrix", "qkv_proj.bias": "vector", "out.weight": "matrix",
        "out.bias": "vector", "lm_head.weight": "head", "lm_head.bias": "vector",
    }  # fmt: skip
    assert [group.get("pieces") for group in optimizer.param_groups] == [None, (8, 4, 4), None]


def test_a_model_that_is_said_to_have_no_head_gives_it_to_muon():
    model = language_model()
    optimizer = Muon.for_model(model, lr=0.02, adamw_lr=3e-4, head=None, split={"*qkv_proj": None})
    assert algorithms(model, optimizer)["lm_head.weight"] == ("muon", 0.02)
    assert [group.get("pieces") for group in optimizer.param_groups] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head": "lm_heads"}, ValueError, r"head='lm_heads': no such matrix in the model; did you mean 'lm_head'"),
        ({"head": nn.Linear(3, 3)}, ValueError, "no such matrix in the model. Write head=None"),
        ({"head": 3}, TypeError, "head: expected a module or its name, found a int. Write head='lm_head'"),
        ({"head": nn.Parameter(torch.ones(2, 2))}, TypeError, "found a Parameter"),
        ({"split": {"*.qkv": 3}}, ValueError, r"split: '\*.qkv' names no matrix; did you mean 'qkv_proj'"),
        ({"split": {"qkv_proj": "q"}}, TypeError, "expected the rows of each matrix of 'qkv_proj', found 'q'"),
        ({"split": {"qkv_proj": 0}}, ValueError, "expected counts of at least 1"),
        ({"head": "lm_head", "split": {"qkv_proj": (8, 4)}}, ValueError, "add up to the 16 rows"),
        ({"head": "lm_head", "split": {"qkv_proj": 2, "qkv*": 4}}, ValueError, "disagree"),
        ({"pieces": (8, 4, 4)}, TypeError, r"Write split=\{'\*.qkv_proj': \(q, k, v\)\}"),
        ({"momentum_dtype": "bfloat16"}, TypeError, "Write kinds={'matrix': {'momentum_dtype': 'bfloat16'}"),
        ({"gram": (2,)}, TypeError, r"Write kinds=\{'matrix': \{'gram': \(2,\)\}"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_the_model_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Muon.for_model(language_model(), lr=0.02, adamw_lr=3e-4, **arguments)


def test_a_head_that_is_the_embedding_stays_the_embedding():
    model = language_model()
    model["lm_head"].weight = model["embed"].weight
    for arguments in ({}, {"head": "lm_head"}):
        decisions = Muon.for_model(model, lr=0.02, adamw_lr=3e-4, split={"qkv_proj": None}, **arguments).decisions()
        assert [decision.kind for decision in decisions if "lm_head.weight" in decision.names] == ["embedding"]


def test_rules_stand_behind_the_head_and_the_splits():
    rules = [[Rule("other", "*.weight")], MODULE_TYPES]
    model, arguments = language_model(), {"head": "lm_head", "split": {"*.qkv_proj": (8, 4, 4)}}  # at the top, too
    optimizer = Muon.for_model(model, lr=0.02, adamw_lr=3e-4, rules=rules, **arguments)
    kinds = {decision.names[0]: decision.kind for decision in optimizer.decisions()}
    assert (kinds["lm_head.weight"], kinds["qkv_proj.weight"], kinds["out.weight"]) == ("head", "matrix", "other")


def test_neither_signature_has_more_than_fourteen_arguments():
    for function in (Muon, Muon.for_model):
        assert len(inspect.signature(function).parameters) <= 14
    assert {field.name for field in fields(StepExecution)} == {"stages", "exchange", "cost", "form"}


def wrapped(rank: int, world: int, given: bool) -> list[tuple[int, ...]]:
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(nn.Linear(6, 12, bias=False), process_group=group)
    replicas = {"replicas": dist.new_group([rank], use_local_synchronization=True)} if given else {}
    optimizer = Muon.for_model(model, lr=0.02, **replicas)
    model.module.weight.grad = model.module.weight.detach().clone()
    optimizer.step()
    return list(optimizer.schedules)


def test_ranks_of_ddp_share_the_matrices_out_unless_told_otherwise():
    assert run(2, wrapped, False) == [[(0, 1)], [(0, 1)]]
    assert run(2, wrapped, True) == [[(0,)], [(1,)]]


# --- the order of groups, which schedulers know by number ------------------------------------------------------------

Made = tuple[nn.Sequential, Muon]


def sorted_net(change: str = "", **options: Any) -> Made:
    model = net()
    if change == "frozen embedding":
        model[0].requires_grad_(False)
    if change == "another first layer":
        model[0] = nn.Linear(8, 6, bias=False)
    if change == "only matrices":
        for part in (model[0].weight, model[1].bias, *model[2].parameters(), model[3].weight):
            part.requires_grad_(False)
    rules = [[*HEAD, Rule("matrix", "0.weight")] if change == "another first layer" else HEAD, MODULE_TYPES]
    return model, Muon.for_model(model, **{"lr": 0.02, "adamw_lr": 1e-4, "rules": rules, "named": True, **options})


def rates(optimizer: Muon) -> list[tuple[str, float]]:
    return [(group["algorithm"], group["lr"]) for group in optimizer.param_groups]


def stepped(made: Made) -> None:
    for parameter in made[0].parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    made[1].step()


def halving(made: Made) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(made[1], 0.5)


def test_groups_have_one_order_whatever_is_frozen_and_whatever_comes_first():
    orders = [rates(sorted_net(change)[1]) for change in ("", "frozen embedding", "another first layer")]
    assert orders == [[("muon", 0.02), ("adamw", 1e-4)]] * 3
    assert rates(sorted_net("only matrices")[1]) == orders[0][:1]


def test_a_group_of_which_everything_is_frozen_keeps_its_number():
    """With options of their own, kinds have groups of their own."""
    kinds = {"embedding": {"lr": 5e-5}, "vector": {"weight_decay": 0.0}}
    groups = [sorted_net(change, kinds=kinds)[1].param_groups for change in ("", "frozen embedding")]
    assert [[len(group["params"]) for group in each] for each in groups] == [[1, 1, 1, 3], [1, 1, 0, 3]]
    assert [group["lr"] for group in groups[0]] == [group["lr"] for group in groups[1]] == [0.02, 1e-4, 5e-5, 1e-4]
    made = sorted_net("frozen embedding", kinds=kinds)
    stepped(made)
    weights, state = get_state_dict(*made)
    set_state_dict(*made, model_state_dict=weights, optim_state_dict=state)
    assert rates(made[1]) == [(group["algorithm"], group["lr"]) for group in groups[0]]


def saved(made: Made, path: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of two steps: the states of its optimizer and its scheduler."""
    schedule = halving(made)
    for _ in range(2):
        stepped(made)
        schedule.step()
    weights, state = get_state_dict(*made)
    muonckpt.save({"model": weights, "optimizer": state, "schedule": schedule.state_dict()}, path)
    return copy.deepcopy(made[1].state_dict()), schedule.state_dict()


def loaded(made: Made, path: Any, schedule: Any = None, **arguments: Any) -> str:
    """Whatever was said."""
    weights, state = get_state_dict(*made)
    tree = {"model": weights, "optimizer": state, **({"schedule": schedule.state_dict()} if schedule else {})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = raised(lambda: muonckpt.load(tree, path, **arguments))
    if told == "no error":
        set_state_dict(*made, model_state_dict=weights, optim_state_dict=tree["optimizer"])
        if schedule:
            schedule.load_state_dict(tree["schedule"])
    return "\n".join([told, *(str(warning.message) for warning in caught if "distributed" not in str(warning.message))])


@pytest.mark.parametrize("by", ["checkpoint", "state dict"])
def test_embeddings_that_are_unfrozen_when_a_run_is_resumed_leave_rates_as_they_were(by, tmp_path):
    state, of_schedule = saved(sorted_net("frozen embedding"), tmp_path / "c")
    made = sorted_net()
    schedule = halving(made)
    if by == "checkpoint":
        assert loaded(made, tmp_path / "c", schedule, fresh=["0.weight"]) == "no error"
    else:
        made[1].load_state_dict(state, fresh=["0.weight"])
        schedule.load_state_dict(of_schedule)
    stepped(made)
    schedule.step()
    assert rates(made[1]) == [("muon", 0.0025), ("adamw", 1.25e-5)]


SWAPPED = [{"algorithm": "adamw", "lr": 1e-4}, {"lr": 0.02}]
"""As the model has them: what a program that makes groups by hand, or an earlier version of this package, has saved."""


def by_hand() -> Made:
    model = net()
    matrices, rest = [("1.weight", model[1].weight)], []
    rest = [(name, part) for name, part in model.named_parameters() if name != "1.weight"]
    return model, Muon([{**SWAPPED[0], "params": rest}, {**SWAPPED[1], "params": matrices}])


CHANGES: dict[str, tuple[Callable[[], Made], str]] = {
    "swapped": (by_hand, r"initial_lr \[0.0001, 0.02\], this optimizer \[0.02, 0.0001\]"),
    "added": (lambda: sorted_net("frozen embedding"), r"\[0.02, 0.0001\], this optimizer \[0.02, 0.0001, 0.0001\]"),
}


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_a_scheduler_would_take_for_others_are_refused_at_load_with_the_cure(change, tmp_path):
    former, told = CHANGES[change]
    kinds = {"kinds": {"vector": {"weight_decay": 0.0}}} if change == "added" else {}
    fresh = ["0.weight"] if change == "added" else []
    state, _ = saved(former(), tmp_path / "c")
    made = sorted_net(**kinds)
    schedule = halving(made)
    before = rates(made[1])
    words = rf"(?s){told}\. Load the optimizer before a scheduler is made, and make a new one for these groups"
    with pytest.raises(ValueError, match=words):
        made[1].load_state_dict(state, fresh=fresh)
    for each in (schedule, None):
        with pytest.raises(AssertionError, match=words):
            assert loaded(made, tmp_path / "c", each, fresh=fresh) == "no error"
    assert rates(made[1]) == before
    made = sorted_net(**kinds)  # without a scheduler yet
    with pytest.warns(UserWarning, match=words):
        made[1].load_state_dict(state, fresh=fresh)
    arguments = {"fresh": fresh, "allow_extra": ["schedule.*"]}
    made = sorted_net(**kinds)
    assert loaded(made, tmp_path / "c", **arguments).startswith("no error\n")
    later = torch.optim.lr_scheduler.ExponentialLR(made[1], 0.5, last_epoch=1)
    stepped(made)
    later.step()
    assert rates(made[1])[:2] == [("muon", 0.0025), ("adamw", 1.25e-5)]


def test_base_rates_that_are_not_those_of_the_groups_are_told(tmp_path):
    """As after a resume that has swapped them."""
    made = sorted_net()
    schedule = halving(made)
    schedule.base_lrs.reverse()
    weights, state = get_state_dict(*made)
    muonckpt.save({"model": weights, "optimizer": state, "schedule": schedule.state_dict()}, tmp_path / "c")
    told = loaded(made, tmp_path / "c", halving(made))
    assert "'schedule.base_lrs' of the checkpoint has [0.0001, 0.02], and the groups initial_lr [0.02, 0.0001]" in told


# --- parameters that no group has ------------------------------------------------------------------------------------


def warned(made: Made) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepped(made)
    return caught


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.compile, when it is first imported
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_gradient_that_no_group_has_is_told_once_and_trained_by_the_step_to_take(named, wrapped, tmp_path):
    inner, options = net(), {"lr": 0.02, "adamw_lr": 1e-4, "rules": [HEAD, MODULE_TYPES], "named": named}
    for frozen in (inner[0].weight, inner[1].weight, inner[1].bias):
        frozen.requires_grad_(False)
    model: Any = torch.compile(inner) if wrapped else inner  # its names have a prefix
    optimizer = Muon.for_model(model, **options)
    assert not warned((model, optimizer))
    inner[0].requires_grad_(True)
    inner[1].requires_grad_(True)
    (told,) = warned((model, optimizer))
    assert told.category is RuntimeWarning and told.filename == __file__
    assert "changes them: 0.weight, 1.*." in str(told.message)
    assert not warned((model, optimizer))
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "saved")
    again = Muon.for_model(model, **options)
    weights, empty = get_state_dict(model, again)
    fresh = ast.literal_eval(str(told.message).partition("fresh=")[2])
    muonckpt.load({"model": weights, "optimizer": empty}, tmp_path / "saved", fresh=fresh)
    set_state_dict(model, again, model_state_dict=weights, optim_state_dict=empty)
    for parameter, slots in optimizer.state.items():
        assert all(torch.equal(value, again.state[parameter][slot]) for slot, value in slots.items())
    former = [parameter.detach().clone() for parameter in inner.parameters()]
    assert not warned((model, again))
    assert not any(torch.equal(a, b) for a, b in zip(former, inner.parameters(), strict=True))


def test_a_parameter_that_came_later_is_told_as_well_and_the_model_is_not_kept_alive():
    model, optimizer = sorted_net()
    model.append(nn.Bilinear(10, 2, 3, bias=False))  # no rule says what it is
    (told,) = warned((model, optimizer))
    assert "no step changes them: 4.weight. " in str(told.message)
    assert not warned(copy.deepcopy((model, optimizer))), "a copy does not know its model"
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_a_model_that_got_other_parameters_is_told_so_instead():
    model, optimizer = sorted_net()
    for part in model:
        part.weight = nn.Parameter(part.weight.detach().clone())
        part.bias = None
    (told,) = warned((model, optimizer))
    assert "build the optimizer of those" in str(told.message)
