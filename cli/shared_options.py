"""The options that `reshard` and `convert` share; help lists the rare ones at the end.

Each option has the name of the Python function's argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..converters.engine.launch import TIMEOUT
from ..converters.engine.run import MEMORY, THREADS
from ..converters.target.formats import FORMATS
from ..converters.target.topology import LAYOUTS, ROWS
from ..converters.translate.conventions import STATE_DTYPES, WeightsFrom
from ..converters.translate.dialects import DIALECTS
from ..converters.translate.key_forms import FORMS as KEY_FORMS
from ..converters.translate.key_forms import ROOTS
from ..layouts.buffers.placements import FORMER
from ..vocabulary import Convention
from .argument_types import (
    CHECKPOINT,
    JOBS,
    LEAST_MEMORY,
    ByteCountType,
    MeshType,
    RulesType,
    ShardRuleType,
    WordType,
    first_cuts,
)


class RootType(click.ParamType):  # type: ignore[type-arg]
    """Where a state dict has its model or its optimizer, such as optimizer=app.optimizer."""

    name = "what=path"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> tuple[str, str]:
        what, equals, path = str(value).partition("=")
        if what not in ROOTS or not equals:
            self.fail(f"expected {' or '.join(f'{root}=PATH' for root in ROOTS)}, found {value!r}", param, context)
        return what, path


class LayoutType(WordType):
    """The name of a layout; a former name is accepted with a warning."""

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        name = str(value)
        if name in FORMER:
            click.echo(f"warning: --layout {name} is called {FORMER[name]} now", err=True)
        return super().convert(FORMER.get(name, name), param, context)


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
    """Apply all of these decorators, the first as the outermost: help lists options in this order."""

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
        type=WordType(FORMATS),
        metavar="FORMAT",
        help=f"Format to write: {', '.join(FORMATS)}.",
    ),
    "to": click.option(
        "--to",
        "to_dialect",
        type=WordType(_WRITABLE),
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
        type=WordType(list(DIALECTS)),
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
        type=LayoutType(list(LAYOUTS)),
        default=ROWS,
        metavar="LAYOUT",
        help=f"What each rank holds: {', '.join(LAYOUTS)}.",
    ),
)
"""What each rank of the destination holds."""

SHARED_OPTIONS = decorated_by(*_OPTIONS.values())

MERGE_OPTIONS = decorated_by(
    *(_OPTIONS[name] for name in ("format", "to", "from", "rules", "select", "dry_run", "resume", "verify", "json")),
    *(
        _OPTIONS[name]
        for name in ("keys", "root", "convention", "mu", "drop", "shard_size", "memory", "jobs", "timeout")
    ),
)
"""Those that `merge` has, too."""
