"""`muonckpt preflight`: whether a job would resume, before it is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from ..names.wording import counted
from ..store.io.location import Location
from .argument_types import CHECKPOINT, MeshType
from .printing import print_line, print_result, print_table
from .runs import newest_checkpoint

if TYPE_CHECKING:
    from ..lab.preflight import Preflight


@click.command("preflight")
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("source", metavar="FILE.py:FUNCTION")
@click.option("--mesh", type=MeshType(), help="Sizes of axes: dp=512,ep=32; by default one rank.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="The rank that is asked.")
@click.option(
    "--loader",
    type=click.Choice(["muonckpt", "dcp", "torchtitan", "huggingface", "lightning"]),
    default="muonckpt",
    show_default=True,
    help="The program that will load it.",
)
@click.option("--fresh", multiple=True, metavar="GLOB", help="Parameters whose state begins from zero; repeatable.")
@click.option("--grow", multiple=True, metavar="GLOB", help="Parameters that have more rows now; repeatable.")
@click.option("--ungrouped", multiple=True, metavar="GLOB", help="Parameters in no group of CHECKPOINT; repeatable.")
@click.option("--allow-extra", multiple=True, metavar="GLOB", help="Keys that may stay unread; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def preflight_command(
    checkpoint: Location,
    source: str,
    mesh: Mapping[str, int] | None,
    rank: int,
    loader: str,
    as_json: bool,
    **choices: Sequence[str],
) -> int:
    """Say whether a job would resume from CHECKPOINT, and with what; exit with 1 if it would not.

    FUNCTION returns a model and its optimizer, or a list of optimizers; if it takes an argument, that is the device
    mesh.  It is called on the meta device, in a fake process group of the size of the mesh, so that the answer for 512
    ranks takes no GPU and little memory.  The answer is that of muonckpt.load, or of another program's loader.  For the
    folder of a run, its newest whole step is asked.

    This runs your file, with your rights: name only what you would run yourself.

    \b
    muonckpt preflight run/step-00001000 train.py:make --mesh dp=512
    muonckpt preflight run/step-00001000 train.py:make --loader dcp
    """
    from ..lab.preflight import preflight  # imports torch

    answer = preflight(newest_checkpoint(checkpoint), source, mesh, rank=rank, loader=loader, **choices)
    print_result(answer, as_json, partial(_print, answer))
    return int(not answer)


def _print(answer: Preflight) -> None:
    """Print the answer first, then what would change."""
    sentence, *code = answer.sentence.splitlines()
    print_line(sentence, fg=None if answer else "red")
    for line in code:
        print_line(line, code=True)
    if answer:
        for line in str(answer.report).splitlines():
            print_line(f"  {line}")
    if answer.changes:
        print_line()
        rows = [(c.group, c.option, c.saved_value, c.code_value) for c in answer.changes]
        print_table(("parameters", "option", "in the checkpoint, which counts", "in the code"), rows)
    if answer.next_step:
        print_line(f"next: {answer.next_step}")
    for warning in answer.warnings:
        print_line(f"look at: {warning}", fg="red")
    if answer.unasked:
        print_line(
            f"not asked about: {counted(len(answer.unasked), 'part')} of the checkpoint: {', '.join(answer.unasked)}"
        )
