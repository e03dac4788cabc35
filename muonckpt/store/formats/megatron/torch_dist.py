"""Megatron's ``torch_dist``: a DCP checkpoint with ``metadata.json``, and everything but tensors in one item.

That item is ``common_state/shard_0_1`` since core 0.19, and the file ``common.pt`` before; programs that read the first
also read the second.  docs/formats/torch_dist.md.

Source: ``megatron/core/dist_checkpointing/{core,serialization}.py`` of core 0.19.2.
"""

from __future__ import annotations

from dataclasses import replace

from ....record import Manifest
from ...io.checksums import xxh3_128
from ...io.location import Location
from ...io.new_file import write_synced
from ..dcp import directory as dcp
from ..native_writer import write_native
from ..signs import COMMON_FILE, COMMON_STATE, MEGATRON_FILE
from ..torch_save.plain_item import plain_item

_BACKEND = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def write_torch_dist(manifest: Manifest, directory: Location) -> None:
    """Write our description of a checkpoint, DCP's and Megatron's, and sync them.

    Where the checkpoint has no common state, an empty one is written: without one Megatron loads no tensor either.
    """
    if not any(blob.key in (COMMON_STATE, COMMON_FILE) for blob in manifest.blobs):
        (directory / COMMON_FILE).unlink(missing_ok=True)  # left by a run that was killed right after this
        data = plain_item({})
        write_synced(directory / COMMON_FILE, data)
        common = (replace(blob, digest=xxh3_128([data])) for blob in dcp.common_file(directory))
        manifest = replace(manifest, blobs=(*manifest.blobs, *common))
    write_native(manifest, directory, {MEGATRON_FILE: _BACKEND})
