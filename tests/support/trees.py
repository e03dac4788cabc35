"""All files of a checkpoint, for scripts too: without torch."""

from __future__ import annotations

from pathlib import Path


def tree(path: Path) -> dict[str, bytes] | None:
    """The bytes of all files below a directory, or of one that is none, by path; None if there is nothing."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files} if path.exists() else None
