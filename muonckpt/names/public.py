"""The public names of a package: its stub, which type checkers read, says which module each is imported from."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def public_names(package: str, file: str, hint: str = "") -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a package, which imports a module when a name of it is first used.

    A package that the stub imports is an attribute as well, and not in ``__all__``.
    """
    homes: dict[str, str] = {}
    for statement in ast.parse(Path(file).with_suffix(".pyi").read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            homes.update((name.name, f".{statement.module or name.name}") for name in statement.names)

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module = import_module(homes[name], package)
        return module if homes[name] == f".{name}" else getattr(module, name)

    return sorted(name for name, home in homes.items() if home != f".{name}"), attribute
