"""Checkouts of other programs, which tests of real migrations need and which are in no registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def checkout(package: str) -> Path:
    """The folder with this package, in the folder that PEERS names or in a folder of it; skips the test without it."""
    folder = Path(os.environ["PEERS"]) if "PEERS" in os.environ else None
    places = [folder, *sorted(folder.iterdir())] if folder is not None else []
    package_places = [place for place in places if (place / package / "__init__.py").is_file()]
    if not package_places:
        pytest.skip(f"PEERS does not name a folder with a checkout of {package}")
    return package_places[0]
