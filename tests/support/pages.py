"""Scripts of documentation pages, run in workers as a launcher would run them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from support.workers import run

DOCS = Path(__file__).parents[2] / "docs"


def script(page: str, room: str = "integrations", number: int = 0) -> dict[str, Any]:
    """The names that a block of a page of a folder of docs/ defines, by default the first; its main part is not run."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / room / page).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks[number], page, "exec"), names)
    return names


def recipe(page: str, first_line: str, names: dict[str, Any]) -> None:
    """Run the indented code of a page of docs/integrations that begins with a line, so that names has what it makes."""
    text = (DOCS / "integrations" / page).read_text()
    [(code, _)] = re.findall(rf"^(( +){re.escape(first_line)}\n(?:\2.*\n)+)", text, re.MULTILINE)
    exec(compile(dedent(code), page, "exec"), names)


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


def distance(image: dict[str, Any], other_image: dict[str, Any]) -> float:
    """The largest difference of an element between the parameters of two runs."""
    assert image["parameters"].keys() == other_image["parameters"].keys()
    return max((a - other_image["parameters"][name]).abs().max().item() for name, a in image["parameters"].items())


def uninterrupted_runs(
    train: Callable[..., dict[str, Any]], kinds: Iterable[str], make_folder: Callable[[], Path]
) -> dict[tuple[str, int], tuple[Path, dict[str, Any]]]:
    """Folder and result of a script, by kind and number of ranks; all ranks end with the same parameters."""
    runs = {}
    for world in (2, 1):
        for kind in kinds:
            folder = make_folder()
            results = run(world, train, kind, str(folder))
            assert all(distance(results[0], other_image) == 0 for other_image in results)
            runs[kind, world] = folder, results[0]
    return runs
