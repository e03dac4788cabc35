"""The nights of a person on call: a run of five steps, and how each script beside this one deals with its message.

A script breaks something, takes the message, runs the commands that it prints and no other, and ends with the weights
of a run that nothing happened to.
"""

import re
import shlex
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch import nn

import muonckpt
from muonckpt.optimizer import Muon

STEPS = 5


class Model(nn.Module):
    def __init__(self, words=12, table="words"):
        super().__init__()
        torch.manual_seed(0)
        self.table = table
        self.add_module(table, nn.Embedding(words, 8))
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, numbers):
        return self.norm(self.up(self.get_submodule(self.table)(numbers)))


def optimizer_of(model):
    return Muon.for_model(model, lr=0.02, adamw_lr=1e-3)


def train(folder, until=STEPS, model=None, keep_last=9, **choices):
    """Resume and train, as the job does when it is started; return the weights."""
    model = model or Model()
    optimizer = optimizer_of(model)
    run = muonckpt.Series(folder, model, optimizer, keep_last=keep_last)
    for step in range(run.resume(**choices), until):
        optimizer.zero_grad()
        model(torch.arange(12) * (step + 1) % 12).square().mean().backward()
        optimizer.step()
        run.save(step)
    return [weight.detach() for weight in model.parameters()]


def begin(folder="run"):
    """Train three steps; return the folder of the last."""
    train(folder, 3)
    return Path(folder, "step-00000002")


def message_of(call, *arguments, **choices):
    """Return what a call says: its error, or its lines and warnings."""
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()) as lines:
        warnings.simplefilter("always")
        try:
            call(*arguments, **choices)
        except muonckpt.MuonckptError as error:
            print(error)
    return show(lines.getvalue() + "\n".join(str(each.message) for each in caught))


def follow(message, **names):
    """Run the first line that a message prints, with names for what it writes in capitals; return what that says."""
    [line] = re.findall(r"(?:muonckpt|mkdir|mv) (?:[^\s(;,.]|\.(?=\S)| (?![(]))+", message)[:1]
    output = ""
    for command in line.split(" && "):
        words = [names.get(word, word) for word in shlex.split(command)]
        print("$", *words)
        program = [sys.executable, "-m", *words] if words[0] == "muonckpt" else words
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        output += done.stdout + done.stderr
    return show(output)


def show(text):
    print(text.strip())
    return text


def solved(weights):
    """Compare the end of the training with that of a run that nothing happened to."""
    expected = train("undisturbed")
    assert all(map(torch.equal, weights, expected)), "something was lost"
    print("solved")
