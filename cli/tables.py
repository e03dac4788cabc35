"""Tables and paragraphs as lines of text, folded between words and columns so that they fit a terminal.

A table that is too wide stays one: long keys in the first column take lines of their own, words of
other columns are folded, and columns that still find no place go on below, the headers likewise.  Nothing is left out,
and no word is broken; only a word that alone is too long is wider than the terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

GAP = 2
"""Spaces between columns."""

_INDENT = 4
"""Spaces before what belongs to a key on the line above."""

_SAMPLE_ROWS = 200
"""The rows by whose lines the best of several forms is chosen."""

_TIGHT = 24
"""The most that the first column is narrowed to while its keys stand beside the others."""


Block = tuple[tuple[int, int], ...]
"""Columns that stand side by side: the number of each, and its width."""


@dataclass(frozen=True)
class Folding:
    """A way to fold a table: the width of the ``key`` column, and the other columns in blocks, one below the other."""

    key: int
    blocks: tuple[Block, ...]

    @property
    def width(self) -> int:
        return self.key + max(sum(GAP + width for _, width in block) for block in self.blocks)

    def lines(self, row: Sequence[str]) -> list[str]:
        """Return the lines of a row."""
        key, lines = row[0], list[str]()
        if len(key) > self.key and self.blocks:
            lines.append(key)
            key = ""
        for block in self.blocks:
            cells = [folded(row[column], width) for column, width in block]
            for parts in zip_longest(*cells, fillvalue=""):
                texts = [part.ljust(width) for part, (_, width) in zip(parts, block, strict=True)]
                lines.append((" " * GAP).join((key.ljust(self.key), *texts)).rstrip())
                key = ""
        return lines or [key]


def folding_of(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Folding:
    """Return the way to fold a table to a width that makes the fewest lines, at best none; a width of None is any."""
    natural, *widths = (max(map(len, column)) for column in zip(headers, *rows, strict=True))
    columns = tuple(enumerate(widths, 1))
    unfolded = Folding(natural, (columns,) if columns else ())
    if width is None or natural + sum(widths) + GAP * len(widths) <= width or not columns:
        return unfolded
    # Keys are never folded: they stay beside the other columns where these fit, or take lines of their own.
    sample = [headers, *rows[:_SAMPLE_ROWS]]
    longest_words = [max(map(len, " ".join(column).split()), default=0) for column in zip(*sample, strict=True)]
    beside = width - sum(widths) - GAP * len(widths)
    narrow = min(natural, _INDENT)
    keys = {natural, min(natural, max(beside, _TIGHT)), narrow}
    forms = [Folding(key, _blocks(columns, longest_words, max(width - key - GAP, 1))) for key in keys]

    def cost(form: Folding) -> tuple[int, int, int]:
        """Count the lines that are too wide although they have several words, and all lines; wide keys are better."""
        lines = list(chain.from_iterable(map(form.lines, sample)))
        wide_lines = [line for line in lines if len(line) > width and len(line.split()) > 1]
        return len(wide_lines), len(lines), -form.key

    return min((form for form in forms if form.key == narrow or form.width <= width), key=cost)


def _blocks(columns: Block, longest_words: Sequence[int], available: int) -> tuple[Block, ...]:
    """Return columns with widths that fit in the available width: one block if folding suffices."""

    def block_width(block: Sequence[tuple[int, int]]) -> int:
        return sum(width for _, width in block) + GAP * (len(block) - 1)

    # The widest columns are narrowed first, but none below its longest word, unless that has a line alone.
    min_widths = [min(width, available) for width in longest_words]
    for max_width in range(min(max(width for _, width in columns), available), 0, -1):
        narrowed = tuple((column, max(min(width, max_width), min_widths[column])) for column, width in columns)
        if block_width(narrowed) <= available:
            return (narrowed,)
    blocks: list[list[tuple[int, int]]] = [[]]
    for column, width in columns:
        narrowed_column = (column, max(min(width, available), min_widths[column]))
        if blocks[-1] and block_width([*blocks[-1], narrowed_column]) > available:
            blocks.append([])
        blocks[-1].append(narrowed_column)
    return tuple(map(tuple, blocks))


def folded(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text, folded between words where it is too long; further lines are indented."""
    if len(text) <= width:
        return [text]
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text, width, initial_indent="", subsequent_indent=lead + indent, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip
