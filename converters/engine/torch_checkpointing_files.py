"""torch_checkpointing's files as a destination: for each rank and each top-level key an archive of ``torch.save``.

``{key}_{rank}.pt`` holds the rank's boxes as plain tensors, and everything that is no tensor.  ``metadata.pkl`` says
for each tensor the mesh, the placements and the ranks that hold a part.  Its meshes are on the device ``meta``, and so
equal no run's: the library's loader then takes its resharding path, which cuts what a rank needs out of plain tensors,
and not the direct one, which needs pickled DTensors.

Source: ``checkpoint_layout.py``, ``dtensor_metadata.py`` and ``default_resharder.py`` of torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import json
import math
import pickle
import pickletools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any

from ...algebra.box import Index, row_major
from ...layouts.buffers.records import GroupBuffer
from ...names.errors import SourceError, TargetError, about
from ...programs.signs import TORCH_CHECKPOINTING_FILE
from ...record.record import Manifest, StateRecord
from ...store.formats import native
from ...store.formats.flat_buffers import ITEMS
from ...store.formats.torch_save.plain_item import plain_value
from ...store.formats.torch_save.stored_zip import (
    MEMBER_ALIGNMENT,
    SERIALIZATION_ID,
    ZipEntry,
    aligned,
    descriptor,
    directory,
    local_header,
    store,
)
from ...store.formats.torch_save.tensor_item import tensor_pickle
from ...store.io.location import Location
from ...store.open_checkpoint import checked_blob
from ...store.reading.payloads import Payloads
from .container import Arranged, WriteRequest
from .output_files import ChunkPlan, Crc32Frame, OutputChunks, OutputFile, bare, items_file
from .outputs import OutputItem
from .rank_files import LocalBoxes, RankFiles
from .staging import ChunkSums

_Path = tuple[str | int, ...]


class TorchCheckpointingFiles(RankFiles):
    """A directory that torch_checkpointing loads, with our manifest: docs/formats/trainers.md.

    Items are in every rank's files as part of the state dicts, and once more, byte for byte, in a file of their own.
    """

    name = "torch_checkpointing"

    frame_of = staticmethod(bare)

    def arrange(self, request: WriteRequest) -> Arranged:
        items = []
        for item in request.outputs.items:  # parts of the archives need their bytes
            data = checked_blob(request.payloads, item.source) if item.source else item.data
            items.append(replace(item, source=None, data=data))
        return super().arrange(replace(request, outputs=replace(request.outputs, items=items)))

    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]
    ) -> tuple[list[OutputFile], list[dict[str, Any]]]:
        if buffers:
            raise TargetError(f"format {self.name} has rows, and no flat buffers: leave out `layout=`")
        values = _values((item.key, item.path, item.data) for item in items)
        files = [items_file(ITEMS, items)]
        for rank, local in enumerate(boxes):
            numbers: defaultdict[str, list[int]] = defaultdict(list)
            for number, output in enumerate(local.outputs):
                numbers[_root(output.record.path)].append(number)
            for root, root_numbers in numbers.items():
                files.append(_archive(_FILE(root, rank), local, root_numbers, values[root]))
        return files, []

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Write the descriptions, and the files of ranks that hold no elements of a key."""
        world = math.prod(manifest.provenance["resharded"][-1]["mesh"].values())
        tensors_by_root: defaultdict[str, list[StateRecord]] = defaultdict(list)
        for tensor in manifest.tensors:
            tensors_by_root[_root(tensor.path)].append(tensor)
        contents: dict[str, bytes] = {}
        with Payloads(folder) as payloads:
            values = _values((blob.key, blob.path, checked_blob(payloads, blob)) for blob in manifest.blobs)
            for root in [*tensors_by_root, *values]:
                # Numbers of the run, such as its step, have no resharder: every rank reads its own file.
                tensors = tensors_by_root[root]
                numbers = [] if any(tensor.shape for tensor in tensors) else _numbers(tensors, payloads)
                for name in (_FILE(root, rank) for rank in range(world)):
                    if name not in manifest.columns.names:
                        contents[name] = _members(values[root], 0, numbers=numbers)
        contents[TORCH_CHECKPOINTING_FILE] = pickle.dumps(_sharding(manifest, world), protocol=2)
        native.write_torch_checkpointing(manifest, folder, contents)


_FILE = "{}_{}.pt".format


@dataclass(frozen=True, slots=True)
class _Number:
    """Holds a tensor without dims: its path in a file, its dtype, and its bytes."""

    path: _Path
    dtype: str
    data: bytes


def _numbers(tensors: Iterable[StateRecord], payloads: Payloads) -> list[_Number]:
    numbers = []
    for tensor in tensors:
        (chunk,) = tensor.chunks
        assert chunk.payload is not None, "these files are not compressed"
        numbers.append(_Number(tensor.path[1:], tensor.dtype, bytes(payloads.view(chunk.payload))))
    return numbers


def _values(items: Iterable[tuple[str, _Path, bytes]]) -> defaultdict[str, dict[_Path, bytes]]:
    """Return the pickles of plain items by their top-level keys and their paths below."""
    values: defaultdict[str, dict[_Path, bytes]] = defaultdict(dict)
    for key, path, data in items:
        with about(f"item {key!r}, which `select=` or `tensors_only=True` can leave out"):
            values[_root(path)][path[1:]] = _part(plain_value(data))
    return values


def _root(path: _Path) -> str:
    root = str(path[0])
    if "/" in root or not root.isprintable():
        raise SourceError(f"key {root!r}: torch_checkpointing writes a file for each top-level key, expected its name")
    return root


def _archive(file: str, local: LocalBoxes, numbers: Sequence[int], values: Mapping[_Path, bytes]) -> OutputFile:
    """Return the file of some of a rank's boxes and of pickled values, by their paths in it."""
    # The members of tensors come first, each framed as in a zip archive; their pickles refer to them by number.
    end, plans, entries, leaves = 0, list[ChunkPlan](), list[ZipEntry](), dict(values)
    for member, number in enumerate(numbers):
        plan, record = local.plans[number], local.outputs[number].record
        entry = ZipEntry(f"data/{member}", end, plan.frame.payload_length, 0)
        frame = Crc32Frame(entry.size, local_header(entry), partial(_descriptor, entry), len(descriptor(entry)))
        entries.append(entry)
        plans.append(replace(plan, frame=frame))
        leaves[record.path[1:]] = _tensor(plan.dtype, plan.box.shape, member)
        end = aligned(end + frame.length)

    # The directory repeats the checksums, so the end of the archive is written last.
    def footer(sums: ChunkSums) -> bytes:
        stored = zip(entries, sums["checksum"].tolist(), strict=True)
        return _members(leaves, end, (replace(entry, crc32=crc32) for entry, crc32 in stored))

    outputs = [local.outputs[number] for number in numbers]
    chunks = OutputChunks.end_to_end(file, outputs, plans, 0, MEMBER_ALIGNMENT)
    return OutputFile(file, (), chunks, end + len(_members(leaves, end, entries)), footer=footer)


def _descriptor(entry: ZipEntry, crc32: int) -> bytes:
    return descriptor(replace(entry, crc32=crc32))


def _members(
    leaves: Mapping[_Path, bytes], start: int, stored: Iterable[ZipEntry] = (), numbers: Sequence[_Number] = ()
) -> bytes:
    """Return the end of an archive, behind the members of tensors, which end at byte ``start``.

    If there are none of these, it may have numbers, which are small tensors.

    The pickle follows the tensors, whose checksums are known only then.  Without a ``.format_version`` torch looks up
    where members lie, and does not expect it first.
    """
    values = dict(leaves)
    for member, number in enumerate(numbers):
        values[number.path] = _tensor(number.dtype, (), member)
    members = (
        *((f"data/{member}", number.data) for member, number in enumerate(numbers)),
        ("data.pkl", b"\x80\2" + _tree(values) + pickle.STOP),
        ("byteorder", b"little"),
        ("version", b"3\n"),
        (".data/serialization_id", SERIALIZATION_ID),
    )
    data, entries = store(members, start)
    return data + directory((*stored, *entries), start + len(data))


def _tensor(dtype: str, shape: Index, member: int) -> bytes:
    """Return the pickle of a tensor, whose elements are a member of the archive, as part of another."""
    return pickletools.optimize(tensor_pickle(dtype, shape, b"%d" % member))[2:-1]


def _part(value: object) -> bytes:
    """Return the pickle of plain data without its head, its end and a memo, as part of another."""
    out = BytesIO()
    pickler = pickle.Pickler(out, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]


def _tree(leaves: Mapping[_Path, bytes]) -> bytes:
    """Return the pickle of nested dicts and lists with these pickled leaves; integers from 0 on are a list's."""
    if set(leaves) == {()}:
        return leaves[()]
    below: defaultdict[str | int, dict[_Path, bytes]] = defaultdict(dict)
    for path, leaf in leaves.items():
        if not path:
            raise SourceError("expected either a value or what is below it, found both under one key")
        below[path[0]][path[1:]] = leaf
    if below and set(below) == set(range(len(below))):
        return b"](" + b"".join(_tree(below[number]) for number in range(len(below))) + b"e"
    return b"}(" + b"".join(_part(key) + _tree(entries) for key, entries in below.items()) + b"u"


def _sharding(manifest: Manifest, world: int) -> dict[str, Any]:
    """Return the content of ``metadata.pkl``: for each tensor its sharding and the ranks that hold a part."""
    shardings: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for tensor in manifest.tensors:
        root = _root(tensor.path)
        path = json.dumps(list(tensor.path[1:]), separators=(",", ":"))
        ranks = sorted(int(chunk.item.file[len(root) + 1 : -len(".pt")]) for chunk in tensor.chunks)
        sharding = {"type": "DTensorShardingMetadata", "data": _cut(tensor, world)}
        shardings[root][path] = [{"sharding_metadata": sharding, "ranks": tuple(ranks)}]
    files = dict.fromkeys(range(world))  # they have the library's own names
    roots = {}
    for root, paths in shardings.items():
        roots[root] = {"nested_path_to_metadata": paths, "rank_to_layout_info": files}
    return {"metadata": roots, "world_size": world, "version": "2.0"}


def _cut(tensor: StateRecord, world: int) -> dict[str, Any]:
    """Return a tensor's mesh and placements; one without dims is replicated."""
    layout = tensor.layout or {"mesh": [world], "ranks": range(world), "placements": ["Replicate"]}
    placements: list[dict[str, Any]] = []
    for text in layout["placements"]:
        cut = text.removeprefix("Shard(").removesuffix(")")
        placements.append({"type": "Shard", "dim": int(cut)} if cut.isdigit() else {"type": cut})
    return {
        "global_shape": [*tensor.shape],
        "dtype": f"torch.{tensor.dtype}",
        "stride": [*row_major(tensor.shape)],
        "mesh_spec": {
            "device_type": "meta",
            "mesh_shape": tuple(layout["mesh"]),
            "mesh_data": tuple(layout["ranks"]),
            "mesh_dim_names": None,
        },
        "placements": placements,
    }
