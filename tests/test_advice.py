"""Advice is a promise: cures that errors print are followed here as they are printed, and state that can be kept is."""

from __future__ import annotations

import ast
import inspect
import random
import re
import shlex
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from itertools import cycle
from pathlib import Path

import pytest
import torch
from support.commands import LINES, called, command_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import muonckpt
from muonckpt.cli.main import cli
from muonckpt.names.renaming import WRAPPERS
from muonckpt.names.resumption import in_globs
from muonckpt.optimizer import LayerWise, Muon
from muonckpt.optimizer.groups import MODULE_TYPES, Rule

ROOT = Path(__file__).parents[1]
RULES = MODULE_TYPES

# --- What is named exists ---------------------------------------------------------------------------------------------

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
ITS_COMMAND = re.compile(r"muonckpt ((?:lab )?[a-z-]+)\b([^`;(]*)")
OF_OTHER_PROGRAMS = re.compile(r"--(muon|dist-ckpt|use-distributed)-")
CALLS = {
    "muonckpt.load": muonckpt.load,
    "muonckpt.save": muonckpt.save,
    "muonckpt.redistribute": muonckpt.redistribute,
    "Muon.for_model": Muon.for_model,
    "Muon": Muon,
    "Series": muonckpt.Series,
    "LayerWise": LayerWise,
}


def flags_of(name: str) -> set[str]:
    return {flag for option in command_of(name).params for flag in option.opts}


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """Where each text of the program is that is no docstring, and the text with {} for values."""
    folders = [ROOT / name for name in ("muonckpt", "optimizer", "converters", "cli")]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [text for file in files for text in texts_of(file)]


def texts_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file."""
    name = file.relative_to(ROOT)
    for node in ast.walk(ast.parse(file.read_text())):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "command":
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield place, f"muonckpt {' '.join(words)}"
        if isinstance(node, ast.Expr):
            continue
        for text in ast.iter_child_nodes(node):
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and not isinstance(node, ast.JoinedStr):
                yield place, text.value
            if isinstance(text, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in text.values)
                yield place, "".join(parts)


def test_every_flag_in_a_message_is_one_of_the_command_that_it_is_said_of(texts):
    flags = {name: flags_of(name) for name in LINES}
    top = {flag for option in cli.params for flag in option.opts}
    everywhere, checked = top.union(["--version", "--help"], *flags.values()), 0
    for place, text in texts:
        for name, words in ITS_COMMAND.findall(text):
            for flag in FLAG.findall(words) if name in flags else ():
                assert flag in flags[name], f"{place}: muonckpt {name} has no {flag}: {text}"
                checked += 1
        for flag in FLAG.findall(text):
            assert flag in everywhere or OF_OTHER_PROGRAMS.match(flag), f"{place}: no command has {flag}: {text}"
            checked += 1
    assert checked > 100


def test_every_argument_in_a_message_is_one_of_the_function_that_it_is_said_of(texts):
    call, checked = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, CALLS))})\(([^()]*)"), 0
    for place, text in texts:
        for function, arguments in call.findall(text):
            for name in re.findall(r"(?:^|[ ,(])(\w+)=(?!=)", arguments):
                taken = inspect.signature(CALLS[function]).parameters
                free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
                assert name in taken or free, f"{place}: {function} takes no {name}=: {text}"
                checked += 1
    assert checked > 3


def test_a_message_has_at_most_60_words(texts):
    """Without what it is filled with: each is at least one word."""
    counts = {f"{place}: {text}": len(text.split()) for place, text in texts}
    assert 50 < max(counts.values()) <= 60, max(counts, key=counts.__getitem__)


class Deep(nn.Module):
    """Blocks, each with ``extra`` more layers, and an output head of so many ``words``."""

    def __init__(self, depth: int, *extra: str, words: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 4)
        layers = {"norm": nn.LayerNorm(4), "qkv": nn.Linear(4, 12), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
        layers |= {name: nn.Linear(4, 4) for name in extra}
        self.blocks = nn.ModuleList(deepcopy(nn.ModuleDict(layers)) for _ in range(depth))
        self.head = nn.Linear(4, words)


def deep_run(folder: str, model: nn.Module, head: str = "head", **options) -> muonckpt.Series:
    optimizer = Muon.for_model(model, lr=0.02, adamw_lr=1e-3, head=head, split={"*.qkv": 3}, **options)
    return muonckpt.Series(folder, model, optimizer)


def each_of_its_own(model: nn.Module) -> Muon:
    """Return an optimizer that gives parameters that follow one another different algorithms."""
    matrices = cycle(["adamw", "lion", "normuon", "adamuon", "muon"])
    groups = [
        {"params": [named], "algorithm": next(matrices) if named[1].ndim == 2 else "lion", "lr": 1e-3}
        for named in model.named_parameters()
    ]
    return Muon(groups)


MISFITS: dict[str, Callable[[], object]] = {
    "40 more layers": lambda: deep_run("deep", Deep(52)).resume(),
    "fewer layers": lambda: deep_run("deep", Deep(3)).resume(),
    "more layers, with others in all": lambda: deep_run("deep", Deep(52, "a", "b", "c", "d")).resume(),
    "fewer words, more layers": lambda: deep_run("deep", Deep(14, words=8)).resume(),
    "float64": lambda: deep_run("deep", Deep(12).double()).resume(),
    "other names": lambda: deep_run("deep", nn.Sequential(Deep(12)), head="0.head").resume(),
    "other algorithms, more layers": lambda: muonckpt.Series(
        "deep", model := Deep(14), each_of_its_own(model)
    ).resume(),
    "many extra keys": lambda: muonckpt.load({}, "keys"),
    "many missing keys": lambda: muonckpt.load(dict.fromkeys((f"b{n}" for n in range(99)), 1.0), "keys"),
    "open questions": lambda: Muon.for_model(Deep(12, "in_proj", "gate_up_proj"), lr=0.02, adamw_lr=1e-3),
    "changed tensors": lambda: muonckpt.attest(dict.fromkeys((f"w{n}" for n in range(99)), torch.zeros(1)), "ones"),
}


def test_an_error_about_very_many_things_has_at_most_60_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep_run("deep", Deep(12)).save(0)
    muonckpt.save(dict.fromkeys((f"a{n}" for n in range(99)), 1.0), "keys")
    muonckpt.save({f"w{n}": torch.ones(1) for n in range(99)}, "ones")
    for name, call in MISFITS.items():
        with pytest.raises(muonckpt.MuonckptError) as refused:
            call()
        told = str(refused.value).partition(", with FILE:")[0]
        assert 20 < len(told.split()) <= 60, f"{name}: {told}"


def test_a_warning_about_many_options_has_at_most_60_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep_run("deep", Deep(12)).save(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rates = {"vector": {"lr": 0.3}, "head": {"lr": 0.4}, "matrix": {"momentum": 0.5, "ns_steps": 3}}
        deep_run("deep", Deep(12), weight_decay=0.3, cautious=True, kinds=rates).resume()
    told = [str(each.message) for each in caught if "as it was saved" not in str(each.message)]
    assert len(told) > 2 and max(len(text.split()) for text in told) <= 60, told


@pytest.mark.parametrize("seed", range(20))
def test_globs_of_many_numbers_match_exactly_their_names(seed):
    dice = random.Random(seed)
    every = [f"blocks.{n}.{part}" for n in range(dice.choice([12, 130])) for part in ("norm", "moe.7.up", "moe.12.up")]
    new = [name for name in every if dice.random() < 0.8]
    globs = in_globs(new, {*every} - {*new})
    assert {name for name in every if any(fnmatchcase(name, glob) for glob in globs)} == {*new}
    layers = [f"blocks.{n}.norm" for n in range(30, 64)]
    assert in_globs(layers, ["blocks.0.norm"]) == ["blocks.[3-5][0-9].norm", "blocks.6[0-3].norm"]


@pytest.mark.parametrize("command", [("diff", "--to", "muonckpt"), ("inspect",)])
def test_a_command_says_where_the_flag_is_that_it_lacks(command, tmp_path, monkeypatch):
    """A momentum of no known convention: convert has the flag for it, and what it writes is understood."""
    monkeypatch.chdir(tmp_path)
    group = {"params": ["up"], "lr": 0.02, "momentum": 0.95}
    for name in ("a", "b"):
        state = {"up": {"momentum_buffer": torch.ones(4, 4)}}
        muonckpt.save({"model": {"up": torch.ones(4, 4)}, "optimizer": {"state": state, "param_groups": [group]}}, name)
    name, *options = command
    places = {"inspect": ["a"], "diff": ["a", "b"]}[name]
    told = called(name, *places, *options)
    for flag in FLAG.findall(ITS_COMMAND.sub("", told.stdout + told.stderr)):
        assert flag in flags_of(name) or f"{flag}: options of `muonckpt convert`" in told.stderr, told
    for place in ("a", "b"):
        assert called("convert", place, f"{place}2", "--to", "muonckpt", "--convention", "ema").returncode == 0
    assert called(name, *(f"{place}2" for place in places), *options).returncode == 0


# --- What is printed is followed --------------------------------------------------------------------------------------


def model_and_state(kind: Callable[[nn.Module], torch.optim.Optimizer], dtype=torch.float32, **more: nn.Module):
    """Return weights and state after a step, by the names of a linear layer."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    for name, module in more.items():
        model.add_module(name, module)
    optimizer = kind(model.to(dtype))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def ours(model: nn.Module, rules=RULES) -> Muon:
    return Muon.for_model(model, rules=rules, lr=0.02, adamw_lr=1e-3)


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def as_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def zeroed(state: dict[str, dict]) -> dict[str, dict]:
    for key, tensor in tensors(state).items():
        if key[-1] != "lr":
            tensor.detach().zero_()
    return state


def tensors(value: object, path: tuple = ()) -> dict[tuple, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return {key: tensor for name, child in items for key, tensor in tensors(child, (*path, name)).items()}


def refusal(state: dict, path: str, **how) -> str:
    with pytest.raises(muonckpt.MuonckptError) as caught:
        muonckpt.load(state, path, **how)
    told = str(caught.value)
    assert len(told.partition(", with FILE:")[0].split()) <= 60, told
    return told


def arguments(told: str) -> dict[str, list[str]]:
    """Return what a message gives for arguments of `muonckpt.load`."""
    found = re.findall(r"\b(fresh|allow_extra|grow|ungrouped)=(\[.*?\])", told)
    return {name: ast.literal_eval(value) for name, value in found}


def run_command(told: str, *more: str) -> str:
    """Run the command of a message on a new destination, with the file that it shows; return the destination."""
    told, _, file = told.partition(", with FILE:\n")
    [line] = re.findall(r"muonckpt (convert [^(;,]*)", told)
    Path("FILE").write_text(file)
    done = called(*shlex.split(line), *more)
    assert done.returncode == 0, done.stderr
    return "NEW"


def equal(loaded: dict, saved: dict) -> None:
    found = tensors(loaded)
    for path, tensor in tensors(saved).items():
        assert (
            torch.equal(found[path], tensor.to(found[path].dtype))
            and tensor.dtype.itemsize <= found[path].dtype.itemsize
        )


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:.*schedulers know groups by their numbers")
def test_state_that_the_checkpoint_never_had_begins_anew(here):
    model, optimizer = model_and_state(stock)
    saved = as_dict(model, optimizer)
    muonckpt.save({"model": saved["model"]}, "weights")
    without_bias = {**saved["optimizer"], "state": {"weight": saved["optimizer"]["state"]["weight"]}}
    muonckpt.save({"model": saved["model"], "optimizer": without_bias}, "no-grad")
    for kind in (stock, ours):
        state = zeroed(as_dict(*model_and_state(kind)))
        told = refusal(state, "weights")
        assert "convert" not in told
        muonckpt.load(state, "weights", **arguments(told))
        equal({"model": state["model"]}, {"model": as_dict(*model_and_state(stock))["model"]})
    state = zeroed(as_dict(*model_and_state(stock)))
    told = refusal(state, "no-grad")
    assert "convert" not in told
    muonckpt.load(state, "no-grad", **arguments(told))
    assert state["optimizer"]["state"]["weight"]["exp_avg"].any() and state["model"]["bias"].any()


@pytest.mark.filterwarnings("ignore:.*did not say options")
def test_state_of_another_program_is_translated_and_all_there(here):
    saved = as_dict(*model_and_state(stock))
    muonckpt.save(saved, "of_torch")
    rules = [[Rule("other", "weight")], MODULE_TYPES]
    state = zeroed(as_dict(*model_and_state(lambda model: ours(model, rules))))
    muonckpt.load(state, run_command(refusal(state, "of_torch")))
    equal(state, saved)


@pytest.mark.filterwarnings("ignore:.*did not say options")
@pytest.mark.parametrize("program", ["torch", "dion"])
def test_state_that_was_converted_for_another_program_is_translated_back(program, here):
    saved = as_dict(*model_and_state(ours))
    muonckpt.save(saved, "ours")
    assert called("convert", "ours", "OLD RUN", "--to", program).returncode == 0
    state = zeroed(as_dict(*model_and_state(ours)))
    told = refusal(state, "OLD RUN")
    assert "fresh" not in told
    muonckpt.load(state, run_command(told))
    momentum, moments = state["optimizer"]["state"]["weight"], state["optimizer"]["state"]["bias"]
    torch.testing.assert_close(momentum, saved["optimizer"]["state"]["weight"], rtol=1e-6, atol=0)
    equal({"bias": moments, **state["model"]}, {"bias": saved["optimizer"]["state"]["bias"], **saved["model"]})


@pytest.mark.filterwarnings("ignore:.*did not say options")
def test_state_in_float32_of_weights_in_bfloat16_is_loaded_by_the_options_to_give(here):
    saved = as_dict(*model_and_state(ours))
    saved["model"] = {name: weight.bfloat16() for name, weight in saved["model"].items()}
    muonckpt.save(saved, "mixed")
    told = refusal(zeroed(as_dict(*model_and_state(ours, torch.bfloat16))), "mixed")
    (muon, adamw) = re.findall(r"(\w+)='(\w+)'", told)

    def with_options(model: nn.Module) -> Muon:
        kinds = {"matrix": dict([muon]), "vector": dict([adamw])}
        return Muon.for_model(model, rules=RULES, lr=0.02, adamw_lr=1e-3, kinds=kinds)

    state = zeroed(as_dict(*model_and_state(with_options, torch.bfloat16)))
    muonckpt.load(state, "mixed")
    equal(state, saved)


def test_one_weight_of_another_dtype_is_loaded_exactly(here):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.data = model[0].weight.data.bfloat16()
    muonckpt.save({"model": model.state_dict()}, "one")
    live = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    told = refusal({"model": live.state_dict()}, "one")
    [(name, there, back)] = re.findall(r"Exact for model\.(\S+): (.*), load, then (.*)$", told)
    weight = live.get_parameter(name)
    exec(there)
    muonckpt.load({"model": live.state_dict()}, "one")
    exec(back)
    assert weight.dtype == torch.float32
    assert all(map(torch.equal, live.float().parameters(), model.float().parameters()))


@pytest.mark.parametrize("kind", [ours, stock])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_another_dtype_than_the_weights_is_loaded_exactly(kind, dtype, here):
    saved = as_dict(*model_and_state(kind))
    for slots in saved["optimizer"]["state"].values():
        slots |= {slot: value.bfloat16() if value.ndim else value for slot, value in slots.items()}
    muonckpt.save(saved, "mixed")
    state = zeroed(as_dict(*model_and_state(kind, dtype)))
    told = refusal(state, "mixed")
    if dtype is not torch.float32:
        assert told.endswith("To keep all bits, build the model in float32")
        state = zeroed(as_dict(*model_and_state(kind)))
        told = refusal(state, "mixed")
    muonckpt.load(state, run_command(told))
    equal(state, saved)


def test_a_parameter_that_changed_its_family_keeps_its_state_in_the_groups_of_the_saved_run(here):
    def as_saved(model: nn.Module) -> Muon:
        return ours(model, [[Rule("other", "weight")], MODULE_TYPES])

    saved = as_dict(*model_and_state(as_saved))
    muonckpt.save(saved, "other")
    told = refusal(zeroed(as_dict(*model_and_state(ours))), "other")
    assert "moved from 'adamw' to 'muon': weight. To keep their state, group them as in the saved run" in told
    state = zeroed(as_dict(*model_and_state(as_saved)))
    muonckpt.load(state, "other")
    equal(state, saved)


def test_state_that_a_wrapper_of_the_optimizer_makes_in_its_first_step_is_loaded_after_one(here):
    def step_of_wrapper(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        for param in model.parameters():
            optimizer.state[param]["z"] = param.detach() + 1

    model, optimizer = model_and_state(ours)
    step_of_wrapper(model, optimizer)
    saved = as_dict(model, optimizer)
    muonckpt.save(saved, "wrapped")
    model, optimizer = model_and_state(ours)
    told = refusal(zeroed(as_dict(model, optimizer)), "wrapped")
    assert "2 parameters differ: with z in the checkpoint, not here: weight, bias" in told
    assert "To keep their state, use the optimizer of the saved run, after a step if it makes state there" in told
    step_of_wrapper(model, optimizer)
    state = zeroed(as_dict(model, optimizer))
    muonckpt.load(state, "wrapped")
    equal(state, saved)


@pytest.mark.parametrize("kind", [ours, stock])
def test_state_under_numbers_is_loaded_into_what_has_them(kind, here):
    model, optimizer = model_and_state(kind)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    muonckpt.save(saved, "numbers")
    model, optimizer = model_and_state(kind)
    told = refusal(as_dict(model, optimizer), "numbers")
    [code] = re.findall(r"give what it was saved from, ('optimizer': \w+)$", told)
    state = eval(f"{{'model': model.state_dict(), {code}}}", {"model": model, "optimizer": optimizer})
    zeroed({"model": state["model"], "optimizer": optimizer.state_dict()})
    muonckpt.load(state, "numbers")
    equal({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)


@pytest.mark.parametrize("key", ["net", "app.net"])
def test_parts_at_other_keys_are_loaded_where_the_checkpoint_has_them(key, here):
    saved = as_dict(*model_and_state(ours))
    top = {key.partition(".")[0]: {"net": saved["model"]} if "." in key else saved["model"]}
    muonckpt.save({**top, "optimizer": saved["optimizer"]}, "moved")
    state_dict = zeroed(as_dict(*model_and_state(ours)))
    told = refusal(state_dict, "moved")
    [(there, here_)] = re.findall(r"the checkpoint has at '(.*?)' what the state dict has at '(.*?)'", told)
    part = state_dict[here_]
    for name in reversed(there.split(".")):
        part = {name: part}
    muonckpt.load({**part, "optimizer": state_dict["optimizer"]}, "moved")
    equal(state_dict, saved)


def test_what_only_one_side_has_is_left_out_by_the_line_to_write(here):
    saved = as_dict(*model_and_state(ours))
    muonckpt.save({**saved, "loader": {"position": 3}}, "more")
    muonckpt.save(saved, "less")
    state_dict = zeroed(as_dict(*model_and_state(ours)))
    muonckpt.load(state_dict, "more", **arguments(refusal(state_dict, "more")))
    equal(state_dict, saved)
    state_dict = {**zeroed(as_dict(*model_and_state(ours))), "loader": {"position": 0}}
    told = refusal(state_dict, "less")
    assert "The checkpoint has nothing of 'loader': to load all else, leave it out of the state dict" in told
    del state_dict["loader"]
    muonckpt.load(state_dict, "less")
    equal(state_dict, saved)


@pytest.mark.filterwarnings("ignore:.*did not say options")
def test_a_parameter_in_no_group_is_loaded_with_the_options_of_its_group_here(here):
    saved = as_dict(*model_and_state(ours))
    for group in saved["optimizer"]["param_groups"]:
        group["params"] = [name for name in group["params"] if name != "bias"]
    muonckpt.save(saved, "ungrouped")
    model, optimizer = model_and_state(ours)
    state_dict = zeroed(as_dict(model, optimizer))
    told = refusal(state_dict, "ungrouped")
    report = muonckpt.load(state_dict, "ungrouped", **arguments(told))
    assert report.own_options == ("all of bias, which has those of group 1 here",)
    equal(state_dict, saved)
    set_state_dict(model, optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 1e-3]


@pytest.mark.parametrize("prefix", ["module", "inner.wrapped"])
def test_names_with_parts_of_a_wrapper_are_renamed_by_the_rule_to_write(prefix, here):
    saved = as_dict(*model_and_state(ours))

    def renamed(names: Mapping[str, object]) -> dict[str, object]:
        return {f"{prefix}.{name}": value for name, value in names.items()}

    group = [
        {**group, "params": [f"{prefix}.{name}" for name in group["params"]]}
        for group in saved["optimizer"]["param_groups"]
    ]
    muonckpt.save(
        {
            "model": renamed(saved["model"]),
            "optimizer": {"state": renamed(saved["optimizer"]["state"]), "param_groups": group},
        },
        "OLD",
    )
    state = zeroed(as_dict(*model_and_state(ours)))
    muonckpt.load(state, run_command(refusal(state, "OLD")))
    equal(state, saved)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "checkpointed": checkpoint_wrapper,
    "compiled": compiled,
    "checkpointed, of compiled": lambda module: checkpoint_wrapper(compiled(module)),
    "compiled, of checkpointed": lambda module: compiled(checkpoint_wrapper(module)),
}


def wrapped(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose blocks are wrapped, and its optimizer after a step; the blocks' names are no numbers."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": WRAPPINGS[kind](block()), "two": WRAPPINGS[kind](block()), "out": nn.Linear(4, 4)})
    optimizer = ours(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def by_plain_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        found[plain,] = parameter.detach().clone()
        found |= {(plain, slot): value.clone() for slot, value in optimizer.state[parameter].items()}
    return found


@pytest.mark.parametrize("saved_as", WRAPPINGS)
def test_names_of_compiled_and_checkpointed_blocks_are_renamed_by_the_table_to_write(saved_as, here):
    model, optimizer = wrapped(saved_as)
    truth = by_plain_name(model, optimizer)
    muonckpt.save(as_dict(model, optimizer), "OLD")
    shown = "'_orig_mod' is a part of 8 names" in called("inspect", "OLD").stdout
    assert shown == (saved_as == "checkpointed, of compiled")
    for number, kind in enumerate(WRAPPINGS):
        model, optimizer = wrapped(kind)
        state, path = zeroed(as_dict(model, optimizer)), "OLD"
        inner = "checkpointed, of compiled"
        if (kind == inner) != (saved_as == inner):  # of the others DCP drops the wrappers' parts
            path = run_command(refusal(state, "OLD"))
        muonckpt.load(state, path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = by_plain_name(model, optimizer)
        assert found.keys() == truth.keys() and all(torch.equal(found[key], truth[key]) for key in truth)
        if path == "NEW":
            Path("NEW").rename(f"NEW{number}")


def layered(layers: str, attention: str, more: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(more)
    parts = [
        nn.ModuleDict({attention: nn.ModuleDict({n: nn.Linear(4, 4) for n in "qkv"}), "up": nn.Linear(4, 6)})
        for _ in range(4)
    ]
    model = nn.ModuleDict({layers: nn.ModuleList(parts), "head": nn.Linear(4, 9)})
    optimizer = ours(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("parts", [{"model"}, {"model", "optimizer"}])
def test_renamed_modules_are_loaded_by_the_table_to_write(parts, here):
    saved = as_dict(*layered("layers", "attention"))
    muonckpt.save({part: saved[part] for part in parts}, "OLD")
    state = {part: value for part, value in zeroed(as_dict(*layered("blocks", "attn"))).items() if part in parts}
    told = refusal(state, "OLD")
    assert "fresh" not in told and "allow_extra" not in told
    table = tomllib.loads(told.partition(", with FILE:\n")[2])
    assert table["rule"] == [
        {"from": "layers.{a}.attention.{tail*}", "to": "blocks.{a}.attn.{tail*}"},
        {"from": "layers.{tail*}", "to": "blocks.{tail*}"},
    ]
    report = muonckpt.load(state, run_command(told))
    assert not report.fresh and not report.kept and len(report.loaded) == (34 if "optimizer" in parts else 0)
    found = [*tensors({part: state[part] for part in sorted(parts)}).values()]
    truth = [*tensors({part: saved[part] for part in sorted(parts)}).values()]
    assert len(found) == len(truth) and all(map(torch.equal, found, truth))


def test_a_new_name_that_cannot_be_told_is_not_guessed(here):
    def pair(*names: str) -> dict[str, dict]:
        model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
        return as_dict(model, ours(model))

    muonckpt.save(pair("a", "b"), "equal")
    state = pair("c", "d")
    told = refusal(state, "equal")
    assert "it cannot be told which is which: here c.weight, d.weight; there a.weight, b.weight. Write a rule" in told
    assert "fresh" not in told
    # The rules that a user writes in the form of the one that is shown.
    head, _, rule = told.partition(", with FILE:\n")
    rules = [rule.replace("ITS NAME HERE", "c.weight")]
    rules.append(rule.replace("a.weight", "b.weight").replace("ITS NAME HERE", "d.weight"))
    muonckpt.load(state, run_command(head + ", with FILE:\n" + "\n".join(rules)))
    saved = pair("a", "b")
    muonckpt.load(saved, "equal")
    assert torch.equal(state["model"]["d.weight"], saved["model"]["b.weight"])
    assert not torch.equal(state["model"]["d.weight"], saved["model"]["a.weight"])
    muonckpt.save(pair(*"abcdefg"), "many")
    told = refusal(pair(*"hijklmn"), "many")
    lists = [f"{', '.join(f'{name}.weight' for name in names)} and 2 more" for names in ("hijkl", "abcde")]
    assert f"here {lists[0]}; there {lists[1]}. Write" in told


def test_a_rule_is_written_for_any_name(here):
    muonckpt.save({"model": {"a'\x1b\x7f\\\".weight": torch.arange(3.0), "b": torch.ones(1)}}, "odd")
    state = {"model": {"it's.weight": torch.zeros(3), "b": torch.zeros(1)}}
    told = refusal(state, "odd")
    assert told.replace("\n", "").isprintable()
    muonckpt.load(state, run_command(told))
    assert torch.equal(state["model"]["it's.weight"], torch.arange(3.0))


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["unwrapped", "wrapped"])
def test_a_model_that_is_wrapped_is_loaded_by_one_rule(is_wrapped, here):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = nn.Sequential(model)
    source, target = (model, wrapped) if is_wrapped else (wrapped, model)
    saved = as_dict(source, ours(source))
    muonckpt.save(saved, "OLD")
    truth = [tensor.clone() for tensor in tensors(saved).values()]
    state = zeroed(as_dict(target, ours(target)))
    told = refusal(state, "OLD")
    assert len(tomllib.loads(told.partition(", with FILE:\n")[2])["rule"]) == 1
    report = muonckpt.load(state, run_command(told))
    assert not report.fresh and not report.kept
    found = tensors(state).values()
    assert len(found) == len(truth) and all(map(torch.equal, found, truth))


def test_weights_that_fresh_leaves_as_initialised_come_first(here):
    saved = as_dict(*layered("layers", "attention"))
    muonckpt.Series("run").save(7, saved)
    model, optimizer = layered("blocks", "attn", more=1)
    state = as_dict(model, optimizer)
    restored = muonckpt.Series("run").restore(state, fresh=["blocks.*", "layers.*"])
    told = "32 weights stay as initialised"
    assert str(restored.report).startswith(f"{told}: model.blocks.*") and f": {told}: " in str(restored)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    proof = restored.check(model, optimizer)
    assert str(proof).startswith(f"{told}: model.blocks.*") and len(proof.initialised) == 32
    assert told in called("inspect", "run").stdout


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_tied_weights_are_loaded_whichever_name_the_writer_kept(name, here):
    model = Tied()
    saved = as_dict(model, stock(model))
    kept = model.embed.weight.detach().clone()
    muonckpt.save({**saved, "model": {name: kept}}, "tied")
    state = zeroed(as_dict(model, stock(model)))
    assert not model.head.weight.any()
    muonckpt.load(state, "tied")
    assert torch.equal(model.head.weight, kept)


def test_reshard_does_not_advise_the_command_that_runs(here):
    muonckpt.save(as_dict(*model_and_state(ours)), "run")
    Path("run/muonckpt.json").unlink()
    done = called("reshard", "run", "new", "--mesh", "dp=2")
    assert (
        done.returncode == 0
        and "muonckpt reshard" not in done.stderr
        and "muonckpt.json would give back" in done.stderr
    )
    told = called("verify", "run").stdout
    [line] = re.findall(r"^\(a\) muonckpt (.*)$", told, re.MULTILINE)
    assert called(*shlex.split(line)).returncode == 0 and called("verify", shlex.split(line)[2]).returncode == 0


def test_state_that_is_not_understood_is_left_out_by_the_command_to_write(here):
    saved = as_dict(*model_and_state(ours))
    saved["optimizer"]["param_groups"][0]["adam_betas"] = [0.9, 0.99]
    saved["optimizer"]["state"]["stray"] = {"momentum_buffer": torch.ones(4, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        muonckpt.save(saved, "stray")
    done = called("convert", "stray", "NEW", "--to", "dion")
    [name] = re.findall(r"--select of muonckpt\.(\w+)", done.stderr)
    copied = called(name, "stray", "copy", "--select", "model.*", "--select", "optimizer.state.weight.*")
    assert copied.returncode == 0, copied.stderr
