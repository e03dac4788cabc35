"""A check that folders of transformers or accelerate are whole; needs neither of them."""

from __future__ import annotations

import fnmatch
import os
import zipfile
from pathlib import Path

from ..names.errors import SourceError
from ..names.wording import fitted
from ..store.io.location import folders_with, names_in, source_errors
from ..store.verify.audit import verify

ZIPPED = ("*.pt", "*.pth", "*.bin")
"""Files that torch.save writes: zip archives, with a CRC-32 for each of their records."""


def check_saved(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Check every part of a folder that a trainer has saved, and return the parts.

    - Directories that DCP wrote (``pytorch_model_fsdp_0``, ``optimizer_0``): as `muonckpt.verify`, so coverage, bounds,
      CRC-32 and values that are not finite.
    - Weights in safetensors: coverage, bounds and values that are not finite.  The format has no checksums.
    - Files of torch.save (``optimizer.pt``, ``scheduler.pt``): the CRC-32 of every record.

    Raises:
        SourceError: lists all damage, or says that there is nothing to check.
    """
    folder = Path(folder)
    with source_errors(folder):
        names = names_in(folder)
        sharded = [folder / name for name in folders_with(folder, ".metadata")]
    weights = [folder] if fnmatch.filter(names, "*.safetensors") else []
    zipped = [folder / name for pattern in ZIPPED for name in fnmatch.filter(names, pattern)]
    parts = (*sharded, *weights, *zipped)
    if not parts:
        raise SourceError(
            f"{folder}: expected what a trainer saves (DCP directories, safetensors, files of torch.save), found none"
        )
    # Checkpoints with descriptions are verified; the records of zip archives are compared with their checksums.
    faults: list[str] = []
    for part in (*sharded, *weights):
        try:
            faults += [f"{part.name}: {finding.message}" for finding in verify(part).findings]
        except SourceError as error:
            faults.append(str(error))
    for part in zipped:
        try:
            with zipfile.ZipFile(part) as archive:
                if damaged := archive.testzip():
                    faults.append(f"{part.name}: the CRC-32 of {damaged} is not that of its bytes")
        except zipfile.BadZipFile as error:
            faults.append(f"{part.name}: {error}")
    if faults:
        failure = f"{folder} is not whole; resume from another checkpoint:\n- "
        raise SourceError(failure + fitted(faults, "\n- ", failure))
    return parts
