"""The ``.metadata`` file of any content, also such as this package does not write."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from muonckpt.algebra.box import Index
from muonckpt.programs.signs import OUR_MARK
from muonckpt.store.formats.dcp_metadata import Metadata, StoredItem, TensorMeta
from muonckpt.store.formats.torch_save.inert_pickle import Global, Pickler, Record

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def dump_metadata(metadata: Metadata) -> bytes:
    """The file with this content; of ``extra`` it keeps our mark only."""
    hints = {
        (key, offsets): position
        for key, tensor in metadata.tensors.items()
        for position, (offsets, _) in enumerate(tensor.chunks)
    }
    tensors = {key: _tensor_record(tensor) for key, tensor in metadata.tensors.items()}
    state = {
        "state_dict_metadata": tensors | {key: _object("BytesStorageMetadata") for key in metadata.blobs},
        "planner_data": dict(metadata.paths),
        "storage_data": {_index_record(*where, hints): _item_record(item) for where, item in metadata.storage.items()},
        "storage_meta": None,
        "version": metadata.version,
        **({OUR_MARK: True} if OUR_MARK in metadata.extra else {}),
    }
    writer = Pickler()
    writer.put(_object("Metadata", state))
    return bytes(writer.out + pickle.STOP)


def _object(kind: str, state: object = None, module: str = _METADATA) -> Record:
    return Record(Global(f"{module} {kind}"), (), state)


def _size(sizes: Index) -> Record:
    return Record(Global("torch Size"), (sizes,))


def _index_record(key: str, offsets: Index | None, hints: Mapping[tuple[str, Index], int]) -> Record:
    if offsets is None:
        return _object("MetadataIndex", {"fqn": key, "index": None})
    return _object("MetadataIndex", {"fqn": key, "offset": _size(offsets), "index": hints.get((key, offsets))})


def _item_record(item: StoredItem) -> Record:
    assert not item.transforms
    state = {"relative_path": item.file, "offset": item.offset, "length": item.length}
    return _object("_StorageInfo", state, _FILESYSTEM)


def _tensor_record(tensor: TensorMeta) -> Record:
    layout = Record(Global("torch.serialization _get_layout"), ("torch.strided",))
    contiguous = Record(Global(f"{_METADATA} _MEM_FORMAT_ENCODING"), (0,))
    properties = (Global(f"torch {tensor.dtype}"), layout, False, contiguous, False)
    chunks = [
        _object("ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)})
        for offsets, sizes in tensor.chunks
    ]
    return _object(
        "TensorStorageMetadata",
        {"properties": _object("TensorProperties", properties), "size": _size(tensor.size), "chunks": chunks},
    )
