"""Muon momentum that survives any change of topology, and a Muon that runs on every one of them.

``box``, ``layout`` and ``plan`` say where elements lie; ``layouts/`` reads shardings, ``store/`` files; ``checkpoint/``
saves and loads live state, ``series/`` step after step; ``compat/`` has our optimizer under others' names;
``forecasting/`` answers what if; ``page/`` makes a report; ``checkup/`` looks at a program's own optimizer.
``optimizer``, ``converters`` and ``cli`` lie beside this folder.  Open ``layout`` first.

All names but the errors are imported when first used, so that programs which only look at checkpoints start without
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    ArgumentError,
    AttestError,
    DamageError,
    DestinationError,
    Interrupted,
    LayoutError,
    LostRankError,
    MuonckptError,
    SourceError,
    TargetError,
)
from .version import VERSION as __version__

if TYPE_CHECKING:
    from .checkpoint.async_saving import AsyncSave, async_save
    from .checkpoint.attestation import Attestation, Fingerprints, attest, fingerprints
    from .checkpoint.loading import load
    from .checkpoint.redistribution import Redistribution, redistribute
    from .checkpoint.resume_check import ResumeDifference, ResumeProof
    from .checkpoint.saving import save
    from .checkup.doctor import Checkup, doctor
    from .converters.compare.diff import Difference, diff
    from .converters.compare.stats import CheckpointStats, stats
    from .converters.look.fits import Fit, fits
    from .converters.look.inspection import Inspection, inspect
    from .converters.look.run_history import RunDifference, RunHistory, diff_runs, look_at_run
    from .converters.merging import Average, merge
    from .converters.options import Execution, Translation
    from .converters.report import Report
    from .converters.rewrite import convert, reshard
    from .converters.salvage import salvage
    from .forecasting.hardware import Rates, rates_of
    from .forecasting.iteration import Training
    from .forecasting.prospects import Prospect, forecast
    from .layouts.boxed_tensor import BoxedTensor
    from .page.checkpoint_page import Page, report
    from .page.run_page import RunPage, report_run
    from .series.restored import Restored
    from .series.series import SavedStep, Series
    from .store.audit import AuditReport, verify
    from .store.open_checkpoint import OpenCheckpoint
    from .store.opening import open
    from .store.run import Run, RunStep
    from .store.run_audit import StepVerdict, verify_run

__all__ = [
    "ArgumentError",
    "AsyncSave",
    "AttestError",
    "Attestation",
    "AuditReport",
    "Average",
    "BoxedTensor",
    "CheckpointStats",
    "Checkup",
    "DamageError",
    "DestinationError",
    "Difference",
    "Execution",
    "Fingerprints",
    "Fit",
    "Inspection",
    "Interrupted",
    "LayoutError",
    "LostRankError",
    "MuonckptError",
    "OpenCheckpoint",
    "Page",
    "Prospect",
    "Rates",
    "Redistribution",
    "Report",
    "Restored",
    "ResumeDifference",
    "ResumeProof",
    "Run",
    "RunDifference",
    "RunHistory",
    "RunPage",
    "RunStep",
    "SavedStep",
    "Series",
    "SourceError",
    "StepVerdict",
    "TargetError",
    "Training",
    "Translation",
    "__version__",
    "async_save",
    "attest",
    "convert",
    "diff",
    "diff_runs",
    "doctor",
    "fingerprints",
    "fits",
    "forecast",
    "inspect",
    "load",
    "look_at_run",
    "merge",
    "open",
    "rates_of",
    "redistribute",
    "report",
    "report_run",
    "reshard",
    "salvage",
    "save",
    "stats",
    "verify",
    "verify_run",
]

_NAMES = {
    ".checkpoint.async_saving": ("AsyncSave", "async_save"),
    ".checkpoint.attestation": ("Attestation", "Fingerprints", "attest", "fingerprints"),
    ".checkpoint.loading": ("load",),
    ".checkpoint.resume_check": ("ResumeDifference", "ResumeProof"),
    ".checkpoint.redistribution": ("Redistribution", "redistribute"),
    ".checkpoint.saving": ("save",),
    ".series.restored": ("Restored",),
    ".series.series": ("SavedStep", "Series"),
    ".converters.compare.diff": ("Difference", "diff"),
    ".converters.compare.stats": ("CheckpointStats", "stats"),
    ".converters.look.fits": ("Fit", "fits"),
    ".converters.look.inspection": ("Inspection", "inspect"),
    ".converters.look.run_history": ("RunDifference", "RunHistory", "diff_runs", "look_at_run"),
    ".converters.merging": ("Average", "merge"),
    ".converters.options": ("Execution", "Translation"),
    ".converters.report": ("Report",),
    ".converters.rewrite": ("convert", "reshard"),
    ".converters.salvage": ("salvage",),
    ".checkup.doctor": ("Checkup", "doctor"),
    ".forecasting.prospects": ("Prospect", "forecast"),
    ".forecasting.hardware": ("Rates", "rates_of"),
    ".forecasting.iteration": ("Training",),
    ".layouts.boxed_tensor": ("BoxedTensor",),
    ".page.checkpoint_page": ("Page", "report"),
    ".page.run_page": ("RunPage", "report_run"),
    ".store.audit": ("AuditReport", "verify"),
    ".store.run": ("Run", "RunStep"),
    ".store.run_audit": ("StepVerdict", "verify_run"),
    ".store.open_checkpoint": ("OpenCheckpoint",),
    ".store.opening": ("open",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; Muon and what goes with it is in muonckpt.optimizer"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
