"""What `inspect --fits` and `plan --fits` print: yes or no, and what each rank would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..store.io.location import Location
from ..wording import size
from .argument_types import Cuts
from .printing import print_duration, print_json, print_line, print_section

if TYPE_CHECKING:
    from ..converters.look.fits import Fit

_MOST_ROWS = 12


def print_fit(
    checkpoint: Location, mesh: Mapping[str, int], shard: Mapping[str, Cuts], layout: str | None, as_json: bool
) -> int:
    """Print whether a checkpoint can be resumed on a mesh; return the exit code, 0 for yes and 1 for no."""
    from ..converters.look.fits import fits  # imports all layouts
    from ..store.run import run_of
    from .runs import newest_whole

    if (run := run_of(checkpoint)) is not None:
        [checkpoint] = newest_whole(run)

    fit = fits(checkpoint, mesh, shard=shard, **({} if layout is None else {"layout": layout}))
    if as_json:
        print_json(fit.to_json())
    else:
        _print(fit)
        print_duration()
    return 0 if fit else 1


def _print(fit: Fit) -> None:
    print_line(f"{fit.checkpoint} on {fit.place}: {fit.sentence}.")
    for remedy in fit.diagnosis.remedies:
        print_line(f"  {remedy.command}")
        print_line(f"    {remedy.gives}")
    if not fit.diagnosis:
        print_line(f"{fit.advice}.")
    for finding in fit.findings:
        print_line(f"note: {finding.message}")
    amounts = ("bytes", "least", "mean", "most")
    rows = [(held["slot"], held["tensors"], *(size(round(held[name])) for name in amounts)) for held in fit.held]
    print_section(("a rank would hold", "tensors", *amounts), rows)
    uneven = [(entry.pattern, entry.tensors, " x ".join(map(str, entry.shape)), entry.cuts,
               f"{entry.least} to {entry.most}", entry.without) for entry in fit.uneven]  # fmt: skip
    headers = ("uneven", "tensors", "shape", "cut by", "elements", "ranks without")
    print_section(headers, uneven[:_MOST_ROWS])
    if len(uneven) > _MOST_ROWS:
        print_line(f"and {len(uneven) - _MOST_ROWS} more (--json)")
