"""The half of the plug-in that writes: a file for each tensor, whose elements lie whole after a header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy

from muonckpt import SourceError
from muonckpt.algebra.box import Box
from muonckpt.converters.engine.output_files import OutputChunks, OutputFile, bare, chunk_plans
from muonckpt.converters.engine.outputs import OutputTensor
from muonckpt.converters.engine.whole_files import WholeFiles
from muonckpt.record.record import Manifest
from muonckpt.store.io.location import Location


class NpyFiles(WholeFiles):
    """Whole tensors, each in the file ``KEY.npy``; other items go beside the folder, as for safetensors."""

    name = "npy"

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        return [file_of(tensor) for tensor in tensors]

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Write nothing: the headers describe the files."""


def file_of(tensor: OutputTensor) -> OutputFile:
    """Plan the file of a tensor: the header, then all elements row by row.

    Raises:
        SourceError: the format has no such dtype, or the key is no name of a file.
    """
    key, shape, dtype = tensor.record.key, tensor.record.shape, tensor.record.dtype
    if "/" in key or not hasattr(np, dtype):
        raise SourceError(f"tensor {key!r}, {dtype}: .npy files have neither such names nor such elements")
    header_stream = BytesIO()
    npy.write_array_header_1_0(
        header_stream, {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    )
    header = header_stream.getvalue()
    plans = chunk_plans(tensor, [Box.of(shape)], bare)
    chunks = OutputChunks.end_to_end(f"{key}.npy", [tensor], plans, start=len(header))
    return OutputFile(chunks.file, (), chunks, chunks.end, header=lambda sums: header)
