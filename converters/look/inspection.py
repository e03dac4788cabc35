"""The contents and layout of a checkpoint, from its metadata alone: as data, and as labelled lines."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from ...algebra.box import box_at
from ...names.collector import gc_paused
from ...names.errors import SourceError, TargetError
from ...names.renaming import wrappers_in
from ...names.wording import Finding, counted, fields_of, listed, moment, size
from ...programs.model_view import ModelView, Role
from ...programs.quantised import describe_quantised, scales_of_quantised
from ...record.columns import UNKNOWN
from ...record.record import Manifest, StateRecord, by_key, entry_keys, find_key, match_keys, names_of
from ...store.io.location import Remote, location
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.payloads import tensor_bytes
from ...store.verify.diagnosis import Diagnosis, diagnosis_by_files, open_damaged
from ...store.verify.verification import Verification, unless_removed
from .contents import NO_STATE, FirstLook, first_look, folded_names, option_value, ranges, unknown_state
from .holders import (
    Branch,
    StoredShard,
    balance_of,
    bytes_by_rank,
    cut_text,
    module_tree,
    newton_schulz_by_rank,
    shards_of,
    shards_on_rank,
    writing_ranks,
)
from .symptoms import symptoms_of


@dataclass(frozen=True, slots=True)
class Inspection:
    """A summary of a checkpoint's metadata; sizes are in bytes.

    Attributes:
        dialect: the program whose keys it has: ``name`` and ``who`` (None if unknown), and the ``reasons``.
        provenance: which program made it and how, without its long records of flat buffers.
        chunks: how many have elements; some ranks write ``empty_chunks`` of small tensors.
        other_items: the number of items that are not tensors.
        step: as the saving program recorded it, or else as all step counters say; else None.
        steps: ``least`` and ``most`` of the step counters that were ``read``, and the number of ``counters``.
        optimizer: for each update ``method`` the number of ``parameters``, and of ``matrices`` among them.
        unknown_state: the keys of optimizer state that is in no slot of a parameter, as nested or encoded state.
        conventions: for each momentum convention the number of ``tensors``, and ``by``: who says so.
        groups: groups with equal options: the ``name`` of what steps them (empty if unknown), their positions
            (``groups``), the number of ``parameters``, their names in short (``holds``), and ``options``.
        unread_groups: the number of groups of one parameter that were not read because there are many.
        roles: for each role ``tensors``, ``elements``, ``bytes``, ``dtypes`` and ``slots``.
        layouts: each layout on the ranks that wrote, with the number of ``tensors``.
        cuts: each way to cut tensors into chunks, in words, with the number of ``tensors``.
        balance: how evenly the files of ranks hold ``bytes`` and, if each matrix is whole on a rank, ``newton_schulz``
            (FLOPs of one iteration); each None if unknown.
        buffers: `buffer_summary` of the flat buffers.
        quantised: the keys of quantised weights, each with the key of its scales.
        wrappers: parts that wrappers have put into names of parameters, and into how many.
        slots: for each slot of optimizer state ``tensors``, ``elements``, ``bytes`` and ``dtypes``.
        checks: the numbers of chunks by the best checksum in the metadata: ``digest``, ``crc32``, ``in_the_item``
            (known when it is opened).  `verify` says whether they hold.
        verified: when it was last verified, if that is recorded and its files are the same.
        diagnosis: the losses that names and sizes of files show, and the next step.
        symptoms: other suspicious facts.
        notes: what could not be told, and why.
        manifest: with parameters and slots as the dialect's keys name them.
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
    unknown_state: tuple[str, ...]
    conventions: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]
    unread_groups: int
    roles: tuple[Mapping[str, Any], ...]
    layouts: tuple[Mapping[str, Any], ...]
    cuts: tuple[Mapping[str, Any], ...]
    balance: Mapping[str, Any]
    buffers: tuple[Mapping[str, Any], ...]
    quantised: Mapping[str, str]
    wrappers: Mapping[str, int]
    slots: tuple[Mapping[str, Any], ...]
    checks: Mapping[str, int]
    verified: Verification | None
    diagnosis: Diagnosis
    symptoms: tuple[Finding, ...]
    notes: tuple[str, ...]
    manifest: Manifest

    def to_json(self) -> dict[str, Any]:
        return _fields_without(fields_of(self), {"manifest"})

    def matching(self, *globs: str) -> tuple[StateRecord, ...]:
        """Return the tensors with these keys, or that match these shell patterns; all of them if there are none.

        Raises:
            TargetError: as `match_keys`.
        """
        tensors = self.manifest.tensors
        keys = match_keys(globs, entry_keys(tensors), names_of(tensors))
        return tuple(tensor for tensor in tensors if tensor.key in keys)

    def tensor(self, word: str) -> StateRecord:
        """Return the tensor with this key; its first parts may be left out.

        Raises:
            TargetError: it is none, or several; names them.
        """
        tensors = by_key(self.manifest.tensors)
        return tensors[find_key(word, [*tensors], names_of(tensors.values()))]

    def selected(self, words: str) -> tuple[StateRecord, tuple[int | slice | EllipsisType, ...]]:
        """Return the tensor that ``KEY`` or ``KEY[100:200, 3]`` names, and the indices, if any.

        Raises:
            TargetError: as `tensor`; or the indices are not such as numpy takes.
        """
        match = _SELECTION.fullmatch(words)
        if match is None or any(tensor.key == words for tensor in self.manifest.tensors):
            return self.tensor(words), ()
        tensor, indices = self.tensor(match[1]), list[int | slice | EllipsisType]()
        for text in match[2].split(","):
            if (index := _INDEX.fullmatch(text)) is None:
                raise TargetError(f"expected indices such as [17] or [3, :, -64:], found {text.strip()!r} among them")
            number, dots, start, stop = index.groups()
            bounds = slice(int(start) if start else None, int(stop) if stop else None)
            indices.append(int(number) if number is not None else ... if dots else bounds)
        return tensor, tuple(indices)

    def shards(self, key: str, *index: int | slice | EllipsisType) -> tuple[StoredShard, ...]:
        """Return the shards of one tensor: which file and rank holds which box.

        Args:
            index: only those with elements there, as numpy would index the tensor: ``17`` for an expert,
                ``slice(100, 200)`` for rows.  `muonckpt.open(path).tensors[key].parts` says at which bytes.

        Raises:
            TargetError: there is no such tensor, or it has no such indices; names the closest keys.
        """
        tensor = self.tensor(key)
        try:
            box = box_at(tensor.shape, index)
        except IndexError as error:
            raise TargetError(f"{tensor.key} of shape {tensor.shape} has {error}") from None
        return tuple(shard for shard in shards_of(tensor) if not index or shard.box & box)

    def on_rank(self, rank: int) -> Mapping[str, tuple[StoredShard, ...]]:
        """Return the shards in the files that a rank wrote, by key.

        Raises:
            TargetError: no file is that rank's.
        """
        shards = shards_on_rank(self.manifest, rank)
        if not shards:
            ranks = writing_ranks(self.manifest)
            holders = f"ranks {ranks[0]} to {ranks[-1]} do" if ranks else "the names of its files tell no rank"
            raise TargetError(f"rank {rank} holds nothing of {self.checkpoint}: {holders}")
        return shards

    def bytes_of_ranks(self) -> Mapping[int, int]:
        """Return the bytes of elements in the files of each rank; empty if the names of files do not tell ranks."""
        return bytes_by_rank(self.manifest)

    def tree(self, *globs: str) -> tuple[Branch, ...]:
        """Return the tensors that match a shell pattern by module, with layers that are alike as one branch."""
        return module_tree(self.matching(*globs))


def _fields_without(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


_SELECTION = re.compile(r"(.+)\[([^\[\]]+)\]")
_INDEX = re.compile(r"\s*(?:(-?[0-9]{1,18})|(\.\.\.)|(-?[0-9]{1,18})?\s*:\s*(-?[0-9]{1,18})?)\s*")


def inspect(path: str | os.PathLike[str] | Remote) -> Inspection:
    """Summarise the contents and layout of a checkpoint of any format, as ``muonckpt inspect`` prints it.

    Reads metadata, hyper-parameters and step counters; needs no torch, and executes nothing.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.

    Raises:
        SourceError: there is no checkpoint, its metadata are damaged or refused, or it was removed meanwhile.
        UnavailableError: it cannot be looked at now, or not by this user.
    """
    place = location(path, SourceError)
    with unless_removed(place), open_damaged(place) as checkpoint:
        return inspection_of(checkpoint)


@gc_paused()
def inspection_of(checkpoint: OpenCheckpoint, look: FirstLook | None = None) -> Inspection:
    """Summarise an open checkpoint; ``look`` is its `first_look`, if that was taken."""
    look = look or first_look(checkpoint)
    manifest, view, program = look.manifest, look.view, look.program
    tensors, elements = manifest.tensors, manifest.elements
    empty_chunks = int((elements == 0).sum())
    # The program, and the provenance without its long records.
    dialect: dict[str, Any] = {"name": None, "who": None, "reasons": [program]}
    if not isinstance(program, str):
        dialect = {"name": program.dialect.name, "who": program.dialect.who, "reasons": list(program.reasons)}
    provenance = _fields_without(manifest.provenance, {"buffers"})
    if run := provenance.get("layer_wise"):
        provenance["layer_wise"] = _fields_without(run, {"buffers", "ranks"})
    # Tensors by role and by slot.
    roles = []
    for role, members in view.tensors.items():
        roles.append({"role": str(role), **_sizes(members), "slots": view.slots_of(role)})
    by_slot: defaultdict[str | None, list[StateRecord]] = defaultdict(list)
    for tensor in tensors:
        by_slot[tensor.slot].append(tensor)
    # Losses that the files show, and suspicious facts about the others.
    diagnosis = diagnosis_by_files(checkpoint)
    notes = [*look.notes, *([f"not read: {listed(checkpoint.not_read)}"] if checkpoint.not_read else [])]
    return Inspection(
        checkpoint=str(checkpoint.path),
        kind=checkpoint.format.name,
        dialect=dialect,
        provenance=provenance,
        tensors=len(tensors),
        chunks=len(elements) - empty_chunks,
        empty_chunks=empty_chunks,
        bytes=sum(map(tensor_bytes, tensors)),
        other_items=len(manifest.blobs),
        files=len({*manifest.columns.names, *(blob.item.file for blob in manifest.blobs)}),
        step=look.step,
        steps=dataclasses.asdict(look.steps),
        optimizer=tuple(_method_rows(view)),
        unknown_state=tuple(unknown_state(look, checkpoint.not_read)),
        conventions=tuple(_conventions(view)),
        groups=tuple(_groups(view)),
        unread_groups=look.unread_groups,
        roles=tuple(roles),
        layouts=tuple(_layouts(tensors)),
        cuts=tuple({"cut": cut, "tensors": count} for cut, count in Counter(map(cut_text, tensors)).most_common()),
        balance=_rank_balances(manifest, view),
        buffers=_buffers(manifest.provenance),
        quantised=scales_of_quantised(tensors),
        wrappers=wrappers_in(view.parameters),
        slots=tuple({"slot": slot or NO_STATE, **_sizes(members)} for slot, members in by_slot.items()),
        checks=_checksum_counts(manifest),
        verified=diagnosis.verified,
        diagnosis=diagnosis,
        symptoms=symptoms_of(look, diagnosis.damage),
        notes=tuple(notes),
        manifest=manifest,
    )


def _layouts(tensors: Sequence[StateRecord]) -> Iterator[dict[str, Any]]:
    """Yield each layout with the number of its tensors, which mostly share it."""
    texts: dict[int, str] = {}
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.layout:
            if id(tensor.layout) not in texts:
                texts[id(tensor.layout)] = json.dumps(tensor.layout)
            counts[texts[id(tensor.layout)]] += 1
    for text, count in counts.most_common():
        yield {**json.loads(text), "tensors": count}


def _buffers(provenance: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    if not provenance.keys() & {"buffers", "layer_wise"}:
        return ()
    from .buffer_summary import buffer_summary, labelled_buffers  # imports all of flat buffers

    return tuple(buffer_summary(labelled_buffers(provenance)))


def _groups(view: ModelView) -> Iterator[dict[str, Any]]:
    """Yield the groups, each with the name of what steps it: as its option says, or the one method of its members."""
    # A group without such an option has the name of its members' method, if that is one.
    option = view.dialect.method_option if view.dialect else None
    for group in view.groups:
        members = [view.parameters[name] for name in group.parameters if name in view.parameters]
        methods = {parameter.method.name for parameter in members if parameter.method}
        name = group.options.get(option or "")
        if not isinstance(name, str):
            name = methods.pop() if len(methods) == 1 else ""
        yield {
            "name": name,
            "groups": group.positions,
            "parameters": len(group.parameters),
            "holds": folded_names(group.parameters),
            "options": group.options,
        }


def _method_rows(view: ModelView) -> Iterator[dict[str, Any]]:
    parameters, matrices = Counter[str](), Counter[str]()
    for parameter in view.parameters.values():
        if parameter.state:
            name = parameter.method.name if parameter.method else "unknown"
            parameters[name] += 1
            matrices[name] += parameter.is_matrix
    for name, count in parameters.most_common():
        yield {"method": name, "parameters": count, "matrices": matrices[name]}


def _conventions(view: ModelView) -> Iterator[dict[str, Any]]:
    """Count momentum conventions as the manifest records them, or else the group, or else the program."""
    counts: Counter[tuple[str | None, str]] = Counter()
    for tensor in view.tensors_of(Role.MOMENTUM):
        authority, convention = next(iter(view.conventions(tensor).items()), ("recorded nowhere", None))
        counts[convention, authority] += 1
    for (convention, authority), count in counts.most_common():
        yield {"convention": convention, "tensors": count, "by": authority}


def _rank_balances(manifest: Manifest, view: ModelView) -> dict[str, Any]:
    amounts = bytes_by_rank(manifest)
    work = newton_schulz_by_rank(view, list(amounts)) if amounts else None
    return {"bytes": balance_of(amounts) if amounts else None, "newton_schulz": balance_of(work) if work else None}


def _checksum_counts(manifest: Manifest) -> dict[str, int]:
    columns, stored = manifest.columns, manifest.elements > 0
    digests = columns.has_digest & stored
    sums = (columns.crc32 != UNKNOWN) & ~columns.has_digest & stored
    counts = {"digest": int(digests.sum()), "crc32": int(sums.sum())}
    return {**counts, "in_the_item": int(stored.sum()) - sum(counts.values())}


def _sizes(members: Sequence[StateRecord]) -> dict[str, Any]:
    return {
        "tensors": len(members),
        "elements": sum(math.prod(tensor.shape) for tensor in members),
        "bytes": sum(map(tensor_bytes, members)),
        "dtypes": sorted({tensor.dtype for tensor in members}),
    }


LOOK_AT = "look at"
"""The label of suspicious facts."""

_MAX_LINES = 8
_MAX_GROUPS = 24
_MAX_NAMES = 36
"""Characters of the names of a group's parameters; `.groups` has them whole."""

_MAX_CUTS = 3
_MAX_OPTIONS = 3
"""Options of a group that no other group of its method contrasts with; the others are counted."""

_FIRST = ("algorithm", "lr", "weight_decay", "wd", "momentum", "mu", "betas", "beta1", "beta2", "adamw_betas", "step",
          "convention", "nesterov")  # fmt: skip
"""Options that come first; what programs call them does not matter otherwise."""

_MAKERS = ("program", "torch", "python", "world")
"""Entries of the provenance that say where a checkpoint was made."""

_OTHER_LINES = frozenset({*_MAKERS, "platform", "format", "version", "step", "resharded"})


def overview(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the summary of a checkpoint as labelled lines, with suspicious facts; the tables are not included."""
    yield from description(inspection)
    yield from _limited_lines(LOOK_AT, [symptom.message for symptom in inspection.symptoms])


def description(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the summary without suspicious facts; an empty label goes on with the one above."""
    yield "checkpoint", inspection.checkpoint
    # The program of the checkpoint, and its origin.
    dialect = inspection.dialect
    keys = f"of {dialect['name']} ({dialect['who']})" if dialect["name"] else "unknown"
    yield "kind", f"{inspection.kind}, keys {keys}"
    for reason in () if dialect["name"] else dialect["reasons"]:
        yield "", reason
    makers = [f"{name} {inspection.provenance[name]}" for name in _MAKERS if inspection.provenance.get(name)]
    if makers:
        yield "made by", ", ".join(makers).removeprefix("program ")
    for name, value in inspection.provenance.items():
        if name not in _OTHER_LINES and value not in ([], {}, None, ""):
            yield name, value if isinstance(value, str) else json.dumps(value)
    for step in inspection.provenance.get("resharded") or ():
        yield "resharded", _reshard_text(step)
    steps = inspection.steps
    if inspection.step is not None:
        yield "step", str(inspection.step)
    if steps["least"] is not None and (steps["least"], steps["most"]) != (inspection.step, inspection.step):
        count = "all" if steps["read"] == steps["counters"] else f"{steps['read']}"
        span = steps["most"] if steps["least"] == steps["most"] else f"{steps['least']} to {steps['most']}"
        yield "counters", f"{span}, by {count} of {counted(steps['counters'], 'step counter')}"
    yield from _optimizer_lines(inspection)
    # Where the tensors lie.
    items = f"{counted(inspection.other_items, 'other item')}; {counted(inspection.files, 'file')}"
    empty = f" and {inspection.empty_chunks} empty" if inspection.empty_chunks else ""
    chunks = f"{inspection.tensors} in {counted(inspection.chunks, 'chunk')}{empty}, {size(inspection.bytes)}"
    yield "tensors", f"{chunks}; {items}"
    if inspection.quantised:
        yield "quantised", describe_quantised(inspection.quantised)
    for part, number in inspection.wrappers.items():
        yield "wrapper", f"{part!r} is a part of {counted(number, 'name')}, as the program's wrapper has put it there"
    layouts = [f"{counted(layout['tensors'], 'tensor')} {_layout_text(layout)}" for layout in inspection.layouts]
    yield from _limited_lines("layout", layouts)
    cuts = [f"{cut['tensors']}: {cut['cut']}" for cut in inspection.cuts[:_MAX_CUTS]]
    if rare := sum(cut["tensors"] for cut in inspection.cuts[_MAX_CUTS:]):
        cuts.append(f"{rare} more")
    yield "cut into", "; ".join(cuts)
    yield from _balance_lines(inspection.balance)
    # By what the bytes can be checked, and when they were.
    nouns = {"digest": "digests", "crc32": "CRC-32s", "in_the_item": "perhaps in the files"}
    sums = ", ".join(f"{inspection.checks[kind]} {noun}" for kind, noun in nouns.items() if inspection.checks[kind])
    last = inspection.verified
    is_new = last and last.sentence not in inspection.diagnosis.sentence  # else it stands above
    faults = f": {last.sentence}" if last and is_new else ""
    when = f"{moment(last.timestamp)} UTC, {last.verdict}{faults}" if last else "never since last written"
    yield "verified", f"{when}; checksums: {sums or 'none'}"


def _optimizer_lines(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the lines on methods, momentum and parameter groups."""
    # The method that updates the parameters, and the convention of their momentum.
    methods = []
    for row in inspection.optimizer:
        matrices = f"{row['matrices'] or 'no'} {'matrix' if row['matrices'] == 1 else 'matrices'}"
        methods.append(f"{row['method']}: {counted(row['parameters'], 'parameter')}, {matrices}")
    if unknown := inspection.unknown_state:
        methods.append(f"state in an unknown form under {counted(len(unknown), 'key')}, such as {unknown[0]}")
    yield "optimizer", "; ".join(methods) if methods else "no state"
    for row in inspection.conventions:
        yield "momentum", f"{row['convention'] or 'unknown'} in {counted(row['tensors'], 'tensor')} ({row['by']})"
    yield from _group_lines(inspection.groups)
    if inspection.unread_groups:
        unread = f"and {inspection.unread_groups} groups of one parameter, which were not read"
        yield "", f"{unread} (`muonckpt inspect --groups` reads them)"
    if inspection.optimizer:
        for note in inspection.notes:
            yield "", note


def _group_lines(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the lines of parameter groups, with each option once: for all groups, for those of one name, or for one.

    A line has the first `_MAX_OPTIONS` options and counts the others; but groups of one name differ only by the options
    of their own lines, so those have all.
    """
    # Options that all groups have in common.
    common = _common_options(groups) if len(groups) > 1 else {}
    if common:
        yield "groups", f"all: {_options_text(common, _MAX_OPTIONS)}"
    # Options that all groups of one name have in common.
    by_name: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for group in groups:
        by_name[group["name"]].append(group)
    common_by_name = {name: _common_options(members) for name, members in by_name.items() if len(members) > 1}
    for name, options in common_by_name.items():
        name_options = _options_besides(options, common, name)
        if name_options and len(by_name) > 1:
            yield "groups", f"{name or 'others'}: {_options_text(name_options, _MAX_OPTIONS)}"
    # Each group: its numbers, its parameters, and the options that are in no line above.
    for group in groups[:_MAX_GROUPS]:
        name = group["name"]
        shared_options = {**common, **common_by_name.get(name, {})}
        options = _options_besides(group["options"], shared_options, name)
        numbers = f"{ranges(group['groups'])}: " if group["groups"] else ""
        members = ", ".join(group["holds"])
        if len(members) > _MAX_NAMES:
            members = f"{members[:_MAX_NAMES].rstrip()} …"
        count = counted(group["parameters"], "parameter") + (f" ({members})" if members else "")
        limit = None if len(by_name[name]) > 1 else _MAX_OPTIONS
        absence = "" if shared_options else ", without options"
        options_text = f": {_options_text(options, limit)}" if options else absence
        yield "group", f"{numbers}{f'{name}, ' if name else ''}{count}{options_text}"
    if len(groups) > _MAX_GROUPS:
        yield "", f"and {len(groups) - _MAX_GROUPS} groups with other options (`.groups`)"


def _options_besides(options: Mapping[str, Any], shared_options: Collection[str], name: str) -> dict[str, Any]:
    """Return the options that other lines do not have, but for the one whose value is the name of the group."""
    return {option: value for option, value in options.items() if option not in shared_options and value != name}


def _common_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options that all groups have with the same value, compared as printed: so NaN equals itself."""
    common = dict(groups[0]["options"])
    for group in groups[1:]:
        options = group["options"]
        common = {name: value for name, value in common.items() if repr(options.get(name, ...)) == repr(value)}
    return common


def _options_text(options: Mapping[str, Any], limit: int | None) -> str:
    """Return options as text: the usual ones first, the others beyond a limit counted, unset ones last."""
    ordered = sorted(options, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    names = [name for name in ordered if options[name] is not None]
    if limit is None or len(options) <= limit + 1:  # one more is no longer than its count
        limit = len(options)
    phrases = [f"{name} {option_value(options[name])}" for name in names[:limit]]
    if len(names) > limit:
        phrases.append(f"{len(names) - limit} more (`.groups`)")
    unset = ", ".join(name for name in ordered if options[name] is None) if len(options) <= limit else ""
    return "; ".join(filter(None, (", ".join(phrases), unset and f"not set: {unset}")))


def _balance_lines(balance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how evenly bytes and Newton-Schulz work lie on ranks, if the names of files tell the ranks."""
    bytes_, work = balance["bytes"], balance["newton_schulz"]
    if bytes_:
        text = f"{counted(bytes_['ranks'], 'rank')} of {size(round(bytes_['mean']))}"
        if bytes_["ranks"] > 1:
            ratio = f"{bytes_['most_to_mean']:.3g} of the mean"
            text += f", at most {size(bytes_['most'])} (rank {bytes_['busiest_rank']}): {ratio}"
        yield "balance", text
    if work and work["ranks"] > 1:
        busiest = f"rank {work['busiest_rank']} has {work['most_to_mean']:.3g} of the mean"
        yield "", f"Newton-Schulz work of the matrices that ranks hold: {busiest}"


def _reshard_text(step: Mapping[str, Any]) -> str:
    mesh = step.get("mesh")
    on = f" on {','.join(f'{axis}={size}' for axis, size in mesh.items())}" if isinstance(mesh, dict) else ""
    options = ""
    for name, value in _fields_without(step, _RESHARD_FIELDS).items():
        options += f", {name} {json.dumps(value)}" if value else ""
    return f"from {step.get('source')} to {step.get('layout')}{on}{options}, by {step.get('program')}"


_RESHARD_FIELDS = frozenset({"program", "source", "mesh", "layout"})


def _limited_lines(label: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines[:_MAX_LINES]:
        yield label, line
    if len(lines) > _MAX_LINES:
        yield "", f"and {len(lines) - _MAX_LINES} more (`.to_json()`)"


def _layout_text(layout: Mapping[str, Any]) -> str:
    match layout:
        case {"algorithm": "mesh", "mesh": [*sizes], "placements": [*placements]}:
            return f"on mesh {_mesh_text(sizes, layout)}: {', '.join(map(str, placements))}"
        case {"algorithm": algorithm, "version": version, "mesh": [*sizes], "cuts": [*cuts]}:
            cut = "".join(f", {axis} cuts dim {dim}" for axis, dim in cuts)
            return f"by {algorithm} v{version} on mesh {_mesh_text(sizes, layout)}{cut}"
        case _:
            return json.dumps(_fields_without(layout, {"tensors"}))


def _mesh_text(sizes: Sequence[object], layout: Mapping[str, Any]) -> str:
    axes = layout.get("axes")
    if not axes:
        return " x ".join(map(str, sizes))
    return " x ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
