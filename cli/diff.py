"""`muonckpt diff`: what differs between two checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import click

from ..converters.compare.diff import DIFF_MEMORY, Difference, diff
from ..converters.compare.elements import TensorDifference
from ..converters.look.run_history import RunDifference, diff_runs, resume_lines
from ..names.wording import command, counted, listed, shape_text, size
from ..programs.registry import DIALECTS
from ..store.io.location import Location
from ..store.verify.diagnosis import open_damaged
from ..store.verify.run import run_of
from .argument_types import CHECKPOINT, KEY, ProgramType, jobs_option, memory_option
from .printing import print_labelled, print_line, print_result, print_section, print_table, progress
from .runs import newest_whole

_MAX_ROWS = 4

_WRITABLE = [dialect.name for dialect in DIALECTS.values() if dialect.writable]


@click.command("diff")
@click.argument("a", type=CHECKPOINT)
@click.argument("b", type=CHECKPOINT, required=False)
@click.argument("globs", type=KEY, nargs=-1, metavar="[GLOB]...")
@click.option("--summary", is_flag=True, help="Print counts only.")
@click.option("--all", "every", is_flag=True, help="List every tensor and item that changed.")
@click.option("--rtol", type=click.FloatRange(0), metavar="NUMBER", help="Take as equal: |a-b| <= RTOL max(|a|, |b|).")
@click.option("--atol", type=click.FloatRange(0), metavar="NUMBER", help="The same with an absolute bound.")
@click.option("--to", "to_dialect", type=ProgramType(_WRITABLE), metavar="PROGRAM", help="Compare as it has them.")
@click.option("--from-a", type=ProgramType(list(DIALECTS)), metavar="PROGRAM", help="Program that wrote A, if unclear.")
@click.option("--from-b", type=ProgramType(list(DIALECTS)), metavar="PROGRAM", help="Program that wrote B, if unclear.")
@click.option("--read", is_flag=True, help="Read both whole, and check everything against what was recorded.")
@memory_option(DIFF_MEMORY)
@jobs_option()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def diff_command(
    a: Location, b: Location | None, globs: Sequence[str], summary: bool, every: bool, as_json: bool, **options: Any
) -> int:
    """Say what differs between the checkpoints A and B, of any formats and meshes; exit with 1 if anything does.

    For two run folders, compare by metadata the steps that both have, and their recorded resumes.

    Every file's presence and size are looked at; a fault exits with 3.  Where both have fingerprints, tensors that are
    equal are not read without --read, so flipped bytes are not found.  For one run folder, compare its two newest
    whole steps are compared.

    \b
    muonckpt diff run
    muonckpt diff run/step-00001000 run/step-00001100 '*momentum*'
    muonckpt diff run-on-8 run-on-64 --summary
    """
    if (options["from_a"] or options["from_b"]) and not options["to_dialect"]:
        raise click.UsageError("--from-a and --from-b have no meaning without --to")
    # One run folder: compare its two newest whole steps.  Two: compare them step by step, by metadata alone.
    if b is None:
        run = run_of(a)
        if run is None:
            open_damaged(a).close()  # says so if it is no checkpoint either
            raise click.UsageError(f"expected a second checkpoint, or the folder of a run, and {a} is none")
        a, b = newest_whole(run, 2)
    elif run_of(a) is not None and run_of(b) is not None:
        runs = diff_runs(a, b)
        print_result(runs, as_json, partial(_print_runs, runs))
        return int(runs.differs)
    with progress("diff") as advance:
        difference = diff(a, b, select=globs, progress=advance, **options)

    def print_text() -> None:
        if not summary:
            _print_details(difference, every)
        for line in _summary_lines(difference):
            print_line(line, fg="red" if line.startswith(("look at:", "infinite or NaN")) else None)

    print_result(difference, as_json, print_text)
    return int(difference.differs)


def _print_runs(difference: RunDifference) -> None:
    """Print two runs: the steps of both with their differences, and the recorded resumes."""
    # Each run, with its resumes.
    sides = (("A", difference.a, difference.only_a), ("B", difference.b, difference.only_b))
    for name, history, only_steps in sides:
        print_labelled(name, f"{history.run.path}: {counted(len(history.steps), 'step')}")
        if only_steps:
            print_labelled(f"only in {name}", f"step{'s' * (len(only_steps) > 1)} {listed(only_steps)}")
        for label, line in resume_lines(history):
            print_labelled(label, line)
    # The steps of both: neighbours that differ in the same way are one row, and one line for each way.
    rows, lines_by_steps = [], list[tuple[str, str]]()
    for (counts, lines), members in groupby(difference.steps, lambda step: (step.counts, step.lines)):
        first, *others = members
        steps = first.name if first.since == first.name else f"{first.since} and {first.name}"
        steps += f" to {others[-1].name}" if others else ""
        rows.append((steps, *counts))
        lines_by_steps += ((steps, line) for line in lines)
    print_section(("steps of both", "tensors changed", "same", "without fingerprints"), rows)
    print_section(("steps of both", "beside elements, from A to B"), lines_by_steps)
    # Where elements may differ, the command that reads them.
    print_line()
    for step in [step for step in difference.steps if step.counts[0] or step.counts[2]][:1]:
        print_line(command("diff", difference.a.run.path / step.since, difference.b.run.path / step.name))
    print_line("different" if difference.differs else "the same by their records; no elements were read")


def _print_details(difference: Difference, every: bool) -> None:
    """Print the tensors that changed most, then items, then keys that one side lacks; all of them if ``every``."""

    def relative_change(tensor: TensorDifference) -> float:
        """Return the norm of the change, divided by the norms; what has no numbers comes first."""
        if tensor.statistics is None:
            return float("inf")
        largest = max(tensor.statistics.norm_a, tensor.statistics.norm_b)
        return tensor.statistics.norm_change / largest if largest else 0.0

    changed = [tensor for tensor in difference.tensors if tensor.status in ("changed", "close")]
    changed.sort(key=relative_change, reverse=True)
    headers = ("tensor", "changed", "max abs", "max rel", "cosine", "norm A", "norm B", "RMS change")
    max_rows = None if every else _MAX_ROWS
    if changed:
        print_table(headers, list(map(_tensor_row, changed[:max_rows])))
    if len(changed) > _MAX_ROWS and not every:
        print_line(f"and {len(changed) - _MAX_ROWS} more that changed less (--all)")

    # Items of two programs have other meanings, so they are only counted.
    only_a, only_b, all_items = difference.only_a, difference.only_b, difference.items
    are_two_programs = not difference.tensors and (only_a or only_b)
    max_items = len(all_items) if every else 0 if are_two_programs else _MAX_ROWS
    items = [(item.key, *_value_pair(item.a, item.b)) for item in all_items[:max_items]]
    print_section(("item", "A", "B"), items)
    unlisted = len(all_items) - len(items)
    if unlisted:
        print_line(f"and {unlisted} more (--all)" if items else f"{counted(unlisted, 'other item')} changed (--all)")

    for name, keys, colour in (("A", only_a, "red"), ("B", only_b, "green")):  # as `git diff` has them
        rows = [(key,) for key in keys[:max_rows]]
        print_section((f"only in {name}",), rows, [colour] * len(rows))
        if len(keys) > _MAX_ROWS and not every:
            print_line(f"and {len(keys) - _MAX_ROWS} more (--all)")
    if changed or all_items or only_a or only_b:
        print_line()


def _tensor_row(tensor: TensorDifference) -> tuple[object, ...]:
    """Return the cells of a tensor that changed; numbers that were not computed are dashes."""
    (shape_a, shape_b), (dtype_a, dtype_b) = tensor.shapes, tensor.dtypes
    name = tensor.key if dtype_a == dtype_b else f"{tensor.key} ({dtype_a}, {dtype_b})"
    s = tensor.statistics
    if s is None:
        return name, f"shape {shape_text(shape_a)}, {shape_text(shape_b)}", *("-" * 6)
    share = f"all {s.elements}" if s.changed == s.elements else f"{s.changed} of {s.elements}"
    if tensor.by == "bits":
        return name, share, *("-" * 6)
    cosine = "-" if s.cosine is None else f"{s.cosine:.6f}"
    norms = f"{s.norm_a:.4g}", f"{s.norm_b:.4g}", f"{s.rms_change:.4g}"
    return name, share, f"{s.max_abs:.3g}", f"{s.max_rel:.3g}", cosine, *norms


def _value_pair(a: object, b: object) -> tuple[str, str]:
    """Return two values in short; of lists, what only one of them has."""
    if isinstance(a, list) and isinstance(b, list):
        only_a, only_b = [value for value in a if value not in b], [value for value in b if value not in a]
        if not only_a and not only_b:
            return "the same", "in another order"
        return f"also {_short_repr(only_a)}", f"also {_short_repr(only_b)}"
    return _short_repr(a), _short_repr(b)


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} …"


def _summary_lines(difference: Difference) -> Iterator[str]:
    """Yield what both have and what differs, then the verdict."""
    yield from (f"note: {note}" for note in difference.notes if "note:" in note)
    counts = difference.counts
    ways = Counter(tensor.by for tensor in difference.tensors)
    labels = {"same": "same", "moved": "moved only", "close": "within the tolerance", "changed": "changed"}
    parts = ", ".join(f"{counts[status]} {labels[status]}" for status in labels if counts[status] or status == "same")
    details = [f"{ways[way]} by {way}" for way in ("fingerprint", "elements", "bits", "shape") if ways[way]]
    details.append(f"{size(difference.read)} read" if difference.read else "nothing read")
    yield f"{counted(len(difference.tensors), 'tensor')} in both: {parts} ({', '.join(details)})"
    nonfinite = [tensor.key for tensor in difference.tensors if tensor.statistics and tensor.statistics.nonfinite_b]
    if nonfinite:
        yield f"infinite or NaN in B: {listed(nonfinite)}"
    items = difference.same_items + len(difference.items)
    if items:
        yield f"{counted(items, 'other item')} in both: {len(difference.items) or 'none'} changed"
    if difference.only_a or difference.only_b:
        yield f"keys on one side: {len(difference.only_a)} only in A, {len(difference.only_b)} only in B"
    if difference.unmoved:
        steps = " and ".join(map(str, difference.steps))
        yield (
            f"look at: {counted(len(difference.unmoved), 'tensor')} of weights and state identical although the steps "
            f"differ ({steps}): stale, frozen or without gradients: {listed(difference.unmoved)}"
        )
    verdict = "different" if difference.differs else "the same"
    if not difference.differs and difference.unread:  # equal records say what was written, not what the files hold now
        unread = f"; of that {difference.unread} tensors and items as recorded, which were not read"
        verdict += unread if difference.read else " as recorded; nothing was read"
    yield f"{difference.a} and {difference.b}: {verdict}"
