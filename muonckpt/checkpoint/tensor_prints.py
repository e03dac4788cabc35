"""What a state dict or a checkpoint holds, in a few bytes for each tensor: a value that travels as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..box import Index
from ..errors import SourceError

_FORMAT, _VERSION = "muonckpt fingerprints", 1
_HEX = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """Shape, dtype (torch's name without the prefix) and fingerprint (16 hex digits) of a logical tensor."""

    shape: Index
    dtype: str
    fingerprint: str

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.fingerprint):
            raise ValueError(f"expected a fingerprint of 16 hex digits, found {self.fingerprint!r}")

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Tensors by key, as a manifest names them.  Two are equal where shapes, dtypes and fingerprints are."""

    tensors: Mapping[str, TensorPrint]

    def as_json(self) -> str:
        """JSON text with one line for each tensor, about 100 bytes."""
        lines = ",\n  ".join(
            f'{json.dumps(key)}: {{"shape": {list(tensor.shape)}, "dtype": {json.dumps(tensor.dtype)}, '
            f'"fingerprint": "{tensor.fingerprint}"}}'
            for key, tensor in self.tensors.items()
        )
        return f'{{"format": "{_FORMAT}", "version": {_VERSION},\n "tensors": {{\n  {lines}\n }}}}\n'

    @classmethod
    def from_json(cls, text: str) -> Fingerprints:
        """Read what `as_json` wrote.

        Raises:
            SourceError: it is something else, of another version, or damaged.
        """
        try:
            data = json.loads(text)
            if (data["format"], data["version"]) != (_FORMAT, _VERSION):
                raise SourceError(
                    f"expected {_FORMAT!r} version {_VERSION}, found {data['format']!r} version {data['version']!r}"
                )
            return cls({key: _tensor_print(entry) for key, entry in data["tensors"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SourceError(f"damaged fingerprints: {type(error).__name__}: {error}") from error


def _tensor_print(entry: Mapping[str, Any]) -> TensorPrint:
    if not isinstance(entry["dtype"], str) or not all(type(size) is int and size >= 0 for size in entry["shape"]):
        raise TypeError(f"expected a shape and the name of a dtype, found {entry!r}")
    return TensorPrint(tuple(entry["shape"]), entry["dtype"], entry["fingerprint"])


def differing(live: Mapping[str, TensorPrint], expected: Mapping[str, TensorPrint]) -> Iterator[str]:
    """What differs, a phrase for each key."""
    for key in sorted(live.keys() | expected.keys()):
        here, there = live.get(key), expected.get(key)
        if here is None:
            yield f"{key!r} is missing"
        elif there is None:
            yield f"{key!r} is not expected"
        elif here.shape != there.shape:
            yield f"{key!r} has shape {here.shape}, expected {there.shape}"
        elif here.dtype != there.dtype:
            yield f"{key!r} is {here.dtype}, expected {there.dtype}"
        elif here.fingerprint != there.fingerprint:
            yield f"{key!r} has fingerprint {here.fingerprint}, expected {there.fingerprint}"
