"""Neighbours in a sequence, grouped in order: small ones are read, written or computed at once.

The file is short: packages that know nothing of each other group in these two ways, and nothing else belongs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def neighbours(items: Iterable[T], joins: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Yield groups of neighbours: an item joins the group before it where ``joins(group, item)`` says so."""
    group: list[T] = []
    for item in items:
        if group and not joins(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def batches(items: Iterable[T], size_of: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """Yield groups of neighbours whose sizes add up to at most ``max_size``; a larger item is alone."""
    batch, batch_size = list[T](), 0
    for item in items:
        size = size_of(item)
        if batch and batch_size + size > max_size:
            yield batch
            batch, batch_size = [], 0
        batch.append(item)
        batch_size += size
    if batch:
        yield batch
