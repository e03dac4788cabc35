"""Proving that what is in memory is what is on disk, in the replicas, or in another process.

Every rank takes the share of the fingerprint of each box that it holds, where the box lies.  One gather brings the
shares to the first rank, which compares those of equal boxes, adds up one of each, and compares the sums; one broadcast
tells all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist

from ..box import Box
from ..errors import AttestError, SourceError
from ..fingerprint import as_hex, combine, fingerprint
from ..store.io.location import location
from ..store.open_checkpoint import OpenCheckpoint, open
from ..store.reading.bands import bands
from ..store.reading.dtypes import itemsize
from ..store.stored_tensor import StoredTensor
from .all_ranks import judged
from .live_boxes import HeldBox, boxes_of_all, held_boxes
from .tensor_prints import Fingerprints, TensorPrint, differing

_LISTED = 12
"""Differences that an error lists; it counts the others."""

_BAND_BYTES = 64 << 20
"""Bytes read at a time of a stored tensor that has no fingerprint."""

Prints = Mapping[str, TensorPrint]

Compared = Callable[[Prints], tuple[Prints, Prints]]
"""Gives, on the first rank, which live tensors are compared, and what they have to be."""


@dataclass(frozen=True, slots=True)
class Attestation:
    """The result of an attestation, the same on every rank.

    Attributes:
        compared: tensors that are equal to what they were compared with.
        compared_bytes: of these tensors, each counted once.
        replicated: boxes that several ranks hold, all of them alike.
        fingerprints: of all live tensors.
    """

    compared: int
    compared_bytes: int
    replicated: int
    fingerprints: Fingerprints

    def __str__(self) -> str:
        return (
            f"{self.compared} tensors ({self.compared_bytes / 1e9:.3g} GB) are equal; "
            f"{self.replicated} boxes that several ranks hold agree"
        )


def fingerprints(state_dict: Mapping[str, Any], *, process_group: dist.ProcessGroup | None = None) -> Fingerprints:
    """Fingerprints of all tensors of a state dict, whatever mesh they are on.  Collective; changes nothing.

    They are those that `save` would write into the manifest, under the same keys.  Each rank reads what it holds, in
    place: of a tensor on a GPU nothing is copied to the host but one number for each box.

    Args:
        state_dict: nested as for `save`; other objects with a ``state_dict`` are asked for it.

    Raises:
        AttestError: ranks that hold the same box of a tensor hold different elements; names tensor, box and ranks.
        LayoutError: nobody holds some elements of a tensor, or boxes overlap in part.
    """
    return _attested(state_dict, lambda live: ({}, {}), "", process_group).fingerprints


def attest(
    state_dict: Mapping[str, Any],
    other: str | os.PathLike[str] | Fingerprints,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Attestation:
    """Prove that the tensors of a state dict are those of a checkpoint, or of another process.  Collective.

    Keys, shapes, dtypes and fingerprints have to be equal, and replicas have to agree.  What is not a tensor is not
    compared.  docs/guide/attest.md says what this costs and what it does not prove.

    Args:
        state_dict: nested as for `save`; other objects with a ``state_dict`` are asked for it.
        other: a path or URL of a checkpoint of any format whose keys are those of the state dict; or fingerprints, of
            which those of the first rank count.  Where a checkpoint records no fingerprint, the first rank reads the
            tensor and takes it.

    Raises:
        AttestError: something differs; lists the keys.
        SourceError: the checkpoint cannot be read.
        LayoutError: nobody holds some elements of a tensor, or boxes overlap in part.
    """
    if isinstance(other, Fingerprints):
        return _attested(
            state_dict, lambda live: (live, other.tensors), " is not what the fingerprints say", process_group
        )
    place = location(other, SourceError)

    def recorded(live: Prints) -> tuple[Prints, Prints]:
        with open(place) as checkpoint:
            return live, {key: _recorded(tensor) for key, tensor in checkpoint.tensors.items()}

    return _attested(state_dict, recorded, f" is not that of {place}", process_group)


def attest_loaded(
    state_dict: Mapping[str, Any],
    checkpoint: OpenCheckpoint,
    sources: Callable[[], Mapping[str, str]],
    process_group: dist.ProcessGroup | None,
) -> Attestation:
    """`attest` what was just loaded.  What began fresh or was kept is compared among replicas only.

    Args:
        sources: gives, on the first rank, the keys of the checkpoint by those of the state dict, of what was loaded.

    Raises:
        AttestError: as `attest`.
    """

    def recorded(live: Prints) -> tuple[Prints, Prints]:
        expected = {
            key: _recorded(checkpoint.tensors[source])
            for key, source in sources().items()
            if source in checkpoint.tensors
        }
        return {key: live[key] for key in live.keys() & expected.keys()}, expected

    return _attested(
        state_dict, recorded, f" is not that of {checkpoint.path}, from which it was loaded", process_group
    )


def _attested(
    state_dict: Mapping[str, Any], compared: Compared, unequal: str, process_group: dist.ProcessGroup | None
) -> Attestation:
    """Compare what the ranks hold with each other, and with what is expected of them.

    Args:
        unequal: what follows "live state" in the error.
    """

    def judge(ranks: list[list[HeldBox]]) -> Attestation:
        live = boxes_of_all(ranks)
        subject, expected = compared(live.tensors)
        faults = [*live.faults, *differing(subject, expected)]
        if faults:
            listed = "; ".join(faults[:_LISTED]) + (f"; and {len(faults) - _LISTED} more" * (len(faults) > _LISTED))
            raise AttestError(f"live state{unequal or ' differs from rank to rank'}: {listed}")
        nbytes = sum(prod(tensor.shape) * itemsize(tensor.dtype) for tensor in subject.values())
        return Attestation(len(subject), nbytes, live.replicated, Fingerprints(live.tensors))

    return judged(process_group, AttestError, lambda: held_boxes(state_dict), judge)


def _recorded(tensor: StoredTensor) -> TensorPrint:
    """Of a stored tensor; what records no fingerprint is read."""
    found = tensor.fingerprint
    if found is None:
        boxes = (
            box for band in bands(Box.of(tensor.shape), _BAND_BYTES // itemsize(tensor.dtype)) for box in band.boxes
        )
        found = as_hex(combine(*(_share(tensor, box) for box in boxes)))
    return TensorPrint(tensor.shape, tensor.dtype, found)


def _share(tensor: StoredTensor, box: Box) -> int:
    words = tensor.reader.words(tensor.record, box)
    return fingerprint(words, box.lo + (0,) * (words.ndim - box.ndim))
