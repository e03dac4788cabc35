"""What `reshard` and `convert` have in common: they show progress, then print the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import click

from ..converters.engine.launch import worker_of
from ..converters.engine.workers import LaunchError
from ..converters.report import Report
from ..errors import TargetError
from ..wording import counted, size
from .printing import print_duration, print_json, print_table, printable, progress, some_of

_MOST_FILES = 32
"""The most files that a plan lists."""


def rewrite(function: Callable[..., Report | None], label: str, *, as_json: bool, **options: Any) -> None:
    """Call ``function``, show its progress, and print its report."""
    try:
        worker = worker_of(os.environ)
        with progress(f"{label if worker.world == 1 else worker}, checked and written") as advance:
            report = function(**options, progress=advance)
    except (TargetError, LaunchError) as error:  # a mistake in the command line, or in how it was launched
        raise click.UsageError(str(error)) from error
    if report is None:  # only the coordinator of several processes prints
        return
    if report.unchecked and report.fingerprints is not None:
        click.echo(
            f"note: {counted(report.unchecked, 'source chunk')} without a checksum, where damage cannot be noticed",
            err=True,
        )
    if as_json:
        print_json(report.to_json())
        return
    for note in report.notes:
        click.echo(printable(note))
    if report.fingerprints is None:
        _show_plan(report)
    if report.items_file:
        undecoded = f"; only listed, not plain data: {some_of(report.undecoded)}" if report.undecoded else ""
        click.echo(printable(f"{report.items_file}: {counted(report.decoded, 'item')} of plain data{undecoded}"))
    if report.left_out:
        click.echo(printable(f"left out: {some_of(report.left_out)}"))
    for check in report.checklist:
        click.echo(printable(str(check)))
    click.echo(_would_do(report) if report.fingerprints is None else _done(report))
    print_duration()


def _show_plan(report: Report) -> None:
    shown = report.files if len(report.files) <= _MOST_FILES else report.files[: _MOST_FILES - 4]
    rows = [(file.file, file.items, size(file.elements), size(file.bytes)) for file in shown]
    print_table(("file", "items", "of tensors", "in all"), rows)
    if len(shown) < len(report.files):
        click.echo(f"and {len(report.files) - len(shown)} more (--json)")
    if report.ranks is not None and report.ranks > 1:
        held = [file.elements for file in report.files]
        mean = sum(held) / report.ranks
        click.echo(f"a rank holds {size(round(mean))} of tensors on average, {size(max(held, default=0))} at most")
    if report.buffers:
        from . import buffer_tables

        buffer_tables.print_summary(report.buffers)


def _would_do(report: Report) -> str:
    return (
        f"would check {size(report.checked)} of {report.source}, read {size(report.read)} of it again (whole chunks "
        f"would be {size(report.avoided)} more), and write {size(report.written)}"
    )


def _done(report: Report) -> str:
    where = counted(len(report.files), "file") if report.ranks is None else counted(report.ranks, "rank")
    spread = f"whole in {where}" if report.ranks is None else f"over {where}"
    written = f"{report.destination}: {counted(report.tensors, 'tensor')} {spread}, {size(report.written)}"
    return "; ".join((written, *_compared(report)))


def _compared(report: Report) -> Iterator[str]:
    """What was compared with what the source records, what could not be, and where to look then."""
    if report.compared:
        yield f"{counted(report.compared, 'fingerprint')} compared with the source's, all equal"
    rest = report.tensors - report.compared
    if not rest:
        return
    bare = counted(report.unchecked, "source chunk")
    yield f"{bare} without a checksum" if report.unchecked else f"all {size(report.checked)} read match their checksums"
    yield (
        f"for {counted(rest, 'tensor')} the source has no fingerprint to compare with (saved without, or computed, "
        f"joined or cut here): `muonckpt stats {report.destination}` shows the numbers"
    )
