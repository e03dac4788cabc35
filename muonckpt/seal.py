"""Digests by which the description of a checkpoint shows that it is the one that was written.

A text that only we write is closed by a digest of its own bytes (`sealed_text`).  A file that other programs may lay
out anew, as zarr's and Hugging Face's JSON, has a digest of the values in it (`digest_of`).  They detect accidents:
whoever wants to can compute them again.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from .errors import DamageError

_END = ',\n "digest": "{}"}}\n'.format
_END_LENGTH = len(_END("0" * 32))


def sealed_text(text: str) -> str:
    """The text of a JSON object whose closing brace is missing, closed by its last field: the digest of the text."""
    return text + _END(_digest(text))


def unsealed_fields(text: str) -> dict[str, Any]:
    """The fields of a JSON object that `sealed_text` closed, or that earlier releases wrote without a ``digest``.

    Raises:
        DamageError: the text is not the one that was sealed.
        ValueError, TypeError, RecursionError: it is not a JSON object.
    """
    data: dict[str, Any] = json.loads(text)
    if "digest" in data and text != sealed_text(text[:-_END_LENGTH]):
        raise DamageError(
            f"its text is not the one that was written: digest {_digest(text[:-_END_LENGTH])}, "
            f"expected {data['digest']}"
        )
    return data


def digest_of(value: Any) -> str:
    """The xxh3-128, in hex, of JSON data, whatever the order and the spacing of its text."""
    return _digest(json.dumps(value, sort_keys=True, separators=(",", ":")))


def check_digest(recorded: object, value: Any) -> None:
    """Compare JSON data with its recorded digest.

    Raises:
        DamageError: they differ.
    """
    if recorded != digest_of(value):
        raise DamageError(f"it is not the one that was written: digest {digest_of(value)}, expected {recorded}")


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))
