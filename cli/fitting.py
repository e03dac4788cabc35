"""Print the answer of `inspect --fits` and `plan --fits`: yes or no, and what each rank would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..names.wording import size
from ..store.io.location import Location
from .argument_types import Cuts
from .printing import print_duration, print_json, print_line, print_section

if TYPE_CHECKING:
    from ..converters.look.fits import Fit

_SCREEN = 24
_WIDTH = 80
"""The answer fits into such a terminal, at the expense of the list of what is uneven."""

_MIN_ROWS = 3


def print_fit(
    checkpoint: Location, mesh: Mapping[str, int], shard: Mapping[str, Cuts], layout: str | None, as_json: bool
) -> int:
    """Print whether a checkpoint can be resumed on a mesh; return the exit code, 0 for yes and 1 for no.

    Raises:
        SourceError: it cannot be opened, for which the exit code is 3.
    """
    from ..converters.look.fits import fits  # imports all layouts
    from ..store.verify.run import run_of
    from .runs import newest_whole

    run = run_of(checkpoint)
    if run is not None:
        [checkpoint] = newest_whole(run)

    fit = fits(checkpoint, mesh, shard=shard, **({} if layout is None else {"layout": layout}))
    if as_json:
        print_json(fit)
    else:
        _print(fit)
        print_duration()
    return 0 if fit else 1


def _print(fit: Fit) -> None:
    lines = [f"{fit.checkpoint} on {fit.place}: {fit.sentence}."]
    for remedy in fit.diagnosis.remedies:
        lines += [f"  {remedy.command}", f"    {remedy.gives}"]
    if not fit.diagnosis:
        lines.append(f"{fit.advice}.")
    lines += [f"note: {finding.message}" for finding in fit.findings]
    for line in lines:
        print_line(line)
    amounts = ("bytes", "least", "mean", "most")
    # The table of uneven tensors gets the rows that the answer leaves of the screen.
    rows = [(s["slot"], s["tensors"], *(size(round(s[name])) for name in amounts)) for s in fit.shares]
    print_section(("a rank would hold", "tensors", *amounts), rows)
    uneven = [(entry.pattern, entry.tensors, " x ".join(map(str, entry.shape)), entry.cuts,
               f"{entry.least} to {entry.most}", entry.empty_ranks) for entry in fit.uneven]  # fmt: skip
    headers = ("uneven", "tensors", "shape", "cut by", "elements", "ranks without")
    used = sum(-(-len(line) // _WIDTH) for line in lines) + 2 + len(rows)  # a section has a blank line and a header
    max_rows = max(_SCREEN - used - 5, _MIN_ROWS)  # and "and more", the duration and the prompt
    print_section(headers, uneven[:max_rows])
    if len(uneven) > max_rows:
        print_line(f"and {len(uneven) - max_rows} more (--json)")
