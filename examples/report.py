"""What the runs of the demo have in common with the uninterrupted one, as tables and as a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import muonckpt


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: losses of its steps, final parameters in full, fingerprints of the momentum it began with (for the
    uninterrupted run: of the momentum that it saved), seconds."""

    losses: list[float]
    parameters: dict[str, Tensor]
    fingerprints: dict[str, str]
    train_seconds: float
    io_seconds: float

    def save(self, path: Path) -> None:
        torch.save(self, path)

    @staticmethod
    def load(path: Path) -> Outcome:
        """Unpickle a file that this program has written itself."""
        outcome: Outcome = torch.load(path, weights_only=False)
        return outcome


@dataclass(frozen=True, slots=True)
class Distance:
    """Largest absolute difference of two runs' losses, and of their final parameters."""

    losses: float
    parameters: float

    @classmethod
    def between(cls, run: Outcome, reference: Outcome) -> Distance:
        """`run` ends with the steps that `reference` ends with."""
        tail = reference.losses[-len(run.losses) :]
        assert run.parameters.keys() == reference.parameters.keys()
        return cls(
            max(abs(a - b) for a, b in zip(run.losses, tail, strict=True)),
            max((run.parameters[name] - whole).abs().max().item() for name, whole in reference.parameters.items()),
        )

    def within(self, limits: Distance) -> bool:
        return self.losses <= limits.losses and self.parameters <= limits.parameters


def show_losses(columns: Mapping[str, Outcome], first: int, last: int) -> None:
    """Losses of some of the steps ``first … last - 1``, with which all runs end."""
    print(f"\n{'step':>6}" + "".join(f"{label:>14}" for label in columns))
    for step in (*range(first, last, 4), last - 1):
        print(f"{step:>6}" + "".join(f"{run.losses[step - last]:>14.8f}" for run in columns.values()))


def show_distances(distances: Mapping[str, Distance]) -> None:
    print("\nagainst the uninterrupted run    max |loss difference|   max |parameter difference|")
    for label, distance in distances.items():
        print(f"{label:<33}{distance.losses:<24.3g}{distance.parameters:.3g}")


def show_fingerprints(columns: Mapping[str, Mapping[str, str | None]]) -> bool:
    """Whether all columns have the same fingerprint of every momentum."""
    first = next(iter(columns.values()))
    assert all(column.keys() == first.keys() for column in columns.values())
    print(f"\n{'momentum of':<32}" + "".join(f"{label:<18}" for label in columns).rstrip())
    for name in first:
        prints = [column[name] for column in columns.values()]
        print(f"{name:<32}" + "  ".join(map(str, prints)) + ("" if len(set(prints)) == 1 else "  DIFFERENT"))
    return all(column == first for column in columns.values())


def stored_fingerprints(checkpoint: Path) -> dict[str, str | None]:
    """Return the fingerprint of every momentum in a checkpoint, by its parameter's name, as the manifest has it."""
    tensors = muonckpt.open(checkpoint).tensors.values()
    return {tensor.name: tensor.fingerprint for tensor in tensors if tensor.name and tensor.slot == "momentum_buffer"}


def print_checks(checks: Mapping[str, bool]) -> bool:
    """Print each check and its outcome; return whether all are fine."""
    for check, is_fine in checks.items():
        print(f"{'ok' if is_fine else 'FAILED':<7}{check}")
    return all(checks.values())
