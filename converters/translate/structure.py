"""Parameters between source and target, and name rules, which rename, split and join them without touching an element.

A part is the composition (`through`) of boxes of the whole with its layout; a whole is the union of its parts' layouts,
shifted.  The result is again a layout, proved to tile its tensor, to which further rules can be applied.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from ...algebra.box import Box, Index, flat_boxes, row_major
from ...algebra.layout import Fragment, Piece, TensorLayout, stacked, through
from ...names.errors import LayoutError, about
from ...names.renaming import compiled, filled
from ...names.wording import listed
from ...programs.dialect import StoredMethod
from ...programs.model_view import Entry, ParameterGroup
from ...record.record import StateRecord, no_chunks
from ..engine.outputs import OutputTensor
from . import matrices
from .matrices import Matrices
from .names import NameRule, NameRules

_NO_METHOD = StoredMethod("none", {})


@dataclass(frozen=True, slots=True)
class TranslatedParameter:
    """A parameter under the target's name.

    Attributes:
        listed: the name by which the target's groups know it: the whole's, where rules split only tensors.
        aliases: the names by which the source's groups may know it.
        entries: the source's that it is made of: those of its state by slot, and weights under None.
        tensors: those that are written, likewise; with the source's records and keys.
        matrices: in it; they count where it is ``regrouped``: where rules have split or joined what groups list.
        hidden_pieces: why it seems split into matrices that no option names; empty if nothing shows that.
        is_flattened: whether the source stores its momentum as a matrix, though it has more dims.
        method: how the source updates and stores it, if that is known.
        target_method: how the target does.
        group: the source's group with its options.
        step: the number of updates, if the source or the user says it.
        chains: the optimizers, as keys name them, that its state belongs to.
        chain: the target's optimizer that its state belongs to, as its keys name it; empty if they name none.
        target_matrices: in it, where they are not those that the options of its group say.
        unsaid: options of its group that the source has from no run, but from a new optimizer.
    """

    name: str
    listed: str
    aliases: tuple[str, ...]
    entries: Mapping[str | None, tuple[Entry, ...]] = field(default_factory=dict)
    tensors: Mapping[str | None, OutputTensor] = field(default_factory=dict)
    matrices: Matrices = matrices.UNKNOWN
    regrouped: bool = False
    hidden_pieces: str = ""
    is_flattened: bool = False
    method: StoredMethod = _NO_METHOD
    target_method: StoredMethod = _NO_METHOD
    group: ParameterGroup | None = None
    step: int | None = None
    chains: frozenset[str] = frozenset()
    chain: str = ""
    target_matrices: Matrices | None = None
    unsaid: frozenset[str] = frozenset()

    @property
    def weight(self) -> OutputTensor | None:
        return self.tensors.get(None)

    @property
    def is_stateful(self) -> bool:
        return self.method is not _NO_METHOD and not self.tensors.keys() <= {None}

    @property
    def is_stateless(self) -> bool:
        """Whether the source has no state of it, because it never had a gradient."""
        return self.method is not _NO_METHOD and self.tensors.keys() <= {None}

    @property
    def counters(self) -> tuple[Entry, ...]:
        """The step counters of its parts, if they have such."""
        return self.entries.get(self.method.slots.get("step", ""), ())

    @property
    def slots(self) -> dict[str, OutputTensor]:
        """The tensors of its state, by common name."""
        return {name: self.tensors[slot] for name, slot in self.method.slots.items() if slot in self.tensors}

    @property
    def shape(self) -> Index:
        """The shape of the weight, or else of the largest tensor of its state."""
        tensors = [self.weight] if self.weight else self.tensors.values()
        return max((tensor.record.shape for tensor in tensors), key=math.prod, default=())


def unflattened(tensor: OutputTensor, shape: Index) -> OutputTensor:
    """Return a matrix in the dims of its parameter; all but the first are its columns; others unchanged."""
    if len(shape) < 3 or tensor.record.shape != (shape[0], math.prod(shape[1:])):
        return tensor
    return _with_layout(tensor, _unflattened(tensor.layout, shape))


def _with_layout(tensor: OutputTensor, layout: TensorLayout) -> OutputTensor:
    """Return a tensor of elements of the given one, where ``layout`` finds them; the dtype stays."""
    key, path, dtype = tensor.key, tensor.record.path, tensor.record.dtype
    return OutputTensor(
        StateRecord(key, path=path, shape=layout.shape, dtype=dtype, chunks=no_chunks(len(layout.shape))),
        layout,
        tensor.sources,
    )


def apply_rules(rules: NameRules, parameters: Mapping[str, TranslatedParameter]) -> dict[str, TranslatedParameter]:
    """Apply a table to parameters by name; those that no rule matches stay as they are.

    Raises:
        LayoutError: parts are missing, or do not tile the whole; or two tensors would get one name.
    """
    current = dict(parameters)
    for rule in rules.rules:
        unmatched, results = dict(current), dict[str, TranslatedParameter]()
        for names, placeholders in _matches(rule, current):
            # The results of a rule take the place of the matched parameters, also for the rules after it.
            parts = [unmatched.pop(name) for name in names]
            with about(f"tensor {' + '.join(names)!r}"):
                products = _split_parameter(rule, parts[0]) if rule.splits else [_join_parameters(rule, parts)]
                is_numbered = rule.splits and rule.each is not None
                patterns = rule.target * len(products) if is_numbered else rule.target
                for number, (pattern, product) in enumerate(zip(patterns, products, strict=True)):
                    name = filled(pattern, {**placeholders, str(rule.each): str(number)})
                    if name in results:
                        raise LayoutError(f"rule {rule} makes {name!r} twice")
                    # Groups know a product by its new name, or by the whole's, where a program lists that.
                    is_whole = rule.keeps_groups and not rule.splits
                    aliases = (*product.aliases, name) if is_whole else product.aliases
                    listed_name = product.listed if rule.keeps_groups and rule.splits else name
                    results[name] = replace(product, name=name, listed=listed_name, aliases=aliases)
        # State that had another name than its weight, such as a number, is that parameter's.
        for name in unmatched.keys() & results.keys():
            if not unmatched[name].tensors.keys().isdisjoint(results[name].tensors):
                raise LayoutError(f"rule {rule} makes {name!r}, which exists already")
            same_name = unmatched.pop(name), results[name]
            stateless, stateful = sorted(same_name, key=lambda parameter: {*parameter.tensors} != {None})
            results[name] = replace(
                stateful,
                aliases=tuple(dict.fromkeys((*stateless.aliases, *stateful.aliases))),
                entries=_merged_entries([stateless, stateful]),
                tensors={**stateless.tensors, **stateful.tensors},
                matrices=stateless.matrices if stateless.regrouped else stateful.matrices,
                regrouped=stateless.regrouped or stateful.regrouped,
            )
        current = unmatched | results
    return current


def _matches(rule: NameRule, names: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield the names that match the rule's source, in the order of the parts, and their placeholders."""
    # Names with equal placeholders are parts of one whole; their number, or their pattern, is their place in it.
    matches: defaultdict[tuple[tuple[str, str], ...], dict[int, str]] = defaultdict(dict)
    for name in names:
        for index, pattern in enumerate(rule.source):
            match = compiled(pattern, rule.each).fullmatch(name)
            if match:
                values = match.groupdict()
                number = int(values.pop(rule.each)) if rule.each in values else index
                matches[tuple(values.items())][number] = name
                break
    for placeholders, parts in matches.items():
        numbers = range(max(parts) + 1 if rule.each else len(rule.source))
        if missing := [number for number in numbers if number not in parts]:
            raise LayoutError(f"rule {rule}: found {', '.join(parts.values())} without part {listed(missing)}")
        yield tuple(parts[number] for number in numbers), dict(placeholders)


# Splitting and joining.


def _split_parameter(rule: NameRule, whole: TranslatedParameter) -> list[TranslatedParameter]:
    """Return the parts of a parameter, each with its share of every tensor, in the order of the rule."""
    count = rule.count or (len(rule.target) if rule.each is None else None)
    if count == 1 and not rule.stacked:
        return [whole]
    # A stack has one part for each index; any other whole has as many as the rule says.
    if rule.stacked and rule.dim < len(whole.shape):
        count = whole.shape[rule.dim]
    shares = rule.shares or (1,) * (count or 0)
    tensors_of_parts: list[dict[str | None, OutputTensor]] = [{} for _ in shares]
    for slot, tensor in whole.tensors.items():
        shape = tensor.record.shape
        if rule.dim >= len(shape):
            raise LayoutError(f"rule {rule}: shape {shape} has no dim {rule.dim}")
        if count is None:
            raise LayoutError(f"rule {rule}: `count` is needed to split a tensor that is not stacked")
        # Each part is a view of the whole: its boxes, seen through the whole's layout.
        boxes_of_parts = _part_boxes(shape, rule.dim, shares, rule.interleaved)
        for tensors, boxes in zip(tensors_of_parts, boxes_of_parts, strict=True):
            layout = through(stacked(boxes, rule.dim), tensor.layout)
            tensors[slot] = _with_layout(tensor, _without_dim(layout, rule.dim) if rule.stacked else layout)
    parts = []
    boxes_of_parts = _part_boxes(whole.shape, rule.dim, shares, rule.interleaved)
    for tensors, boxes in zip(tensors_of_parts, boxes_of_parts, strict=True):
        part = whole.matrices.part(_ranges_in_dim(boxes, rule.dim), rule.dim)
        part = part.without_dim(rule.dim) if rule.stacked else part
        is_regrouped = whole.regrouped or not rule.keeps_groups
        parts.append(replace(whole, tensors=tensors, matrices=part, regrouped=is_regrouped))
    return parts


def _join_parameters(rule: NameRule, parts: Sequence[TranslatedParameter]) -> TranslatedParameter:
    """Return the parameter that a rule joins of these parts, which are in their order."""
    if rule.count not in (None, len(parts)):
        raise LayoutError(f"rule {rule}: {len(parts)} parts, expected {rule.count}")
    tensors: dict[str | None, OutputTensor] = {}
    for slot in dict.fromkeys(chain.from_iterable(part.tensors for part in parts)):
        if missing := [part.name for part in parts if slot not in part.tensors]:
            raise LayoutError(f"rule {rule}: found {slot or 'a weight'} of other parts, but not of {listed(missing)}")
        tensors[slot] = _joined_tensor(rule, [part.tensors[slot] for part in parts])
    # Parameters of their own are matrices of their own in the whole.
    origins = [None if rule.keeps_groups else part.aliases for part in parts]
    shapes = [_with_size(part.shape, rule.dim) if rule.stacked else part.shape for part in parts]
    lengths = tuple(shape[rule.dim] for shape in shapes)
    shape = _with_value(shapes[0], rule.dim, sum(lengths))
    boxes_of_parts = _part_boxes(shape, rule.dim, rule.shares or lengths, rule.interleaved)
    ranges = [_ranges_in_dim(boxes, rule.dim) for boxes in boxes_of_parts]
    parts_matrices = [part.matrices.with_dim(rule.dim) if rule.stacked else part.matrices for part in parts]
    return replace(
        parts[0],
        aliases=tuple(dict.fromkeys(chain.from_iterable(part.aliases for part in parts))),
        entries=_merged_entries(parts),
        tensors=tensors,
        matrices=matrices.joined(parts_matrices, origins, ranges, rule.dim),
        regrouped=not rule.keeps_groups or any(part.regrouped for part in parts),
        hidden_pieces=next(filter(None, (part.hidden_pieces for part in parts)), ""),
        is_flattened=any(part.is_flattened for part in parts),
    )


def _merged_entries(parts: Iterable[TranslatedParameter]) -> dict[str | None, tuple[Entry, ...]]:
    entries: dict[str | None, tuple[Entry, ...]] = {}
    for slot, part_entries in chain.from_iterable(part.entries.items() for part in parts):
        entries[slot] = (*entries.get(slot, ()), *part_entries)
    return entries


def _joined_tensor(rule: NameRule, parts: Sequence[OutputTensor]) -> OutputTensor:
    """Return one tensor of the same slot of all parts; its elements stay where they are."""
    dtypes, ranks = {part.record.dtype for part in parts}, {len(part.record.shape) for part in parts}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise LayoutError(f"rule {rule}: parts of dtypes {sorted(dtypes)} and ranks {sorted(ranks)} cannot be joined")
    # Buffers are counted through the sources of all parts.
    layouts: list[TensorLayout] = []
    num_buffers = 0
    for part in parts:
        layout = _renumbered_layout(part.layout, num_buffers)
        layouts.append(_with_dim(layout, rule.dim) if rule.stacked else layout)
        num_buffers += sum(map(len, part.sources))
    if rule.dim >= len(layouts[0].shape):
        raise LayoutError(f"rule {rule}: shape {layouts[0].shape} has no dim {rule.dim}")
    lengths = tuple(layout.shape[rule.dim] for layout in layouts)
    shape = _with_value(layouts[0].shape, rule.dim, sum(lengths))
    layout = _joined_layout(tuple(layouts), shape, rule.dim, rule.shares or lengths, rule.interleaved)
    sources = tuple(chain.from_iterable(part.sources for part in parts))
    return _with_layout(replace(parts[0], sources=sources), layout)


def _ranges_in_dim(boxes: Iterable[Box], dim: int) -> list[tuple[int, int]]:
    return [(box.lo[dim], box.hi[dim]) for box in boxes]


@lru_cache(maxsize=1024)
def _renumbered_layout(layout: TensorLayout, first: int) -> TensorLayout:
    """Return a layout whose buffers are counted from ``first`` on."""
    buffers = tuple(first + buffer for buffer in layout.buffers if isinstance(buffer, int))
    return replace(layout, buffers=buffers) if first else layout


@lru_cache(maxsize=1024)
def _joined_layout(
    layouts: tuple[TensorLayout, ...], shape: Index, dim: int, shares: tuple[int, ...], interleaved: int
) -> TensorLayout:
    """Return the layout of a whole.  Cached, as all below, because tensors share layouts."""
    fragments: list[Fragment] = []
    for layout, boxes in zip(layouts, _part_boxes(shape, dim, shares, interleaved), strict=True):
        fragments += _shifted_fragments(layout, boxes, dim)
    return TensorLayout.of(shape, tuple(fragments))


def _part_boxes(shape: Index, dim: int, shares: Sequence[int], interleaved: int) -> Iterator[list[Box]]:
    """Yield the boxes of each part in a whole of this shape, in their order within the part."""
    unit, remainder = divmod(shape[dim], interleaved * sum(shares))
    if remainder:
        raise LayoutError(
            f"{shape[dim]} elements of dim {dim} do not divide into {interleaved} x {sum(shares)} equal shares"
        )
    turn = sum(shares) * unit
    offset = 0
    for share in shares:
        boxes = []
        for lo in [repeat * turn + offset for repeat in range(interleaved)]:
            boxes.append(Box(_with_value((0,) * len(shape), dim, lo), _with_value(shape, dim, lo + share * unit)))
        yield boxes
        offset += share * unit


def _shifted_fragments(layout: TensorLayout, boxes: Sequence[Box], dim: int) -> Iterator[Fragment]:
    """Yield the fragments of a part, shifted to the places of its successive pieces in the whole (``boxes``)."""
    pieces = stacked(boxes, dim)
    expected = _with_value(boxes[0].shape, dim, pieces[-1].origin[dim] + pieces[-1].box.shape[dim])
    if expected != layout.shape:
        raise LayoutError(f"a part has shape {layout.shape}, expected {expected}")
    for piece in pieces:
        local_box = piece.box.shift([o - lo for o, lo in zip(piece.origin, piece.box.lo, strict=True)])
        if local_box.numel:
            is_all = local_box == Box.of(layout.shape)
            piece_layout = layout if is_all else through((Piece(local_box, (0,) * local_box.ndim),), layout)
            yield from (Fragment(f.box.shift(piece.box.lo), f.place) for f in piece_layout.fragments)


def _with_value(values: Index, dim: int, value: int) -> Index:
    return (*values[:dim], value, *values[dim + 1 :])


@lru_cache(maxsize=1024)
def _without_dim(layout: TensorLayout, dim: int) -> TensorLayout:
    """Return the same elements without a dim of size 1."""
    return _reshaped(layout, lambda values, _: values[:dim] + values[dim + 1 :])


@lru_cache(maxsize=1024)
def _with_dim(layout: TensorLayout, dim: int) -> TensorLayout:
    """Return the same elements with one more dim, of size 1."""
    return _reshaped(layout, lambda values, size: _with_size(values, dim, size))


def _with_size(values: Index, dim: int, size: int = 1) -> Index:
    return (*values[:dim], size, *values[dim:])


@lru_cache(maxsize=1024)
def _unflattened(layout: TensorLayout, shape: Index) -> TensorLayout:
    """Return the elements of a matrix in a shape whose dims but the first are its columns."""
    fragments, strides = [], row_major(shape)[1:]
    for fragment in layout.fragments:
        # A range of columns is a few boxes of the dims that they become.
        (top, left), (bottom, right) = fragment.box.lo, fragment.box.hi
        row_stride, column_stride = fragment.place.strides
        for columns in flat_boxes(shape[1:], left, right):
            first = sum(start * stride for start, stride in zip(columns.lo, strides, strict=True))
            offset = fragment.place.offset + (first - left) * column_stride
            place_strides = (row_stride, *(stride * column_stride for stride in strides))
            place = replace(fragment.place, offset=offset, strides=place_strides)
            fragments.append(Fragment(Box((top, *columns.lo), (bottom, *columns.hi)), place))
    return TensorLayout.of(shape, tuple(fragments))


def _reshaped(layout: TensorLayout, edit: Callable[[Index, int], Index]) -> TensorLayout:
    """Return the same elements after an edit of every index, whose second argument is for a dim that it adds."""
    fragments = []
    for fragment in layout.fragments:
        box = Box(edit(fragment.box.lo, 0), edit(fragment.box.hi, 1))
        fragments.append(Fragment(box, replace(fragment.place, strides=edit(fragment.place.strides, 0))))
    return TensorLayout.of(edit(layout.shape, 1), tuple(fragments))
