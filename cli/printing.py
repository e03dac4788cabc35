"""Printing: tables and lines, folded and in colour on a terminal and plain elsewhere, JSON, and progress."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..names.errors import DamageError
from ..names.wording import as_json, printable, size
from .tables import folded, folding_of

if TYPE_CHECKING:
    from ..converters.look.buffer_summary import LabelledBuffer


BEGAN = "muonckpt.began"

_LABEL = 13
_COMMAND = re.compile(r"\s*(\([a-z]\) )?(muonckpt|python) ")
"""The beginning of a line that is a command, perhaps one of a list."""

_ARGUMENT = re.compile(r"`([a-z_]+)=([^`]*)`|`\.(?:to_)?([a-z_]+)(?:\(\))?`")
"""An argument, or an attribute of a result, in a message of the library: ```dry_run=True```, ```.groups```."""

OPTION_NAMES = {"from_dialect": "from", "to_dialect": "to", "roots": "root", "others": "from"}
"""The options that are not called as the argument is."""


def with_options(text: str) -> str:
    """Name the options of the command line where a message of the library names arguments of its functions.

    ```dry_run=True``` becomes ``--dry-run``, ```to_dialect="dion"``` ``--to dion``, ```.groups``` ``--groups``.
    """

    def option(match: re.Match[str]) -> str:
        argument, value, attribute = match.groups()
        name = OPTION_NAMES.get(argument, argument) or attribute
        value = "" if value == "True" or not value else f" {value.strip(chr(34))}"
        return f"--{name.replace('_', '-')}{value}"

    return _ARGUMENT.sub(option, text) if "`" in text else text


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], colours: Sequence[str | None] = ()) -> None:
    """Print a table, folded to the width of a terminal; elsewhere nothing is folded, so that it can be searched.

    Args:
        colours: of the rows, on a terminal; those that are not given have none.
    """
    cells: list[list[str]] = []
    for row in rows:
        cells.append([_shown(str(cell)) for cell in row])
    texts = [*map(printable, headers)]
    form = folding_of(texts, cells, terminal_width(sys.stdout))
    for line in form.lines(texts):
        click.secho(line, bold=True)
    for text_row, colour in zip_longest(cells, colours):
        for line in form.lines(text_row):
            click.echo(_coloured(line, colour))


def print_damage(error: DamageError, as_json: bool) -> int:
    """Print why a checkpoint cannot be opened, which is what was asked; return the exit code."""
    if as_json:
        print_json({"damage": str(error)})
    else:
        print_line(str(error), fg="red")
    return 1


def print_section(headers: Sequence[str], rows: Sequence[Sequence[object]], colours: Sequence[str | None] = ()) -> None:
    if rows:
        print_line()
        print_table(headers, rows, colours)


def print_line(text: str = "", *, err: bool = False, fg: str | None = None, code: bool = False) -> None:
    """Print a line that may have names of files and tensors in it; on a terminal in a colour, and folded.

    A command and a line of code stay one line, so that they can be pasted.
    """
    width, shown = terminal_width(sys.stderr if err else sys.stdout), _shown(text)
    whole = code or _COMMAND.match(shown) is not None
    for line in [shown] if whole or width is None else folded(shown, width, "    "):
        click.echo(_coloured(line, fg), err=err)


def print_labelled(label: str, value: str, fg: str | None = None) -> None:
    """Print a line of a summary; without a label it goes on with the one above."""
    width, shown = terminal_width(sys.stdout), _shown(value)
    lines = [shown] if width is None else folded(shown, max(width - _LABEL - 1, 1))
    for number, line in enumerate(lines):
        name = printable(label) if number == 0 else ""
        click.echo(f"{click.style(name.ljust(_LABEL), bold=True, fg=fg)} {_coloured(line, fg)}")


def _shown(text: str) -> str:
    return printable(with_options(text))


def _coloured(text: str, fg: str | None) -> str:
    return text if fg is None else click.style(text, fg=fg)


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream writes to; None if it writes to none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def print_json(result: Any) -> None:
    """Print a result as JSON; an object also says how many `seconds` the command has taken."""
    data = result if isinstance(result, Mapping | Sequence) else as_json(result)
    timed = {**data, "seconds": round(_seconds(), 3)} if isinstance(data, Mapping) else data
    click.echo(json.dumps(timed, indent=1, default=as_json))


def print_result(result: Any, as_json: bool, print_text: Callable[[], None]) -> None:
    """Print a result as JSON, or as text and how long the command has taken."""
    if as_json:
        print_json(result)
    else:
        print_text()
        print_duration()


def print_duration() -> None:
    """Say on standard error how long the command has taken, if over a second."""
    if (seconds := _seconds()) >= 1:
        with suppress(OSError):  # a closed standard error must not stop the work
            click.echo(f"took {seconds:.1f} s", err=True)


def _seconds() -> float:
    context = click.get_current_context(silent=True)
    began = None if context is None else context.meta.get(BEGAN)
    return 0.0 if began is None else time.monotonic() - began


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress; yields a function to call, from any thread, with the bytes done since the last call and the total.

    A terminal gets a bar on standard error; other outputs get a line for every tenth, at most one a second.
    """
    lock, label = threading.Lock(), printable(label)
    bytes_done, tenths, last = 0, 0, time.monotonic()
    # On a terminal a bar, which is gone at the end.
    if sys.stderr.isatty():
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
        )
        context = click.get_current_context(silent=True)
        is_plain = context is not None and context.color is False
        console = Console(stderr=True, no_color=True if is_plain else None)  # None: as the environment says
        with bars.Progress(*columns, bars.TimeRemainingColumn(), console=console, transient=True) as shown:
            task = shown.add_task(label, total=None, visible=False)
            yield lambda count, total: shown.update(task, advance=count, total=total, visible=True)
        return

    # Elsewhere few lines, for these stay in a log.
    def advance(count: int, total: int) -> None:
        nonlocal bytes_done, tenths, last
        with lock:
            bytes_done += count
            if total and tenths < bytes_done * 10 // total and time.monotonic() - last >= 1:
                tenths, last = bytes_done * 10 // total, time.monotonic()
                with suppress(OSError):  # a closed standard error must not stop the work
                    share = bytes_done * 100 // total
                    click.echo(f"{label}: {size(bytes_done)} of {size(total)} ({share} %)", err=True)

    yield advance


_FEW_RANKS = 24


def print_buffers(summary: Sequence[Mapping[str, Any]], every_rank: bool = False) -> None:
    """Print a summary of flat buffers, with a line for each rank if there are few or all are requested.

    A rank's share is compared with the mean Newton-Schulz work, or with that of elements if no rank owns a matrix.
    """
    rows: list[tuple[object, ...]] = []
    rank_rows: list[tuple[object, ...]] = []
    for entry in summary:
        padding = f"{entry['padding']} ({entry['padding_percent']:g} %, {size(entry['padding_bytes'])})"
        busiest = (or_dash(entry["busiest"]["elements"]), or_dash(entry["busiest"]["newton_schulz"]))
        placed_by, ranks = f"{entry['algorithm']} v{entry['version']}", entry["ranks"]
        rows.append((entry["of"], placed_by, len(ranks), entry["buckets"], entry["elements"], padding, *busiest))
        measure = "elements" if ranks[0]["newton_schulz"] is None else "newton_schulz"
        mean = sum(share[measure] for share in ranks) / len(ranks)
        for share in ranks:
            ratio = f"{share[measure] / mean:.3f}" if mean else "-"
            cost = or_dash(share["newton_schulz"])
            rank_rows.append((share["rank"], entry["of"], placed_by, share["elements"], cost, ratio))
    sizes = ("buffers of", "placed by", "ranks", "buckets", "elements", "padding")
    print_section((*sizes, "busiest by elements", "by Newton-Schulz"), rows)
    if every_rank or len(rank_rows) <= _FEW_RANKS:
        print_section(("rank", "buffers of", "placed by", "elements", "Newton-Schulz", "of the mean"), rank_rows)


def print_buffer_parameters(buffers: Iterable[LabelledBuffer]) -> None:
    """Print where each parameter of each buffer lies, and which rank owns it."""
    rows: list[tuple[object, ...]] = []
    for label, buffer in buffers:
        layout, owners = buffer.layout, buffer.layout.owners
        placed_by = f"{layout.algorithm} v{layout.version}"
        for parameter in layout.parameters:
            owner, span = owners[parameter.name], f"{parameter.start}:{parameter.stop}"
            holder = "-" if owner is None else buffer.group[owner]
            rows.append((parameter.name, label, placed_by, parameter.bucket, span, holder))
    print_section(("parameter", "buffers of", "placed by", "bucket", "elements", "owner"), rows)


def or_dash(value: object) -> object:
    return "-" if value is None else value
