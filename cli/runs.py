"""What the commands print of the folder of a run."""

from __future__ import annotations

from collections.abc import Sequence

from ..converters.look.run_history import RunHistory, overview_of_run
from ..errors import SourceError
from ..store.io.location import Location
from ..store.run import RunStep
from ..wording import counted, moment, size
from .printing import print_line, print_table

HEADERS = ("step", "state", "bytes", "saved (UTC)", "verified (UTC)")


def print_run(history: RunHistory) -> None:
    """Print the table of steps, and what there is to know besides."""
    (label, first), *rest = overview_of_run(history)
    print_line(f"{label:<13} {first}")
    print_steps(history.steps)
    for label, value in rest:
        print_line(f"{label:<13} {value}")


def newest_whole(history: RunHistory) -> Location:
    """Return the newest whole checkpoint of a run, and say on standard error which that is.

    Raises:
        SourceError: none is whole.
    """
    run = history.run
    if run.newest_whole is None:
        faults = "; ".join(f"{step.name}: {step.fault}" for step in run.steps[-2:])
        raise SourceError(f"expected a whole checkpoint in {run.path}, found none: {faults}")
    print_line(f"the newest whole of {counted(len(run.steps), 'step')} is {run.newest_whole.name}", err=True)
    return run.newest_whole.path


def print_steps(steps: Sequence[RunStep]) -> None:
    print_line()
    print_table(HEADERS, [row_of(step) for step in steps])
    print_line()


def row_of(step: RunStep) -> tuple[str, ...]:
    saved = "-" if step.saved is None else moment(step.saved)
    last = "never" if step.verified is None else moment(step.verified.when)
    return step.name, step.state, size(step.bytes), saved, last
