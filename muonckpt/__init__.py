"""Muon momentum that survives any change of topology, and a Muon that runs on every one of them.

``algebra/`` says where elements lie, ``record/`` what a checkpoint holds, ``names/`` has words, ``programs/`` what
programs write; ``layouts/`` reads shardings, ``store/`` files; ``checkpoint/`` saves and loads live state, ``runs/``
step after step; ``integrations/`` and ``compat/`` are other people's trainers and names; ``lab/`` observes and advises.
``optimizer``, ``converters`` and ``cli`` are links to the folders beside this one.  Open ``algebra/layout`` first.

The public names are in ``__init__.pyi``, and imported when first used: programs that only look at checkpoints start
without torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _homes() -> dict[str, str]:
    """Return the module of each public name, as the stub has it, which type checkers read."""
    homes: dict[str, str] = {}
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            module = f"{'.' * statement.level}{statement.module}"
            homes.update((name.asname or name.name, module) for name in statement.names)
    return homes


_HOMES = _homes()
__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; Muon and what goes with it is in muonckpt.optimizer"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
