"""What trainers save with torch.save in one process: read, given names, resharded, and trained on with."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from argparse import Namespace
from collections import deque
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import hostile, sweep
from support.commands import called
from support.continued import EXACT, Model, load_ours, train

import muonckpt
from muonckpt import SourceError
from muonckpt.optimizer import Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def ours(model: Model) -> Muon:
    """Its groups are not in the order of the model."""
    groups = [
        {"params": model.vectors, "algorithm": "adamw", "lr": 1e-3},
        {"params": model.matrices[::-1], "weight_decay": 0.2},
    ]
    return Muon(groups, lr=0.02, **EXACT)


def numbered_names(model: Model, optimizer: torch.optim.Optimizer) -> list[str]:
    """The code of docs/formats/trainers.md."""
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize(("optimizer_file", "weights"), [("optimizer.pt", "model.safetensors"),
                                                         ("optimizer.bin", "pytorch_model.bin")])  # fmt: skip
def test_our_muon_goes_on_with_what_a_trainer_saved(optimizer_file, weights, tmp_path):
    model, source = Model(), tmp_path / "checkpoint-3"
    optimizer = ours(model)
    train(model, [optimizer], range(3))
    source.mkdir()
    torch.save(optimizer.state_dict(), source / optimizer_file)
    (save_file if weights.endswith("safetensors") else torch.save)(model.state_dict(), source / weights)
    torch.save({"last_epoch": 3}, source / "scheduler.pt")

    assert muonckpt.verify(source).verdict == ("readable, unchecked" if weights.endswith("safetensors") else "whole")
    assert "numbers" not in called("inspect", source).stderr
    with pytest.raises(SourceError, match=r"number 0, and nothing .* parameter_names.json"):
        muonckpt.reshard(source, tmp_path / "out", mesh={"dp": 2})
    names = numbered_names(model, optimizer)
    (source / "parameter_names.json").write_text(json.dumps(names[::-1]))
    with pytest.raises(SourceError, match="names are in another order"):
        muonckpt.open(source)
    (source / "parameter_names.json").write_text(json.dumps(names))
    report = muonckpt.reshard(source, tmp_path / "out", mesh={"dp": 3})
    assert "not read: scheduler.pt" in report.notes

    twin = Model()
    continued = ours(twin)
    load_ours(twin, continued, tmp_path / "out")
    train(model, [optimizer], range(3, 5))
    train(twin, [continued], range(3, 5))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True))


def test_names_that_torch_recorded_are_taken_and_tables_name_numbers(tmp_path):
    model = Model()
    named = torch.optim.AdamW(model.named_parameters())
    train(model, [named], range(1))
    torch.save({"optimizer": named.state_dict(), "model": model.state_dict(), "step": 7}, tmp_path / "all.pt")
    with muonckpt.open(tmp_path / "all.pt") as opened:
        assert opened.items["step"] == 7 and opened.groups["optimizer.param_groups.0"]["params"][0] == "qkv"
        moment = opened.tensors["optimizer.state.qkv.exp_avg"].numpy()
        np.testing.assert_array_equal(moment, named.state[model.qkv]["exp_avg"].numpy())
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(named.state_dict())
    torch.save({**plain.state_dict(), "param_groups": [{"params": [0, 1, 2, 3, 4], "lr": 0.1, "betas": (0.9, 0.95),
                "eps": 1e-8, "weight_decay": 0.0}]}, tmp_path / "optimizer.pt")  # fmt: skip
    order = numbered_names(model, plain)
    (tmp_path / "t.toml").write_text("\n".join(f"[[rule]]\nfrom = '{i}'\nto = '{n}'" for i, n in enumerate(order)))
    done = called("convert", tmp_path / "optimizer.pt", tmp_path / "o", "--to", "dcp", "--rules", tmp_path / "t.toml")
    assert done.returncode == 0, done.stderr
    with muonckpt.open(tmp_path / "o") as out:
        np.testing.assert_array_equal(out.tensors["optimizer.state.qkv.exp_avg"].numpy(), moment)
        assert out.groups["optimizer.param_groups.0"]["params"] == order


def test_deepspeeds_universal_folders_are_read(tmp_path):
    zero = tmp_path / "zero"
    weight, bias = torch.arange(12.0).reshape(4, 3), torch.arange(5.0)
    for name, value in {"h.0.weight": weight, "h.0.bias": bias}.items():
        (zero / name).mkdir(parents=True)
        for number, slot in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
            torch.save({"param": value + number, "cat_dim": 0}, zero / name / f"{slot}.pt")
        torch.save(torch.tensor(3.0), zero / name / "step.pt")
    assert muonckpt.verify(tmp_path).verdict == "whole"
    muonckpt.reshard(tmp_path, tmp_path.with_name("out"), mesh={"dp": 2})
    for slot in ("fp32", "exp_avg"):  # as from ZeRO 3
        torch.save(weight.flatten() + 7, zero / "h.0.weight" / f"{slot}.pt")
    with pytest.raises(SourceError, match="expected its shape in param_shapes"):
        muonckpt.open(tmp_path)
    torch.save({"param_shapes": [{"h.0.weight": weight.shape}]}, tmp_path / "mp_rank_00_model_states.pt")
    for path, more in ((tmp_path.with_name("out"), 0), (tmp_path, 7)):
        with muonckpt.open(path) as opened:
            np.testing.assert_array_equal(opened.tensors["model.h.0.weight"].numpy(), weight.numpy() + more)
            moment = opened.tensors["optimizer.state.h.0.weight.exp_avg"].numpy()
            np.testing.assert_array_equal(moment, weight.numpy() + (more or 1))
            assert opened.tensors["optimizer.state.h.0.bias.step"].numpy() == 3
    (zero / "h.0.bias" / "fp32.pt").unlink()
    with pytest.raises(SourceError, match=r"expected zero/h.0.bias/fp32.pt, found"):
        muonckpt.open(tmp_path)


def universal(folder: Path, slots: Mapping[str, tuple[str, ...]], step: int = 1) -> Path:
    """A folder whose parameters have these slots; shapes and elements are of the parameter and the step."""
    for number, (name, own) in enumerate(slots.items(), 2):
        (folder / "zero" / name).mkdir(parents=True)
        for slot in ("fp32", *own):
            value = torch.tensor(float(step)) if slot == "step" else torch.full((number, 3), float(step))
            torch.save(value if slot == "step" else {"param": value}, folder / "zero" / name / f"{slot}.pt")
    return folder


ADAM, MUON = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)


@pytest.mark.parametrize(
    "damage",
    [
        *((slot, None) for slot in ADAM),  # lost
        *((slot, other) for slot in ("exp_avg", "exp_avg_sq") for other in ("b/exp_avg", "c/step")),
        ("fp32", "b/exp_avg"),
    ],
)
@pytest.mark.parametrize("others", sweep([{}, {"muon": MUON}], {"muon": MUON}))
def test_what_a_universal_folder_has_lost_shows_by_the_other_files(damage, others, tmp_path):
    slot, other = damage
    slots = {**dict.fromkeys("abc", ADAM), **others}
    path = universal(tmp_path / "one", slots)
    assert muonckpt.verify(path).verdict == "whole"
    damaged = path / "zero" / "a" / f"{slot}.pt"
    damaged.unlink() if other is None else shutil.copy(path / "zero" / f"{other}.pt", damaged)
    for command in ("verify", "inspect"):
        said = called(command, path)
        assert said.returncode == 1 and f"zero/a has lost {slot}.pt" * (other is None) in said.stdout.splitlines()[0]
        assert "zero/a" in said.stdout.splitlines()[0]
    done = called("reshard", path, tmp_path / "out", "--mesh", "dp=2", "--format", "dcp")
    assert done.returncode == 3 and "zero/a" in done.stderr


@pytest.mark.parametrize(
    "slots",
    [
        {"a": ADAM, "b": MUON},
        {"a": ADAM, "b": ("exp_avg",)},  # Lion's
        {"a": MUON, "b": ("momentum_buffer", "second_moment")},  # NorMuon's
        {"a": ADAM, "b": ()},  # it has had no gradient
        {"a": ("exp_avg", "exp_avg_sq"), "b": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
    ],
)
def test_methods_side_by_side_in_a_universal_folder_are_no_damage(slots, tmp_path):
    assert muonckpt.verify(universal(tmp_path, slots)).verdict == "whole"


class Code:
    def __reduce__(self):
        return exec, ("raise AssertionError",)


def laughs() -> bytes:
    """A state dict of dicts that share each other: 2 ** 30 values."""
    out = b"\x80\2" + pickle.EMPTY_DICT + pickle.BINPUT + b"\0"
    for level in range(1, 31):
        uses = b"".join(pickle.BININT1 + bytes([key]) + pickle.BINGET + bytes([level - 1]) for key in (0, 1))
        out += pickle.EMPTY_DICT + pickle.BINPUT + bytes([level]) + pickle.MARK + uses + pickle.SETITEMS
    return out + pickle.STOP


def test_files_that_are_more_than_a_state_dict_are_refused_and_damage_is_found(tmp_path):
    for name, content, why in (
        ("code", {"w": torch.ones(2), "f": Code()}, None),
        ("gaps", {"w": torch.ones(4, 2)[:, 0]}, "each element once"),
        ("shared", {str(key): torch.ones(1 << 18) for key in range(2)}, None),
    ):
        torch.save(content, tmp_path / name)
        if why:
            with pytest.raises(SourceError, match=why):
                muonckpt.open(tmp_path / name)
    with muonckpt.open(tmp_path / "code") as opened:
        assert opened.not_read == ["f (undecoded: __builtin__ exec) in code"] and [*opened.tensors] == ["w"]
    (tmp_path / "laughs").write_bytes(hostile.item(laughs()))
    with pytest.raises(SourceError, match=r"expected at most .* values"):
        muonckpt.open(tmp_path / "laughs")
    one = torch.ones(1 << 18)
    torch.save({str(key): one for key in range(12)}, tmp_path / "copies")
    with pytest.raises(SourceError, match="which share storages"):
        muonckpt.open(tmp_path / "copies")
    torch.save({"w": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    with pytest.raises(SourceError, match="save it again"):
        muonckpt.open(tmp_path / "old")
    part = torch.arange(64.0).reshape(8, 8)
    torch.save({"w": part[2:5], "t": part[5:].t()}, tmp_path / "parts")
    assert muonckpt.verify(tmp_path / "parts").verdict == "whole"
    with muonckpt.open(tmp_path / "parts") as opened:
        np.testing.assert_array_equal(opened.tensors["w"].numpy(), part[2:5].numpy())
        np.testing.assert_array_equal(opened.tensors["t"].numpy(), part[5:].t().numpy())
    data = bytearray((tmp_path / "parts").read_bytes())
    data[data.index(part.numpy().tobytes()) + 100] ^= 1
    (tmp_path / "parts").write_bytes(bytes(data))
    assert muonckpt.verify(tmp_path / "parts").verdict == "faulty"
    assert called("reshard", tmp_path / "parts", tmp_path / "out", "--mesh", "dp=2").returncode == 3


class Blocks(torch.Tensor):
    """State in eight bits, as torchao keeps it: a tensor without elements of its own."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, (4, 3))

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], []

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0].codes)


class Color(Enum):
    RED = 1


ODD = {
    "an array": (np.ones(3), "numpy.*multiarray _reconstruct"),
    "an array in a list": ([1, {"deep": np.ones(3)}], "numpy.*multiarray _reconstruct"),
    "an array in plain lists": ([[1, (np.ones(3),)]], "numpy.*multiarray _reconstruct"),
    "a dtype": (torch.bfloat16, "torch bfloat16"),
    "a dtype of numpy": (np.dtype("f4"), "numpy dtype"),
    "a path": (Path("x"), "pathlib.* PosixPath"),
    "a namespace": (Namespace(lr=1), "argparse Namespace"),
    "a class": (Code, "test_trainer_files Code"),
    "code": (Code(), "__builtin__ exec"),
    "an enumeration": (Color.RED, "test_trainer_files Color"),
    "a set": ({1, 2}, "__builtin__ set"),
    "a queue": (deque([1, torch.ones(2)]), "collections deque"),
    "an integer of many bytes": (2**3000, "builtins int"),
    "a module": (torch.nn.Linear(2, 2), "torch.nn.modules.linear Linear"),
    "objects as keys": (
        {(Path("x"), ("a", torch.bfloat16)): np.ones(2), torch.float16: Path("y")},
        "numpy.*|pathlib.*",
    ),
    "a tensor of a class": (Blocks(torch.ones(3)), "test_trainer_files Blocks"),
    "a parameter of a class": (torch.nn.Parameter(Blocks(torch.ones(3)), False), "test_trainer_files Blocks"),
}


@pytest.mark.parametrize("kind", ODD)
def test_tensors_beside_objects_are_read_and_the_objects_listed(kind, tmp_path):
    value, name = ODD[kind]
    pair = (torch.zeros(2), torch.ones(2))
    content = {"state_dict": {"net.weight": torch.ones(2, 2)}, "hyper_parameters": {"odd": value, "lr": 0.5}, "p": pair}
    torch.save(content, tmp_path / "x.ckpt")
    with muonckpt.open(tmp_path / "x.ckpt") as opened:
        assert opened.tensors["state_dict.net.weight"].numpy().tolist() == [[1, 1], [1, 1]]
        assert opened.tensors["p.1"].numpy().tolist() == [1, 1]
        assert opened.items["hyper_parameters.lr"] == 0.5
        assert all(re.match(rf"hyper_parameters\.odd.* \(undecoded: ({name})\) in x.ckpt", e) for e in opened.not_read)
        assert opened.not_read
    done = called("convert", tmp_path / "x.ckpt", tmp_path / "o", "--model-only", "--to-format", "safetensors")
    assert done.returncode == 0 and "hyper_parameters.odd" in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("value", [{1, 2}, set(), frozenset({1}), bytearray(b"a" * 300), np.ones(1 << 14)], ids=repr)
def test_objects_in_pickles_of_later_protocols_are_listed(value, protocol, tmp_path):
    content = {"w": torch.ones(2, 2), "odd": value, "bytes": b"a" * 300, b"key": 1}
    torch.save(content, tmp_path / "x.pt", pickle_protocol=protocol)
    with muonckpt.open(tmp_path / "x.pt") as opened:
        assert opened.tensors["w"].numpy().tolist() == [[1, 1], [1, 1]]
        assert opened.items["bytes"] == b"a" * 300
        assert [entry.partition(" ")[0] for entry in opened.not_read] == ["odd"]


def test_state_in_the_shapes_of_other_weights_is_refused_and_low_rank_state_is_read(tmp_path):
    save_file({"a": torch.ones(4, 3), "b": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "parameter_names.json").write_text('["a", "b"]')
    groups = [{"params": [0, 1], "lr": 0.5}]
    swapped = {0: {"exp_avg": torch.ones(3, 4)}, 1: {"exp_avg": torch.ones(4, 3)}}
    torch.save({"state": swapped, "param_groups": groups}, tmp_path / "optimizer.pt")
    with pytest.raises(SourceError, match="names are in another order"):
        muonckpt.open(tmp_path)
    # A file of its own is named itself.
    weights = {"a": torch.ones(4, 3), "b": torch.ones(3, 4)}
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "parameter_names.json").write_text('["a", "b"]')
    file = tmp_path / "alone" / "ckpt.pt"
    torch.save({"model": weights, "optimizer": {"state": swapped, "param_groups": groups}}, file)
    with pytest.raises(SourceError, match=f"^{re.escape(str(file))}: expected exp_avg of 'a' in the shape"):
        muonckpt.open(file)
    # One of the shapes is that of a weight, as the rank of GaLore may be the rows of another matrix.
    low_rank = {0: {"exp_avg": torch.ones(3, 3)}, 1: {"exp_avg": torch.full((3, 4), 2.0)}}
    torch.save({"state": low_rank, "param_groups": groups}, tmp_path / "optimizer.pt")
    with muonckpt.open(tmp_path) as opened:
        assert opened.tensors["optimizer.state.a.exp_avg"].shape == (3, 3)
        assert opened.tensors["optimizer.state.b.exp_avg"].numpy().tolist() == [[2] * 4] * 3


UNKNOWN = {
    "names": {"base.lora": {"step": 1, "exp_avg_B": torch.ones(5)}},
    "names beside numbers": {0: {"exp_avg": torch.ones(4, 3)}, "global": {"step": 1, "trace": torch.ones(5)}},
    "tuples": {(0, "a"): {"exp_avg": torch.ones(5)}},
    "tuples in tuples": {((0, 1), "a"): {"exp_avg": torch.ones(5)}},
    "slots that are tuples": {0: {("exp_avg", 0): torch.ones(5)}},
    "nested": {0: {"step": 1, "__bnb_optimizer_quant_state__": {"absmax1": torch.ones(5)}}},
    "numbers in numbers": {0: {0: {"exp_avg": torch.ones(5)}, (0, 1): {"GG": [torch.ones(5)]}}},
    "lists": {0: {"GG": [torch.ones(5), [torch.ones(5)]], "Q": (torch.ones(5), None)}},
    "no dict": {0: torch.ones(5), "step": 3},
    "objects": {0: {"exp_avg": torch.ones(5), "projector": Namespace(rank=4)}},
    "classes of tensors": {0: {"exp_avg": Blocks(torch.ones(5))}},
    "none": {},
}


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_weights_beside_state_of_an_unknown_form_are_read_and_the_state_named(kind, names, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(4, 3)}, source / "model.safetensors")
    torch.save({"state": UNKNOWN[kind], "param_groups": [{"params": [0], "lr": 0.5}]}, source / "optimizer.pt")
    if names:
        (source / "parameter_names.json").write_text('["w"]')
    with muonckpt.open(source) as opened:
        assert opened.tensors["model.w"].numpy().tolist() == [[1] * 3] * 4
        state = [key for key in (*opened.tensors, *opened.not_read) if key.startswith("optimizer.state.")]
        assert bool(state) == (kind != "none")
    inspected = called("inspect", source)
    assert inspected.returncode == 0 and "cannot be opened" not in inspected.stderr
    assert ("optimizer     no state" in inspected.stdout) == (kind == "none"), inspected.stdout
    done = called("convert", source, tmp_path / "o", "--model-only", "--to-format", "safetensors")
    assert done.returncode == 0, done.stderr
    with muonckpt.open(tmp_path / "o") as opened:
        assert [tensor.numpy().tolist() for tensor in opened.tensors.values()] == [[[1] * 3] * 4]


def test_state_of_an_unknown_form_is_not_taken_along(tmp_path):
    """State of another form beside the weights is refused, with the copy of the weights as the way forward."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(4, 3)}, source / "model.safetensors")
    groups = [{"params": [0], "lr": 0.5}]
    torch.save({"state": UNKNOWN["nested"], "param_groups": groups}, source / "optimizer.pt")
    fit = muonckpt.fits(source, {"dp": 2})
    assert fit and fit.optimizer == "unknown" and "its optimizer state has an unknown form" in fit.sentence
    with pytest.raises(SourceError, match=r"quant_state__.absmax1' is state of an optimizer that .* by `select=`"):
        muonckpt.convert(source, tmp_path / "made", to_dialect="muonckpt")
    muonckpt.convert(source, tmp_path / "weights", select=["model.*"])
    muonckpt.convert(tmp_path / "weights", tmp_path / "made", to_dialect="muonckpt")
    with muonckpt.open(tmp_path / "made") as made:
        assert {key: tensor.numpy().tolist() for key, tensor in made.tensors.items()} == {"model.w": [[1] * 3] * 4}


def one_group(group: dict, number: int = 0) -> dict:
    slots = {"exp_avg": torch.ones(4, 3), "exp_avg_sq": torch.ones(4, 3), "step": torch.tensor(1.0)}
    return {"state": {number: slots}, "param_groups": [group]}


SPOILT_GROUPS = {
    "no parameters": ({"lr": 0.1, "paramz": [0]}, r"parameters of group 0 under 'params', found lr, paramz"),
    "a number as a list": ({"params": 0}, "expected list, found int"),
    "names and numbers": ({"params": [0, "x"]}, "expected numbers, or names, of the parameters of group 0, found 'x'"),
    "a list": ({"params": [[0]]}, r"found \[0\]"),
    "twice": ({"params": [0, 0]}, "each parameter in one group, once; found 0 2 times"),
    "state in no group": ({"params": [-1]}, "parameters that have state, found none with 0"),
}


@pytest.mark.parametrize("kind", SPOILT_GROUPS)
def test_groups_that_do_not_list_the_parameters_are_refused(kind, tmp_path):
    group, why = SPOILT_GROUPS[kind]
    torch.save({"a.weight": torch.ones(4, 3)}, tmp_path / "pytorch_model.bin")
    torch.save(one_group(group), tmp_path / "optimizer.bin")
    with pytest.raises(SourceError, match=why):
        muonckpt.open(tmp_path)
    assert called("verify", tmp_path).returncode in (1, 3)
