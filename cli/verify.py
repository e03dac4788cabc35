"""`muonckpt verify`: checks that a checkpoint is whole and that its bytes are those that were written."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import click

from ..record import Manifest
from ..store.audit import verify
from ..store.damage import Kind
from ..store.io.location import Location
from ..wording import Finding, counted, size
from .argument_types import CHECKPOINT, jobs_option
from .printing import print_duration, print_json, print_line, progress


@click.command("verify")
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("-v", "--verbose", is_flag=True, help="List every finding; else those of a kind are one line.")
@jobs_option(help="Threads that read and check.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, with every finding and lost box.")
def verify_command(checkpoint: Location, verbose: bool, jobs: int, as_json: bool) -> int:
    """Check that CHECKPOINT is whole; exit with 1 if anything is wrong, with 3 if it cannot be opened at all.

    Says first what is wrong and what to do.  Reads everything and checks coverage, bounds, checksums, fingerprints,
    and for infinite or NaN values.  Without our manifest, DCP checkpoints are checked by the CRC-32 of each item.

    \b
    muonckpt verify run/step-00001000
    muonckpt verify s3://bucket/run/step-00001000 --jobs 8 --json
    """

    def kinds(manifest: Manifest) -> Kind:
        from ..converters.look.contents import kinds_in  # not needed where nothing is wrong

        return kinds_in(manifest)

    with progress("verify") as advance:
        report = verify(checkpoint, jobs=jobs, progress=advance, kinds=kinds)
    if as_json:
        findings = [{"kind": f.kind, "key": f.key, "message": f.message} for f in report.findings]
        own = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if f.name != "diagnosis"}
        print_json({**own, "findings": findings, "verdict": report.verdict, "diagnosis": report.diagnosis.to_json()})
        return 1 if report.findings else 0
    for line in report.diagnosis.lines:
        print_line(line)
    _print_findings(report.findings, verbose)
    for note in report.notes:
        print_line(f"note: {note}")
    if report.unchecked:
        print_line(
            f"unchecked: {report.unchecked} of {counted(report.chunks, 'chunk')} without a checksum, "
            "where damage cannot be noticed"
        )
    summary = (
        f"{counted(report.tensors, 'tensor')} in {counted(report.chunks, 'chunk')}, "
        f"{counted(report.blobs, 'other item')}, {size(report.payload_bytes)}"
    )
    verdict = counted(len(report.findings), "finding") if report.findings else report.verdict
    print_line(f"{checkpoint}: {summary}: {verdict}")
    print_duration()
    return 1 if report.findings else 0


def _print_findings(findings: Sequence[Finding], verbose: bool) -> None:
    """Print findings by their kind; unless ``verbose``, only the first of each."""
    by_kind = defaultdict[str, list[Finding]](list)
    for finding in findings:
        by_kind[finding.kind].append(finding)
    for kind, alike in by_kind.items():
        for finding in alike if verbose else alike[:1]:
            print_line(f"{kind}: {finding.message}")
        if len(alike) > 1 and not verbose:
            print_line(f"{kind}: and {len(alike) - 1} more (-v)")
