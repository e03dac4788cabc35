"""Scripts of documentation pages, run in workers as a launcher would run them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

INTEGRATIONS = Path(__file__).parents[2] / "docs" / "integrations"


def script(page: str) -> dict[str, Any]:
    """The names that the script of a page of docs/integrations defines; its main part is not run."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (INTEGRATIONS / page).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, page, "exec"), names)
    return names


@contextmanager
def as_launched(rank: int, world: int) -> Iterator[None]:
    """The environment of torchrun, without the network; what trainers add to it is taken back."""
    before = dict(os.environ)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names = {"TORCHELASTIC_RUN_ID": "none", "HF_HUB_OFFLINE": "1"}
    os.environ |= {name: str(number) for name, number in numbers.items()} | names
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all elements of a parameter."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of an element between the parameters of two runs."""
    assert one["parameters"].keys() == other["parameters"].keys()
    return max((a - other["parameters"][name]).abs().max().item() for name, a in one["parameters"].items())
