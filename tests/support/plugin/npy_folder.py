"""A format that another package brings: a folder of ``.npy`` files, each a tensor that is called like its file.

This, ``npy_writer`` and the entry point beside them are a whole plug-in, which muonckpt finds once it is installed: to
begin with one of your own, copy it.
"""

from __future__ import annotations

from io import BytesIO
from tokenize import TokenError

from numpy.lib import format as npy

from muonckpt import DamageError, SourceError
from muonckpt.algebra.box import Box
from muonckpt.record.record import Chunk, Chunks, Extent, Manifest, StateRecord
from muonckpt.store.formats.registry import Format
from muonckpt.store.io.location import Location
from muonckpt.store.io.regular import open_regular
from muonckpt.store.reading.payloads import Payloads, Reader

LONGEST_HEADER = 10_000


def reader(path: Location) -> Reader:
    """Read headers only; elements are read from the extents that the manifest names."""
    files = sorted((file for file in path.iterdir() if file.name.endswith(".npy")), key=lambda file: file.name)
    return Reader(Manifest(tuple(map(record, files)), (), {"format": "npy"}), Payloads(path))


def record(file: Location) -> StateRecord:
    """Read the header of the tensor in a file.

    Raises:
        DamageError: the header is damaged, or the file has another size than it says.
        SourceError: its elements are big-endian, or Python objects.
    """
    key = file.name.removesuffix(".npy")
    with open_regular(file) as opened:
        head = BytesIO(opened.read(0, min(opened.size, LONGEST_HEADER)))
        try:
            npy.read_magic(head)
            shape, fortran_order, dtype = npy.read_array_header_1_0(head, max_header_size=LONGEST_HEADER)
        except (ValueError, SyntaxError, TokenError) as error:  # numpy parses headers as Python does
            raise DamageError(f"{file}: {error}") from error
        if dtype.byteorder == ">" or dtype.hasobject:  # a record's elements are little-endian
            raise SourceError(f"{file}: elements of {dtype.str} cannot be read as they lie")
        payload = Extent(file.name, head.tell(), opened.size - head.tell())
        size = dtype.itemsize * Box.of(shape).numel
        if fortran_order or payload.length != size:
            raise DamageError(f"{file}: expected {size} bytes of elements row by row, found {payload.length}")
    chunks = Chunks.of([Chunk(Box.of(shape), payload, payload)], len(shape))
    return StateRecord(key, (key,), shape, dtype.name, chunks)


FORMAT = Format(
    "a folder of .npy files",
    reader,
    signs=("*.npy",),
    written_as="npy",
    writer="npy_writer:NpyFiles",  # imported when it is asked for
)
