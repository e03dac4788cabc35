"""Errors that a test brings about on one rank, and what each rank makes of them."""

from __future__ import annotations

import gc
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))


def raised(function: Callable[..., Any], *args: Any) -> str:
    """The error of a call, in words."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def told_by(function: Callable[..., Any], *args: Any) -> list[str]:
    """The warnings of a call that say which hyper-parameters of the code have no effect."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    messages = [str(warning.message) for warning in caught]
    return [text.partition(". To train")[0] for text in messages if text.startswith("hyper-parameters are those of")]


@contextmanager
def full_disk(length: int) -> Iterator[None]:
    """No file of this process can grow beyond a length in bytes.

    torch's file store of an earlier job writes when it is deleted, and ends the process where it cannot: what waits for
    the garbage collector is deleted before.
    """
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class OutOfMemory(TorchDispatchMode):
    """Some operators, the products of matrices unless told otherwise, fail on this rank after so many."""

    def __init__(self, after: int, operators: Sequence[Any] = PRODUCTS) -> None:
        super().__init__()
        self.calls_left, self.operators = after, operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.operators:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise MemoryError("out of memory")
        return func(*args, **(kwargs or {}))
