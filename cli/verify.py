"""`muonckpt verify`: checks that a checkpoint is whole and that its bytes are those that were written."""

from __future__ import annotations

import dataclasses

import click

from ..store.audit import verify
from ..store.damage import NOTHING_LOST
from ..store.io.location import Location
from ..wording import counted, size
from .argument_types import CHECKPOINT, jobs_option
from .printing import print_duration, print_json, print_line, progress


@click.command("verify")
@click.argument("checkpoint", type=CHECKPOINT)
@jobs_option(help="Threads that read and check.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify_command(checkpoint: Location, jobs: int, as_json: bool) -> int:
    """Check that CHECKPOINT is whole; exit with 1 if anything is wrong, with 3 if it cannot be opened at all.

    Reads everything and checks coverage, bounds, checksums, fingerprints, and for infinite or NaN values.  Without our
    manifest, DCP checkpoints are checked by the CRC-32 of each item.

    \b
    muonckpt verify run/step-00001000
    muonckpt verify s3://bucket/run/step-00001000 --jobs 8 --json
    """
    with progress("verify") as advance:
        report = verify(checkpoint, jobs=jobs, progress=advance)
    if as_json:
        findings = [{"kind": f.kind, "key": f.key, "message": f.message} for f in report.findings]
        plain = dataclasses.asdict(dataclasses.replace(report, damage=NOTHING_LOST))
        del plain["damage"]
        lost = {"sentence": report.damage.sentence(), "tensors": [t.key for t, _ in report.damage.lost_boxes()]}
        print_json({**plain, "findings": findings, "verdict": report.verdict, "lost": lost if report.damage else None})
        return 1 if report.findings else 0
    if report.damage:
        print_line(report.damage.sentence())
    for finding in report.findings:
        print_line(f"{finding.kind}: {finding.message}")
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
