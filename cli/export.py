"""`muonckpt export`: the tensors of a checkpoint in a format that others read."""

from __future__ import annotations

from typing import Any

import click

from ..converters.export import TARGETS
from .asked import CONTENT, PLACES, WHOLE, WORK, Asked, taking
from .conversion import carry_out


@click.command("export")
@PLACES
@taking(
    click.option("--format", type=click.Choice(list(TARGETS)), required=True, help="The format to write."),
    WHOLE,
    CONTENT,
    WORK,
)
def command(**options: Any) -> None:
    """Write the tensors of the checkpoint SOURCE, whole, as DESTINATION in another format.

    Checks the source, streams bytes, reads back what was written and compares fingerprints.  DESTINATION must not
    exist; it appears when all that is done.
    """
    carry_out(Asked(**options), "export")
