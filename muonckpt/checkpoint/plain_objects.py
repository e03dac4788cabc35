"""Items that are not tensors: what `load` accepts of them, and `save` therefore writes, is plain data."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress

import torch

from ..errors import DestinationError, SourceError
from ..store.formats.torch_save.inert_pickle import Anything
from ..store.formats.torch_save.plain_item import plain_value
from ..store.io.limits import LimitError

_PLAIN = (type(None), bool, int, float, str)


def refuse_code(key: str, raw: bytes) -> None:
    """Refuse an item that is more than plain data.

    Raises:
        LimitError: it would cost too much to find out.
        SourceError: names the item and the classes.
    """
    try:
        classes = _refused(raw)
    except LimitError as error:
        raise LimitError(f"refused {key!r}: {error}") from error
    if classes is not None:
        raise SourceError(
            f"refused {key!r}: it holds more than plain data ({classes}); if you trust the checkpoint, name its "
            "classes with torch.serialization.add_safe_globals"
        )


def refuse_unloadable(key: str, value: object) -> None:
    """Refuse to save an object that `load` would refuse.

    Raises:
        DestinationError: names the key and the classes.
    """
    if _is_plain(value):
        return
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # whatever an object raises that cannot be pickled
        classes: str | None = f"{type(error).__name__}: {error}"
    else:
        classes = _refused(stream.getvalue())
    if classes is not None:
        raise DestinationError(
            f"{key!r} holds more than plain data ({classes}), which load would refuse, so it is not saved: save what "
            "is needed of it as numbers, strings, lists and dicts, such as vars() of a namespace, or allow its classes "
            "on both sides with torch.serialization.add_safe_globals"
        )


def _is_plain(value: object) -> bool:
    """Whether this is plain data at first sight, as almost everything is; objects of subclasses are looked at."""
    kind = type(value)
    if kind is dict:
        assert isinstance(value, dict)
        return all(type(key) in _PLAIN and _is_plain(part) for key, part in value.items())
    if kind is list or kind is tuple:
        assert isinstance(value, list | tuple)
        return all(map(_is_plain, value))
    return kind in _PLAIN


def _refused(raw: bytes) -> str | None:
    """The classes for which torch does not load these bytes as plain data; None: it loads them."""
    stream = io.BytesIO(raw)
    try:
        plain_value(raw, Anything())  # torch's reader has no limits on memory and time
        torch.load(stream, weights_only=True)  # what passes here holds no code
    except LimitError:
        raise
    except (SourceError, pickle.UnpicklingError) as error:
        stream.seek(0)
        with suppress(ValueError):  # it is not a zip archive
            return ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(stream)) or str(error)
        return str(error)
    return None
