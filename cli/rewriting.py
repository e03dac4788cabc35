"""`muonckpt reshard` and `convert`: their options, progress, and the printed report.

Each option has the name of the Python function's argument; help lists the rare ones at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

from ..converters.engine.container import FORMATS, container_of
from ..converters.engine.run import MEMORY, THREADS
from ..converters.engine.workers import TIMEOUT, LaunchError, worker_of
from ..converters.options import grouped
from ..converters.report import Report
from ..converters.rewrite import convert, reshard
from ..converters.target.topology import LAYOUTS, ROWS
from ..converters.translate.conventions import WeightsFrom
from ..names.errors import ADVICE, DamageError, TargetError
from ..names.vocabulary import STATE_DTYPES, Convention
from ..names.wording import command, counted, listed, size
from ..programs.detection import FORMS as KEY_FORMS, ROOTS
from ..programs.registry import DIALECTS
from ..store.io.location import Location
from ..store.verify.diagnosis import way_on
from ..store.verify.run import newest_steps
from ..store.verify.step_names import NumberedName
from .argument_types import (
    CHECKPOINT,
    KEY,
    ByteCountType,
    Function,
    MeshType,
    ProgramType,
    RulesType,
    WordType,
    jobs_option,
    memory_option,
    shard_option,
)
from .printing import print_buffers, print_duration, print_json, print_line, print_table, progress
from .runs import newest_checkpoint


class RootType(click.ParamType):  # type: ignore[type-arg]
    """The root of the model, of the optimizer or of its parameters, such as optimizer=app.optimizer."""

    name = "what=path"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> tuple[str, str]:
        root_name, equals, path = str(value).partition("=")
        if root_name not in ROOTS or not equals:
            self.fail(f"expected {' or '.join(f'{root}=PATH' for root in ROOTS)}, found {value!r}", param, context)
        return root_name, path


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


def decorated_by(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Apply these decorators, the first as the outermost: help lists options in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _list_rules(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        from ..converters.translate.names import READY_MADE, load_rules  # few commands translate

        tables = [(name, len(rules := load_rules(name).rules), str(rules[0])) for name in READY_MADE]
        print_table(("table", "rules", "the first"), tables)
        context.exit()


def _show_rules(context: click.Context, _: click.Parameter, table: str | None) -> None:
    if table is not None:
        from ..converters.translate.names import load_rules

        click.echo(load_rules(table).to_toml(), nl=False)
        context.exit()


_rare = partial(click.option, cls=RareOption)
_WRITABLE = [dialect.name for dialect in DIALECTS.values() if dialect.writable]
_CONVENTIONS = WordType([convention.value for convention in Convention])

_LAYOUT_OPTIONS = (
    click.option("--mesh", type=MeshType(), help="Mesh axes, outermost first: dp=8,tp=2."),
    shard_option("Axes that cut matching tensors; repeatable."),
    click.option(
        "--layout",
        type=WordType(list(LAYOUTS)),
        default=ROWS,
        metavar="LAYOUT",
        help=f"Layout of the output: {', '.join(LAYOUTS)}.",
    ),
)
_OPTIONS = (
    click.option(
        "--to-format",
        "--format",
        "format",
        type=FormatType(FORMATS),
        metavar="FORMAT",
        help=f"Format to write: {', '.join(FORMATS)}.",
    ),
    click.option("--to", "to_dialect", type=ProgramType(_WRITABLE), metavar="PROGRAM", help="Program to write for."),
    _rare("--keys", type=WordType(KEY_FORMS), metavar="nested|flat", help="Form of the optimizer's keys, for --to."),
    _rare(
        "--root",
        "roots",
        type=RootType(),
        multiple=True,
        callback=lambda _, __, roots: dict(roots),
        metavar="ROOT=PATH",
        help="Place of the model, optimizer or parameters.",
    ),
    click.option(
        "--from",
        "from_dialect",
        type=ProgramType(list(DIALECTS)),
        metavar="PROGRAM",
        help="Program that wrote SOURCE, if unclear.",
    ),
    click.option(
        "--rules",
        type=RulesType(),
        multiple=True,
        metavar="TABLE",
        help="Table of renames and splits; repeatable.",
    ),
    click.option(
        "--list-rules",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_rules,
        help="List the ready-made tables, and exit.",
    ),
    click.option(
        "--show-rules",
        type=RulesType(),
        is_eager=True,
        expose_value=False,
        callback=_show_rules,
        metavar="TABLE",
        help="Print a table as TOML, to edit, and exit.",
    ),
    click.option(
        "--select", type=KEY, multiple=True, metavar="GLOB", help="Take only what has a matching key; repeatable."
    ),
    click.option("--tensors-only", is_flag=True, help="Leave out items that are not tensors."),
    click.option("--model-only", is_flag=True, help="Take the model's weights alone."),
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
    _rare("--convention", type=_CONVENTIONS, metavar="ema|sum", help="SOURCE's momentum convention, if unrecorded."),
    _rare(
        "--target-convention",
        type=_CONVENTIONS,
        metavar="ema|sum",
        help="Convention to write, if --to has none.",
    ),
    _rare(
        "--mu", type=click.FloatRange(0, 1, max_open=True), metavar="NUMBER", help="Momentum coefficient, if missing."
    ),
    _rare("--step", type=click.IntRange(0), metavar="NUMBER", help="Steps taken, whatever the source says."),
    _rare("--drop", multiple=True, metavar="SLOT", help="Leave out a slot of state; repeatable."),
    _rare("--like", metavar="JSON", help="Groups to fit, from Muon.describe()."),
    _rare("--fill-missing", is_flag=True, help="Write zeros where state is missing."),
    _rare(
        "--weights",
        type=WordType([weights.value for weights in WeightsFrom]),
        metavar="masters|model",
        help="Write these as the weights, if the source has both.",
    ),
    _rare("--state-dtype", type=WordType(STATE_DTYPES), metavar="DTYPE", help="Round momentum to float32 or bfloat16."),
    _rare("--shard-size", type=ByteCountType(), help="Largest file of safetensors or zarr."),
    memory_option(MEMORY, "Memory for buffers.", cls=RareOption),
    jobs_option(THREADS, cls=RareOption),
    _rare(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        default=TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        help="Wait for other processes to start.",
    ),
)


@click.command("reshard", cls=RewriteCommand)
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=CHECKPOINT)
@decorated_by(*_LAYOUT_OPTIONS, *_OPTIONS)
def reshard_command(source: Location, **options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh, layout, format or program.

    Needs no GPU.  For the folder of a run, SOURCE is its newest whole step.  DESTINATION must not exist; it
    appears when all is written and checked.

    \b
    muonckpt reshard step-1000 on-64 --mesh dp=64 --dry-run
    muonckpt reshard step-1000 moe --mesh ep=8,dp=8 --shard '*experts*=ep:0,dp:1'
    """
    _rewrite(reshard, source=newest_checkpoint(source), **options)


@click.command("convert", cls=RewriteCommand)
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=CHECKPOINT)
@decorated_by(*_OPTIONS)
def convert_command(source: Location, **options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION in another format, or for another program.

    safetensors and zarr hold whole tensors; the other formats are written for one rank.  For more ranks and other
    layouts use `reshard`, which takes the same options.

    \b
    muonckpt convert dion-run/step-1000 ours --to muonckpt
    muonckpt convert run/step-00001000 model.safetensors --to-format safetensors --select 'model.*'
    """
    _rewrite(convert, source=newest_checkpoint(source), **options)


_MAX_ROWS = 12


def _rewrite(function: Callable[..., Report | None], *, as_json: bool, **options: Any) -> None:
    """Run `reshard` or `convert`, of this process or as a worker, and print the report."""
    try:
        worker = worker_of(os.environ)
        with progress(f"{function.__name__ if worker.world == 1 else worker}, checked and written") as advance:
            report = function(**grouped(**options, progress=advance))
    except LaunchError as error:  # a mistake in how the command was launched
        raise click.UsageError(str(error)) from error
    except DamageError as error:
        source: Location = options["source"]
        is_step = not error.advice and NumberedName.parsed(source.name)
        remedy = way_on(newest_steps(source), source.name) if is_step else None
        if remedy is None:
            raise
        raise error.with_text(error.fault, f"{ADVICE}(a) {remedy.command} ({remedy.gives})") from error
    if report is None:  # only the coordinator of several processes prints
        return
    planned = report.fingerprints is None
    if report.unchecked and not planned:
        chunks = counted(report.unchecked, "source chunk")
        print_line(f"note: {chunks} without a checksum, where damage cannot be noticed", err=True)
    if as_json:
        print_json(report)
        return
    # Notes on the source, the plan, the items left out, then the result.
    for note in report.notes:
        print_line(note)
    if planned:
        _print_plan(report)
    if report.items_file:
        undecoded = f"; only listed, not plain data: {listed(report.undecoded)}" if report.undecoded else ""
        print_line(f"{report.items_file}: {counted(report.decoded, 'item')} of plain data{undecoded}")
    if report.left_out:
        print_line(f"left out: {listed(report.left_out)}")
    for check in report.checklist:
        print_line(str(check))
    if planned:
        print_line(
            f"would check {size(report.checked)} of {report.source}, read {size(report.read)} of it again (whole "
            f"chunks would be {size(report.avoided)} more), and write {size(report.written)}"
        )
    else:
        files, ranks = counted(len(report.files), "file"), report.ranks
        spread = f"whole in {files}" if ranks is None else f"over {counted(ranks, 'rank')}"
        tensors = f"{counted(report.tensors, 'tensor')}, {size(sum(file.elements for file in report.files))}"
        summary = f"{report.destination}: {tensors}, {spread} ({size(report.written)} of files)"
        print_line("; ".join((summary, *_comparison_phrases(report))))
    print_duration()


def _print_plan(report: Report) -> None:
    """Print the files that a job would write, and the share of each rank."""
    shown = report.files if len(report.files) <= _MAX_ROWS else report.files[: _MAX_ROWS - 4]
    rows = [(file.file, file.items, size(file.elements), size(file.bytes)) for file in shown]
    print_table(("file", "items", "of tensors", "in all"), rows)
    if len(shown) < len(report.files):
        print_line(f"and {len(report.files) - len(shown)} more (--json)")
    if report.ranks is not None and report.ranks > 1:
        rank_bytes = [file.elements for file in report.files]
        mean, maximum = sum(rank_bytes) / report.ranks, max(rank_bytes, default=0)
        print_line(f"a rank holds {size(round(mean))} of tensors on average, {size(maximum)} at most")
    if report.buffers:
        print_buffers(report.buffers)


def _comparison_phrases(report: Report) -> Iterator[str]:
    """Say what was compared with what the source records, what could not be, and where to look then."""
    if report.compared:
        yield f"{counted(report.compared, 'fingerprint')} compared with the source's, all equal"
    uncompared = report.tensors - report.compared
    if not uncompared:
        return
    chunks = counted(report.unchecked, "source chunk")
    yield (
        f"{chunks} without a checksum" if report.unchecked else f"all {size(report.checked)} read match their checksums"
    )
    yield (
        f"for {counted(uncompared, 'tensor')} the source has no fingerprint to compare with (saved without, or "
        f"computed, joined or cut here): `{command('stats', report.destination)}` shows the numbers"
    )
