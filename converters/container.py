"""What a destination's files are: how an item is framed in one, and what describes them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..record import Manifest
from ..store import directory, torch_zip
from ..store.torch_zip import Frame


@dataclass(frozen=True, slots=True)
class Container:
    """One kind of destination.

    Args:
        file: the name of a rank's file.
        frame: what lies around the elements of an item, by dtype and shape.
        describe: writes what readers need besides the files, synced, into the finished directory.
        descriptions: the names of what that is.
    """

    name: str
    file: Callable[[int], str]
    frame: Callable[[str, tuple[int, ...]], Frame]
    describe: Callable[[Manifest, Path], None]
    descriptions: tuple[str, ...]


DCP = Container(
    "dcp",
    "__{}_0.distcp".format,
    lru_cache(maxsize=1024)(torch_zip.frame),  # few dtypes and shapes make a checkpoint
    directory.write_manifest,
    ("muonckpt.json", ".metadata"),
)
"""A directory that `torch.distributed.checkpoint` reads, with our manifest."""
