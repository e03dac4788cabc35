"""The contents of a destination: tensors made from the source's elements, and non-tensor items.

Elements that change are computed in float64, and rounded once to the dtype that is written.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Box, Index
from ...algebra.layout import Buffer, Fragment, Place, TensorLayout
from ...names.errors import SourceError, UnnamedStateError
from ...names.keys import PARAM_GROUPS, key_of
from ...names.vocabulary import MASTER
from ...names.wording import counted
from ...programs.signs import NAMES_FILE, NUMBERED
from ...record.chunks import Chunks
from ...record.record import Blob, Chunk, Manifest, StateRecord, entry_keys, match_keys, names_of
from ...store.io.checksums import xxh3_128
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.blocks import slices_within
from ...store.reading.dtypes import FLOATS, NATIVE_FLOATS, dtype, itemsize, rounded
from ...store.reading.payloads import Payloads, payload_of


def unnamed_state(provenance: Mapping[str, object], number: str) -> UnnamedStateError:
    """Return the error that state is known by the number of its parameter only, where names are needed."""
    if isinstance(optimizers := provenance.get(NUMBERED), list):
        lists = ", ".join(f'"{optimizer}": ["…"]' for optimizer in optimizers)
        cure = f"write the names in the order of the optimizer's parameters to {NAMES_FILE} beside them"
        if len(optimizers) > 1:
            cure += f", for each optimizer a list: {{{lists}}}"
        else:
            cure += (
                ". In the program that saved it: names = {p: name for name, p in model.named_parameters()}; "
                "json.dump([names[p] for group in optimizer.param_groups for p in group['params']], "
                f"open({NAMES_FILE!r}, 'w'))"
            )
    else:
        cure = (
            "load it into the optimizer that it was saved from, and save get_optimizer_state_dict(model, optimizer) "
            f"instead of optimizer.state_dict(); or give a table with `rules=` (from = '{number}', to = "
            "'layers.0.weight'; docs/formats/names.md)"
        )
    return UnnamedStateError(
        f"found state of number {number}, and nothing in the files says which parameter that is: {cure}"
    )


class Action(StrEnum):
    """The kinds of a `Check`, in the order of a checklist."""

    CARRIED = "carried"
    """It is in the destination, bit for bit or with the same meaning."""
    RESCALED = "rescaled"
    """It is in the destination with other values, computed from the source's."""
    LEFT = "left"
    """It is in the source only."""
    SET = "set in code"
    """The user must set it where the optimizer of the continued run is made."""


@dataclass(frozen=True, slots=True)
class Check:
    """An entry of a checklist: what became of a subject, the values of both sides, and why."""

    action: Action
    subject: str
    values: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        values = f": {', '.join(self.values)}" if self.values else ""
        return f"{self.action}: {self.subject}{values}{f' ({self.reason})' if self.reason else ''}"


class Topic(StrEnum):
    """The subject of a `Check`: it counts only where some of that is written."""

    ALL = "all"
    STATE = "state"
    OPTIONS = "options"


@dataclass(frozen=True, slots=True)
class Findings:
    """The facts that a translation reports.

    Attributes:
        programs: sentences about source and target.
        momenta: sentences that say what the momentum is, and why, each with the slot that it is in.
        notes: other sentences, each once.
        checks: entries of the checklist, with their topics.
    """

    programs: list[str] = field(default_factory=list)
    momenta: list[tuple[str, str]] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    checks: set[tuple[Topic, Check]] = field(default_factory=set)

    def add(self, note: str) -> None:
        self.notes.add(note)

    def check(self, action: Action, subject: str, *values: str, reason: str = "", topic: Topic = Topic.STATE) -> None:
        self.checks.add((topic, Check(action, subject, values, reason)))


Words = NDArray[Any]
"""Raw elements as unsigned words of their size; elements of 16 bytes as two words each, in a last dim of 2."""


def scaled(words: Words, dtype: str, by: float, to: str | None = None) -> Words:
    """Return elements multiplied by a factor, each rounded once (to nearest, ties to even).

    Args:
        words: the raw elements, of any shape.
        dtype: torch's name of their dtype.
        to: that of the result; None: the same.

    Raises:
        SourceError: elements of the dtypes cannot be computed.
    """
    to = to or dtype
    for name in (dtype, to):
        if name not in FLOATS:
            raise SourceError(f"state of dtype {name} cannot be scaled or cast; expected one of {', '.join(FLOATS)}")
    values = (words.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else words.view(NATIVE_FLOATS[dtype])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return rounded(values.astype(np.float64) * by, to)


Reads = Callable[[Chunks, int, int, memoryview], None]
"""Receives the chunks of a tensor, the number of one, a byte of its payload, and the bytes read from there on."""

Memory = Callable[[Index, str], Words]
"""Returns memory for words of this shape and type, with whatever is in it."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write: ``record`` describes it (its chunks do not count), ``layout`` says where its elements lie.

    The layout's buffers are numbers of chunks, counted through ``sources``.  Tensors of one geometry so share a layout,
    whichever chunks they are in.

    Elements of ``source_dtype`` (None: ``record.dtype``) are multiplied by ``scale``, and rounded once to
    ``record.dtype``; without either they are copied bit for bit.
    """

    record: StateRecord
    layout: TensorLayout
    sources: tuple[Chunks, ...] = ()
    scale: float | None = None
    source_dtype: str | None = None

    @classmethod
    def copy_of(cls, record: StateRecord) -> OutputTensor:
        """Return a tensor of the source unchanged.

        Raises:
            LayoutError: its chunks leave a hole or overlap.
        """
        return cls(record, record.chunk_layout(), (record.chunks,))

    @property
    def key(self) -> str:
        return self.record.key

    @property
    def boxes(self) -> set[Box]:
        """The boxes in which its elements lie."""
        return {fragment.box for fragment in self.layout.fragments}

    @property
    def computed(self) -> bool:
        return self.scale is not None or self.source_dtype is not None

    @property
    def stored_dtype(self) -> str:
        """The dtype of the elements in the source."""
        return self.source_dtype or self.record.dtype

    @property
    def kind(self) -> Hashable:
        """A key: equal for tensors for which `compute` does the same, and whose sources have equal boxes."""
        return self.scale, self.source_dtype, self.record.dtype, *[chunks.boxes for chunks in self.sources]

    def compute(self, words: Words) -> Words:
        """Return the elements to write, given those of the source, in any shape."""
        if not self.computed:
            return words
        return scaled(words, self.stored_dtype, 1.0 if self.scale is None else self.scale, self.record.dtype)

    def locate(self, buffer: Buffer) -> tuple[Chunks, int]:
        """Return the chunks among which a buffer is, and its number there."""
        assert isinstance(buffer, int), "buffers of outputs are numbers"
        for source in self.sources:
            if buffer < len(source):
                return source, buffer
            buffer -= len(source)
        raise AssertionError("layouts have no other buffers")

    def elements(
        self,
        payloads: Payloads,
        fragments: Iterable[Fragment],
        box: Box,
        reads: Reads = lambda chunks, number, start, raw: None,
        memory: Memory = np.empty,
    ) -> Words:
        """Return the elements of a box to write, dense.

        Args:
            fragments: those of `layout` that cover the box, without overlaps.
            reads: called with the bytes read of the source.
            memory: returns the memory for the result.
        """
        kind = dtype(self.stored_dtype)
        words = memory((*box.shape, *(2,) * (kind.itemsize > 8)), kind.bits)
        for fragment in fragments:
            common = fragment.box & box
            if common is not None:
                part: tuple[Any, ...] = (*slices_within(common, box.lo), ...)  # so that without dims it is a view, too
                self._copy_from(payloads, fragment.place_at(common.lo), common.shape, words[part], reads)
        return self.compute(words)

    def _copy_from(self, payloads: Payloads, place: Place, shape: Index, out: Words, reads: Reads) -> None:
        """Copy the elements of a box of this shape; read nothing before the first or after the last of them."""
        source, number = self.locate(place.buffer)
        payload, name = source.payload(number), self.stored_dtype
        if payload is None or payload.length != source.boxes.numel[number] * itemsize(name):
            payload = payload_of(dataclasses.replace(self.record, dtype=name), source[number])  # raises
        payloads.gather_into(
            out, payload, name, place, shape, lambda offset, raw: reads(source, number, offset - payload.offset, raw)
        )


def constant(payloads: Payloads, name: str, element: bytes = b"") -> StateRecord:
    """Return a tensor of one element of this dtype that is in no file, zero if none is given; ``payloads`` keep it."""
    raw, box = element or bytes(itemsize(name)), Box.of((1,))
    extent = payloads.keep(raw)
    chunks = Chunks.of([Chunk(box, extent, payload=extent, digest=xxh3_128([raw]))], 1)
    return StateRecord(extent.file, path=(extent.file,), shape=box.shape, dtype=name, chunks=chunks)


@dataclass(frozen=True, slots=True)
class OutputItem:
    """A non-tensor item: a copy of an item of the source, or if ``source`` is None the bytes ``data``.

    ``length`` is in bytes; ``is_option`` says that it is one of parameter groups.
    """

    key: str
    path: tuple[str | int, ...]
    source: Blob | None = None
    data: bytes = b""
    is_option: bool = False

    @property
    def length(self) -> int:
        return len(self.data) if self.source is None else self.source.item.length


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything that a destination holds, and the keys of the source that it does not hold (``left_out``).

    ``findings`` are those of a translation, and ``losses`` say what has been left out since; ``constants`` are tensors
    for outputs, which the source's files do not have; ``provenance`` is added to that of the source.

    Raises:
        SourceError: two tensors or items have the same key.
    """

    tensors: Sequence[OutputTensor]
    items: Sequence[OutputItem] = ()
    left_out: tuple[str, ...] = ()
    findings: Findings = field(default_factory=Findings)
    losses: tuple[Check, ...] = ()
    constants: tuple[StateRecord, ...] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        key, count = Counter(self.keys).most_common(1)[0] if self.keys else ("", 0)
        if count > 1:
            raise SourceError(f"two tensors or items would get the key {key!r}; add a rule that renames one of them")

    @property
    def keys(self) -> list[str]:
        return entry_keys(self.tensors) + entry_keys(self.items)

    # The facts for the report.

    @property
    def _momentum_sentences(self) -> list[str]:
        """Sentences that say what each written momentum is: `select` may have left out others."""
        slots = {tensor.record.slot for tensor in self.tensors}
        return [*dict.fromkeys(sentence for slot, sentence in self.findings.momenta if slot in slots)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what a translation has decided."""
        if not self.findings.programs:
            return ()
        remarks = sorted(f"note: {note}" for note in self.findings.notes)
        return (*self.findings.programs, *self._momentum_sentences, *self._summary_sentences(), *remarks)

    @property
    def checklist(self) -> tuple[Check, ...]:
        """The result for each tensor and item, where something was translated or left out."""
        if not (self.findings.programs or self.losses):
            return ()
        topics = {Topic.ALL}
        if any(tensor.record.slot is not None for tensor in self.tensors):
            topics.add(Topic.STATE)
        if any(item.is_option for item in self.items):
            topics.add(Topic.OPTIONS)
        checks = {check for topic, check in self.findings.checks if topic in topics}
        order = list(Action)
        return tuple(
            sorted(
                checks.union(self.losses, self._written_checks()),
                key=lambda check: (order.index(check.action), check.subject, check.values, check.reason),
            )
        )

    def _written_checks(self) -> Iterator[Check]:
        """Yield entries for what is written, by slot: copied bit for bit, scaled, cast; then for copied items."""
        copied_counts = Counter(_slot_label(tensor) for tensor in self.tensors if not tensor.computed)
        for slot, count in copied_counts.items():
            yield Check(Action.CARRIED, slot, (counted(count, "tensor"),))
        kinds = Counter((_slot_label(t), t.scale, t.source_dtype, t.record.dtype) for t in self.tensors)
        for (slot, scale, source_dtype, target_dtype), count in kinds.items():
            tensors = counted(count, "tensor")
            if scale is not None:
                yield Check(Action.RESCALED, slot, (tensors, f"times {scale!r}"), "; ".join(self._momentum_sentences))
            if source_dtype is not None:
                reason = "" if slot == MASTER else "`state_dtype=`"
                yield Check(Action.RESCALED, slot, (tensors, f"from {source_dtype} to {target_dtype}"), reason)
        if copied := sum(item.source is not None for item in self.items):
            yield Check(Action.CARRIED, "items that are no tensors", (f"{copied}",), "byte for byte")

    def _summary_sentences(self) -> Iterator[str]:
        """Yield sentences that say how many tensors, items and options are written, and how."""
        places = {constant.chunks.place for constant in self.constants}
        # Tensors made of a constant are not the source's.
        new = [tensor.key for tensor in self.tensors if not places.isdisjoint(c.place for c in tensor.sources)]
        scales = Counter(tensor.scale for tensor in self.tensors if tensor.scale is not None)
        num_old, copied = len(self.tensors) - len(new), sum(item.source is not None for item in self.items)
        exact = num_old - sum(tensor.computed for tensor in self.tensors)
        share = f"{exact} of them " if exact < num_old else ""
        yield counted(num_old, "tensor") + (f", {share}bit for bit" if exact else "")
        for scale, count in scales.items():
            noun = "momentum is" if count == 1 else "momenta are"
            yield f"{count} {noun} multiplied by {scale!r}, each element rounded once"
        if new:
            yield f"{counted(len(new), 'tensor')} not in the source, such as {new[0]}"
        if copied:
            yield f"{counted(copied, 'item')} other than tensors, byte for byte"
        if options := len(self.items) - copied:
            yield f"{counted(options, 'option')} of parameter groups, written in the words of the target"

    # A part of them.

    def reduced_to(
        self, tensors: Sequence[OutputTensor], items: Sequence[OutputItem], keys: Collection[str], argument: str
    ) -> Outputs:
        """Return only these tensors and items; the checklist names the others as left out by an argument.

        Args:
            keys: those of ``self`` that stay.
        """
        lost = Counter(_slot_label(tensor) for tensor in self.tensors if tensor.key not in keys)
        losses = [Check(Action.LEFT, slot, (counted(count, "tensor"),), argument) for slot, count in lost.items()]
        for is_option, subject in ((True, "options of parameter groups"), (False, "other items that are no tensors")):
            lost_items = [item for item in self.items if item.is_option == is_option and item.key not in keys]
            if lost_items:
                losses.append(Check(Action.LEFT, subject, (f"{len(lost_items)}",), argument))
        return dataclasses.replace(self, tensors=tensors, items=items, losses=(*self.losses, *losses))

    def selected(self, globs: Sequence[str]) -> Outputs:
        """Return the tensors and items that the keys or shell patterns match; everything if there are none.

        Raises:
            TargetError: as `match_keys`.
        """
        if not globs:
            return self
        names = names_of(tensor.record for tensor in self.tensors)
        selected_keys = match_keys(globs, self.keys, names, "key", " of the checkpoint")
        return self.reduced_to(
            [tensor for tensor in self.tensors if tensor.key in selected_keys],
            [item for item in self.items if item.key in selected_keys],
            selected_keys,
            "`select=`",
        )

    def tensors_only(self) -> Outputs:
        """Return these outputs without items."""
        reduced = self.reduced_to(self.tensors, (), {*entry_keys(self.tensors)}, "`tensors_only=True`")
        return dataclasses.replace(reduced, left_out=(*self.left_out, *entry_keys(self.items)))

    def used(self, manifest: Manifest) -> Manifest:
        """Return the part of the source's manifest that these outputs are made from, and their constants."""
        places = set[tuple[int, int]]()
        for tensor in self.tensors:
            places.update(chunks.place for chunks in tensor.sources if len(chunks))
        tensors = (*manifest.tensors, *self.constants)
        blobs = {item.source for item in self.items}
        return dataclasses.replace(
            manifest,
            tensors=tuple(tensor for tensor in tensors if len(tensor.chunks) and tensor.chunks.place in places),
            blobs=tuple(blob for blob in manifest.blobs if blob in blobs),
        )


def _slot_label(tensor: OutputTensor) -> str:
    return tensor.record.slot or "weights and others"


def unchanged(source: OpenCheckpoint) -> Outputs:
    """Return all tensors and items of a checkpoint under their own keys.

    Layouts sort tensors by slot; where the manifest records none, the keys tell.

    Raises:
        LayoutError: a tensor has a hole or an overlap.
    """
    manifest = source.manifest
    tensors = manifest.tensors
    if all(tensor.slot is None for tensor in tensors):
        from ...programs.detection import with_slots  # most reshards start sooner without it

        tensors = with_slots(manifest).tensors
    items = [OutputItem(b.key, b.path, b, is_option=PARAM_GROUPS in key_of(b.path).split(".")) for b in manifest.blobs]
    return Outputs(list(map(OutputTensor.copy_of, tensors)), items)
