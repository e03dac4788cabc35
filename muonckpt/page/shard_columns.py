"""Where every shard of a checkpoint is, as columns of numbers: a million shards are ten megabytes of JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..chunks import Boxes
from ..columns import UNKNOWN
from ..converters.look.contents import Contents
from ..converters.look.holders import chunk_bytes, cut_in_words, rank_in_name
from ..record import Manifest
from ..store.reading.dtypes import itemsize


def shard_columns(manifest: Manifest, contents: Contents) -> dict[str, Any]:
    """JSON data of the tensors, of the ways in which they are cut, and of their shards in the order of the tensors.

    ``tensors``: columns ``key``, ``role``, ``slot``, ``shape``, ``dtype``, ``bytes``, ``fingerprint`` and ``cut``, the
    number of its cut.  ``cuts``: ``words``, and the boxes ``lo`` and ``hi``, one for each shard of a tensor that is cut
    so.  ``shards``: columns ``file``, the number of a file, and ``offset`` in it: of the elements, or else of the item
    that holds them.  ``files``: columns ``name``, ``rank`` (None if the name does not tell) and ``bytes`` of elements.
    """
    roles = {tensor.key: str(role) for role, tensors in contents.tensors.items() for tensor in tensors}
    cuts: dict[tuple[tuple[int, ...], Boxes], int] = {}
    words: list[str] = []
    cut_of = []
    for tensor in manifest.tensors:
        number = cuts.setdefault((tensor.shape, tensor.boxes), len(cuts))
        if number == len(words):
            words.append(cut_in_words(tensor))
        cut_of.append(number)
    columns = manifest.columns
    held = np.zeros(len(columns.names), np.int64)
    np.add.at(held, columns.file, chunk_bytes(manifest))
    return {
        "tensors": {
            "key": [tensor.key for tensor in manifest.tensors],
            "role": [roles[tensor.key] for tensor in manifest.tensors],
            "slot": [tensor.slot for tensor in manifest.tensors],
            "shape": [list(tensor.shape) for tensor in manifest.tensors],
            "dtype": [tensor.dtype for tensor in manifest.tensors],
            "bytes": [math.prod(tensor.shape) * itemsize(tensor.dtype) for tensor in manifest.tensors],
            "fingerprint": [tensor.fingerprint for tensor in manifest.tensors],
            "cut": cut_of,
        },
        "cuts": [
            {"words": text, "lo": boxes.lo.tolist(), "hi": boxes.hi.tolist()}
            for (_, boxes), text in zip(cuts, words, strict=True)
        ],
        "shards": {
            "file": columns.file.tolist(),
            "offset": np.where(columns.payload == UNKNOWN, columns.item, columns.payload).tolist(),
        },
        "files": {
            "name": list(columns.names),
            "rank": [rank_in_name(name) for name in columns.names],
            "bytes": held.tolist(),
        },
    }


def by_number(shares: Mapping[int, int] | None) -> dict[str, list[int]] | None:
    """Shares of ranks as columns ``rank`` and ``share``; None if they are unknown."""
    return {"rank": list(shares), "share": list(shares.values())} if shares else None
