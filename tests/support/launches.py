"""Which of our kernels are launched, on a GPU or through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched meanwhile, in order."""
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    run = InterpretedFunction.run

    def interpreted(kernel: Any, *args: Any, **options: Any) -> Any:
        names.append(kernel.__name__)
        return run(kernel, *args, **options)

    def launched(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(launched)
    try:
        with patch.object(InterpretedFunction, "run", interpreted):
            yield names
    finally:
        knobs.runtime.launch_enter_hook.remove(launched)
