"""Which files of a folder are its weights, and where the tensors of an index really lie.

One precedence, whoever reads the folder: that of transformers' ``from_pretrained``, the whole file before the index of
its shards and safetensors before pickles.  An index is checked against the files, and they are searched before a tensor
counts as lost: people consolidate shards and leave the index, or copy an index that numbers its files otherwise.

Source: ``_get_resolved_checkpoint_files`` and ``_load_pretrained_model`` of transformers 5.23, which loads all tensors
of all files that an index names, in the order of their names, so that the last of several copies counts.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...names.errors import DamageError, SourceError, UnlistedError, about
from ...names.wording import counted, listed
from ...record.json_fields import check_digest
from ...record.record import Extent
from ..io.location import Location
from ..io.regular import read_text_file

INDEX_NAME = re.compile(r"(?P<stem>.+)(?P<ending>\.safetensors|\.bin)\.index(?P<variant>\.[^.]+)?\.json")
"""The name of an index; transformers writes a variant before ``.json``."""

SHARD_NAME = re.compile(r"(?!shard-)(?P<stem>.+)-[0-9]+-of-(?P<count>[0-9]{1,9})(?P<ending>\.safetensors|\.bin)")
"""The name of one of several files; those of DCP's ``HuggingFaceStorageWriter`` begin with ``shard-``."""

_WEIGHTS_NAME = re.compile(r".+\.(safetensors|bin|pt|pth|gguf)|.+\.index(\.[^.]+)?\.json")

_PRECEDENCE = (
    "model{number}.safetensors",
    "model{number}.safetensors.index.json",
    "pytorch_model{number}.bin",
    "pytorch_model{number}.bin.index.json",
    "pytorch_model_fsdp{number}.bin",
)
"""The names under which transformers and accelerate look for weights; accelerate numbers models after the first."""

_MODEL_NAME = re.compile(r"(?:pytorch_model_fsdp|pytorch_model|model)(_[0-9]{1,4})?\.(safetensors|bin)(\.index\.json)?")


def models_in(names: Collection[str]) -> dict[str, str]:
    """Return, by model (``model``, ``model_1``, …), the file or index by which transformers and accelerate read it."""
    numbers = sorted({match[1] or "" for name in names if (match := _MODEL_NAME.fullmatch(name))})
    models = dict[str, str]()
    for number in numbers:
        candidates = [name.format(number=number) for name in _PRECEDENCE]
        models |= {f"model{number}": name for name in reversed(candidates) if name in names}
    return models


def weights_in(folder: Location, names: Collection[str], ending: str) -> str | None:
    """Return the file or index of the one model in a folder, whatever it is called; None for shards without an index.

    Raises:
        SourceError: there are none, or several, and none of them has the name that transformers looks for.
    """
    usual = {name for name in names if ending in name}
    if "model" in (models := models_in(usual)):
        return models["model"]
    whole_files = sorted(name for name in names if name.endswith(ending) and not SHARD_NAME.fullmatch(name))
    indices = matches_in(names, INDEX_NAME, ending)
    if len(indices) == 1:
        whole_file = f"{indices[0]['stem']}{indices[0]['variant'] or ''}{ending}"
        return whole_file if whole_file in whole_files else indices[0].string
    if not indices and matches_in(names, SHARD_NAME, ending):
        return None
    if not indices and len(whole_files) == 1:
        return whole_files[0]
    found = f"found {len(indices)}" + f" and the files {listed(whole_files)}" * bool(whole_files)
    raise SourceError(
        f"{folder}: expected one index (*{ending}.index.json), {found}: give the path of the file, or of the index, "
        "that you mean"
    )


def matches_in(names: Collection[str], pattern: re.Pattern[str], ending: str) -> list[re.Match[str]]:
    """Return the matches of `INDEX_NAME` or `SHARD_NAME` in names of this ending, sorted."""
    matches = map(pattern.fullmatch, sorted(names))
    return [match for match in matches if match and match["ending"] == ending]


def unread_beside(names: Collection[str], read: Collection[str]) -> list[str]:
    """Return the names of files of weights, and of indices, in a folder that are not read."""
    return sorted(name for name in {*names} - {*read} if _WEIGHTS_NAME.fullmatch(name))


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The file of each tensor, and the digest of each file's header (none in other programs' indices)."""

    files: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, place: Location) -> WeightIndex:
        """Read an index.

        Raises:
            DamageError: it is damaged, or names a file outside its folder.
        """
        with about(place):
            try:
                index = cls._of(json.loads(read_text_file(place)))
            except (ValueError, RecursionError) as error:
                raise DamageError(f"damaged index: {error}") from error
            for name in index.names:
                Extent(name, 0, 0)
        return index

    @classmethod
    def _of(cls, data: object) -> WeightIndex:
        match data:
            case {"weight_map": dict(files)} if all(isinstance(name, str) for name in files.values()):
                pass
            case _:
                raise DamageError("damaged index: expected a weight_map of file names")
        match data:
            case {"metadata": {"muonckpt": {"digest": recorded, "headers": dict(headers), **version}, **sizes}}:
                check_digest(recorded, [sizes, {**version, "headers": headers}, files])
                return cls(files, headers)
            case {"metadata": {"muonckpt": _}}:
                raise DamageError("damaged index: expected digests of headers under muonckpt")
        return cls(files)

    @property
    def names(self) -> list[str]:
        """The names of its files, in the order in which transformers loads them."""
        return sorted({*self.files.values(), *self.headers})


Entry = TypeVar("Entry")

Read = Callable[[str, str | None], Mapping[str, Entry]]
"""Returns the tensors of a file by key, given its name and the digest that its header has to have, or None."""


@dataclass(frozen=True, slots=True)
class Shards(Generic[Entry]):
    """The tensors that the files of an index have.

    Attributes:
        files: the files that are read, with their tensors.
        faults: why the index does not describe them, or what is lost.
        copies: copies of tensors that are not read, each with its file.
    """

    files: Mapping[str, Mapping[str, Entry]]
    faults: tuple[SourceError, ...] = ()
    copies: tuple[str, ...] = ()


def read_shards(index: WeightIndex, names: Collection[str], ending: str, read: Read[Entry]) -> Shards[Entry]:
    """Read the files of an index, and look for what they lack in the others of the folder.

    Args:
        names: of all files in the folder; those with this ``ending`` may have weights.

    Raises:
        DamageError: two files have a tensor, and transformers takes another than the index says.
        SourceError: a file is refused.
    """
    # Read each file that the index names, under its name or under the one that its header's digest proves.
    others = {name for name in names if name.endswith(ending)}
    contents: dict[str, Mapping[str, Entry]] = {}
    reasons: list[str] = []
    for name in index.names:
        expected = index.headers.get(name)
        try:
            contents[name] = read(name, expected)
        except DamageError as error:
            renamed = _readable(others - {name}, read, expected) if expected else {}
            if renamed:
                other = next(iter(renamed))
                contents[other] = renamed[other]
                reasons.append(f"the file that the index calls {name} is called {other}: rename it")
            else:
                reasons.append(f"{name} is missing" if name not in names else str(error))
    if not index.headers:
        contents |= _unnamed_shards(index, others, read)
    # Take each tensor from the last file that has it, as transformers does; the index must not say otherwise.
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(contents):
        for key in contents[name]:
            holders[key].append(name)
    for key, holding_files in holders.items():
        if len(holding_files) > 1 and index.files.get(key) != holding_files[-1]:
            raise DamageError(
                f"tensor {key!r} is in another file as well: the index says {index.files.get(key)}, transformers takes "
                f"it from {holding_files[-1]}, the last of {listed(holding_files)}: give the path of the file that you "
                "mean, or remove the other copy"
            )
    files = {
        name: {key: entry for key, entry in entries.items() if holders[key][-1] == name}
        for name, entries in contents.items()
    }
    copies = tuple(f"{key} in {name}" for key, holding_files in holders.items() for name in holding_files[:-1])
    # Compare with the index, and look into files that it does not name before a tensor counts as lost.
    lost = sorted(index.files.keys() - holders.keys())
    if lost:
        unnamed = {} if index.headers else _readable(others - {*index.names}, read, None)
        if complete := _complete_set(index, unnamed):
            why = f"all {len(index.files)} tensors are in {listed(complete)}, which the index does not name"
            return Shards(complete, (UnlistedError("; ".join([*reasons, why]), count=0),))
        loss = f"{len(lost)} of {len(index.files)} tensors are lost{' with it' * bool(reasons)} ({listed(lost, 2)})"
        alike = [name for name, entries in unnamed.items() if not entries.keys().isdisjoint(lost)]
        elsewhere = f"tensors of these names are in {listed(alike)}, which the index does not name"
        unread = sorted(name for name in names if _MODEL_NAME.fullmatch(name) and ending not in name)
        instead = f"{listed(unread)} may have them, and is not read: give its path if you mean it"
        reasons += [loss, *[elsewhere] * bool(alike), *[instead] * bool(unread)]
        return Shards(files, (UnlistedError("; ".join(reasons), lost),), copies)
    moved = sorted(key for key, holding_files in holders.items() if index.files.get(key) != holding_files[-1])
    if moved and not index.headers:
        key = moved[0]
        reasons.append(
            f"the index and the files disagree about {counted(len(moved), 'tensor')}, such as {key!r}: the index says "
            f"{index.files.get(key)}, found it in {holders[key][-1]}"
        )
    elif moved and not reasons:
        raise DamageError(f"the index and the files disagree about tensor {moved[0]!r}")
    if reasons:
        reasons.append("all tensors are there")
    return Shards(files, (UnlistedError("; ".join(reasons), count=0),) if reasons else (), copies)


def _unnamed_shards(index: WeightIndex, others: Collection[str], read: Read[Entry]) -> dict[str, Mapping[str, Entry]]:
    """Return the files of an index's numbering that it does not name, and whose tensors it does not name either."""
    matches = {name: match for name in {*others, *index.names} if (match := SHARD_NAME.fullmatch(name))}
    families = {matches[name].group("stem", "count") for name in index.names if name in matches}
    unnamed = {name for name in {*others} - {*index.names} if name in matches}
    if index.files:
        unnamed = {name for name in unnamed if matches[name].group("stem", "count") in families}
    return {name: own for name, own in _readable(unnamed, read, None).items() if index.files.keys().isdisjoint(own)}


def _complete_set(
    index: WeightIndex, others: Mapping[str, Mapping[str, Entry]]
) -> Mapping[str, Mapping[str, Entry]] | None:
    """Return the files that have every tensor of an index once: one file, those of one numbering, or all that have any.

    Raises:
        DamageError: several such sets have them, and nothing tells which is meant.
    """
    having_some = {name: entries for name, entries in others.items() if not index.files.keys().isdisjoint(entries)}
    families: defaultdict[object, dict[str, Mapping[str, Entry]]] = defaultdict(dict)
    for name, entries in having_some.items():
        match = SHARD_NAME.fullmatch(name)
        families[match.group("stem", "count") if match else name][name] = entries
    complete = [family for family in families.values() if _has_each_once(index, family)]
    if not complete and _has_each_once(index, having_some):
        complete = [having_some]
    if len(complete) > 1:
        several = "; ".join(listed(family) for family in complete)
        raise DamageError(
            f"the files that the index names are missing, and several others have all its tensors ({several}): give "
            "the path of the one that you mean, or remove the index"
        )
    return complete[0] if complete else None


def _has_each_once(index: WeightIndex, family: Mapping[str, Mapping[str, Entry]]) -> bool:
    keys = [key for entries in family.values() for key in entries]
    return len({*keys}) == len(keys) and {*index.files} <= {*keys}


def read_shards_without_index(
    folder: Location, names: Collection[str], ending: str, read: Read[Entry]
) -> Shards[Entry]:
    """Read numbered files whose index is lost.

    Raises:
        DamageError: they are of several sets.
    """
    shards = matches_in(names, SHARD_NAME, ending)
    reason = f"expected one index (*{ending}.index.json), found 0"
    if len({match.group("stem", "count") for match in shards}) != 1:
        raise DamageError(f"{folder}: {reason}")
    contents, reasons = dict[str, Mapping[str, Entry]](), [reason]
    missing = int(shards[0]["count"]) - len(shards)
    reasons += [f"{missing} of {shards[0]['count']} files are missing"] * bool(missing)
    for match in shards:
        try:
            contents[match.string] = read(match.string, None)
        except DamageError as error:
            reasons.append(str(error))
    keys = [key for entries in contents.values() for key in entries]
    if len({*keys}) < len(keys):
        raise DamageError(f"{folder}: {reason}, and a tensor is in several files")
    complete = missing == 0 and len(contents) == len(shards)
    return Shards(contents, (UnlistedError("; ".join(reasons), count=0 if complete else None),))


def _readable(names: Collection[str], read: Read[Entry], expected: str | None) -> dict[str, Mapping[str, Entry]]:
    """Return the tensors of those files that are whole, and have a header of this digest if there is one."""
    contents = {}
    for name in sorted(names):
        try:
            contents[name] = read(name, expected)
        except SourceError:
            continue
    return contents
