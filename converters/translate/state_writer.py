"""Writes weights and state of a translated model: which tensors they are made of, in the target's keys."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, Place, TensorLayout
from ...names.errors import SourceError
from ...names.keys import key_of
from ...names.vocabulary import Convention, KeyPath
from ...programs.dialect import Dialect
from ...programs.model_view import AVERAGES
from ...record.record import Blob, StateRecord, no_chunks
from ...store.formats.torch_save.plain_item import plain_item
from ..engine.outputs import Action, OutputItem, OutputTensor, constant
from .conventions import agreed_convention, momentum_factor
from .parameters import TranslatedModel
from .structure import TranslatedParameter

_MAX_COUNTS: Mapping[str, int] = {"bfloat16": 256, "float16": 2048}
"""The number to which a counter of this dtype counts: adding one to it changes nothing."""


@dataclass(frozen=True, slots=True)
class StateWriter:
    """Writes the weights and the state of a translated model in the keys of a program.

    Attributes:
        numbers: what keys of state have in place of names, if the target knows parameters by number.
        constants: tensors of one element that the source does not have, by dtype and bytes; made when first used.
    """

    model: TranslatedModel
    numbers: Mapping[str, str]
    constants: dict[tuple[str, bytes], StateRecord] = field(default_factory=dict)

    @property
    def target(self) -> Dialect:
        return self.model.target

    # Keys.

    def path(self, parameter: TranslatedParameter, slot: str) -> KeyPath:
        name = parameter.name
        if self.numbers and name not in self.numbers and not self.model.dialect.numbered:
            raise SourceError(
                f"{self.target.name} numbers the parameters of groups, and {name!r}, which has state, is in none"
            )
        return self.target.keys.write_state(self.numbers.get(name, name), slot, parameter.chain)

    # Tensors.

    def weight(self, parameter: TranslatedParameter, weight: OutputTensor) -> OutputTensor:
        """Return the weight of a parameter, which stays in its chunk where the target has the source's."""
        paths = (entry.path for entry in parameter.entries.get(None, ()))
        reading = self.model.dialect.keys.read_weight(next(paths, ()))
        return _at(weight, self.target.keys.write_weight(parameter.name, reading.chain if reading else ""))

    def slot(self, parameter: TranslatedParameter, common: str) -> OutputTensor:
        """Return the tensor of a slot; momentum is in the convention of the target."""
        tensor, slot = parameter.slots[common], parameter.target_method.slots[common]
        record = replace(_at(tensor, self.path(parameter, slot)).record, name=parameter.name, slot=slot)
        # The user may round averages; counters and rows of variances keep their dtype.
        target_dtype = (common in AVERAGES and self.model.choices.state_dtype) or record.dtype
        source_dtype = record.dtype if target_dtype != record.dtype else None
        if source_dtype is not None:
            record = replace(record, dtype=target_dtype, fingerprint=None)
        if common != "momentum":
            return replace(tensor, record=record, source_dtype=source_dtype)
        # Only momentum has a convention: between two of them all its elements are scaled.
        about, requested = f"parameter {parameter.name!r}", self.model.choices.target_convention
        convention, _ = self.model.convention(parameter)
        statements = {self.target.name: self.target.convention, "`target_convention=`": requested}
        remedy = f"leave `target_convention=` out, because {self.target.name} reads no other convention than its own"
        target_convention = agreed_convention(about, statements, remedy) or convention
        scale = momentum_factor(convention, target_convention, self.model.mu(parameter), about)
        # A momentum that is written unchanged, and that runs of the target's program take for another.
        runs_keep = self.target.runs_keep
        if runs_keep not in (None, target_convention, self.model.dialect.runs_keep):
            factor = "1 / (1 - μ)" if runs_keep is Convention.EMA else "1 - μ"
            reason = f"runs of {self.target.name} keep {runs_keep}, and take it for that: "
            if target_convention is None:
                reason += f"if it is another, it is {factor} times what they expect; say it with `convention=`"
            else:
                reason += f'it is {factor} times what they expect; convert with `target_convention="{runs_keep}"`'
            said = target_convention or "unknown"
            self.model.findings.check(Action.SET, "the momentum's convention", said, reason=reason)
        if scale is not None and record.dtype == "float16":
            raise SourceError(
                f"{about}: its momentum is float16, in which a {convention} multiplied by {scale:.4g} may overflow or "
                'vanish; keep the convention, or give `state_dtype="float32"`'
            )
        fingerprint = record.fingerprint if scale is None else None
        record = replace(record, convention=target_convention, fingerprint=fingerprint)
        return replace(tensor, record=record, scale=scale, source_dtype=source_dtype)

    def step_counter(self, parameter: TranslatedParameter) -> OutputTensor | OutputItem:
        """Return the step counter: the source's if it is a tensor or the dialect stays, else a new one."""
        slot = parameter.target_method.slots["step"]
        path = self.path(parameter, slot)
        # The source's own counter moves unchanged, where it can count on; else the number is written again.
        counter = next(iter(parameter.counters), None) if self.model.choices.step is None else None
        if isinstance(counter, StateRecord):
            if counter.dtype == "float32" or (self.model.is_same_dialect and counter.dtype not in _MAX_COUNTS):
                tensor = moved(counter, path)
                return replace(tensor, record=replace(tensor.record, name=parameter.name, slot=slot))
            reason, max_count = "written in float32", _MAX_COUNTS.get(counter.dtype)
            if max_count is not None and parameter.step is not None and parameter.step >= max_count:
                reason += (
                    f"; in {counter.dtype} one more than {max_count} is {max_count} again, so the run may have taken "
                    "more: if it did, give `step=`"
                )
            self.model.findings.check(
                Action.SET, f"step counters in {counter.dtype}", str(parameter.step), reason=reason
            )
        elif counter is not None and self.model.is_same_dialect:
            return written_at(path, counter)
        if parameter.step is None:
            raise unknown_steps(parameter, self.target)
        record = StateRecord(
            key_of(path), path=path, shape=(), dtype="float32", chunks=no_chunks(0), name=parameter.name, slot=slot
        )
        return self._filled(record, struct.pack("<f", parameter.step))

    def _filled(self, record: StateRecord, element: bytes = b"") -> OutputTensor:
        """Return a tensor whose elements all have the given bytes, or are zero if none are given."""
        content = record.dtype, element
        if content not in self.constants:
            self.constants[content] = constant(self.model.values.payloads, *content)
        return OutputTensor(record, _repeated(record.shape), (self.constants[content].chunks,))

    # Parameters without state.

    def zero_state(self, parameter: TranslatedParameter) -> Iterator[OutputTensor]:
        """Yield the first state of a parameter: zeros, and a master that is the weight."""
        weight = parameter.weight
        slots = {common: slot for common, slot in parameter.target_method.slots.items() if common != "step"}
        unknown = [slot for common, slot in slots.items() if common not in (*AVERAGES, "dion_rows", "master")]
        if weight is None or unknown:
            reason = f"not known how {', '.join(unknown)} begins" if weight else "no weight tells the shape"
            raise SourceError(
                f"parameter {parameter.name!r} has no state, and `fill_missing=True` cannot write it: {reason}; leave "
                "that out, and let the parameter start with fresh=[…] of muonckpt.load, or leave the slot out with "
                "`drop=`"
            )
        choices = self.model.choices
        for common, slot in slots.items():
            path, shape, dtype = self.path(parameter, slot), weight.record.shape, weight.record.dtype
            chunks = no_chunks(len(shape))
            record = StateRecord(
                key_of(path), path, shape=shape, dtype="float32", chunks=chunks, name=parameter.name, slot=slot
            )
            if common == "master":
                yield replace(weight, record=record, source_dtype=None if dtype == "float32" else dtype)
                continue
            # Zeros are like the state of the others: of their dtype, and in their convention, whichever that is.
            source_slot = parameter.method.slots[common]
            others = (other.tensors[source_slot] for other in self.model.stateful if source_slot in other.tensors)
            dtypes = (other.record.dtype for other in others)
            requested_dtype = choices.state_dtype if common in AVERAGES else None
            shape = (*shape[:-1], 1) if common == "dion_rows" else shape
            record = replace(record, shape=shape, dtype=requested_dtype or next(dtypes, dtype))
            if common == "momentum":
                conventions = self.target.convention, choices.target_convention, self.model.dialect.convention
                record = replace(record, convention=next(filter(None, conventions), None))
            yield self._filled(record)


def unknown_steps(parameter: TranslatedParameter, target: Dialect) -> SourceError:
    return SourceError(
        f"parameter {parameter.name!r}: {target.name} stores the number of steps, which neither its state nor its "
        "group says; give `step=`"
    )


def moved(tensor: StateRecord, path: KeyPath) -> OutputTensor:
    """Return a tensor of the source under another path."""
    return _at(OutputTensor.copy_of(tensor), path)


def written_at(path: KeyPath, value: object) -> OutputTensor | OutputItem:
    """Return a tensor or an item of the source under another path, or an item of a value."""
    match value:
        case StateRecord():
            return moved(value, path)
        case Blob():
            return OutputItem(key_of(path), path, value)
    return OutputItem(key_of(path), path, data=plain_item(value))


def _at(tensor: OutputTensor, path: KeyPath) -> OutputTensor:
    record, chunks = tensor.record, no_chunks(len(tensor.record.shape))
    return replace(tensor, record=replace(record, key=key_of(path), path=path, chunks=chunks, layout=None))


@lru_cache(maxsize=1024)
def _repeated(shape: Index) -> TensorLayout:
    """Return the layout of a tensor whose elements are all the one of buffer 0."""
    box = Box.of(shape)
    fragments = (Fragment(box, Place(0, 0, (0,) * box.ndim)),) if box.numel else ()
    return TensorLayout.of(shape, fragments)
