"""Calls a user's function that makes a model and an optimizer, on the meta device where that is possible."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...names.errors import TargetError, did_you_mean

Maker = Callable[[], Any]

_INNER = ("chained_optimizers", "optimizers", "optimizer")
"""Attributes in which wrappers keep optimizers: Megatron's, torchtitan's, accelerate's."""


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A model, its optimizers, and where they were made.

    Attributes:
        source: the function, as the user named it.
        device: "meta", or "cpu" where it cannot be made without memory; ``why`` says why.
    """

    source: str
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    device: str
    why: str = ""


def maker_of(source: str) -> Maker:
    """Import a function by "FILE.py:NAME" or "package.module:NAME".  This runs the file.

    Raises:
        TargetError: there is no such file, module or function, or it cannot be imported.
    """
    place, colon, name = source.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(f"{source!r}: expected FILE.py:FUNCTION or package.module:FUNCTION, such as build.py:make")
    module = _of_file(Path(place)) if place.endswith(".py") else _of_module(place)
    made = getattr(module, name, None)
    if not callable(made):
        functions = [own for own, value in vars(module).items() if callable(value) and not own.startswith("_")]
        found = "nothing of that name" if made is None else f"{type(made).__name__}"
        raise TargetError(
            f"{source}: expected a function {name!r} in {place}, found {found}{did_you_mean(name, functions)}"
        )
    return made  # type: ignore[no-any-return]


def _of_file(file: Path) -> Any:
    if not file.is_file():
        raise TargetError(f"{file}: there is no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickles look their module up
    return _imported(str(file.parent.resolve()), lambda: spec.loader.exec_module(module) or module, str(file))  # type: ignore[union-attr]


def _of_module(name: str) -> Any:
    return _imported(str(Path.cwd()), lambda: importlib.import_module(name), name)


def _imported(folder: str, load: Callable[[], Any], what: str) -> Any:
    """Import with this folder on the path, as Python itself does for a script."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{what} cannot be imported: {_said(error)}") from error


def build(make: Maker, source: str) -> Built:
    """Call the function on the meta device, or on the CPU where that fails.

    Raises:
        TargetError: it fails on the CPU as well, or returns something else.
    """
    why = ""
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                made = make()
            built = _sorted(made, source, device, why)
            if device == "cpu" or not _unreadable(built.optimizers):
                return built
            why = "options of groups are tensors made on the default device"
        except TargetError:
            raise
        except (Exception, SystemExit) as error:
            if device == "cpu":
                raise TargetError(f"{source}() fails: {_said(error)}") from error
            why = _said(error)
    raise AssertionError("the CPU is the last device")


def _sorted(made: Any, source: str, device: str, why: str) -> Built:
    parts = [*made.values()] if isinstance(made, Mapping) else made
    if isinstance(parts, tuple | list) and len(parts) >= 2 and isinstance(parts[0], nn.Module):
        optimizers = tuple(_unwrapped(parts[1:]))
        if lazy := [name for name, param in parts[0].named_parameters() if is_lazy(param)]:
            raise TargetError(f"{source}(): {lazy[0]} is uninitialized and has no shape yet; run the model once first")
        if optimizers:
            return Built(source, parts[0], optimizers, device, why)
    found = ", ".join(type(part).__name__ for part in parts) if isinstance(parts, tuple | list) else type(made).__name__
    raise TargetError(
        f"{source}() returned {found}: expected a model and its optimizer, or a list of optimizers, as in "
        "`return model, optimizer`"
    )


def _unwrapped(parts: Iterable[Any]) -> Iterator[Optimizer]:
    """Yield the optimizers in lists, dicts and wrappers, each once."""
    seen: set[int] = set()

    def inside(part: Any) -> Iterator[Optimizer]:
        if id(part) in seen or part is None:
            return
        seen.add(id(part))
        inner = [vars(part)[name] for name in _INNER if hasattr(part, "__dict__") and name in vars(part)]
        if isinstance(part, Mapping):
            inner = [*part.values()]
        elif isinstance(part, tuple | list):
            inner = [*part]
        found = [one for member in inner for one in inside(member)]
        if found:
            yield from found
        elif isinstance(part, Optimizer):
            yield part

    for part in parts:
        yield from inside(part)


def _unreadable(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether the value of an option is not known, as it lies on the meta device."""
    values = (
        value for one in optimizers for group in one.param_groups for key, value in group.items() if key != "params"
    )
    return any(isinstance(value, Tensor) and value.is_meta for value in values)


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r}); keep what a script does under `if __name__ == '__main__':`"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
