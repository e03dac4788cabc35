"""The mistakes of the first hour: each script was written from the README alone, and its error shows what to write.

Where the advice is code, the test runs that code.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict

import muonckpt
from muonckpt.optimizer import (
    FreshStart,
    LayerWise,
    MatrixMethod,
    Muon,
    Projection,
    StepExecution,
    clip_grad_norm_,
    orthogonalize,
    qk_clip,
)
from muonckpt.optimizer.groups import MODULE_TYPES, Rule, Split, UnsortedError, grouped_qkv, sort_parameters
from muonckpt.optimizer.megatron_fsdp import attach

RULES = [[Rule("head", "head.weight")], MODULE_TYPES]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.up = nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.down = nn.Linear(24, 16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(self.words(words)).relu())))


CALLS = (LayerWise, attach, clip_grad_norm_, grouped_qkv, orthogonalize, qk_clip)
VALUES = (FreshStart, MatrixMethod, Projection, Split, StepExecution)
NAMES = {
    thing.__name__: thing for thing in (torch, nn, muonckpt, Muon, Net, Rule, sort_parameters, *CALLS, *VALUES)
} | {
    "MODULE_TYPES": MODULE_TYPES,
    "RULES": RULES,
    "RATES": {"lr": 0.02, "adamw_lr": 3e-4},
}


def run(script: str, names: dict[str, Any]) -> str:
    """Run a script whose last line fails, and return the error as it is printed."""
    with pytest.raises(Exception) as refused:
        exec(script, names)
    assert not isinstance(refused.value.__cause__, muonckpt.MuonckptError), "one error of ours, told once"
    return f"{type(refused.value).__name__}: {refused.value}"


MADE = {
    "muonckpt.clip_grad_norm_(model.parameters())": "has no attribute 'clip_grad_norm_'; what goes with Muon is in ",
    "muonckpt.Muon(model)": "ArgumentError: params: expected parameters or groups, found a model, Net. Write ",
    "Muon(model.parameters())": (
        "LayoutError: parameter 2 of group 0: Muon needs a matrix, got shape (24,); put this parameter in an "
    ),
    "Muon(model.named_parameters(), lr=0.02)": "LayoutError: up.bias: Muon needs a matrix, got shape (24,); put this",
    "Muon(model)": "ArgumentError: params: expected parameters or groups, found a model, Net. Write ",
    "Muon(model, lr=0.02)": "ArgumentError: params: expected parameters or groups, found a model, Net. Write ",
    "Muon.for_model(model, **RATES)": "UnsortedError: the parameters cannot be sorted:",
    "Muon.for_model(model, head='heads', **RATES)": "no such matrix in the model; did you mean 'head'? Write head=None",
    "Muon.for_model(model, 'head', **RATES)": "too many positional arguments; by name only: lr, adamw_lr, head, ",
    "Muon.for_model(model, rules=RULES)": "ForModel.for_model: missing a required ",
    "Muon.for_model(model, RULES, 0.02)": "too many positional arguments; by name only: lr, adamw_lr, head, ",
    "Muon.for_model(model, rules=RULES, lr=0.02)": "ArgumentError: a group of 'adamw' says no lr",
    "Muon.for_model(model.parameters(), rules=RULES, lr=0.02)": "ArgumentError: model: expected a model",
    "Muon.for_model(model, rules=RULES, lr='0.02', adamw_lr=3e-4)": "ArgumentError: lr='0.02': expected a finite rate",
    "Muon.for_model(model, rules=RULES, **RATES, momentum='0.9')": "ArgumentError: momentum='0.9': expected",
    "Muon.for_model(model, rules=RULES, **RATES, momentun=0.9)": "did you mean 'momentum'? Write ",
    "Muon.for_model(model, rules=RULES, lr=0.02, adam_lr=3e-4)": "argument 'adam_lr'; did you mean 'adamw_lr'?",
    "Muon.for_model(model, rules=RULES, **RATES, betas=(0.9, 0.99))": "Write kinds={'embedding': {'betas'",
    "Muon.for_model(model, rules=RULES, **RATES, adamw_betas=(0.9, 0.99))": "Write kinds={'embedding': {'betas'",
    "Muon.for_model(model, rules=RULES, **RATES, algorithm='normuon')": "kinds={'matrix': {'algorithm'",
    "Muon.for_model(model, rules=MODULE_TYPES, **RATES)": "head.weight [50, 16] has as many rows",
    "Muon.for_model(model, rules=[*RULES[0], *MODULE_TYPES], **RATES)": "Rule('head', 'head.weight') and ",
    "Muon.for_model(model, rules=['head.weight'], lr=0.02)": "ArgumentError: rules: expected rules in lists, as in ",
    "Muon.for_model(model, rules={'head.weight': 'adamw'}, lr=0.02)": "ArgumentError: rules: expected rules in lists",
    "Muon.for_model(model, rules=lambda name, p: p.ndim == 2, lr=0.02)": "found a function among them",
    "Muon.for_model(model, rules=[[Rule('head', 'heads.weight')], MODULE_TYPES], lr=0.02)": "did you mean 'head.weig",
    "Muon(sort_parameters(model, RULES))": "ArgumentError: params: expected parameters or groups, found the decisions",
    "Muon(model.state_dict(), lr=0.02)": "ArgumentError: params: expected parameters or groups in a list, found ",
    "Muon([model.up.weight, model.up.weight])": "parameter 1 of group 0 is parameter 0 of group 0, too: expected each",
    "Muon([{'params': [model.up.weight]}, {'params': iter([model.up.weight])}])": "parameter 0 of group 1 is",
    "Muon([{'params': [model.up.weight], 'use_muon': True}])": "'name' for your logs. Write 'algorithm': 'muon' in its",
    "Muon([model.up.weight], algorithm='lion')": "argument 'algorithm'. Write [{'params': ..., 'algorithm': ...}],",
    "Muon([model.up.weight], pieces=(8, 16))": "argument 'pieces'. Write [{'params': ..., 'pieces': ...}], which",
    "Muon([model.up.weight], stages=2)": "Write Muon(params, execution=StepExecution(stages=...)), from muonckpt",
    "Muon([model.up.weight], replicas=2)": "found 2. Write replicas=torch.distributed.group.WORLD",
    "Muon.for_model(model.requires_grad_(False), rules=RULES, lr=0.02)": "model: expected parameters to train, found",
    "Muon([model.up.weight]).load_state_dict('run')": "expected a state dict, found str. Write weights, state = get_st",
    "Muon.for_model(model, rules=[[Rule('matrix', 'norm.weight')], *RULES], lr=0.02)": "Write rules=[[Rule('vector', '",
    "Muon([model.up.weight, 3])": "Muon: params=a list: expected Iterable[Tensor]",
    "Muon([model.up.weight], nesterov=3)": "ArgumentError: Muon: nesterov=3: expected True or False. Write ",
    "Muon([model.up.weight], execution=3)": "ArgumentError: execution=3: expected a StepExecution, from muonckpt.opt",
    "Muon.for_model(model, split=3, **RATES)": "ArgumentError: sort_parameters: split=3: expected Mapping[str, ",
    "clip_grad_norm_(model.parameters(), '1')": "clip_grad_norm_: max_norm='1': expected float. Write clip_grad_norm_(",
    "clip_grad_norm_(['up'], 1.0)": "clip_grad_norm_: parameters=a list: expected Tensor | Iterable[Tensor]. Write ",
    "qk_clip(model.up.weight, 3, torch.ones(2), 1.0)": "qk_clip: key=3: expected Projection | Tensor. Write qk_clip(",
    "Projection(model.up)": "ArgumentError: Projection: weight=a Linear: expected Tensor. Write Projection(qkv_proj.w",
    "Projection(model.up.weight, 2)": "ArgumentError: Projection: split=2: expected Split. Write Projection(",
    "Projection(model.up.weight, piece=1)": "ArgumentError: piece=1: expected one of the 1 pieces of Split(",
    "Projection(model.up.weight, heads=2)": "argument 'heads'. Write Projection(qkv_proj.weight",
    "Split((8, '8'))": "ArgumentError: Split: pieces=a tuple: expected int | tuple[int, ...]. Write Split(",
    "Rule('matrix', ['up.weight'])": "ArgumentError: Rule: names=a list: expected str | tuple[str, ...] | None. Write",
    "Rule('matrix', module='Linear')": "ArgumentError: Rule: module='Linear': expected type[Module] | None. Write ",
    "grouped_qkv('8', 2, 4)": "ArgumentError: grouped_qkv: heads='8': expected int. Write grouped_qkv(heads=32, ",
    "grouped_qkv(8, 0, 4)": "ArgumentError: kv_heads=0: expected a divisor of heads=8",
    "FreshStart(3)": "ArgumentError: FreshStart: fresh=3: expected Sequence[str]. Write optimizer.register",
    "StepExecution(cost=3)": "ArgumentError: StepExecution: cost=3: expected Callable[",
    "MatrixMethod('signed', 3)": "ArgumentError: MatrixMethod: update=3: expected Callable[",
    "orthogonalize(model)": "ArgumentError: orthogonalize: matrix=a Net: expected Tensor. Write orthogonalize(matrix)",
    "orthogonalize(model.up.bias)": "ArgumentError: matrix: expected one of floats, or a stack, found (24,) of torch.",
    "LayerWise(3, [])": "ArgumentError: LayerWise: model=3: expected Module. Write LayerWise(model, groups",
    "attach(3, model)": "ArgumentError: attach: optimizer=3: expected Muon. Write attach(optimizer, model)",
    "sort_parameters(model)": "UnsortedError: the parameters cannot be sorted:",
    "sort_parameters()": "ArgumentError: sort_parameters: missing a required argument: 'model'. Write sort_parameters",
    "sort_parameters(RULES, model)": "ArgumentError: model: expected a model, whose names and modules decide, found a ",
}


def test_an_argument_of_another_kind_is_refused_because_of_the_error_that_it_caused():
    with pytest.raises(muonckpt.ArgumentError, match="max_norm='1': expected float") as told:
        clip_grad_norm_([torch.ones(1)], "1")
    assert isinstance(told.value.__cause__, TypeError | RuntimeError), "its traceback says where"


@pytest.mark.parametrize("script", MADE)
def test_an_optimizer_that_cannot_be_made_shows_the_line_that_makes_it(script):
    names = {**NAMES, "model": Net()}
    error = run(script, names)
    assert MADE[script] in error
    # What is written either makes the optimizer, or is told the arguments that are missing.
    if "=...)" in error or "decisions" in error or "'params': ..." in error:
        return
    if written := re.search(r"Write (Muon\.for_model\(.*\))$", error):
        try:
            made = eval(written[1], names)
        except UnsortedError as asked:
            assert asked.arguments == {"head": "'head'"}
            made = Muon.for_model(names["model"], head="head", **names["RATES"])
        assert type(made) is Muon
    elif "selects nothing" in error:  # the rule itself is wrong
        assert "did you mean 'head.weight'" in error
    elif written := re.search(r"^Write (head=.*|rules=.*)$", error, re.MULTILINE):
        given = re.search(r"rules=(.*), (?:lr|\*\*RATES)", script)
        names["RULES"] = eval(given[1], names) if given else ()
        rules = "" if written[1].startswith("rules=") else ", rules=RULES"
        decisions = eval(f"Muon.for_model(model, {written[1]}{rules}, **RATES)", names).decisions()
        kinds = {name: decision.kind for decision in decisions for name in decision.names}
        assert kinds["head.weight"] == "head" and kinds["up.weight"] == "matrix"
    elif written := re.search(r"Write (kinds=.*)$", error):
        call = re.sub(r", (adamw_betas|betas|algorithm)=.*", f", {written[1]})", script)
        assert type(eval(call, names)) is Muon


@pytest.mark.parametrize(
    "rules",
    [
        RULES,
        [RULES],
        [RULES[0][0], MODULE_TYPES],
        (RULES[0], [MODULE_TYPES]),
        [RULES, [Rule("other", (), optional=True)]],
    ],
    ids=["layers", "nested", "a rule beside a set", "tuples", "more"],
)
def test_rules_say_the_same_however_they_are_nested(rules):
    model = Net()
    expected = str(sort_parameters(model, *RULES))
    assert str(sort_parameters(model, rules)) == expected
    groups = Muon.for_model(model, rules=rules, lr=0.02, adamw_lr=3e-4).param_groups
    assert [len(group["params"]) for group in groups] == [2, 6]


# Checkpoints.


def trained(seed: int = 0, made: type[nn.Module] = Net) -> tuple[nn.Module, Muon]:
    torch.manual_seed(seed)
    model = made()
    optimizer = Muon.for_model(model, rules=RULES, lr=0.02, adamw_lr=3e-4)
    words = torch.randint(50, (4, 8))
    nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
    optimizer.step()
    return model, optimizer


def state(model: nn.Module, optimizer: Muon) -> dict[str, Any]:
    weights, own = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": own}


def equal(one: tuple[nn.Module, Muon], other: tuple[nn.Module, Muon]) -> bool:
    """Whether two models have the same weights, and their optimizers the same state."""
    pairs = list(zip(one[0].parameters(), other[0].parameters(), strict=True))
    states = [(one[1].state[a], other[1].state[b]) for a, b in pairs]
    return all(torch.equal(a, b) for a, b in pairs) and all(
        torch.equal(a[slot], b[slot]) for a, b in states for slot in a
    )


GIVEN = {
    "objects": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "state dicts": lambda model, optimizer: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    "names": state,
    "weights only": lambda model, optimizer: model.state_dict(),
    "under app": lambda model, optimizer: {"app": state(model, optimizer)},
    "other words": lambda model, optimizer: {"weights": state(model, optimizer)["model"],
                                             "optim": state(model, optimizer)["optimizer"]},
}  # fmt: skip


def moved(state_dict: dict[str, Any], told: str) -> dict[str, Any]:
    """Return the parts of a state dict where a checkpoint has them, as an error says."""
    result: dict[str, Any] = {}
    for there, here in re.findall(r"the checkpoint has at (.*?) what the state dict has at (.*?)[;.]", told):
        part = state_dict if here == "its top" else state_dict[eval(here)]
        for name in reversed([] if there == "its top" else eval(there).split(".")):
            part = {name: part}
        merge(result, part)
    return result


def merge(result: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(result.get(name), dict):
            merge(result[name], value)
        else:
            result[name] = value


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("objects", "names"), ("state dicts", "names"), ("names", "objects"), ("under app", "names"),
     ("names", "under app"), ("names", "other words"), ("other words", "names"), ("names", "weights only"),
     ("weights only", "names")],
)  # fmt: skip
def test_a_template_of_another_form_is_refused_with_the_line_that_loads_everything(tmp_path, saved, loaded):
    source, (model, optimizer) = trained(), trained(1)
    series = muonckpt.Series(tmp_path)
    series.save(3, GIVEN[saved](*source))
    state_dict = GIVEN[loaded](model, optimizer)
    names = {"model": model, "optimizer": optimizer, "state_dict": state_dict, "series": series,
             "get_optimizer_state_dict": get_optimizer_state_dict}  # fmt: skip
    error = run("series.restore(state_dict)", names)
    if form := re.search(r"give what it was saved from, 'optimizer': ([^;]*)(; set_optimizer_state_dict sets)?", error):
        state_dict = {**state_dict, "optimizer": eval(form[1], names)}
        series.restore(state_dict)
        if form[2]:
            set_optimizer_state_dict(model, optimizer, optim_state_dict=state_dict["optimizer"])
        assert equal((model, optimizer), source)
        return
    assert error.endswith("Give each in the state dict at its place in the checkpoint")
    restored = series.restore(moved(state_dict, error), allow_extra=loaded == "weights only")
    assert restored.step == 3
    if "weights only" in (saved, loaded):
        assert all(map(torch.equal, model.state_dict().values(), source[0].state_dict().values()))
    else:
        assert equal((model, optimizer), source)


class Fewer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Linear(24, 16, bias=False), nn.Identity()


class More(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16)


SAVED = {
    "series.save(state, 3)": "a step is an integer, 0 or more; found a dict; it comes before the state dict: "
    "series.save(step, state_dict)",
    "series.save('3', state)": "a step is an integer, 0 or more; found '3'",
    "series.save(torch.tensor(3), state)": "a step is an integer, 0 or more; found a Tensor",
    "series.save(3.0, state)": "a step is an integer, 0 or more; found 3.0",
    "series.save(4, model)": "expected a state dict to save, found Net. Write weights, state = get_state_dict(",
    "series.save(4, get_state_dict(model, optimizer))": "found tuple. Write weights, state = get_state_dict(",
    "muonckpt.save('there', state)": "found str; the state dict is the first argument, and the path comes after it",
    "muonckpt.load('there', state)": "found str; the state dict is the first argument, and the path comes after it",
    "series.restore()": "Write weights, state = get_state_dict(model, optimizer), then series.restore({'model': ",
    "series.restore(model, optimizer)": "by name only: required, allow_extra, fresh, grow, ungrouped, ",
    "series.save(4, model, optimizer)": "Write run = muonckpt.Series(folder, model, optimizer), then run.save(step)",
    "series.save(4, model=model)": "Write run = muonckpt.Series(folder, model, optimizer), then run.save(step)",
    "series.async_save(4)": "expected a state dict. Write Series(folder, model, optimizer).async_save(step)",
    "series.restore(state, step=3)": "got an unexpected keyword argument 'step'",
    "muonckpt.Series()": "Write run = muonckpt.Series('run', model, optimizer, scheduler=scheduler)",
    "muonckpt.Series('there', model, optimizer, schedule)": "too many positional arguments; by name only: scheduler, ",
    "muonckpt.Series('there', keep_last='3')": "ArgumentError: keep_last='3': expected a number of checkpoints, 1 or",
    "muonckpt.Series('there', model, optimizer, extra=[schedule])": "extra=a list: expected Mapping[str",
    "muonckpt.Series(3)": "ArgumentError: expected a path or a URL, found 3",
    "muonckpt.Series('there', model, optimizer).resume(strict='no')": "strict='no': expected True or False. Write ",
    "muonckpt.Series('there', model, optimizer).resume(fresh=3)": "Series.resume: fresh=3: expected Iterable[str]. ",
    "muonckpt.async_save(state, 'there', on_error=3)": "ArgumentError: on_error is 'raise' or 'warn', when_busy",
    "muonckpt.Series('there', on=2.5)": "Series: on=2.5: expected Signals | str | ",
    "muonckpt.Series('there', on='SIGKILL')": "on='SIGKILL': expected some of SIGTERM, SIGINT, ",
    "muonckpt.Series('there', model, optimizer).resume(required=True)": "there, found none: is it the folder of this",
    "muonckpt.Series('there', model, optimizer).resume(stict=True)": "did you mean 'strict'? Write first = run.",
    "muonckpt.Series('there', keep=3)": "unexpected keyword argument 'keep'; did you mean 'keep",
    "muonckpt.load('there')": "Write weights, state = get_state_dict(model, optimizer), then muonckpt.load({'model': ",
    "series.restore(series.latest())": "found SavedStep; the state dict is the first argument",
    "muonckpt.save(state, series.latest())": "exists already, and nothing is overwritten; choose another destination",
    "muonckpt.convert(series.latest(), 'there', to='dion')": "convert: got an unexpected keyword argument 'to'. Write "
    "to_dialect=...",
    "muonckpt.convert(series.latest(), 'there', from_dialect='dcp')": "Write translation=muonckpt.Translation("
    "from_dialect=...)",
    "series.save(3, state)": "goes on after it, from the step that resume returns",
    "series.restore(state)['model']": "Series.restore returns the step, 3, the path and a report; ",
    "step, state = series.restore(state)": "Write first = restored.step + 1",
    "first = series.restore(state) + 1": "Write first = restored.step + 1",
    "muonckpt.Series(series.latest()).restore(state)": "expected the folder of a run, found a checkpoint: ",
    "muonckpt.load(state, folder)": "expected a checkpoint, found a folder of 1 checkpoint, such as a run's: ",
    "series.restore({**state, 'step': 0})": "missing key 'step'. The checkpoint has nothing of 'step': to load all "
    "else, leave it out of the state dict",
    "series.restore({**state, 'schedule': schedule})": "missing key 'schedule.*'. The checkpoint has nothing of "
    "'schedule': to load all else, leave it out of the state dict",
    "series.restore({'model': state['model']})": "to leave it there: Series.restore(..., allow_extra=['optimizer.*'])",
    "series.restore(other(More))": "missing key 'model.extra.*'. If they are new: Series.restore(..., fresh="
    "['extra.*']), and they stay as initialised",
    "series.restore(other(Fewer))": "build the model of the saved run; to go on without: Series.restore(..., fresh=",
    "series.restore(cast())": "To keep all bits, build the model in float32",
    "series.restore(moved())": "To keep their state, group them as in the saved run; to discard it: Series.restore(...",
    "series.restore(state, fresh='head.weight')": "expected a list of globs, such as fresh=['head.weight']",
}


@pytest.mark.parametrize("script", SAVED)
def test_what_cannot_be_saved_or_loaded_says_what_to_write(tmp_path, script):
    model, optimizer = trained()
    own, series = state(model, optimizer), muonckpt.Series(tmp_path)
    series.save(3, own)

    def cast() -> dict[str, Any]:
        half = Net().bfloat16()
        return state(half, Muon.for_model(half, rules=RULES, lr=0.02, adamw_lr=3e-4))

    def moved() -> dict[str, Any]:
        net, rules = Net(), [[Rule("matrix", "head.weight")], MODULE_TYPES]
        return state(net, Muon.for_model(net, rules=rules, lr=0.02, adamw_lr=3e-4))

    def other(made: type[nn.Module]) -> dict[str, Any]:
        net = made()
        return state(net, Muon.for_model(net, rules=RULES, lr=0.02, adamw_lr=3e-4))

    schedule = torch.optim.lr_scheduler.LambdaLR(trained()[1], lambda step: 1.0)
    names = {
        **NAMES,
        "More": More,
        "Fewer": Fewer,
        "model": model,
        "optimizer": optimizer,
        "state": own,
        "series": series,
        "folder": str(tmp_path),
        "get_state_dict": get_state_dict,
        "schedule": schedule,
        "cast": cast,
        "moved": moved,
        "other": other,
    }
    error = run(script, names)
    assert SAVED[script] in error, error
    if script.endswith("cast())"):
        assert "fresh=" not in error, "nothing that loses state where something else keeps it"


def test_what_was_restored_prints_as_one_line(tmp_path):
    series, own = muonckpt.Series(tmp_path), state(*trained())
    series.save(3, own)
    restored = series.restore(own)
    assert str(restored) == f"step 3 restored from {tmp_path}/step-00000003: state loaded: 8"
