"""Tensors folded as people think of a model: by module, with layers that are alike as one line."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...record import StateRecord
from ...store.reading.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Branch:
    """A module or a tensor.

    Attributes:
        name: its part of the key; ``0-11`` or ``0,2,4-7`` for modules that are alike.
        alike: how many modules or tensors this stands for, within one of its parent.
        tensors, bytes: of one of them.
        shape, dtype: of a tensor; None of a module.
        branches: of one of them.
    """

    name: str
    alike: int
    tensors: int
    bytes: int
    shape: tuple[int, ...] | None
    dtype: str | None
    branches: tuple[Branch, ...]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "alike": self.alike, "tensors": self.tensors, "bytes": self.bytes,
                "shape": self.shape, "dtype": self.dtype,
                "branches": [branch.to_json() for branch in self.branches]}  # fmt: skip


def module_tree(tensors: Iterable[StateRecord]) -> tuple[Branch, ...]:
    """The tensors of a checkpoint as a tree of the parts of their keys."""
    return _fold([(tensor.key.split("."), tensor) for tensor in tensors])


_Entry = tuple[Sequence[str], StateRecord]


def _fold(entries: Sequence[_Entry]) -> tuple[Branch, ...]:
    children: defaultdict[str, list[_Entry]] = defaultdict(list)
    for parts, tensor in entries:
        children[parts[0]].append((parts[1:], tensor))
    branches = [branch for name, below in children.items() for branch in _branch(name, below)]
    groups: defaultdict[Any, list[Branch]] = defaultdict(list)
    for branch in branches:
        number = branch.name.isdecimal()
        key = (branch.bytes, branch.shape, branch.dtype, branch.branches) if number else branch.name
        groups[number, key].append(branch)
    return tuple(_alike(members) for members in groups.values())


def _branch(name: str, below: list[_Entry]) -> Iterator[Branch]:
    leaves = [tensor for parts, tensor in below if not parts]
    for tensor in leaves:
        yield Branch(name, 1, 1, math.prod(tensor.shape) * itemsize(tensor.dtype), tensor.shape, tensor.dtype, ())
    inner = _fold([(parts, tensor) for parts, tensor in below if parts])
    chain = len(inner) == 1 and inner[0].alike == 1
    if chain and not name.isdecimal() and not inner[0].name[:1].isdecimal():  # on one line; numbers can be folded
        only = inner[0]
        yield Branch(f"{name}.{only.name}", 1, only.tensors, only.bytes, only.shape, only.dtype, only.branches)
    elif inner:
        tensors = sum(branch.tensors * branch.alike for branch in inner)
        yield Branch(name, 1, tensors, sum(b.bytes * b.alike for b in inner), None, None, inner)


def _alike(members: list[Branch]) -> Branch:
    first = members[0]
    if len(members) == 1:
        return first
    name = ranges(sorted(int(branch.name) for branch in members))
    return Branch(name, len(members), first.tensors, first.bytes, first.shape, first.dtype, first.branches)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs as ranges: ``0-3,7``."""
    text = ""
    for index, number in enumerate(numbers):
        follows = index and numbers[index - 1] == number - 1
        goes_on = index + 1 < len(numbers) and numbers[index + 1] == number + 1
        if not follows:
            text += f",{number}"
        elif not goes_on:
            text += f"-{number}"
    return re.sub("^,", "", text)
