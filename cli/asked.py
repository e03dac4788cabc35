"""What can be asked of `reshard`, `convert` and `export`: the options that they share, and the values as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ..converters.engine.crew import PATIENCE
from ..converters.engine.outputs import Outputs
from ..converters.engine.run import THREADS
from ..converters.target.formats import FORMATS
from ..converters.target.topology import LAYOUTS, Cut
from ..converters.translate.conventions import Overrides
from ..converters.translate.dialects import DIALECTS
from ..converters.translate.names import Rules
from ..converters.translate.request import Request
from ..store.formats.registry import BUFFERS, format_of
from ..store.formats.signs import is_torch_dist
from ..store.io.location import Location
from ..store.open_checkpoint import OpenCheckpoint
from ..vocabulary import Convention
from .argument_types import CHECKPOINT, JOBS, Bytes, LayoutName, RuleTable, ShardRule


@dataclass(frozen=True, slots=True)
class Asked:
    """One command line.  What a command has no option for has the default here."""

    source: Location
    destination: Location
    format: str
    mesh: Mapping[str, int] | None = None
    shard: tuple[tuple[str, tuple[Cut, ...]], ...] = ()
    layout: str = "rows"
    shard_size: int | None = None
    tensors_only: bool = False
    select: tuple[str, ...] = ()
    dialect: str | None = None
    target_dialect: str | None = None
    rules: tuple[Rules, ...] = ()
    convention: str | None = None
    target_convention: str | None = None
    mu: float | None = None
    step: int | None = None
    drop: tuple[str, ...] = ()
    dry_run: bool = False
    memory: int = 256 << 20
    jobs: int = THREADS
    resume: bool = False
    verify: bool = False
    patience: float = PATIENCE
    as_json: bool = False

    def outputs(self, source: OpenCheckpoint) -> Outputs:
        """What is made of the source."""
        overrides = Overrides(_convention(self.convention), _convention(self.target_convention), self.mu, self.step)
        dialect, target = DIALECTS.get(self.dialect or ""), DIALECTS.get(self.target_dialect or "")
        request = Request(dialect, target, sum(self.rules, Rules()), overrides, frozenset(self.drop))
        outputs = request.outputs(source)
        return outputs.tensors_only() if self.tensors_only else outputs


def _convention(name: str | None) -> Convention | None:
    return None if name is None else Convention(name)


Command = TypeVar("Command", bound=Callable[..., Any])


def taking(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """All of these decorators, the first the outermost: help lists options in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


PLACES = taking(click.argument("source", type=CHECKPOINT), click.argument("destination", type=CHECKPOINT))

FORMAT = click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="What to write; without: what SOURCE is, if it is flat buffers or torch_dist, or what --to needs; else dcp.",
)


def kept(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a command, with a format if none is asked for: what the target's program reads, or what the source
    is; DCP where files of its kind are not written by ranks, or are another program's."""
    source, target = options["source"], DIALECTS.get(options["target_dialect"] or "")
    if options["format"] is not None:
        return options
    if target and target.format:
        found = target.format
    elif format_of(source) is BUFFERS:
        found = "buffers"
    else:
        found = "torch_dist" if target is None and is_torch_dist(source) else "dcp"
    return {**options, "format": found}


RANKS = taking(
    click.option(
        "--shard",
        type=ShardRule(),
        multiple=True,
        help="Which axes cut which dims of the tensors whose key fits; the first rule that fits wins. Without: all "
        "axes cut the rows (dim 0), or in the other layouts share the buffer.",
    ),
    click.option("--layout", type=LayoutName(LAYOUTS), default="rows", show_default=True, help="What ranks hold."),
)

WHOLE = taking(
    click.option(
        "--shard-size",
        type=Bytes(),
        help="safetensors, zarr: most bytes of tensors in a file. safetensors: write a folder of such files with an "
        "index, instead of one file. zarr: 1GiB unless given.",
    ),
    click.option("--tensors-only", is_flag=True, help="Leave out what is no tensor, which some formats cannot hold."),
)

CONTENT = taking(
    click.option("--select", multiple=True, metavar="GLOB", help="Take only what has a key that fits; repeatable."),
    click.option(
        "--from",
        "dialect",
        type=click.Choice(list(DIALECTS)),
        metavar="DIALECT",
        help="The program whose keys SOURCE has (`muonckpt rules --dialects`); without it found from them.",
    ),
    click.option(
        "--to",
        "target_dialect",
        type=click.Choice([dialect.name for dialect in DIALECTS.values() if dialect.writable]),
        metavar="DIALECT",
        help="The program to write for: its keys, slots, groups and momentum convention.",
    ),
    click.option(
        "--rules",
        type=RuleTable(),
        multiple=True,
        help="A table of names and structure: a TOML file, or one of `muonckpt rules`; inverse:TABLE is the way back. "
        "Applied in the order given.",
    ),
    click.option(
        "--convention",
        type=click.Choice([each.value for each in Convention]),
        help="Of SOURCE's momentum, if nothing says it.",
    ),
    click.option(
        "--target-convention",
        type=click.Choice([each.value for each in Convention]),
        help="To write, where the target has none of its own.",
    ),
    click.option(
        "--mu",
        type=click.FloatRange(0, 1, max_open=True),
        help="The momentum coefficient, where SOURCE's groups have none.",
    ),
    click.option(
        "--step", type=click.IntRange(0), help="Steps taken, where the target stores them and SOURCE does not."
    ),
    click.option("--drop", multiple=True, metavar="SLOT", help="A slot of state to leave behind; repeatable."),
)

WORK = taking(
    click.option("--dry-run", is_flag=True, help="Print the plan; read metadata only and write nothing."),
    click.option("--memory", type=Bytes(), default="256MiB", show_default=True, help="Most bytes of buffers."),
    click.option("--verify", is_flag=True, help="Read everything back and compare before it is published."),
    click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON."),
)

CREW = taking(
    click.option("--jobs", type=JOBS, default=THREADS, show_default=True, help="Threads that check and write files."),
    click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command."),
    click.option(
        "--patience",
        type=click.FloatRange(0, min_open=True),
        default=PATIENCE,
        show_default=True,
        metavar="SECONDS",
        help="How long another worker may give no sign of life (several processes).",
    ),
)
