"""Files of ``torch.save`` with other bytes in a member, whole as archives: what a check of archives does not find."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path


def rezip(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Write an archive again with each member changed, given its name below the root, and its checksum made anew."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            archive.writestr(name, change(name.partition("/")[2], data))
