"""Opening a checkpoint that has to be whole, as far as its descriptions and the sizes of its files tell."""

from __future__ import annotations

import os
import warnings

from ...names.errors import DamageError, LostFileError, SourceError
from ...record.record import MANIFEST_FILE
from ..io.location import Location, Remote, location
from ..open_checkpoint import OpenCheckpoint
from .verification import last_verification


def open(path: str | os.PathLike[str] | Remote) -> OpenCheckpoint:
    """Open a checkpoint of any known format, in a folder, a file, or an object store.

    Reads its metadata; needs no torch.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.

    Raises:
        SourceError: there is no checkpoint, its metadata are damaged or refused, or no installed library supports the
            protocol.  Of a damaged one it says what is lost, and what to do.
    """
    return _refused(open_damaged(location(path, SourceError)), lost_files=False)


def open_to_load(path: str | os.PathLike[str] | Remote) -> OpenCheckpoint:
    """Open a checkpoint although files of it may be missing or cut, for those who check all that they read.

    Raises:
        SourceError: as `open`, but not for lost files.
    """
    return _refused(open_damaged(location(path, SourceError)), lost_files=True)


def _refused(checkpoint: OpenCheckpoint, lost_files: bool) -> OpenCheckpoint:
    """Return the checkpoint unless it has faults, of which those of ``lost_files`` may be meant to pass."""
    faults = [fault for fault in checkpoint.faults if not (lost_files and isinstance(fault, LostFileError))]
    if not faults and not checkpoint.lacks_manifest:
        return checkpoint
    for fault in faults:
        from .diagnosis import diagnosis_by_files  # not needed where nothing is wrong

        diagnosis = diagnosis_by_files(checkpoint, None)
        raise diagnosis.error if isinstance(fault, DamageError) else type(fault)(str(diagnosis)) from fault
    warnings.warn(
        f"{checkpoint.path} was saved with a {MANIFEST_FILE}, which is missing: it is read as a stock checkpoint, "
        f"without digests, momentum conventions and layouts, which a copy of {MANIFEST_FILE} would give back, if there "
        "is one; whatever is written from it has new descriptions of the same elements",
        stacklevel=3,
    )
    return checkpoint


def open_damaged(place: Location) -> OpenCheckpoint:
    """Open a checkpoint as `open` does, also one with faults.

    Raises:
        SourceError: as `open` does about the metadata.
    """
    try:
        return OpenCheckpoint(place)
    except DamageError as error:
        from .diagnosis import diagnosis_of_unreadable  # not needed where nothing is wrong

        raise diagnosis_of_unreadable(place, error).error from error


def check_files(checkpoint: OpenCheckpoint) -> None:
    """Check that every recorded file is there, and long enough, and that the last verification has found no loss.

    Reads no data.

    Raises:
        DamageError: something is lost; says what, and what to do.
    """
    from .diagnosis import diagnosis_by_files  # not needed where nothing is wrong

    if diagnosis := diagnosis_by_files(checkpoint, last_verification(checkpoint.path)):
        raise diagnosis.error
