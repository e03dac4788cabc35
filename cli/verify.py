"""`muonckpt verify`: checks that a checkpoint is whole and that its bytes are those that were written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import click

from ..names.wording import Finding, counted, fields_of, size
from ..runs.resumes import resumes_of
from ..runs.run_audit import StepVerdict, verdicts_of, verify_recorded
from ..runs.run_verdict import verdict_on
from ..store.io.location import Location
from ..store.io.regular import Pace
from ..store.verify.audit import AuditReport, verify
from ..store.verify.diagnosis import naming_way_back
from ..store.verify.run import Run, run_of
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
    """Print the verdict of each step at once, then the run's; return the exit code."""
    verdicts, steps_by_fault = list[StepVerdict](), dict[str, str]()
    for verdict in verdict_stream:
        verdicts.append(verdict)
        if not as_json:
            first_step = steps_by_fault.setdefault(verdict.sentence, verdict.step.name)
            is_repeated = bool(verdict.sentence) and first_step != verdict.step.name
            _print_verdict(verdict, f"as {first_step}" if is_repeated else verdict.sentence)
    # The run with the verified states of its steps.
    steps_by_name = {step.name: step for step in run.steps} | {verdict.step.name: verdict.step for verdict in verdicts}
    damages = {verdict.step.name: verdict.report.damage for verdict in verdicts if verdict.report}
    run = replace(run, steps=tuple(steps_by_name[step.name] for step in run.steps))
    run_verdict = verdict_on(run, resumes_of(run.path).resumes, damages)
    verified_steps = {verdict.step.name for verdict in verdicts}
    if as_json:
        others = [step for step in run.steps if step.name not in verified_steps]
        not_verified = [{"name": step.name, "state": step.state, "fault": step.fault} for step in others]
        newest = run.newest_whole.name if run.newest_whole else None
        result = {"steps": list(map(_verdict_json, verdicts)), "not_verified": not_verified, "newest_whole": newest}
        print_json({**result, "missing": run_verdict.missing, "verdict": run_verdict.diagnosis})
    else:
        for label, line in (*run_verdict.faults(verified_steps), *run_verdict.facts):
            print_labelled(label, line)
        for line in run_verdict.next_lines:
            print_line(line)
        print_duration()
    return run_verdict.exit_code


def _print_verdict(verdict: StepVerdict, fault: str) -> None:
    """Print the verdict of a step on one line, with its fault if there is one."""
    if verdict.report is None:
        state = "could not be read" if verdict.is_unread else f"{verdict.step.state}, not verified"
    else:
        state, num_bytes = verdict.report.verdict, verdict.report.payload_bytes
        state += f", {size(num_bytes)} read" if num_bytes and not fault else ""
    parts = filter(None, (verdict.step.name, state, fault))
    note = f" ({verdict.note})" if verdict.note else ""
    print_line(f"{': '.join(parts)}{note}", fg=None if verdict.is_whole else "red")


def _verdict_json(verdict: StepVerdict) -> dict[str, Any]:
    return {
        "name": verdict.step.name,
        "path": str(verdict.step.path),
        "verdict": verdict.report.verdict if verdict.report else verdict.step.state,
        "sentence": verdict.sentence,
        "findings": _findings_json(verdict.report.findings if verdict.report else ()),
        "note": verdict.note,
    }


def _findings_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [{"kind": finding.kind, "key": finding.key, "message": finding.message} for finding in findings]
