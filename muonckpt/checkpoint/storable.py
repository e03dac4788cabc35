"""Refusing values that a checkpoint cannot hold: it holds tensors with elements in dense memory, and plain data.

`save` does not write what `load` refuses.
"""

from __future__ import annotations

import io
import marshal
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64_digest

from ..layouts.tensors import local_of
from ..names.errors import DestinationError, SourceError
from ..store.formats.torch_save.inert_pickle import Anything
from ..store.formats.torch_save.plain_item import plain_value
from ..store.io.limits import LimitError
from ..store.reading.dtypes import DTYPES
from .bits import dtype_name


def _is_opaque(tensor: Tensor) -> bool:
    """Return whether neither we nor DCP can look at the elements of this class."""
    # A class that dispatches for itself may hide its elements, unless it defines how DCP writes them.
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if plain or isinstance(tensor, ShardedTensor) or hasattr(tensor, "__create_write_items__"):
        return False
    # It is tried on no elements at all, which costs nothing; a class may raise anything there.
    try:
        tensor.detach().reshape(-1)[:0].cpu().view(torch.uint8).numpy()
    except Exception:
        return True
    return False


_UNWRITABLE: Mapping[str, Callable[[Tensor], bool]] = {
    "has not been initialized": is_lazy,
    "is nested": lambda tensor: tensor.is_nested,
    "is quantized": lambda tensor: tensor.is_quantized,
    "has the layout {0.layout}": lambda tensor: tensor.layout is not torch.strided,
    "is on the device meta, without elements": lambda tensor: tensor.is_meta,
    "has the dtype {0.dtype}": lambda tensor: dtype_name(tensor.dtype) not in DTYPES,
    "is a {0.__class__.__name__}": _is_opaque,
}
"""The tensors that no checkpoint holds, in the words of an error."""


def refuse_unwritable(key: str, value: Tensor) -> None:
    """Refuse a tensor that has no elements in dense memory of a dtype that checkpoints have.

    Raises:
        DestinationError: names the key and the reason.
    """
    if (reason := _unwritable(value)) is not None:
        raise DestinationError(
            f"{key!r} {reason}: expected a tensor with its elements in dense memory; save it as such "
            "tensors, its values and indices for one, or leave it out of the state dict"
        )


def is_writable(value: Tensor) -> bool:
    """Return whether `refuse_unwritable` would let this tensor pass."""
    return _unwritable(value) is None


def _unwritable(value: Tensor) -> str | None:
    local = local_of(value) if isinstance(value, DTensor) else value
    for phrase, is_so in _UNWRITABLE.items():
        if is_so(local):
            return phrase.format(local)
    return None


def refuse_unstorable(flat: Mapping[str, object]) -> None:
    """Refuse a flat state dict with values that a checkpoint cannot hold, or that `load` would refuse.

    Raises:
        DestinationError: names the key, and the reason or the classes.
    """
    for key, value in flat.items():
        if isinstance(value, Tensor):
            refuse_unwritable(key, value)
        # A glance is enough for almost all values; others are saved in memory and read as `load` would.
        elif not _is_plain(value) and (classes := _refused_if_saved(value)) is not None:
            raise DestinationError(
                f"{key!r} holds more than plain data ({classes}), which load would refuse, so it is not saved: save "
                "the needed values as numbers, strings, lists and dicts, such as vars() of a namespace, or allow "
                "its classes on both sides with torch.serialization.add_safe_globals"
            )


def digest_of_object(value: object) -> bytes:
    """Return 8 bytes that are the same for equal plain data, NaN included, and for other objects saved alike."""
    if _is_plain(value):  # marshal's first version has no references, which equal data may have or not
        return xxh3_64_digest(marshal.dumps(value, 0))  # type: ignore[arg-type]
    if isinstance(value, set | frozenset):  # equal ones have other orders in other processes
        return xxh3_64_digest(type(value).__name__.encode() + b"".join(sorted(map(digest_of_object, value))))
    # Any other object is compared by the bytes that would be saved.
    stream = io.BytesIO()
    torch.save(value, stream)
    return xxh3_64_digest(stream.getbuffer())


_PLAIN = (type(None), bool, int, float, str)


def load_plain(key: str, raw: bytes) -> Any:
    """Return the object that the bytes of an item hold; refuse one that is more than plain data.

    Raises:
        LimitError: it would cost too much to find out.
        SourceError: names the item and the classes.
    """
    try:
        return _load_plain(raw)
    except LimitError as error:
        raise LimitError(f"refused {key!r}: {error}") from error
    except SourceError as error:
        raise SourceError(
            f"refused {key!r}: it holds more than plain data ({error}); if you trust the checkpoint, name its "
            "classes with torch.serialization.add_safe_globals"
        ) from error


def _is_plain(value: object) -> bool:
    """Return whether this is plain data at first sight, as almost everything is; subclasses are not."""
    kind = type(value)
    if kind is dict:
        assert isinstance(value, dict)
        return all(type(key) in _PLAIN and _is_plain(part) for key, part in value.items())
    if kind is list or kind is tuple:
        assert isinstance(value, list | tuple)
        return all(map(_is_plain, value))
    return kind in _PLAIN


def _refused_if_saved(value: object) -> str | None:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # whatever an object raises that cannot be pickled
        return f"{type(error).__name__}: {error}"
    try:
        _load_plain(stream.getvalue())
    except LimitError:
        raise
    except SourceError as error:
        return str(error)
    return None


def _load_plain(raw: bytes) -> Any:
    """Return what torch loads from these bytes as plain data; raise a SourceError with the classes that it refuses."""
    stream = io.BytesIO(raw)
    try:
        plain_value(raw, Anything())  # torch's reader has no limits on memory and time
        return torch.load(stream, weights_only=True)  # what passes here holds no code
    except LimitError:
        raise
    except (SourceError, pickle.UnpicklingError) as error:
        stream.seek(0)
        classes = list[str]()
        with suppress(ValueError):  # it is not a zip archive
            # All of its classes at once, so that the user allows them in one go.
            classes = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
        raise SourceError(", ".join(classes) or str(error)) from error
