"""Which of our kernels are launched, on a GPU or through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched meanwhile, in order."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    names: list[str] = []

    def counted(run: Any) -> Any:
        def launch(kernel: Any, *args: Any, **options: Any) -> Any:
            names.append(kernel.__name__)
            return run(kernel, *args, **options)

        return launch

    with (
        patch.object(InterpretedFunction, "run", counted(InterpretedFunction.run)),
        patch.object(JITFunction, "run", counted(JITFunction.run)),
    ):
        yield names
