"""Calls a user's function that makes a model and an optimizer, on the meta device where that is possible."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..names.errors import TargetError, did_you_mean
from ..names.vocabulary import PARAMS

Maker = Callable[[], Any]

_INNER = ("chained_optimizers", "optimizers", "optimizer")
"""Attributes in which wrappers keep optimizers: Megatron's, torchtitan's, accelerate's."""


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A model and its optimizers."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]


def maker_of(source: str) -> Maker:
    """Import a function by "FILE.py:NAME" or "package.module:NAME".  This runs the file.

    Raises:
        TargetError: there is no such file, module or function, or it cannot be imported.
    """
    place, colon, name = source.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(f"{source!r}: expected FILE.py:FUNCTION or package.module:FUNCTION, such as build.py:make")
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise TargetError(f"{file}: there is no such file")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module  # dataclasses and pickles look their module up
        with _importing_from(str(file.parent.resolve()), str(file)):
            spec.loader.exec_module(module)
    else:
        with _importing_from(str(Path.cwd()), place):
            module = importlib.import_module(place)
    maker = getattr(module, name, None)
    if not callable(maker):
        names = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        kind = "nothing of that name" if maker is None else type(maker).__name__
        raise TargetError(f"{source}: expected a function {name!r} in {place}, found {kind}{did_you_mean(name, names)}")
    return maker  # type: ignore[no-any-return]


@contextmanager
def _importing_from(folder: str, source: str) -> Iterator[None]:
    """Put a folder on the path, as Python itself does for a script, and say what cannot be imported."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        yield
    except (Exception, SystemExit) as error:
        raise TargetError(f"{source} cannot be imported: {_describe_error(error)}") from error


def build(make: Maker, source: str) -> Built:
    """Call the function on the meta device, or on the CPU where that fails.

    Raises:
        TargetError: it fails on the CPU as well, or returns something else.
    """
    # Options that are tensors have no values on the meta device, so they need the CPU as well.
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                result = make()
            built = _model_and_optimizers(result, source)
            if device == "cpu" or not _has_meta_options(built.optimizers):
                return built
        except TargetError:
            raise
        except (Exception, SystemExit) as error:
            if device == "cpu":
                raise TargetError(f"{source}() fails: {_describe_error(error)}") from error
    raise AssertionError("the CPU is the last device")


def _model_and_optimizers(result: Any, source: str) -> Built:
    """Tell the model from the optimizers in the result of the user's function."""
    parts = [*result.values()] if isinstance(result, Mapping) else result
    if isinstance(parts, tuple | list) and len(parts) >= 2 and isinstance(parts[0], nn.Module):
        optimizers = tuple(_unwrap_optimizers(parts[1:]))
        lazy_names = [name for name, parameter in parts[0].named_parameters() if is_lazy(parameter)]
        if lazy_names:
            raise TargetError(
                f"{source}(): {lazy_names[0]} is uninitialized and has no shape yet; run the model once first"
            )
        if optimizers:
            return Built(parts[0], optimizers)
    returned_parts = parts if isinstance(parts, tuple | list) else [result]
    types = ", ".join(type(part).__name__ for part in returned_parts)
    raise TargetError(
        f"{source}() returned {types}: expected a model and its optimizer, or a list of optimizers, as in "
        "`return model, optimizer`"
    )


def _unwrap_optimizers(parts: Iterable[Any]) -> Iterator[Optimizer]:
    """Yield the optimizers in lists, dicts and wrappers, each once."""
    visited: set[int] = set()

    def optimizers_in(part: Any) -> list[Optimizer]:
        if id(part) in visited or part is None:
            return []
        visited.add(id(part))
        if isinstance(part, Mapping):
            members = [*part.values()]
        elif isinstance(part, tuple | list):
            members = [*part]
        else:
            members = [vars(part)[name] for name in _INNER if hasattr(part, "__dict__") and name in vars(part)]
        # A wrapper may be an optimizer too: those inside it are the ones that step.
        optimizers: list[Optimizer] = []
        for member in members:
            optimizers += optimizers_in(member)
        return optimizers or ([part] if isinstance(part, Optimizer) else [])

    for part in parts:
        yield from optimizers_in(part)


def _has_meta_options(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether the value of an option is not known, as it lies on the meta device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(isinstance(value, Tensor) and value.is_meta for key, value in group.items() if key != PARAMS):
                return True
    return False


def _describe_error(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r}); keep what a script does under `if __name__ == '__main__':`"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
