"""Print the folder of a run, and find its newest whole steps."""

from __future__ import annotations

from ..converters.look.run_history import STEP_HEADERS, RunHistory, overview_of_run, step_row
from ..names.errors import SourceError
from ..names.wording import counted, fitted
from ..store.io.location import Location
from ..store.verify.run import Run, run_of
from .printing import print_labelled, print_line, print_section


def print_run(history: RunHistory) -> None:
    """Print the table of steps, between the lines of the overview."""
    first_line, *lines = overview_of_run(history)
    print_labelled(*first_line)
    newest_first = [*reversed(history.steps)]
    colours = [None if step.state == "whole" else "red" for step in newest_first]
    print_section(STEP_HEADERS, [*map(step_row, newest_first)], colours)
    print_line()
    for label, value in lines:
        print_labelled(label, value)
    for line in history.verdict.next_lines:
        print_line(line)


def newest_whole(run: Run, count: int = 1) -> list[Location]:
    """Return the newest whole checkpoints of a run, the oldest first, and say on standard error which these are.

    Raises:
        SourceError: there are fewer, or it is not known which these are.
    """
    for step in run.unread[-1:]:
        raise SourceError(
            f"which step of {run.path} is the newest whole one is not known, as {step.name} cannot be read: "
            f"{step.fault}. Name the checkpoint that you mean"
        )
    steps = run.whole[-count:]
    if len(steps) < count:
        failure = f"expected {counted(count, 'whole step')} in {run.path}, found {len(steps)}"
        faults = fitted((f"{step.name}: {step.fault}" for step in run.steps if step.fault), "; ", failure)
        raise SourceError(f"{failure}; {faults}" if faults else failure)
    names = " and ".join(step.name for step in steps)
    print_line(f"of {counted(len(run.steps), 'step')} in {run.path}, the newest whole: {names}", err=True)
    for step in run.steps[run.steps.index(steps[-1]) + 1 :]:
        print_line(f"note: {step.name} is newer and passed over: it is {step.state}: {step.fault}", err=True)
    return [step.path for step in steps]


def newest_checkpoint(place: Location) -> Location:
    """Return a checkpoint, or of the folder of a run the newest whole one, and say which that is.

    Raises:
        SourceError: there is none.
    """
    run = run_of(place)
    return place if run is None else newest_whole(run)[0]
