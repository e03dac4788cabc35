"""Decides what a merged checkpoint holds: averages of weights and state, and from one input whatever has no average.

Floating-point tensors are averaged: weights, momenta, moments, master weights.  Counters, hyper-parameters, integers
and items have no meaningful average: they have to be the same everywhere, or are those of the input that the user
names.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import chain

import numpy as np

from ...algebra.box import Box
from ...algebra.layout import TensorLayout
from ...names.errors import SourceError, TargetError
from ...names.state_forms import stored_slot
from ...names.vocabulary import Convention
from ...names.wording import listed
from ...programs.model_view import Role, view_by_keys
from ...record.record import Blob, Extent, Manifest, by_key
from ...store.open_checkpoint import OpenCheckpoint, checked_blob
from ...store.reading.dtypes import dtype
from ...store.reading.payloads import Payloads
from ..compare.diff import same_value
from ..compare.elements import StoredSide, as_float64, compare_bits
from ..engine.outputs import ELEMENTS_AT_A_TIME, FLOATS, OutputItem, Outputs, OutputTensor, Words, renumbered, rounded

_INDIVISIBLE = ("float", "complex", "bits")
"""Types of numbers, beside those of `FLOATS`, that have an average which we cannot compute."""


@dataclass(frozen=True, slots=True)
class AveragedTensor(OutputTensor):
    """The average of tensors of several inputs, ``terms``, whose ``sources`` it has, one after the other."""

    terms: tuple[OutputTensor, ...] = ()
    weights: tuple[Fraction, ...] = ()

    @property
    def computed(self) -> bool:
        return True

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        layouts, num_buffers = [], 0
        for term in self.terms:
            layouts.append(renumbered(term.layout, num_buffers))
            num_buffers += sum(map(len, term.sources))
        return tuple(layouts)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(term.source_dtype or term.record.dtype for term in self.terms)

    @property
    def making(self) -> Hashable:
        return self.weights, tuple(term.making for term in self.terms)

    def compute(self, terms: Sequence[Words]) -> Words:
        """Return the sums of weighted elements: in float64, in the order of the inputs, and then rounded."""
        # A term's own scale, such as between conventions, is a part of its factor.
        factors = []
        for weight, term in zip(self.weights, self.terms, strict=True):
            factors.append(float(weight * Fraction(1 if term.scale is None else term.scale)))
        flat_terms = [words.reshape(-1) for words in terms]
        average = np.empty(flat_terms[0].shape, dtype(self.record.dtype).bits)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            # A stretch stays in the cache while all terms are added to it.
            for start in range(0, len(average), ELEMENTS_AT_A_TIME):
                part = slice(start, start + ELEMENTS_AT_A_TIME)
                rows = zip(flat_terms, self.dtypes, factors, strict=True)
                products = (as_float64(words[part], name) * factor for words, name, factor in rows)
                average[part] = rounded(reduce(operator.iadd, products), self.record.dtype)
        return average.reshape(terms[0].shape)


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """A request for one checkpoint made of several.

    Attributes:
        weights: of the inputs; their sum is 1.
        others_from: the input whose counters, hyper-parameters and items the result has; None if all have the same.
    """

    weights: tuple[Fraction, ...]
    others_from: int | None = None

    def outputs(
        self, checkpoints: Sequence[OpenCheckpoint], outputs_alone: Sequence[Outputs], select: Sequence[str] = ()
    ) -> Outputs:
        """Return the merged tensors and items.

        Args:
            checkpoints: the inputs, joined.
            outputs_alone: what each input alone would be written as.
            select: shell patterns; what has a key that matches none of them is left out, whatever it is.
        """
        inputs: list[_Input] = []
        for checkpoint, outputs in zip(checkpoints, outputs_alone, strict=True):
            inputs.append(_Input.of(str(checkpoint.path), outputs, select))
        base = inputs[self.others_from or 0]
        # What is averaged has to be there in all inputs; what is not has to be the same, unless one input is named.
        _refuse_missing(inputs)
        tensors: list[OutputTensor] = [self._average(inputs, key) for key in base.averaged]
        if self.others_from is None:
            _refuse_differences(inputs, checkpoints[0].payloads)
        tensors += base.unaveraged.values()
        # What only other inputs have is left out; every input's notes and constants hold for the result.
        left_out, constants = set[str](), list(outputs_alone[0].constants)
        notes = list(self._sentences(inputs))
        for merged in inputs:
            left_out.update(merged.unaveraged, merged.items, merged.left_out)
            notes += [f"{merged.name}: {note}" for note in merged.notes]
        for outputs in outputs_alone[1:]:
            constants += outputs.constants
        left_out -= base.unaveraged.keys() | base.items.keys()
        items = list(base.items.values())
        return Outputs(tensors, items, tuple(sorted(left_out)), tuple(notes), constants=tuple(constants))

    def _average(self, inputs: Sequence[_Input], key: str) -> AveragedTensor:
        terms = [merged.averaged[key] for merged in inputs]
        first = terms[0].record
        # An average of unlike things means nothing.
        for merged, term in zip(inputs, terms, strict=True):
            for noun, attribute, cure in _EQUAL_IN_ALL:
                expected, actual = getattr(first, attribute), getattr(term.record, attribute)
                if expected != actual:
                    raise SourceError(
                        f"tensor {key!r}: expected the same {noun} in all inputs, found {expected} in {inputs[0].name} "
                        f"and {actual} in {merged.name}; convert one of them first{cure}"
                    )
        sources = tuple(chain.from_iterable(term.sources for term in terms))
        record = replace(first, fingerprint=None)
        return AveragedTensor(record, terms[0].layout, sources, None, None, tuple(terms), self.weights)

    def _sentences(self, inputs: Sequence[_Input]) -> Iterator[str]:
        shares = ", ".join(f"{weight} of {merged.name}" for weight, merged in zip(self.weights, inputs, strict=True))
        yield f"averaged tensors: {len(inputs[0].averaged)}, summed in float64 in this order: {shares}"
        base = inputs[self.others_from or 0]
        if count := len(base.unaveraged) + len(base.items):
            origin = "the same in all inputs" if self.others_from is None else f"those of {base.name}"
            yield f"{count} counters, options and other items are {origin}"


_EQUAL_IN_ALL = (
    ("shape", "shape", ""),
    ("dtype", "dtype", ""),
    ("momentum convention", "convention", ", or merge them with `to_dialect=` of a program, or `convention=`"),
)
"""The attributes of a record that terms of an average have in common: what they are called, and another cure."""


@dataclass(frozen=True, slots=True)
class _Input:
    """The tensors of an input that are averaged, those that are not, and its items, by key."""

    name: str
    averaged: dict[str, OutputTensor]
    unaveraged: dict[str, OutputTensor]
    items: dict[str, OutputItem]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, outputs: Outputs, select: Sequence[str]) -> _Input:
        # Roles are those of what is written: keys may be of another program than the input's.
        blobs = tuple(Blob(item.key, item.path, Extent("none", 0, 0)) for item in outputs.items)
        view = view_by_keys(Manifest(tuple(tensor.record for tensor in outputs.tensors), blobs))
        averaged: dict[str, OutputTensor] = {}
        unaveraged: dict[str, OutputTensor] = {}
        selected = outputs.selected(select)
        for output in selected.tensors:
            record = output.record
            if stored_slot(record.slot).is_coded:
                raise SourceError(
                    f"{name}: tensor {record.key!r} is a part of state in 8 bits, which is not averaged: leave it out "
                    "by `model_only=True`, or load it into an optimizer with state in float32, and save that"
                )
            role, convention = view.role(record), view.convention(record)
            tensor = replace(output, record=replace(record, convention=Convention(convention) if convention else None))
            if record.dtype in FLOATS and (role is Role.WEIGHTS or (record.shape and role is not Role.OPTIONS)):
                averaged[record.key] = tensor
            elif record.shape and record.dtype.startswith(_INDIVISIBLE):
                raise SourceError(
                    f"{name}: tensor {record.key!r} is {record.dtype}, which is not averaged; expected "
                    f"{', '.join(FLOATS)}, or leave it out by `select=` or `model_only=True`"
                )
            else:
                unaveraged[record.key] = tensor
        items = by_key(selected.items)
        return cls(name, averaged, unaveraged, items, selected.left_out, selected.notes)


def _refuse_missing(inputs: Sequence[_Input]) -> None:
    """Refuse tensors to average that not all inputs have, and inputs without any."""
    # Every input is compared with the first, both ways.
    first = inputs[0]
    for another in inputs[1:]:
        for owner, lacker in ((first, another), (another, first)):
            missing = [key for key in owner.averaged if key not in lacker.averaged]
            if missing:
                raise SourceError(
                    f"expected the same tensors in all inputs, found {len(missing)} in {owner.name} that "
                    f"{lacker.name} lacks, such as {missing[0]!r}; choose what all have by `select=` or "
                    "`model_only=True`, or give the programs' names with `to_dialect=`"
                )
    if not first.averaged:
        raise SourceError(f"{first.name}: found no floating-point tensor to average")


def _refuse_differences(inputs: Sequence[_Input], payloads: Payloads) -> None:
    """Refuse counters, options and items that are not the same in all inputs."""

    def read_item(item: OutputItem) -> bytes:
        return item.data if item.source is None else checked_blob(payloads, item.source)

    # Keys first, then elements and values of what both have.
    base = inputs[0]
    differing: list[str] = []
    for another in inputs[1:]:
        differing += sorted(base.unaveraged.keys() ^ another.unaveraged.keys())
        differing += sorted(base.items.keys() ^ another.items.keys())
        for key in base.unaveraged:
            if key in another.unaveraged and not _same_elements(
                base.unaveraged[key], another.unaveraged[key], payloads
            ):
                differing.append(key)
        for key in base.items:
            if key in another.items and not same_value(read_item(base.items[key]), read_item(another.items[key])):
                differing.append(key)
    differing = list(dict.fromkeys(differing))
    if differing:
        raise SourceError(
            f"the inputs differ in {len(differing)} counters, options or items, which have no average: "
            f'{listed(map(repr, differing), 3)}; say whose to take, such as `others_from="last"`, or merge the weights '
            "alone with `model_only=True`"
        )


def _same_elements(a: OutputTensor, b: OutputTensor, payloads: Payloads) -> bool:
    record_a, record_b = a.record, b.record
    if (record_a.shape, record_a.dtype) != (record_b.shape, record_b.dtype):
        return False
    if record_a.fingerprint is not None and record_b.fingerprint is not None:
        return record_a.fingerprint == record_b.fingerprint
    for tensor in (a, b):
        tensor.check_sources(payloads)
    return compare_bits(StoredSide(a, payloads), StoredSide(b, payloads), Box.of(record_a.shape))[0]


def shares(
    count: int, proportions: Sequence[str | float | Fraction] | None, ema: str | float | None
) -> tuple[Fraction, ...]:
    """Return the weights of inputs, as fractions whose sum is 1.

    Args:
        count: the number of inputs.
        proportions: positive numbers; None means that all are equal.
        ema: the decay of a moving average that begins with the first input and takes the others in order.

    Raises:
        TargetError: the numbers do not fit the inputs.
    """
    if proportions is not None and ema is not None:
        raise TargetError("`proportions=` and `ema=` contradict each other; give one of them")
    # A moving average is a weighted one, whose weights fall with age.
    if ema is not None:
        decay = _fraction(ema, "ema")
        if not 0 < decay < 1:
            raise TargetError(f"`ema=`: expected a decay between 0 and 1, found {ema}")
        return (decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count)))
    if proportions is None:
        return (Fraction(1, count),) * count
    numbers = [_fraction(number, "proportions") for number in proportions]
    if len(numbers) != count or min(numbers) <= 0:
        text = ",".join(map(str, proportions))
        raise TargetError(f"`proportions=`: expected {count} positive numbers, one for each input, found {text}")
    total = sum(numbers, Fraction(0))
    return tuple(number / total for number in numbers)


def _fraction(value: str | float | Fraction, argument: str) -> Fraction:
    """Read a number as it is written: 0.1 is a tenth, not the nearest float64."""
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise TargetError(f"`{argument}=`: expected numbers such as 0.5 or 1/3, found {value!r}") from None
