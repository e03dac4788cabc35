"""A user's function that makes a model and an optimizer: found, called, and refused in words if it does not serve."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muonckpt import TargetError
from muonckpt.lab.built import build, maker_of

BUILD = """
import torch
from torch import nn
from sizes import WIDTH

def make():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    return model, torch.optim.Muon(model.parameters(), lr=0.02)

def forgetful():
    return nn.Linear(2, 2)

def broken():
    raise RuntimeError("no such data")

def leaves():
    raise SystemExit(3)

def lazy():
    model = nn.LazyLinear(4)
    return model, torch.optim.AdamW(model.parameters())
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "build_of_mine.py").write_text(BUILD)
    (tmp_path / "sizes.py").write_text("WIDTH = 24\n")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path / "build_of_mine.py"


def test_a_file_imports_its_neighbours_and_its_model_takes_no_memory(file):
    built = build(maker_of(f"{file}:make"), "make")
    assert {(param.shape, param.is_meta) for param in built.model.parameters()} == {((24, 24), True)}
    assert [type(optimizer) for optimizer in built.optimizers] == [torch.optim.Muon]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mak", "found nothing of that name; did you mean 'make'?"),
        ("forgetful", "returned Linear: expected a model and its optimizer"),
        ("broken", r"broken\(\) fails: RuntimeError: no such data"),
        ("leaves", r"sys.exit\(3\); keep"),
        ("lazy", "weight is uninitialized"),
    ],
)
def test_a_function_that_does_not_serve_is_named(file, name, words):
    with pytest.raises(TargetError, match=words):
        build(maker_of(f"{file}:{name}"), f"{file}:{name}")


def test_files_that_are_not_there_and_bad_names_are_told(tmp_path):
    for source, words in (
        ("build.py", "expected FILE.py:FUNCTION"),
        (f"{tmp_path}/none.py:make", "there is no such file"),
        ("no_such_module:make", "no_such_module cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(TargetError, match=words):
            maker_of(source)


def by_value():
    torch.ones(1).item()  # not on the meta device
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


def with_a_tensor_as_rate():
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))


@pytest.mark.parametrize("make", [by_value, with_a_tensor_as_rate])
def test_a_function_that_needs_values_is_called_on_the_cpu(make):
    assert not any(param.is_meta for param in build(make, "make").model.parameters())
