"""Real checkpoints and layouts that other programs wrote; ``tests/data/golden/README.md`` says which."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"


def golden(name: str) -> Path:
    """Return the path of one golden file or checkpoint."""
    path = GOLDEN / name
    if not path.exists():
        raise FileNotFoundError(f"no golden file {path}")
    return path
