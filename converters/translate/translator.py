"""A checkpoint of one program in the words of another: what each target tensor is made of, and what is new.

:func:`translate` decides everything from the manifest and a few small values; it moves no data.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from ...errors import SourceError
from ...layout import Fragment, TensorLayout
from ...record import Blob, Manifest, StateRecord
from ...store.stored_items import Values, scalar_bytes
from ...vocabulary import Convention
from ..target.topology import TargetError
from .conventions import Said, agreed, factor
from .detection import Detected, detect
from .dialects import Dialect, KeyPath
from .group_options import read_groups
from .names import Rules
from .regroup import regroup
from .roles import Contents, contents
from .source_parameters import Columns, Param, Side, params_of
from .structure import Tensor, apply
from .translation import CarriedItem, MadeTensor, Moved, Translation


def translate(
    manifest: Manifest,
    values: Values,
    target: Dialect | None = None,
    *,
    source: Dialect | None = None,
    rules: Rules | None = None,
    said: Said | None = None,
    drop: frozenset[str] = frozenset(),
) -> Translation:
    """Say a checkpoint in another dialect, or in its own with other names or another convention.

    Args:
        manifest: with payloads, as ``directory.read(path, payloads=True)`` gives it.
        values: of the same checkpoint.
        target: the dialect to write; the source's own if None.
        source: the dialect it is in; found from its keys if None.
        rules: names and structure; applied to parameters and to their state.
        said: what the user says of the momentum where the checkpoint does not.
        drop: slots of state to leave behind.

    Raises:
        SourceError: the dialect or a convention is not known, or the target has no place for something.
        TargetError: there is no slot of a name in ``drop``, or nothing that a rule fits.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    detected = detect(manifest) if source is None else Detected(source, ("named by the user",))
    dialect, target, rules = detected.dialect, target or detected.dialect, rules or Rules()
    if not target.writable:
        raise SourceError(f"checkpoints of {target.name} are read, not written; say with --to what to write")
    _refuse_unknown(manifest, dialect, drop)
    leave = drop if dialect is target and not rules.rules else drop | dialect.derived
    has = contents(manifest, dialect, leave)
    _refuse_unread(manifest, dialect, has)
    groups = read_groups(manifest, dialect, values)
    group_of = {name: group for group in groups for name in group.params}
    side = Side(manifest, dialect, target, values, said or Said(), has, group_of, drop)
    columns = _columns(side, rules)
    _refuse_unfit(rules, columns)
    params = {param.name: param for param in params_of(side, columns)}
    notes: set[str] = set()
    others = [manifest.tensors[at] for at in has.others]
    moved = [Moved(_under(other, other.path), _layout(side, other)) for other in others]
    moved += [_weight(side, name, tensor) for name, tensor in columns[None].items()]
    moved += [
        _state(side, slot, tensor, params[name])
        for slot, tensors in columns.items()
        if slot is not None
        for name, tensor in tensors.items()
    ]
    counters = [_counter(side, param) for param in params.values() if "step" in param.ours.slots]
    grouped = regroup(side, groups, columns, params, notes)
    moved += [Moved(_under(option, path), _layout(side, option)) for option, path in grouped.tensors]
    if has.others and side.target is not dialect:
        example = manifest.tensors[has.others[0]].key
        notes.add(f"{len(has.others)} tensors are neither weights nor state and keep their keys, such as {example!r}")
    return Translation(
        manifest,
        detected,
        target,
        (*moved, *(counter for counter in counters if isinstance(counter, Moved))),
        tuple(counter for counter in counters if isinstance(counter, MadeTensor)),
        (
            *(CarriedItem(blob, *_called(side, blob)) for blob in has.items),
            *(counter for counter in counters if isinstance(counter, CarriedItem)),
            *grouped.carried,
        ),
        grouped.made,
        has.left,
        tuple(sorted(notes)),
    )


def _refuse_unknown(manifest: Manifest, dialect: Dialect, drop: frozenset[str]) -> None:
    paths = (entry.path for entries in (manifest.tensors, manifest.blobs) for entry in entries)
    there = {found["slot"] for path in paths if (found := dialect.state.read(path))}
    if missing := sorted(drop - there):
        raise TargetError(f"no slot {missing[0]!r} to drop; of {dialect.name} there are {', '.join(sorted(there))}")


def _refuse_unread(manifest: Manifest, dialect: Dialect, has: Contents) -> None:
    """State that is taken for something else would keep its keys and its convention without a word."""
    keys = f"keys of {dialect.name} are like {dialect.state} and {dialect.model}"
    if not (has.tensors or has.counters or has.left):
        entries: tuple[StateRecord | Blob, ...] = (*manifest.tensors, *manifest.blobs)
        examples = ", ".join(repr(entry.key) for entry in entries[:3])
        raise SourceError(f"expected weights or state, found neither: {keys}, here are {examples}")
    for other in (manifest.tensors[at] for at in has.others):
        if other.slot is not None and other.slot not in dialect.derived:
            raise SourceError(f"{other.key!r} is state of an optimizer, under a key that cannot be translated: {keys}")


def _refuse_unfit(rules: Rules, columns: Columns) -> None:
    tensors = [(name, tensor) for named in columns.values() for name, tensor in named.items()]
    fits = any(tensor.restructured or tensor.aliases != (name,) for name, tensor in tensors)
    if rules.rules and not fits:
        examples = ", ".join(sorted({name for name, _ in tensors})[:3])
        raise TargetError(f"no rule fits any parameter; there are {examples} … and the first rule is {rules.rules[0]}")


def _called(side: Side, item: Blob) -> tuple[str, KeyPath]:
    """The key and the path of an item that is neither state nor an option."""
    key = item.key if side.target is side.dialect else side.target.item(item.key)
    return key, item.path if key == item.key else (key,)


# Tensors.


def _layout(side: Side, tensor: StateRecord) -> TensorLayout:
    """Where a tensor of the source lies, in buffers that say whose chunks they are."""
    layout, at = tensor.chunk_layout(), side.has.positions[tensor.key]
    places = ((f, dataclasses.replace(f.place, buffer=f"{at}:{f.place.buffer}")) for f in layout.fragments)
    return TensorLayout(layout.shape, tuple(Fragment(fragment.box, place) for fragment, place in places))


def _columns(side: Side, rules: Rules) -> Columns:
    columns: defaultdict[str | None, dict[str, Tensor]] = defaultdict(dict)
    for (slot, name), at in side.has.tensors.items():
        tensor = side.manifest.tensors[at]
        columns[slot][name] = Tensor(tensor.dtype, _layout(side, tensor), name, (name,))
    return defaultdict(dict, {slot: apply(rules, tensors) for slot, tensors in columns.items()})


def _under(record: StateRecord, path: KeyPath) -> StateRecord:
    """The record of a tensor that is to be stored anew, under this path."""
    return dataclasses.replace(record, key=".".join(map(str, path)), path=path, chunks=(), layout=None)


def _made(side: Side, slot: str | None, tensor: Tensor, path: KeyPath) -> StateRecord:
    """The record of a target tensor; what rests on the source's structure is kept where that is."""
    if tensor.restructured:
        return StateRecord(".".join(map(str, path)), path, tensor.shape, tensor.dtype, ())
    return _under(side.manifest.tensors[side.has.tensors[slot, tensor.aliases[0]]], path)


def _weight(side: Side, name: str, tensor: Tensor) -> Moved:
    return Moved(_made(side, None, tensor, side.target.model.write(name=name)), tensor.layout)


def _state(side: Side, slot: str, tensor: Tensor, param: Param) -> Moved:
    word = next(word for word, own in param.theirs.slots.items() if own == slot)
    path = side.target.state.write(name=param.name, slot=param.ours.slots[word], **param.chain)
    record = _made(side, slot, tensor, path)
    record = dataclasses.replace(record, name=param.name, slot=param.ours.slots[word])
    if word != "momentum":
        return Moved(record, tensor.layout)
    convention, wanted = _conventions(side, slot, tensor, param)
    scale = factor(convention, wanted, _mu(side, param), f"parameter {param.name!r}")
    fingerprint = record.fingerprint if scale is None else None
    record = dataclasses.replace(record, convention=wanted, fingerprint=fingerprint)
    return Moved(record, tensor.layout, scale)


def _conventions(side: Side, slot: str, tensor: Tensor, param: Param) -> tuple[Convention | None, Convention | None]:
    """What the momentum follows, and what the target's is to follow."""
    about = f"parameter {param.name!r}"
    found = [side.has.tensors[slot, alias] for alias in tensor.aliases if (slot, alias) in side.has.tensors]
    recorded = {f"the manifest ({side.manifest.tensors[at].key})": side.manifest.tensors[at].convention for at in found}
    told = {side.dialect.name: side.dialect.convention, "--convention": side.said.convention}
    convention = agreed(about, "--convention", recorded | told)
    wanted = {side.target.name: side.target.convention, "--target-convention": side.said.target}
    return convention, agreed(about, "--target-convention", wanted) or convention


def _mu(side: Side, param: Param) -> float | None:
    """The momentum coefficient of the parameter's group, or what the user says where that has none."""
    own = param.theirs.options.get("momentum", "")
    if param.group is None or own not in param.group.items:
        return side.said.mu
    found = side.values.read(param.group.items[own])
    if found is None:
        return side.said.mu
    if not isinstance(found, float | int):
        raise SourceError(f"parameter {param.name!r}: expected a number as {own} of its group, found {found!r}")
    if side.said.mu not in (None, found):
        raise SourceError(f"parameter {param.name!r}: its group says {own}={found!r}, --mu says {side.said.mu!r}")
    return float(found)


def _counter(side: Side, param: Param) -> Moved | MadeTensor | CarriedItem:
    """The step of a parameter: moved if it is a tensor in the source, else made one where the dialect is another."""
    slot = param.ours.slots["step"]
    path = side.target.state.write(name=param.name, slot=slot, **param.chain)
    key = ".".join(map(str, path))
    own = side.has.counters.get(param.aliases[0], {}).get(param.theirs.slots.get("step", ""))
    if isinstance(own, StateRecord):
        return Moved(dataclasses.replace(_under(own, path), name=param.name, slot=slot), _layout(side, own))
    if own is not None and side.target is side.dialect:
        return CarriedItem(own, key, path)
    if param.step is None:
        raise SourceError(f"parameter {param.name!r}: {side.target.name} stores its step; give --step")
    record = StateRecord(key, path, (), "float32", (), name=param.name, slot=slot)
    return MadeTensor(record, scalar_bytes("float32", param.step))
