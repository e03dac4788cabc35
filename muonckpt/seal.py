"""Digests by which the description of a checkpoint shows that it is the one that was written.

A text that only we write is closed by a digest of its own bytes (`sealed_text`).  A file that other programs may lay
out anew, as zarr's and Hugging Face's JSON, has a digest of the values in it (`digest_of`).  They detect accidents:
whoever wants to can compute them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

from .errors import DamageError

_END = ',\n "digest": "{}"}}\n'.format
_END_LENGTH = len(_END("0" * 32))


def sealed_text(text: str) -> str:
    """The text of a JSON object whose closing brace is missing, closed by its last field: the digest of the text."""
    return "".join(sealed_parts([text]))


def sealed_parts(parts: Iterable[str]) -> Iterator[str]:
    """The same for a text in parts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.encode(errors="surrogatepass"))
        yield part
    yield _END(digest.hexdigest())


def check_seal(text: bytes, fields: Mapping[str, Any]) -> None:
    """Check a JSON object that `sealed_text` closed; other programs write it without a ``digest``.

    Args:
        text: its text as UTF-8.
        fields: the fields in it.

    Raises:
        DamageError: the text is not the one that was sealed.
    """
    if "digest" not in fields:
        return
    digest = xxhash.xxh3_128_hexdigest(memoryview(text)[:-_END_LENGTH])
    if text[-_END_LENGTH:] != _END(digest).encode():
        raise DamageError(f"its text is not the one that was written: digest {digest}, expected {fields['digest']}")


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
