"""`muonckpt watch`: the steps of a run as they are saved, live in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from ..converters.compare.run_watch import RunWatch, WatchedRun, WatchedStep
from ..converters.look.run_history import verdict_of
from ..errors import SourceError
from ..store.io.location import Location
from ..store.io.pace import Pace
from ..wording import moment, size
from .argument_types import CHECKPOINT, RateType
from .printing import print_json, print_line, print_table, printable

_HEADERS = ("step", "state", "bytes", "saved (UTC)", "after", "weights", "momentum")

_SECONDS = 10.0


@click.command("watch")
@click.argument("run", type=CHECKPOINT)
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Look again after so long.",
)
@click.option("--once", is_flag=True, help="Print what there is, and end.")
@click.option("--no-read", is_flag=True, help="Look at names, sizes and metadata only: no norms and no drift.")
@click.option("--scrub", type=RateType(), metavar="RATE", help="Read at most so fast, such as 50MiB/s.")
@click.option("--json", "as_json", is_flag=True, help="With --once, print JSON.")
def watch_command(
    run: Location, every: float, once: bool, no_read: bool, scrub: int | None, as_json: bool
) -> int:  # fmt: skip
    """Show the steps of the folder RUN as they are saved: whole or not, and how far weights and momentum have moved.

    Drift is the norm of the change since the whole step before, estimated to some percent and divided by the norm.
    Each tensor is read once, and not if its fingerprint is that of the step before; of the steps that are there at
    first, the newest two are read.  Off a terminal it prints a line for each new step.  Ctrl-C ends it.

    \b
    muonckpt watch run
    muonckpt watch run --once --no-read
    """
    if as_json and not once:
        raise click.UsageError("--json is for --once")
    watch = RunWatch(run, read=not no_read, pace=Pace(scrub) if scrub else None)
    seen = watch.look()
    if as_json:
        print_json(seen.to_json())
        return 0
    if once:
        _print(seen)
        return 0
    with suppress(KeyboardInterrupt):  # the way to end it
        (_show_live if sys.stdout.isatty() else _print_lines)(watch, seen, every)
    return 0


def _print(seen: WatchedRun) -> None:
    print_table(_HEADERS, list(map(_row, seen.steps)))
    print_line()
    for line in _remarks(seen):
        print_line(line)


def _row(own: WatchedStep) -> tuple[str, ...]:
    step, moved = own.step, own.movement
    saved = "-" if step.saved is None else moment(step.saved)
    drift = moved.drift if moved else {}
    return (
        step.name,
        step.state,
        size(step.bytes),
        saved,
        _span(own.after),
        *(f"{drift[role]:.2%}" if role in drift else "-" for role in ("weights", "momentum")),
    )


def _span(seconds: float | None) -> str:
    """Return a time between two saves in its largest unit."""
    if seconds is None or seconds < 0:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _remarks(seen: WatchedRun) -> Iterator[str]:
    for own in seen.steps:
        if own.step.fault:
            yield f"{own.step.name}: {own.step.state}: {own.step.fault}"
    if seen.steps:
        newest = seen.steps[-1]
        yield from (f"{newest.step.name}: look at: {finding.message}" for finding in newest.findings)
    whole = seen.run.newest_whole
    yield f"newest whole  {verdict_of(whole) if whole else 'none'}"
    if seen.free is not None:
        mean = sum(own.step.bytes for own in seen.steps) // max(len(seen.steps), 1)
        room = f", room for {seen.free // mean} more steps" if mean else ""
        yield f"disk left     {size(seen.free)}{room}"


def _looks(watch: RunWatch, seen: WatchedRun, every: float) -> Iterator[WatchedRun | str]:
    """Yield what each look shows, or why the folder cannot be read at this moment."""
    yield seen
    while True:
        time.sleep(every)
        try:
            yield watch.look()
        except (SourceError, OSError) as error:
            yield str(error)


def _print_lines(watch: RunWatch, seen: WatchedRun, every: float) -> None:
    """Print a line for each step when it is first seen and when its state changes."""
    told: dict[str, str] = {}
    print_line("  ".join(_HEADERS))
    for look in _looks(watch, seen, every):
        if isinstance(look, str):
            if told.get("") != look:
                print_line(look)
            told[""] = look
            continue
        told.pop("", None)
        for own in look.steps:
            if told.get(own.step.name) != own.step.state:
                told[own.step.name] = own.step.state
                fault = f"  {own.step.fault}" if own.step.fault else ""
                print_line("  ".join(_row(own)) + fault)
        sys.stdout.flush()


def _show_live(watch: RunWatch, seen: WatchedRun, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for look in _looks(watch, seen, every):
            if isinstance(look, str):
                console.print(printable(look), markup=False, highlight=False)
            else:
                live.update(_screen(look, console.height), refresh=True)


def _screen(seen: WatchedRun, height: int) -> Any:
    """Return the table and what there is to say, the newest steps if not all fit."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    remarks = list(map(printable, _remarks(seen)))
    table = Table(*(Column(header, overflow="fold") for header in _HEADERS), box=None, pad_edge=False)
    for own in seen.steps[-max(height - len(remarks) - 4, 3) :]:
        table.add_row(*(Text(printable(cell)) for cell in _row(own)))
    return Group(table, Text(), *map(Text, remarks))
