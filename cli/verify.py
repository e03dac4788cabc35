"""`muonckpt verify`: checks that a checkpoint is whole and that its bytes are those that were written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import click

from ..names.wording import Finding, counted, fields_of, size
from ..runs.resumes import missing_step, resumes_of
from ..runs.run_audit import StepVerdict, verdicts_of, verify_recorded
from ..store.io.location import Location
from ..store.io.regular import Pace
from ..store.verify.audit import AuditReport, verify
from ..store.verify.diagnosis import next_step
from ..store.verify.run import Run, naming_way_back, run_of
from .argument_types import CHECKPOINT, RateType, jobs_option
from .printing import print_duration, print_json, print_labelled, print_line, progress


@click.command("verify")
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("-v", "--verbose", is_flag=True, help="List every finding; else those of a kind are one line.")
@click.option("--all", "every", is_flag=True, help="For a run: verify every step, the never verified first.")
@click.option(
    "--scrub",
    type=RateType(),
    is_flag=False,
    flag_value="50MiB/s",
    metavar="RATE",
    help="Read at most so fast, to run beside a training; 50MiB/s if no rate follows.",
)
@jobs_option(help="Threads that read and check.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, with every finding and lost box.")
def verify_command(
    checkpoint: Location, verbose: bool, every: bool, scrub: int | None, jobs: int, as_json: bool
) -> int:
    """Check that CHECKPOINT is whole; exit with 1 if anything is wrong, with 3 if it cannot be read.

    Prints faults first, and the next step.  Reads everything and checks coverage, bounds, checksums, fingerprints,
    and for infinite or NaN values.  Without our manifest, DCP checkpoints are checked by the CRC-32 of each item.  For
    the folder of a run it verifies the newest whole step.  When that was, is recorded in the folder where the
    checkpoint lies: `muonckpt inspect` shows it.

    \b
    muonckpt verify run/step-00001000
    muonckpt verify s3://bucket/run/step-00001000 --jobs 8 --json
    muonckpt verify run --all --scrub 50MiB/s
    """

    pace = None if scrub is None else Pace(scrub)
    with naming_way_back(checkpoint):
        run = run_of(checkpoint)
    if run is None and every:
        raise click.UsageError(f"--all is for the folder of a run, and {checkpoint} is none")

    def audit_with_progress(place: Location) -> AuditReport:
        with progress(f"verify {place.name}") as advance:
            return verify(place, jobs=jobs, progress=advance, pace=pace)

    if run is not None:
        return _print_verdicts(run, verdicts_of(run, audit_with_progress, every), as_json)
    with naming_way_back(checkpoint):
        report, _, unrecorded = verify_recorded(checkpoint, audit_with_progress)
    if as_json:
        fields = {name: value for name, value in fields_of(report).items() if name != "diagnosis"}
        findings = _findings_json(report.findings)
        print_json({**fields, "findings": findings, "verdict": report.verdict, "diagnosis": report.diagnosis})
        return 1 if report.findings else 0
    # The diagnosis says the damage in one sentence, so of the findings behind it one is enough.
    for number, line in enumerate(report.diagnosis.lines):
        print_line(line, fg="red" if number == 0 else None)
    # Findings that the sentence already says are not printed again.
    said = "" if verbose else report.diagnosis.sentence
    unsaid = [finding for finding in report.findings if finding.message not in said]
    _print_findings(unsaid, verbose, 1 if report.diagnosis else None)
    for note in (*report.notes, *filter(None, [unrecorded])):
        print_line(f"note: {note}")
    if report.unchecked:
        print_line(
            f"unchecked: {report.unchecked} of {counted(report.chunks, 'chunk')} without a checksum of any kind: "
            "damage that leaves them readable cannot be noticed there"
        )
    summary = (
        f"{counted(report.tensors, 'tensor')} in {counted(report.chunks, 'chunk')}, "
        f"{counted(report.blobs, 'other item')}, {size(report.payload_bytes)}"
    )
    if report.findings and not (report.tensors or report.blobs):
        summary = "nothing of it could be read"
    verdict = counted(len(report.findings), "finding") if report.findings else report.verdict
    print_line(f"{checkpoint}: {summary}: {verdict}")
    print_duration()
    return 1 if report.findings else 0


def _print_findings(findings: Sequence[Finding], verbose: bool, max_kinds: int | None) -> None:
    """Print findings by kind; unless ``verbose``, the first of each, or of so many kinds, and count the others."""
    by_kind = defaultdict[str, list[Finding]](list)
    for finding in findings:
        by_kind[finding.kind].append(finding)
    counts = []
    for number, (kind, members) in enumerate(by_kind.items()):
        shown = members if verbose else members[: int(max_kinds is None or number < max_kinds)]
        for finding in shown:
            print_line(f"{kind}: {finding.message}", fg="red")
        unshown = len(members) - len(shown)
        if unshown:
            counts.append(f"{unshown} {'more ' if shown else ''}{kind}")
    if counts:
        print_line(f"and {', '.join(counts)} (-v)")


def _print_verdicts(run: Run, verdict_stream: Iterable[StepVerdict], as_json: bool) -> int:
    """Print the verdict of each step at once; return the exit code."""
    verdicts: list[StepVerdict] = []
    for verdict in verdict_stream:
        verdicts.append(verdict)
        if not as_json:
            print_line(_line(verdict), fg=None if verdict.is_whole else "red")
    # The run as it is known to be now.
    verified_steps = {verdict.step.name: verdict.step for verdict in verdicts}
    run = replace(run, steps=tuple(verified_steps.get(step.name, step) for step in run.steps))
    newest = run.newest_whole
    if as_json:
        steps = []
        for verdict in verdicts:
            steps.append(
                {
                    "name": verdict.step.name,
                    "path": str(verdict.step.path),
                    "verdict": verdict.report.verdict if verdict.report else verdict.step.state,
                    "sentence": verdict.sentence,
                    "findings": _findings_json(verdict.report.findings if verdict.report else ()),
                    "note": verdict.note,
                }
            )
        not_verified = []
        for step in run.steps:
            if step.name not in verified_steps:
                not_verified.append({"name": step.name, "state": step.state, "fault": step.fault})
        print_json({"steps": steps, "not_verified": not_verified, "newest_whole": newest.name if newest else None})
    else:
        print_line(f"{'newest usable' if newest and newest.fault else 'newest whole '} {_newest_whole(run)}")
        if text := missing_step(run, resumes_of(run.path).resumes):
            print_labelled("missing", text)
        if text := next_step(run, [step for step in run.steps if step.name in verified_steps]):
            print_line(f"next: {text}")
        print_duration()
    if any(verdict.is_damaged for verdict in verdicts):
        return 1
    return 3 if any(verdict.is_unread for verdict in verdicts) else int(newest is None)


def _newest_whole(run: Run) -> str:
    if newest := run.newest_whole:
        return f"{newest.path}, which has lost nothing" if newest.fault else str(newest.path)
    unknown = "".join(f"unknown, as {step.name} cannot be read" for step in run.unread[-1:])
    readable = f"; the newest that can be read is {run.whole[-1].path}" if run.unread and run.whole else ""
    return f"{unknown}{readable}" or "none"


def _findings_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [{"kind": finding.kind, "key": finding.key, "message": finding.message} for finding in findings]


def _line(verdict: StepVerdict) -> str:
    note = f" ({verdict.note})" if verdict.note else ""
    if verdict.report is None:
        state = "could not be read" if verdict.is_unread else f"{verdict.step.state}, not verified"
        return f"{verdict.step.name}: {state}: {verdict.sentence}{note}"
    read = f", {size(verdict.report.payload_bytes)} read" if verdict.report.payload_bytes else ""
    return f"{verdict.step.name}: {verdict.report.verdict}{': ' if verdict.sentence else read}{verdict.sentence}{note}"
