"""What trials of the harness came to: one row a kind, printed as one table at the end of `make trust`.

``MUONCKPT_TRUST`` says how many trials: 0, as in the suite, few of each kind; 1 some minutes; 10 a night.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.forked import printed

SCALE = float(os.environ.get("MUONCKPT_TRUST", "0"))

SEED = os.environ.get("MUONCKPT_SEED", "0")
"""Another night, another seed."""

SLOW = 20.0
"""Seconds after which a trial counts as slow; one that takes `HUNG` seconds is ended."""

HUNG = 60.0


@dataclass
class Tally:
    """Trials of one kind.

    Attributes:
        survived: the fault made no difference, or was refused with one clear error, and going on gave the same bits.
        lost: what is wrong, one line a trial.
    """

    kind: str
    tried: int = 0
    survived: int = 0
    hung: int = 0
    slow: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, description: str, fault: str | None = None, seconds: float = 0.0, hung: bool = False) -> None:
        """Count a trial."""
        self.tried += 1
        self.hung += hung
        self.slow += seconds > SLOW
        if fault is None and not hung:
            self.survived += 1
        elif fault is not None:
            self.faults.append(f"{self.kind}, {description}: {fault}")


TALLIES: list[Tally] = []


def count(base_count: int, full_count: int) -> int:
    """How many trials: ``few`` in the suite, ``many`` times the scale else."""
    return base_count if SCALE == 0 else max(int(full_count * SCALE), base_count)


@contextmanager
def tally(kind: str) -> Iterator[Tally]:
    """A row of the table; the test fails if anything was lost or hung."""
    row = Tally(kind)
    yield row
    TALLIES.append(row)
    assert row.tried and not row.faults and not row.hung, f"{row}"


def script(file: str, folder: Path, trials: int, *names: str, forked: bool = True) -> list[list[Any]]:
    """What a script of trials prints: of each its name, what was done, what is wrong, seconds, and whether it hung.

    Forked, it does not end as programs do.
    """
    command, night = [file, str(folder), str(trials), SEED, *names], 24 * 3600
    if forked:
        records = printed(folder.parent, *command, timeout=night)
    else:
        variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        completed = subprocess.run(
            [sys.executable, *command], env=variables, capture_output=True, text=True, timeout=night, check=False
        )
        assert completed.returncode == 0, completed.stderr[-6000:]
        records = completed.stdout
    return [json.loads(line) for line in records.splitlines()]


def tallied(kind: str, records: Iterable[list[Any]]) -> set[str]:
    """A row of the table for each name of what `script` gave; the names."""
    by_name: defaultdict[str, list[list[Any]]] = defaultdict(list)
    for name, *trial in records:
        by_name[name].append(trial)
    for name, trials in by_name.items():
        with tally(f"{kind}: {name}") as row:
            for trial in trials:
                row.add(*trial)
    return {*by_name}


def table() -> list[str]:
    """All rows, in Markdown."""
    lines = ["| kind | tried | survived or found | lost | hung | slow |", "|---|---:|---:|---:|---:|---:|"]
    rows = [(r.kind, r.tried, r.survived, len(r.faults), r.hung, r.slow) for r in TALLIES]
    totals = ("all", *(sum(int(row[at]) for row in rows) for at in range(1, 6)))
    return lines + ["| " + " | ".join(f"{cell}" for cell in row) + " |" for row in [*rows, totals]]
