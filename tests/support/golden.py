"""Real checkpoints written by other programs, kept outside the repository because they are not ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def golden(name: str) -> Path:
    """The directory of one golden checkpoint; skips the test where the collection is not there.

    The collection is looked for in ``$MUONCKPT_GOLDEN``, else in ``shared/golden`` beside the repository.
    """
    beside = Path(__file__).resolve().parents[3] / "shared" / "golden"
    path = Path(os.environ.get("MUONCKPT_GOLDEN") or beside) / name
    if not path.exists():
        pytest.skip(f"golden checkpoint {name!r} is not at {path}; set MUONCKPT_GOLDEN to its collection")
    return path
