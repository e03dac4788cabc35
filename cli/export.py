"""`muonckpt export`: the tensors of a checkpoint in a format that others read."""

from __future__ import annotations

from typing import Any

import click

from ..converters.target.formats import OF_WHOLE_TENSORS
from .asked import CONTENT, CREW, PLACES, WHOLE, WORK, Asked, taking
from .conversion import carry_out


@click.command("export")
@PLACES
@taking(
    click.option("--format", type=click.Choice(list(OF_WHOLE_TENSORS)), required=True, help="The format to write."),
    WHOLE,
    CONTENT,
    CREW,
    WORK,
)
def command(**options: Any) -> None:
    """Write the tensors of the checkpoint SOURCE, whole, as DESTINATION in another format.

    Short for convert to the formats of whole tensors.  DESTINATION must not exist; it appears whole, when everything
    has been written, checked and synced.
    """
    carry_out(Asked(**options), "export")
