"""What is in a checkpoint and how it is laid out, from its metadata alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..columns import UNKNOWN
from ..errors import TargetError, did_you_mean
from ..record import Manifest, StateRecord
from ..store.io.gc_paused import gc_paused
from ..store.io.location import Remote
from ..store.open_checkpoint import OpenCheckpoint, open
from ..store.reading.dtypes import itemsize
from .look.contents import NO_STATE, Contents, Role
from .look.first_look import FirstLook, first_look
from .look.holders import (
    StoredShard,
    balance_of,
    bytes_by_rank,
    cut_in_words,
    held_by,
    newton_schulz_by_rank,
    shards_of,
    writing_ranks,
)
from .look.hyper_parameters import HyperParameters
from .look.module_tree import Branch, module_tree
from .look.symptoms import symptoms_of
from .translate.detection import Detected


@dataclass(frozen=True, slots=True)
class Inspection:
    """A summary of a checkpoint's metadata; sizes are in bytes.

    Attributes:
        checkpoint: where it is.
        kind: its format.
        dialect: the program whose keys it has: ``name`` and ``who``, None if that is unknown, and the ``reasons``.
        provenance: which program made it and how, without its records of flat buffers, which are long.
        tensors, chunks, bytes: the numbers of tensors and of chunks with elements, and the bytes of all elements.
        empty_chunks: the number of chunks without elements, which some ranks write of small tensors.
        other_items, files: the numbers of non-tensor items and of files.
        step: the step that the saving program recorded, or else that of the step counters if they agree; else None.
        steps: ``least`` and ``most`` of the step counters that were ``read``, and the number of ``counters``.
        optimizer: for each update method its ``method``, the ``parameters`` and how many of them are ``matrices``.
        conventions: for each momentum convention the number of momentum ``tensors``, and ``by``: who says so.
        groups: parameter groups with equal options: ``groups`` (their positions), the number of ``parameters``, and
            their ``options``.
        unread_groups: the number of groups of one parameter each that were not read because there are many.
        roles: for each role ``tensors``, ``elements``, ``bytes``, ``dtypes`` and ``slots``.
        layouts: how tensors were laid out on the ranks that wrote them, with the number of ``tensors`` of each layout.
        cuts: how tensors are cut into chunks, in words, with the number of ``tensors``.
        balance: how evenly the files of ranks hold ``bytes`` and, if each matrix is whole on a rank, ``newton_schulz``
            (FLOPs of one iteration); each None if that is unknown.
        buffers: a summary of the flat buffers: sizes, padding, and what each rank holds.
        slots: for each slot of optimizer state ``tensors``, ``elements``, ``bytes`` and ``dtypes``.
        checks: the numbers of chunks by the best checksum that the metadata have of them: ``digest``, ``crc32``,
            ``in_the_item`` (known when it is opened).  Whether they hold is for `verify` to say.
        symptoms: what looks sick: ``kind``, ``message`` and ``names``.
        notes: what could not be told, and why.
        manifest: the manifest, with parameters and slots as the keys of the dialect name them.
    """

    checkpoint: str
    kind: str
    dialect: Mapping[str, Any]
    provenance: Mapping[str, Any]
    tensors: int
    chunks: int
    empty_chunks: int
    bytes: int
    other_items: int
    files: int
    step: int | float | None
    steps: Mapping[str, Any]
    optimizer: tuple[Mapping[str, Any], ...]
    conventions: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]
    unread_groups: int
    roles: tuple[Mapping[str, Any], ...]
    layouts: tuple[Mapping[str, Any], ...]
    cuts: tuple[Mapping[str, Any], ...]
    balance: Mapping[str, Any]
    buffers: tuple[Mapping[str, Any], ...]
    slots: tuple[Mapping[str, Any], ...]
    checks: Mapping[str, int]
    symptoms: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    manifest: Manifest

    def to_json(self) -> dict[str, Any]:
        """JSON data: the attributes under their names, without the manifest."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "manifest")
        return {name: getattr(self, name) for name in fields}

    def matching(self, *globs: str) -> tuple[StateRecord, ...]:
        """The tensors whose key matches one of these shell patterns; all of them if there are none.

        Raises:
            TargetError: a pattern matches no tensor; names the keys that are closest to it.
        """
        tensors = self.manifest.tensors
        for glob in globs:
            if not any(fnmatchcase(tensor.key, glob) for tensor in tensors):
                raise TargetError(f"no tensor matches {glob!r}{did_you_mean(glob, [t.key for t in tensors])}")
        return tuple(t for t in tensors if not globs or any(fnmatchcase(t.key, glob) for glob in globs))

    def shards(self, key: str, *index: int) -> tuple[StoredShard, ...]:
        """The shards of one tensor: which file and rank holds which box.

        Args:
            key: the tensor's.
            index: only those that hold something at these indices of the first dims, such as the number of an expert.

        Raises:
            TargetError: there is no such tensor; names the keys that are closest to it.
        """
        for tensor in self.manifest.tensors:
            if tensor.key == key:
                for dim, (wanted, size) in enumerate(zip(index, tensor.shape, strict=False)):
                    if not 0 <= wanted < size:
                        raise TargetError(f"{key} has the indices 0 to {size - 1} in dim {dim}, not {wanted}")
                return tuple(shard for shard in shards_of(tensor) if shard.holds(index))
        keys = [tensor.key for tensor in self.manifest.tensors]
        raise TargetError(f"no tensor {key!r}{did_you_mean(key, keys)}")

    def on_rank(self, rank: int) -> Mapping[str, tuple[StoredShard, ...]]:
        """The shards in the files that a rank wrote, by key.

        Raises:
            TargetError: no file is that rank's.
        """
        held = held_by(self.manifest, rank)
        if not held:
            ranks = writing_ranks(self.manifest)
            found = f"ranks {ranks[0]} to {ranks[-1]} do" if ranks else "the names of its files tell no rank"
            raise TargetError(f"rank {rank} holds nothing of {self.checkpoint}: {found}")
        return held

    def bytes_of_ranks(self) -> Mapping[int, int]:
        """The bytes of elements in the files of each rank; empty if the names of files do not tell ranks."""
        return bytes_by_rank(self.manifest)

    def tree(self, *globs: str) -> tuple[Branch, ...]:
        """The tensors by module, with layers that are alike as one branch; only those that match a shell pattern."""
        return module_tree(self.matching(*globs))


def inspect(path: str | os.PathLike[str] | Remote) -> Inspection:
    """Summarise what is in a checkpoint of any format and how it is laid out, as ``muonckpt inspect`` prints it.

    Reads metadata, and hyper-parameters and step counters of one element; needs no torch, and executes nothing.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.

    Raises:
        SourceError: there is no checkpoint, or its metadata are damaged or refused.
    """
    with open(path) as checkpoint:
        return inspection_of(checkpoint)


@gc_paused()
def inspection_of(checkpoint: OpenCheckpoint, known: FirstLook | None = None) -> Inspection:
    """The same of a checkpoint that is open already; ``known`` is its `first_look`, if that was taken."""
    known = known or first_look(checkpoint)
    manifest, groups, contents = known.manifest, known.groups, known.contents
    layouts = _layouts(manifest)
    elements = manifest.elements
    empty = int((elements == 0).sum())
    return Inspection(
        checkpoint=str(checkpoint.path),
        kind=checkpoint.format.name,
        dialect=_dialect(known.program),
        provenance=_without_buffers(manifest.provenance),
        tensors=len(manifest.tensors),
        chunks=len(elements) - empty,
        empty_chunks=empty,
        bytes=sum(map(_bytes, manifest.tensors)),
        other_items=len(manifest.blobs),
        files=len({*manifest.columns.names, *(blob.item.file for blob in manifest.blobs)}),
        step=known.step,
        steps=dataclasses.asdict(known.steps),
        optimizer=tuple(_methods(contents)),
        conventions=tuple(_conventions(contents, groups)),
        groups=tuple(
            {"groups": group.groups, "parameters": len(group.parameters), "options": group.options}
            for group in groups.groups
        ),
        unread_groups=groups.unread,
        roles=tuple(_role(role, contents) for role in contents.tensors),
        layouts=tuple({**json.loads(layout), "tensors": count} for layout, count in layouts.most_common()),
        cuts=tuple(
            {"cut": cut, "tensors": count} for cut, count in Counter(map(cut_in_words, manifest.tensors)).most_common()
        ),
        balance=_balance(manifest, contents),
        buffers=_buffers(manifest.provenance),
        slots=tuple(_slot(name, manifest.tensors) for name in dict.fromkeys(t.slot for t in manifest.tensors)),
        checks=_checks(manifest),
        symptoms=tuple(
            symptom.to_json()
            for symptom in symptoms_of(contents, manifest, groups, known.steps, checkpoint.payloads.directory)
        ),
        notes=groups.notes,
        manifest=manifest,
    )


def _without_buffers(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance without its records of buffers, which are long."""
    short = {name: value for name, value in provenance.items() if name != "buffers"}
    if run := short.get("layer_wise"):
        short["layer_wise"] = {name: value for name, value in run.items() if name not in ("buffers", "ranks")}
    return short


def _buffers(provenance: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The summary of flat buffers, which most checkpoints have none of."""
    if not provenance.keys() & {"buffers", "layer_wise"}:
        return ()
    from .buffer_summary import buffer_summary, labelled_buffers  # imports all of flat buffers

    return tuple(buffer_summary(labelled_buffers(provenance)))


def _layouts(manifest: Manifest) -> Counter[str]:
    """The layouts as JSON text, with the number of tensors of each; tensors that were read share few of them."""
    layouts = {id(tensor.layout): tensor.layout for tensor in manifest.tensors}
    texts = {number: json.dumps(layout) for number, layout in layouts.items()}
    return Counter(texts[id(tensor.layout)] for tensor in manifest.tensors if tensor.layout)


def _dialect(program: Detected | str) -> dict[str, Any]:
    if isinstance(program, str):
        return {"name": None, "who": None, "reasons": [program]}
    return {"name": program.dialect.name, "who": program.dialect.who, "reasons": list(program.reasons)}


def _methods(contents: Contents) -> Iterator[dict[str, Any]]:
    """The update methods, by the state of parameters."""
    stateful = [parameter for parameter in contents.parameters.values() if parameter.state]
    names = Counter(parameter.method.name if parameter.method else "unknown" for parameter in stateful)
    matrices = Counter(p.method.name if p.method else "unknown" for p in stateful if p.is_matrix)
    for name, count in names.most_common():
        yield {"method": name, "parameters": count, "matrices": matrices[name]}


def _conventions(contents: Contents, groups: HyperParameters) -> Iterator[dict[str, Any]]:
    """Momentum conventions: as the manifest records them, or else the group, or else the program's."""
    in_groups = groups.conventions
    said: Counter[tuple[str | None, str]] = Counter()
    for tensor in contents.tensors.get(Role.MOMENTUM, ()):
        if tensor.convention:
            said[str(tensor.convention), "the manifest"] += 1
        elif convention := in_groups.get(tensor.name or ""):
            said[convention, "the parameter group"] += 1
        elif contents.dialect and contents.dialect.convention:
            said[str(contents.dialect.convention), f"{contents.dialect.name} has no other"] += 1
        else:
            said[None, "recorded nowhere"] += 1
    for (convention, by), count in said.most_common():
        yield {"convention": convention, "tensors": count, "by": by}


def _balance(manifest: Manifest, contents: Contents) -> dict[str, Any]:
    held = bytes_by_rank(manifest)
    work = newton_schulz_by_rank(contents, list(held)) if held else None
    shares = {"bytes": balance_of(held), "newton_schulz": balance_of(work) if work else None}
    return {name: share and share.to_json() for name, share in shares.items()}


def _checks(manifest: Manifest) -> dict[str, int]:
    columns, stored = manifest.columns, manifest.elements > 0
    digests = columns.has_digest & stored
    sums = (columns.crc32 != UNKNOWN) & ~columns.has_digest & stored
    counts = {"digest": int(digests.sum()), "crc32": int(sums.sum())}
    return {**counts, "in_the_item": int(stored.sum()) - sum(counts.values())}


def _role(role: Role, contents: Contents) -> dict[str, Any]:
    members = contents.tensors[role]
    return {"role": str(role), **_sizes(members), "slots": contents.slots_of(role)}


def _slot(name: str | None, tensors: Sequence[StateRecord]) -> dict[str, Any]:
    members = [tensor for tensor in tensors if tensor.slot == name]
    return {"slot": name or NO_STATE, **_sizes(members)}


def _sizes(members: Sequence[StateRecord]) -> dict[str, Any]:
    return {
        "tensors": len(members),
        "elements": sum(math.prod(tensor.shape) for tensor in members),
        "bytes": sum(map(_bytes, members)),
        "dtypes": sorted({tensor.dtype for tensor in members}),
    }


def _bytes(tensor: StateRecord) -> int:
    return math.prod(tensor.shape) * itemsize(tensor.dtype)
