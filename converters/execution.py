"""How a job is carried out: planned only, or with which memory, threads and checks."""

from __future__ import annotations

from dataclasses import dataclass

from ..store.io.location import Location
from ..store.reading.payloads import Progress
from .engine.job import Job
from .engine.run import MEMORY, THREADS, run_job
from .engine.workers import Workers
from .report import Report, report_of


@dataclass(frozen=True, slots=True)
class Execution:
    """The arguments of `reshard` of these names."""

    memory: int = MEMORY
    jobs: int = THREADS
    resume: bool = False
    verify: bool = False
    dry_run: bool = False
    progress: Progress = lambda count, total: None

    def run(self, job: Job, place: Location, notes: tuple[str, ...], workers: Workers) -> Report | None:
        """Do a worker's share of a job, and report; ``notes`` come before those of the job.

        Returns:
            What was done, or would be; None in all workers but the coordinator.
        """
        report = report_of(job, place, notes)
        if self.dry_run:
            return report if workers.me.coordinates else None
        total = (job.bytes_to_check + job.payload_to_write * (1 + self.verify)) // workers.me.world
        manifest = run_job(
            job,
            place,
            memory=self.memory,
            threads=self.jobs,
            resume=self.resume,
            verify=self.verify,
            progress=lambda count: self.progress(count, total),
            workers=workers,
        )
        return None if manifest is None else report.finished(manifest)
