"""The public names of the package, each with the module that it is imported from when it is first used."""

from . import lab as lab, optimizer as optimizer
from .checkpoint.async_saving import AsyncSave as AsyncSave, async_save as async_save
from .checkpoint.attestation import (
    Attestation as Attestation,
    Fingerprints as Fingerprints,
    attest as attest,
    fingerprints as fingerprints,
)
from .checkpoint.loading import load as load
from .checkpoint.redistribution import Redistribution as Redistribution, redistribute as redistribute
from .checkpoint.resume_proof import ResumeProof as ResumeProof
from .checkpoint.saving import save as save
from .converters.compare.diff import Difference as Difference, diff as diff
from .converters.compare.stats import CheckpointStats as CheckpointStats, stats as stats
from .converters.look.fits import Fit as Fit, fits as fits
from .converters.look.inspection import Inspection as Inspection, inspect as inspect
from .converters.look.run_history import RunHistory as RunHistory, diff_runs as diff_runs, look_at_run as look_at_run
from .converters.options import Execution as Execution, Translation as Translation
from .converters.report import Report as Report
from .converters.rewrite import convert as convert, reshard as reshard
from .lab.page.checkpoint_page import Page as Page, report as report
from .lab.page.run_page import report_run as report_run
from .lab.preflight import Preflight as Preflight, preflight as preflight
from .layouts.boxed_tensor import BoxedTensor as BoxedTensor
from .names.errors import (
    ArgumentError as ArgumentError,
    AttestError as AttestError,
    DamageError as DamageError,
    DestinationError as DestinationError,
    LayoutError as LayoutError,
    LostRankError as LostRankError,
    MuonckptError as MuonckptError,
    SourceError as SourceError,
    TargetError as TargetError,
    UnavailableError as UnavailableError,
)
from .optimizer import Muon as Muon
from .runs.run_audit import verify_run as verify_run
from .runs.series.restored import Restored as Restored
from .runs.series.series import SavedStep as SavedStep, Series as Series
from .store.open_checkpoint import OpenCheckpoint as OpenCheckpoint
from .store.verify.audit import AuditReport as AuditReport, verify as verify
from .store.verify.diagnosis import open as open
from .store.verify.run import Run as Run
