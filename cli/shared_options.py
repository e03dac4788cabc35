"""The options that `reshard` and `convert` share, and how help shows them: the usual first, the rare at the end.

An option is called as the argument of the function in Python that does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..converters.engine.launch import TIMEOUT
from ..converters.engine.run import THREADS
from ..converters.target.formats import FORMATS
from ..converters.translate.dialects import DIALECTS
from ..vocabulary import Convention
from .argument_types import CHECKPOINT, JOBS, ByteCountType


class RareOption(click.Option):
    """An option that few need."""


class RewriteCommand(click.Command):
    """A command whose help lists rare options at the end."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self.get_params(context) if isinstance(parameter, click.Option)]
        for title, rare in (("Options", False), ("Rare options", True)):
            records = [option.get_help_record(context) for option in options if isinstance(option, RareOption) is rare]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record])


Function = TypeVar("Function", bound=Callable[..., Any])


def decorated_by(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """All of these decorators, the first the outermost: help lists options in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


SOURCE_AND_DESTINATION = decorated_by(
    click.argument("source", type=CHECKPOINT), click.argument("destination", type=CHECKPOINT)
)

_CONVENTIONS = click.Choice([convention.value for convention in Convention])
_WRITABLE = [dialect.name for dialect in DIALECTS.values() if dialect.writable]

SHARED_OPTIONS = decorated_by(
    click.option(
        "--to-format",
        "--format",
        "format",
        type=click.Choice(FORMATS),
        metavar="FORMAT",
        help=f"What to write: {', '.join(FORMATS)}.",
    ),
    click.option(
        "--to",
        "to_dialect",
        type=click.Choice(_WRITABLE),
        metavar="PROGRAM",
        help="The program to write for: its keys, groups and convention.",
    ),
    click.option(
        "--from",
        "from_dialect",
        type=click.Choice(list(DIALECTS)),
        metavar="PROGRAM",
        help="Whose keys SOURCE has (`muonckpt rules --dialects`).",
    ),
    click.option("--rules", multiple=True, metavar="TABLE", help="Rename, split, join: `muonckpt rules`, or a file."),
    click.option("--select", multiple=True, metavar="GLOB", help="Take only what has a key that fits; repeatable."),
    click.option("--tensors-only", is_flag=True, help="Leave out what is no tensor."),
    click.option("--dry-run", is_flag=True, help="Print the plan; read metadata only and write nothing."),
    click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command."),
    click.option("--verify", is_flag=True, help="Read everything back and compare before it is published."),
    click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON."),
    click.option(
        "--convention",
        cls=RareOption,
        type=_CONVENTIONS,
        metavar="ema|sum",
        help="What SOURCE's momentum is, where nothing else says it.",
    ),
    click.option(
        "--target-convention",
        cls=RareOption,
        type=_CONVENTIONS,
        metavar="ema|sum",
        help="What to write, where the target's program has none of its own.",
    ),
    click.option(
        "--mu",
        cls=RareOption,
        type=click.FloatRange(0, 1, max_open=True),
        metavar="NUMBER",
        help="Momentum coefficient, where SOURCE has none.",
    ),
    click.option(
        "--step",
        cls=RareOption,
        type=click.IntRange(0),
        metavar="NUMBER",
        help="Steps taken, where SOURCE does not say it.",
    ),
    click.option(
        "--drop", cls=RareOption, multiple=True, metavar="SLOT", help="Leave a slot of state behind; repeatable."
    ),
    click.option(
        "--shard-size",
        cls=RareOption,
        type=ByteCountType(),
        help="Most bytes in a file of safetensors (then a folder) or zarr.",
    ),
    click.option(
        "--memory",
        cls=RareOption,
        type=ByteCountType(),
        default="256MiB",
        show_default=True,
        help="Most bytes of buffers.",
    ),
    click.option(
        "--jobs",
        cls=RareOption,
        type=JOBS,
        default=THREADS,
        show_default=True,
        metavar="N",
        help="Threads that check and write.",
    ),
    click.option(
        "--timeout",
        cls=RareOption,
        type=click.FloatRange(0, min_open=True),
        default=TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        help="How long another process may give no answer.",
    ),
)
