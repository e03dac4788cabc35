"""What the cookbook says to touch: at most four files of the package, tried with an option on a copy of the package.

Programs, formats and methods are added from outside, too: `support/plugin` and docs/guide/own_method.md do it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("muonckpt", "optimizer", "converters", "cli")

EDITS = {
    "muonckpt/names/vocabulary.py": [
        ("    cautious: bool = False\n", "    cautious: bool = False\n    halved: bool = False\n"),
        ('("lr", "weight_decay", "cautious")', '("lr", "weight_decay", "cautious", "halved")'),
    ],
    "optimizer/muon.py": [
        (
            "        cautious: bool = MUON.cautious,\n",
            "        cautious: bool = MUON.cautious,\n        halved: bool = MUON.halved,\n",
        ),
        ('"cautious": cautious}', '"cautious": cautious, "halved": halved}'),
    ],
    "optimizer/ground/tensors.py": [
        ('* group["weight_decay"]\n', '* group["weight_decay"] * (0.5 if group["halved"] else 1)\n')
    ],
    "optimizer/triton/updates.py": [
        ('lr * option("weight_decay")\n', 'lr * option("weight_decay") * (1 - option("halved") / 2)\n')
    ],
}
"""A dummy option of every group, ``halved``: half of the decay."""

SCRIPT = """
import torch
import muonckpt
from torch.distributed.checkpoint.state_dict import get_state_dict
from muonckpt.optimizer import Muon

def stepped(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "algorithm": "adamw", "lr": 0.01}]
    optimizer = Muon(groups, lr=0.02, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer

full, half, none = (stepped(**o)[0] for o in ({}, {"halved": True}, {"weight_decay": 0.0}))
for a, b, c in zip(full.parameters(), half.parameters(), none.parameters()):
    torch.testing.assert_close(b, (a + c) / 2)
    assert not torch.equal(a, b)

try:
    stepped(halved="yes")
except ValueError as error:
    assert "halved='yes': expected True or False" in str(error), error
else:
    raise AssertionError("it is not checked")

model, optimizer = stepped(halved=True)
weights, state = get_state_dict(model, optimizer)
muonckpt.save({"model": weights, "optimizer": state}, "saved")
report = muonckpt.convert("saved", "torch", to_dialect="torch")
assert "halved" in str(report.checklist), report.checklist
muonckpt.convert("torch", "back", to_dialect="muonckpt")
with muonckpt.open("saved") as saved, muonckpt.open("back") as back:
    assert [group["halved"] for group in saved.groups.values()] == [True, True]
    assert [group["halved"] for group in back.groups.values()] == [False, False]

other = Muon([{"params": [model.weight]}, {"params": [model.bias], "algorithm": "adamw", "lr": 0.01}], lr=0.02)
weights, state = get_state_dict(model, other)
muonckpt.load({"model": weights, "optimizer": state}, "saved")
other.load_state_dict(optimizer.state_dict())
"""


def test_an_option_of_groups_takes_four_files(tmp_path):
    assert len(EDITS) <= 4
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    for file, replacements in EDITS.items():
        text = (tmp_path / file).read_text()
        for old, new in replacements:
            assert text.count(old) == 1, (file, old)
            text = text.replace(old, new)
        (tmp_path / file).write_text(text)
    program = [sys.executable, "-c", SCRIPT]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", ["veomni", "adamuon", "update_norm"])
def test_a_program_a_method_and_its_option_are_in_at_most_four_files(name):
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if name in file.read_text()]
    assert 2 <= len(files) <= 4, files
