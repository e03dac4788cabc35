"""Tables and progress: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from ..wording import size

BEGAN = "muonckpt.began"
"""Where a command's context keeps the moment when it began."""

_MOST_NAMES = 8
_NARROW = 56
"""Characters of a line of a row that is too wide for the terminal."""


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table.  Off a terminal: aligned columns, nothing wrapped or cut, so that it can be searched."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Column, Table
        from rich.text import Text

        console = Console()
        lengths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
        if len(headers) > 2 and sum(lengths) + 2 * len(lengths) > console.width:  # a name is never folded into slivers
            _print_narrow(headers, cells)
            return
        columns = (Column(header, overflow="fold") for header in headers)  # nothing is cut
        shown = Table(*columns, box=None, header_style="bold", pad_edge=False)
        for row in cells:
            shown.add_row(*map(Text, row))  # not markup
        console.print(shown)
        return
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    for line in ([*headers], *cells):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_narrow(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row as its first cell, and below it the others with their headers."""
    for first, *others in rows:
        click.echo(first)
        known = [f"{header} {cell}" for header, cell in zip(headers[1:], others, strict=True) if cell not in ("", "-")]
        line = ""
        for part in known:
            if line and len(line) + len(part) > _NARROW:
                click.echo(f"    {line.rstrip(', ')}")
                line = ""
            line += f"{part}, "
        if line:
            click.echo(f"    {line.rstrip(', ')}")


def print_section(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print an empty line and a table; nothing if it has no rows."""
    if rows:
        click.echo()
        print_table(headers, rows)


def print_labelled(lines: Iterable[tuple[str, str]]) -> None:
    """Print lines with a label each; an empty label goes on with the one above."""
    for label, value in lines:
        click.echo(printable(f"{label:<13} {value}"))


def printable(text: str) -> str:
    """Text from a file, with characters that could control a terminal or break a line escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some_of(names: Sequence[str]) -> str:
    """The first names of a list, and the number of the others."""
    return ", ".join(names[:_MOST_NAMES]) + f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES)


def print_json(result: Any) -> None:
    """Print the result of a command as JSON; an object also says how many `seconds` the command has taken."""
    timed = {**result, "seconds": round(_seconds(), 3)} if isinstance(result, Mapping) else result
    click.echo(json.dumps(timed, indent=1, default=str))


def print_duration() -> None:
    """Say how long the command has taken, if that was over a second: beside the result, which stays the same text."""
    if (seconds := _seconds()) >= 1:
        with suppress(OSError):  # a closed standard error must not stop the work
            click.echo(f"took {seconds:.1f} s", err=True)


def _seconds() -> float:
    """Since the command began; 0 for a function that was called otherwise."""
    context = click.get_current_context(silent=True)
    began = None if context is None else context.meta.get(BEGAN)
    return 0.0 if began is None else time.monotonic() - began


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress; gives a function to call, from any thread, with the bytes done since the last call and the total.

    A terminal gets a bar on standard error; other outputs get a line for every tenth, at most one a second.
    """
    lock = threading.Lock()
    bytes_done, tenths, last = 0, 0, time.monotonic()
    if sys.stderr.isatty():
        from rich import progress as bars
        from rich.console import Console

        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn(binary_units=True))
        with bars.Progress(*columns, bars.TimeRemainingColumn(), console=Console(stderr=True)) as shown:
            task = shown.add_task(label, total=None, visible=False)
            yield lambda count, total: shown.update(task, advance=count, total=total, visible=True)
        return

    def advance(count: int, total: int) -> None:
        nonlocal bytes_done, tenths, last
        with lock:
            bytes_done += count
            if total and tenths < bytes_done * 10 // total and time.monotonic() - last >= 1:
                tenths, last = bytes_done * 10 // total, time.monotonic()
                with suppress(OSError):  # a closed standard error must not stop the work
                    click.echo(
                        f"{label}: {size(bytes_done)} of {size(total)} ({bytes_done * 100 // total} %)", err=True
                    )

    yield advance
