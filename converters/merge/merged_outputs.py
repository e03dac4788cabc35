"""What a merged checkpoint holds: averages of weights and state, and whatever is not averaged from one input.

Floating-point tensors are averaged: weights, momenta, moments, master weights.  Counters, hyper-parameters, integers
and items have no meaningful average: they have to be the same everywhere, or are taken from the input that the user
names.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import accumulate, chain

import numpy as np

from ...algebra.box import Box
from ...algebra.layout import TensorLayout
from ...names.errors import SourceError, TargetError
from ...names.state_forms import stored_slot
from ...names.vocabulary import Convention
from ...names.wording import listed
from ...programs.model_view import Role, view_by_keys
from ...record.record import Blob, Extent, Manifest
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
        buffers = (sum(map(len, term.sources)) for term in self.terms)
        firsts = accumulate(buffers, initial=0)
        return tuple(renumbered(term.layout, first) for term, first in zip(self.terms, firsts, strict=False))

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(term.source_dtype or term.record.dtype for term in self.terms)

    @property
    def making(self) -> Hashable:
        return self.weights, tuple(term.making for term in self.terms)

    def compute(self, terms: Sequence[Words]) -> Words:
        """Return the sums of weighted elements: in float64, in the order of the inputs, and then rounded."""
        weighted = zip(self.weights, self.terms, strict=True)
        factors = [float(weight * Fraction(1 if term.scale is None else term.scale)) for weight, term in weighted]
        flat = [words.reshape(-1) for words in terms]
        average = np.empty(flat[0].shape, dtype(self.record.dtype).bits)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for start in range(0, len(average), ELEMENTS_AT_A_TIME):
                part = slice(start, start + ELEMENTS_AT_A_TIME)
                named = zip(flat, self.dtypes, factors, strict=True)
                products = (as_float64(words[part], name) * factor for words, name, factor in named)
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
        self, checkpoints: Sequence[OpenCheckpoint], of_inputs: Sequence[Outputs], select: Sequence[str] = ()
    ) -> Outputs:
        """Return the merged tensors and items.

        Args:
            checkpoints: the inputs, joined.
            of_inputs: what each input alone would be written as.
            select: shell patterns; what has a key that matches none of them is left out, whatever it is.
        """
        names = [str(one.path) for one in checkpoints]
        inputs = [_Input.of(name, outputs, select) for name, outputs in zip(names, of_inputs, strict=True)]
        base = inputs[self.others_from or 0]
        keys = _agreed_keys(inputs)
        tensors: list[OutputTensor] = [
            self._average([one.averaged[key] for one in inputs], names) for key in base.averaged if key in keys
        ]
        if self.others_from is None:
            _refuse_differences(inputs, checkpoints[0].payloads)
        left = {key for one in inputs for key in (*one.others, *one.items, *one.left_out)}
        left -= {*base.others, *base.items}
        tensors += base.others.values()
        notes = tuple(f"{one.name}: {note}" for one in inputs for note in one.notes)
        return Outputs(
            tensors,
            list(base.items.values()),
            tuple(sorted(left)),
            (*self._sentences(inputs), *notes),
            constants=tuple(chain.from_iterable(outputs.constants for outputs in of_inputs)),
        )

    def _average(self, terms: Sequence[OutputTensor], names: Sequence[str]) -> AveragedTensor:
        first = terms[0].record
        for name, term in zip(names, terms, strict=True):
            mine = term.record
            for what, expected, found in (
                ("shape", first.shape, mine.shape),
                ("dtype", first.dtype, mine.dtype),
                ("momentum convention", first.convention, mine.convention),
            ):
                if expected != found:
                    raise SourceError(
                        f"tensor {first.key!r}: expected the same {what} in all inputs, found {expected} in {names[0]} "
                        f"and {found} in {name}; convert one of them first"
                        + (", or merge them with --to PROGRAM, or --convention" if what.startswith("momentum") else "")
                    )
        sources = tuple(source for term in terms for source in term.sources)
        record = replace(first, fingerprint=None)
        return AveragedTensor(record, terms[0].layout, sources, None, None, tuple(terms), self.weights)

    def _sentences(self, inputs: Sequence[_Input]) -> tuple[str, ...]:
        shares = ", ".join(f"{weight} of {one.name}" for weight, one in zip(self.weights, inputs, strict=True))
        count = len(inputs[0].averaged)
        one = inputs[self.others_from or 0]
        others = len(one.others) + len(one.items)
        where = "the same in all inputs" if self.others_from is None else f"those of {one.name}"
        average = f"averaged tensors: {count}, summed in float64 in this order: {shares}"
        return (average, *([f"{others} counters, options and other items are {where}"] if others else []))


@dataclass(frozen=True, slots=True)
class _Input:
    """One input's tensors to average, other tensors, and items, by key."""

    name: str
    averaged: dict[str, OutputTensor]
    others: dict[str, OutputTensor]
    items: dict[str, OutputItem]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, outputs: Outputs, select: Sequence[str]) -> _Input:
        nowhere = Extent("none", 0, 0)
        blobs = tuple(Blob(item.key, item.path, nowhere) for item in outputs.items)
        view = view_by_keys(Manifest(tuple(tensor.record for tensor in outputs.tensors), blobs))
        averages: dict[str, OutputTensor] = {}
        others: dict[str, OutputTensor] = {}
        chosen = outputs.selected(select)
        for own in chosen.tensors:
            record = own.record
            if stored_slot(record.slot).is_coded:
                raise SourceError(
                    f"{name}: tensor {record.key!r} is a part of state in 8 bits, which is not averaged: leave it out "
                    "by --model-only, or load it into an optimizer with state in float32, and save that"
                )
            role, convention = view.role(record), view.convention(record)
            tensor = replace(own, record=replace(record, convention=Convention(convention) if convention else None))
            if record.dtype in FLOATS and (role is Role.WEIGHTS or (record.shape and role is not Role.OPTIONS)):
                averages[record.key] = tensor
            elif record.shape and record.dtype.startswith(_INDIVISIBLE):
                raise SourceError(
                    f"{name}: tensor {record.key!r} is {record.dtype}, which is not averaged; expected "
                    f"{', '.join(FLOATS)}, or leave it out by --select or --model-only"
                )
            else:
                others[record.key] = tensor
        items = {item.key: item for item in chosen.items}
        return cls(name, averages, others, items, chosen.left_out, chosen.notes)


def _agreed_keys(inputs: Sequence[_Input]) -> set[str]:
    keys = set(inputs[0].averaged)
    for one in inputs[1:]:
        for with_it, without in ((inputs[0], one), (one, inputs[0])):
            missing = [key for key in with_it.averaged if key not in without.averaged]
            if missing:
                raise SourceError(
                    f"expected the same tensors in all inputs, found {len(missing)} in {with_it.name} that "
                    f"{without.name} lacks, such as {missing[0]!r}; choose what all have by --select or --model-only, "
                    "or give the programs' names with --to"
                )
    if not keys:
        raise SourceError(f"{inputs[0].name}: found no floating-point tensor to average")
    return keys


def _refuse_differences(inputs: Sequence[_Input], payloads: Payloads) -> None:
    """Refuse counters, options and items that are not the same in all inputs."""

    def raw(item: OutputItem) -> bytes:
        return item.data if item.source is None else checked_blob(payloads, item.source)

    base = inputs[0]
    differing: list[str] = []
    for one in inputs[1:]:
        differing += sorted(base.others.keys() ^ one.others.keys())
        differing += sorted(base.items.keys() ^ one.items.keys())
        tensors = [(key, base.others[key], one.others[key]) for key in base.others if key in one.others]
        differing += [key for key, mine, theirs in tensors if not _same_elements(mine, theirs, payloads)]
        items = [(key, base.items[key], one.items[key]) for key in base.items if key in one.items]
        differing += [key for key, mine, theirs in items if not same_value(raw(mine), raw(theirs))]
    differing = list(dict.fromkeys(differing))
    if differing:
        raise SourceError(
            f"the inputs differ in {len(differing)} counters, options or items, which have no average: "
            f"{listed(map(repr, differing), 3)}; say whose to take, such as --others-from last, or merge the weights "
            "alone with --model-only"
        )


def _same_elements(a: OutputTensor, b: OutputTensor, payloads: Payloads) -> bool:
    one, other = a.record, b.record
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.fingerprint is not None and other.fingerprint is not None:
        return one.fingerprint == other.fingerprint
    for tensor in (a, b):
        tensor.check_sources(payloads)
    return compare_bits(StoredSide(a, payloads), StoredSide(b, payloads), Box.of(one.shape))[0]


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
        raise TargetError("--proportions and --ema contradict each other; give one of them")
    if ema is not None:
        decay = _number(ema, "--ema")
        if not 0 < decay < 1:
            raise TargetError(f"--ema: expected a decay between 0 and 1, found {ema}")
        return (decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count)))
    numbers = [_number(number, "--proportions") for number in ([1] * count if proportions is None else proportions)]
    if len(numbers) != count or min(numbers) <= 0:
        given = ",".join(map(str, proportions or ()))
        raise TargetError(f"--proportions: expected {count} positive numbers, one for each input, found {given}")
    total = sum(numbers, Fraction(0))
    return tuple(number / total for number in numbers)


def _number(value: str | float | Fraction, option: str) -> Fraction:
    """Read a number as it is written: 0.1 is a tenth, not the nearest float64."""
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise TargetError(f"{option}: expected numbers such as 0.5 or 1/3, found {value!r}") from None
