"""`muonckpt reshard`: rewrite a checkpoint for another mesh or layout."""

from __future__ import annotations

from typing import Any

import click

from ..converters.target.formats import OF_RANKS
from ..converters.target.topology import LAYOUTS
from .argument_types import MeshSizes
from .asked import CONTENT, CREW, FORMAT, PLACES, RANKS, WHOLE, WORK, Asked, kept, taking
from .conversion import carry_out


def layouts() -> str:
    """The layouts, for the end of the help text."""
    return "\b\nLayouts:\n" + "\n".join(f"  {name:23}{description}" for name, description in LAYOUTS.items())


@click.command("reshard", epilog=layouts())
@PLACES
@taking(
    click.option("--mesh", type=MeshSizes(), help="Axes and sizes, the outermost first: dp=8,ep=4,tp=2.  [required]"),
    RANKS,
    FORMAT,
    WHOLE,
    CONTENT,
    CREW,
    WORK,
)
def command(**options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh or layout.

    Streams bytes; nothing is deserialised and no GPU or process group is needed.  DESTINATION must not exist; it
    appears whole, when everything has been written, checked and synced.  Nothing is renamed or rescaled unless --from,
    --to, --rules, --convention, --target-convention, --mu, --step or --drop is given.
    """
    options = kept(options)
    if options["mesh"] is None and options["format"] in OF_RANKS:
        raise click.UsageError("Missing option '--mesh': the ranks to write for, such as dp=8")
    carry_out(Asked(**options), "reshard")
