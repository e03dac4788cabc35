"""A file of ``torch.save``: nested data with tensors anywhere in it, read without running anything.

It is one uncompressed zip archive: ``data.pkl`` describes the object, ``data/<key>`` are the elements of its storages.

Sources: ``torch/serialization.py`` (``_save``), ``torch/_utils.py`` and ``torch/_tensor.py`` (``__reduce_ex__``) for
the ways in which a tensor is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ....box import Index
from ....errors import SourceError
from ....record import Extent
from ...io import limits
from ...io.location import Location
from ...io.regular import File, open_regular
from ...reading.dtypes import itemsize
from .inert_pickle import Anything, Global, Record, unpickle
from .stored_zip import ZipMember, member_data, read_members
from .tensor_item import described, is_row_major

_TYPES = ("torch Tensor", "torch.nn.parameter Parameter")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of such a file: its raw little-endian row-major elements are ``payload``.

    ``attributes`` are those that the program has set on it.
    """

    dtype: str
    shape: Index
    payload: Extent
    crc32: int | None
    attributes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One file.  ``content`` is the object as inert data; `tensor` decodes the tensors in it."""

    name: str
    content: object
    members: Mapping[str, ZipMember]

    def tensor(self, value: object) -> SavedTensor:
        """The tensor that part of the content stands for, also if it is a parameter or has attributes.

        Raises:
            SourceError: it is not a tensor, or its elements are not a whole member of the file in row-major order.
        """
        tensor = described(_bare(value))
        member = self.members.get(f"data/{tensor.storage}")
        size = math.prod(tensor.shape) * itemsize(tensor.dtype)
        if member is None or member.length != size or not is_row_major(tensor.shape, tensor.strides):
            raise SourceError(
                f"{self.name}: expected {size} bytes of row-major elements in data/{tensor.storage} for {tensor.dtype} "
                f"of shape {tensor.shape}, found strides {tensor.strides} and {member}"
            )
        payload = Extent(self.name, member.offset, member.length)
        return SavedTensor(tensor.dtype, tensor.shape, payload, member.crc32, _attributes(value))


def read_torch_file(directory: Location, name: str) -> TorchFile:
    """Read a file of a directory, but not its tensors' elements.

    Raises:
        SourceError: it is missing, damaged, big-endian, or not an archive of ``torch.save``.
    """
    with open_regular(directory / name) as file:
        try:
            return _read(file, name)
        except SourceError as error:
            raise SourceError(f"{directory / name}: {error}") from error


def _read(file: File, name: str) -> TorchFile:
    members = {member.name: member for member in read_members(file.read, file.size)}
    if "data.pkl" not in members:
        raise SourceError(f"expected a file of torch.save, found a zip archive of {', '.join(members):.200}")
    if "byteorder" in members and member_data(file.read, members["byteorder"], 64) != b"little":
        raise SourceError("expected little-endian elements")
    pickled = members["data.pkl"].length
    most = limits.SMALL_DESCRIPTION + max(file.on_disk - pickled, 0)
    limits.check_limit(pickled, most, "bytes in data.pkl, in proportion to the rest of the file")
    return TorchFile(name, unpickle(member_data(file.read, members["data.pkl"], pickled), Anything()), members)


def _bare(value: object) -> object:
    """The plain tensor in a parameter, or in a tensor with attributes such as Megatron's ``partition_dim``."""
    match value:
        case Record(kind="torch._utils _rebuild_parameter" | "torch._utils _rebuild_parameter_with_state", args=args):
            return args[0] if isinstance(args, tuple) and args else value
        case Record(kind="torch._tensor _rebuild_from_type_v2", args=(Global() as call, Global() as kind, args, _)):
            return Record(call, args) if kind in _TYPES else value
    return value


def _attributes(value: object) -> Mapping[str, object]:
    match value:
        case Record(
            kind="torch._utils _rebuild_parameter_with_state" | "torch._tensor _rebuild_from_type_v2",
            args=(_, _, _, dict() as state),
        ):
            return {str(name): attribute for name, attribute in state.items()}
    return {}
