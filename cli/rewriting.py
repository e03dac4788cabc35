"""What `reshard`, `convert` and `merge` have in common: options, progress, and the printed report.

Each option has the name of the Python function's argument; help lists the rare ones at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from ..converters.engine.container import FORMATS, container_of
from ..converters.engine.launch import TIMEOUT, worker_of
from ..converters.engine.run import MEMORY, THREADS
from ..converters.engine.workers import LaunchError
from ..converters.options import grouped
from ..converters.programs.registry import DIALECTS
from ..converters.report import Report
from ..converters.target.topology import LAYOUTS, ROWS
from ..converters.translate.conventions import STATE_DTYPES, WeightsFrom
from ..converters.translate.detection import FORMS as KEY_FORMS
from ..converters.translate.detection import ROOTS
from ..errors import TargetError
from ..vocabulary import Convention
from ..wording import counted, size
from .argument_types import (
    CHECKPOINT,
    JOBS,
    LEAST_MEMORY,
    ByteCountType,
    MeshType,
    ProgramType,
    RulesType,
    ShardRuleType,
    WordType,
    first_cuts,
)
from .printing import print_buffers, print_duration, print_json, print_line, print_table, progress, some_of


class RootType(click.ParamType):  # type: ignore[type-arg]
    """Where a state dict has its model or its optimizer, such as optimizer=app.optimizer."""

    name = "what=path"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> tuple[str, str]:
        what, equals, path = str(value).partition("=")
        if what not in ROOTS or not equals:
            self.fail(f"expected {' or '.join(f'{root}=PATH' for root in ROOTS)}, found {value!r}", param, context)
        return what, path


class FormatType(WordType):
    """A format to write, built in or of a plug-in."""

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        try:
            container_of(str(value))
        except TargetError:
            return super().convert(value, param, context)
        return str(value)


class RareOption(click.Option):
    """An option that few need."""


class RewriteCommand(click.Command):
    """A command whose help lists its rare options at the end."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self.get_params(context) if isinstance(parameter, click.Option)]
        for title, rare in (("Options", False), ("Rare options", True)):
            records = [option.get_help_record(context) for option in options if isinstance(option, RareOption) is rare]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record])


Function = TypeVar("Function", bound=Callable[..., Any])


def decorated_by(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Apply these decorators, the first as the outermost: help lists options in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


SOURCE_AND_DESTINATION = decorated_by(
    click.argument("source", type=CHECKPOINT), click.argument("destination", type=CHECKPOINT)
)

_CONVENTIONS = WordType([convention.value for convention in Convention])
_WRITABLE = [dialect.name for dialect in DIALECTS.values() if dialect.writable]

_OPTIONS = {
    "format": click.option(
        "--to-format",
        "--format",
        "format",
        type=FormatType(FORMATS),
        metavar="FORMAT",
        help=f"Format to write: {', '.join(FORMATS)}.",
    ),
    "to": click.option(
        "--to",
        "to_dialect",
        type=ProgramType(_WRITABLE),
        metavar="PROGRAM",
        help="Program to write for.",
    ),
    "keys": click.option(
        "--keys",
        cls=RareOption,
        type=WordType(KEY_FORMS),
        metavar="nested|flat",
        help="Form of the optimizer's keys, for --to.",
    ),
    "root": click.option(
        "--root",
        "roots",
        cls=RareOption,
        type=RootType(),
        multiple=True,
        callback=lambda _, __, given: dict(given),
        metavar="model|optimizer=PATH",
        help="Their places in what --to writes.",
    ),
    "from": click.option(
        "--from",
        "from_dialect",
        type=ProgramType(list(DIALECTS)),
        metavar="PROGRAM",
        help="Program that wrote SOURCE, if unclear.",
    ),
    "rules": click.option(
        "--rules",
        type=RulesType(files=True),
        multiple=True,
        metavar="TABLE",
        help="Table of renames, splits and joins; repeatable.",
    ),
    "select": click.option(
        "--select", multiple=True, metavar="GLOB", help="Take only what has a matching key; repeatable."
    ),
    "tensors_only": click.option("--tensors-only", is_flag=True, help="Leave out items that are not tensors."),
    "dry_run": click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    "resume": click.option("--resume", is_flag=True, help="Continue an interrupted run."),
    "verify": click.option("--verify", is_flag=True, help="Read every file back before publishing."),
    "json": click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
    "convention": click.option(
        "--convention",
        cls=RareOption,
        type=_CONVENTIONS,
        metavar="ema|sum",
        help="SOURCE's momentum convention, if unrecorded.",
    ),
    "target_convention": click.option(
        "--target-convention",
        cls=RareOption,
        type=_CONVENTIONS,
        metavar="ema|sum",
        help="Convention to write, if the program has none.",
    ),
    "mu": click.option(
        "--mu",
        cls=RareOption,
        type=click.FloatRange(0, 1, max_open=True),
        metavar="NUMBER",
        help="Momentum coefficient, if missing.",
    ),
    "step": click.option(
        "--step", cls=RareOption, type=click.IntRange(0), metavar="NUMBER", help="Steps taken, if missing."
    ),
    "drop": click.option(
        "--drop", cls=RareOption, multiple=True, metavar="SLOT", help="Leave out a slot of state; repeatable."
    ),
    "like": click.option("--like", cls=RareOption, metavar="JSON", help="Groups to fit, from Muon.describe()."),
    "fill_missing": click.option(
        "--fill-missing",
        cls=RareOption,
        is_flag=True,
        help="Write zeros where state is missing.",
    ),
    "weights": click.option(
        "--weights",
        cls=RareOption,
        type=WordType([weights.value for weights in WeightsFrom]),
        metavar="masters|model",
        help="Make weights of these, if there are both.",
    ),
    "state_dtype": click.option(
        "--state-dtype",
        cls=RareOption,
        type=WordType(STATE_DTYPES),
        metavar="DTYPE",
        help="Round momentum to float32 or bfloat16.",
    ),
    "shard_size": click.option(
        "--shard-size", cls=RareOption, type=ByteCountType(), help="Largest file of safetensors or zarr."
    ),
    "memory": click.option(
        "--memory",
        cls=RareOption,
        type=ByteCountType(least=LEAST_MEMORY),
        default=f"{MEMORY >> 20}MiB",
        show_default=True,
        help="Memory for buffers.",
    ),
    "jobs": click.option(
        "--jobs",
        cls=RareOption,
        type=JOBS,
        default=THREADS,
        show_default=True,
        metavar="N",
        help="Threads.",
    ),
    "timeout": click.option(
        "--timeout",
        cls=RareOption,
        type=click.FloatRange(0, min_open=True),
        default=TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        help="Wait for other processes.",
    ),
}

LAYOUT_OPTIONS = decorated_by(
    click.option("--mesh", type=MeshType(), help="Mesh axes, outermost first: dp=8,tp=2."),
    click.option(
        "--shard",
        type=ShardRuleType(),
        multiple=True,
        callback=first_cuts,
        metavar="GLOB=AXIS:DIM,...",
        help="Axes that cut matching tensors; repeatable.",
    ),
    click.option(
        "--layout",
        type=WordType(list(LAYOUTS)),
        default=ROWS,
        metavar="LAYOUT",
        help=f"What each rank holds: {', '.join(LAYOUTS)}.",
    ),
)

SHARED_OPTIONS = decorated_by(*_OPTIONS.values())

MERGE_OPTIONS = decorated_by(
    *(_OPTIONS[name] for name in ("format", "to", "from", "rules", "select", "dry_run", "resume", "verify", "json")),
    *(
        _OPTIONS[name]
        for name in ("keys", "root", "convention", "mu", "drop", "shard_size", "memory", "jobs", "timeout")
    ),
)


_MOST_FILES = 32


def rewrite(function: Callable[..., Report | None], label: str, *, as_json: bool, **options: Any) -> None:
    """Call ``function`` with progress, and print its report."""
    try:
        worker = worker_of(os.environ)
        with progress(f"{label if worker.world == 1 else worker}, checked and written") as advance:
            report = function(**grouped(**options, progress=advance))
    except (TargetError, LaunchError) as error:  # a mistake in the command line, or in how it was launched
        raise click.UsageError(str(error)) from error
    if report is None:  # only the coordinator of several processes prints
        return
    if report.unchecked and report.fingerprints is not None:
        print_line(
            f"note: {counted(report.unchecked, 'source chunk')} without a checksum, where damage cannot be noticed",
            err=True,
        )
    if as_json:
        print_json(report.to_json())
        return
    for note in report.notes:
        print_line(note)
    if report.fingerprints is None:
        _show_plan(report)
    if report.items_file:
        undecoded = f"; only listed, not plain data: {some_of(report.undecoded)}" if report.undecoded else ""
        print_line(f"{report.items_file}: {counted(report.decoded, 'item')} of plain data{undecoded}")
    if report.left_out:
        print_line(f"left out: {some_of(report.left_out)}")
    for check in report.checklist:
        print_line(str(check))
    print_line(_would_do(report) if report.fingerprints is None else _done(report))
    print_duration()


def _show_plan(report: Report) -> None:
    shown = report.files if len(report.files) <= _MOST_FILES else report.files[: _MOST_FILES - 4]
    rows = [(file.file, file.items, size(file.elements), size(file.bytes)) for file in shown]
    print_table(("file", "items", "of tensors", "in all"), rows)
    if len(shown) < len(report.files):
        print_line(f"and {len(report.files) - len(shown)} more (--json)")
    if report.ranks is not None and report.ranks > 1:
        held = [file.elements for file in report.files]
        mean = sum(held) / report.ranks
        print_line(f"a rank holds {size(round(mean))} of tensors on average, {size(max(held, default=0))} at most")
    if report.buffers:
        print_buffers(report.buffers)


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
    """Say what was compared with what the source records, what could not be, and where to look then."""
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
