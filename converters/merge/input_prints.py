"""The fingerprints of an input's tensors, as its manifest records them or as its bytes say."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from ...fingerprint import as_hex, combine, fingerprint
from ...record import Chunk, StateRecord
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.bands import bands
from ...store.reading.payloads import payload_of

_ELEMENTS_AT_A_TIME = 1 << 18


def input_prints(source: OpenCheckpoint, keys: Collection[str], threads: int) -> dict[str, str]:
    """The fingerprint of each tensor with one of these keys.  Tensors without a recorded one are read.

    Raises:
        SourceError: a file cannot be read.
    """
    tensors = [tensor for tensor in source.manifest.tensors if tensor.key in keys]
    known = {tensor.key: tensor.fingerprint for tensor in tensors if tensor.fingerprint is not None}
    unknown = [tensor for tensor in tensors if tensor.key not in known]
    stored = [(tensor, chunk) for tensor in unknown for chunk in tensor.chunks if chunk.box.numel]

    def share(place: tuple[StateRecord, Chunk]) -> int:
        return _share(source, *place)

    found = {tensor.key: 0 for tensor in unknown}
    with ThreadPoolExecutor(threads) as pool:
        for (tensor, _), part in zip(stored, pool.map(share, stored), strict=True):
            found[tensor.key] = combine(found[tensor.key], part)
    return {tensor.key: known.get(tensor.key) or as_hex(found[tensor.key]) for tensor in tensors}


def _share(source: OpenCheckpoint, tensor: StateRecord, chunk: Chunk) -> int:
    """The share of a chunk, in bounded memory."""
    total, payload, fragment = 0, payload_of(tensor, chunk), chunk.stored("")
    for band in bands(chunk.box, _ELEMENTS_AT_A_TIME):
        for box in band.boxes:
            words = source.payloads.gather(payload, tensor.dtype, fragment.place_at(box.lo), box.shape)
            total = combine(total, fingerprint(words, box.lo + (0,) * (words.ndim - len(box.lo))))
    return total
