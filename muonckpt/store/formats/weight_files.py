"""Chooses the files of a folder that are its weights, and finds where the tensors of an index really lie.

The precedence is that of transformers' ``from_pretrained``: the file before the index of its shards, and safetensors
before pickles.  An index is checked against the files, and they are searched before a tensor counts as lost: people
consolidate shards and leave the index, or copy an index that numbers its files otherwise.

Source: ``_get_resolved_checkpoint_files`` and ``_load_pretrained_model`` of transformers 5.23, which loads the files
that an index names in the order of their names, so that the last of several copies counts.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from ...names.errors import DamageError, MisdescribedError, SourceError, UnlistedError, about
from ...names.wording import counted, listed
from ...record.json_fields import check_digest
from ...record.record import Extent, StateRecord
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
    matches = filter(None, map(_MODEL_NAME.fullmatch, names))
    numbers = sorted({match[1] or "" for match in matches})
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
    # The name that transformers looks for; then one index, or the file of its name; then shards, then one file.
    models = models_in([name for name in names if ending in name])
    if "model" in models:
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
    files = f" and the files {listed(whole_files)}" if whole_files else ""
    raise SourceError(
        f"{folder}: expected one index (*{ending}.index.json), found {len(indices)}{files}: give the path of the file, "
        "or of the index, that you mean"
    )


def matches_in(names: Collection[str], pattern: re.Pattern[str], ending: str) -> list[re.Match[str]]:
    """Return the matches of `INDEX_NAME` or `SHARD_NAME` in names of this ending, sorted."""
    matches = map(pattern.fullmatch, sorted(names))
    return [match for match in matches if match and match["ending"] == ending]


def unread_beside(names: Collection[str], files: Collection[str]) -> list[str]:
    """Return the names of files of weights, and of indices, in a folder other than those that are read."""
    return sorted(name for name in {*names} - {*files} if _WEIGHTS_NAME.fullmatch(name))


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """Maps tensors to their files, and files to the digests of their headers (none in other programs' indices)."""

    files: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, place: Location) -> WeightIndex:
        """Read an index.

        Raises:
            DamageError: it is damaged, or names a file outside its folder.
        """
        with about(place):
            try:
                data = json.loads(read_text_file(place))
            except (ValueError, RecursionError) as error:
                raise DamageError(f"damaged index: {error}") from error
            # Any program's index maps tensors to files; ours has digests as well.
            match data:
                case {"weight_map": dict(files)} if all(isinstance(name, str) for name in files.values()):
                    index = cls(files)
                case _:
                    raise DamageError("damaged index: expected a weight_map of file names")
            match data:
                case {"metadata": {"muonckpt": {"digest": digest, "headers": dict(headers), **version}, **sizes}}:
                    check_digest(digest, [sizes, {**version, "headers": headers}, files])
                    index = cls(files, headers)
                case {"metadata": {"muonckpt": _}}:
                    raise DamageError("damaged index: expected digests of headers under muonckpt")
            for name in index.names:
                Extent(name, 0, 0)  # refuses a name that is not of a file inside the folder
        return index

    @property
    def names(self) -> list[str]:
        """The names of its files, in the order in which transformers loads them."""
        return sorted({*self.files.values(), *self.headers})


Entries = Mapping[str, StateRecord]
"""The tensors of a file, by key."""

Read = Callable[[str, str | None], Entries]
"""Returns the tensors of a file by key, given its name and the digest that its header has to have, or None."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Holds the tensors that the files of an index have.

    Attributes:
        files: the files that are read, with their tensors.
        faults: why the index does not describe them, or the lost files.
        copies: copies of tensors that are not read, each with its file.
    """

    files: Mapping[str, Entries]
    faults: tuple[SourceError, ...] = ()
    copies: tuple[str, ...] = ()


def read_shards(index: WeightIndex, names: Collection[str], ending: str, read: Read) -> Shards:
    """Read the files of an index, and look for what they lack in the others of the folder.

    Args:
        names: of all files in the folder; those with this ``ending`` may have weights.

    Raises:
        DamageError: two files have a tensor, and transformers takes another than the index says.
        SourceError: a file is refused.
    """
    # Read each file that the index names, under its name or under the one that its header's digest proves.
    candidates = {name for name in names if name.endswith(ending)}
    contents: dict[str, Entries] = {}
    reasons: list[str] = []
    for name in index.names:
        header_digest = index.headers.get(name)
        try:
            contents[name] = read(name, header_digest)
        except DamageError as error:
            renamed = _readable(candidates - {name}, read, header_digest) if header_digest else {}
            if renamed:
                new_name = next(iter(renamed))
                contents[new_name] = renamed[new_name]
                reasons.append(f"the file that the index calls {name} is called {new_name}: rename it")
            else:
                reasons.append(f"{name} is missing" if name not in names else str(error))
    if not index.headers:
        contents |= _unnamed_shards(index, candidates, read)

    # Take each tensor from the last file with its name, as transformers does; the index must not say otherwise.
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
    files = {}
    for name, entries in contents.items():
        files[name] = {key: entry for key, entry in entries.items() if holders[key][-1] == name}
    copies: list[str] = []
    for key, holding_files in holders.items():
        copies += [f"{key} in {name}" for name in holding_files[:-1]]

    # Compare with the index, and look into files that it does not name before a tensor counts as lost.
    lost_keys = sorted(index.files.keys() - holders.keys())
    if lost_keys:
        unnamed = {} if index.headers else _readable(candidates - {*index.names}, read, None)
        if complete := _complete_set(index, unnamed):
            reasons.append(f"all {len(index.files)} tensors are in {listed(complete)}, which the index does not name")
            return Shards(complete, (MisdescribedError("; ".join(reasons)),))
        with_it = " with it" if reasons else ""
        reasons.append(f"{len(lost_keys)} of {len(index.files)} tensors are lost{with_it} ({listed(lost_keys, 2)})")
        if namesakes := [name for name, entries in unnamed.items() if not entries.keys().isdisjoint(lost_keys)]:
            reasons.append(f"tensors with the same names are in {listed(namesakes)}, which the index does not name")
        if unread := sorted(name for name in names if _MODEL_NAME.fullmatch(name) and ending not in name):
            reasons.append(f"{listed(unread)} may have them, and is not read: give its path if you mean it")
        return Shards(files, (UnlistedError("; ".join(reasons)),), tuple(copies))
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
    return Shards(files, (MisdescribedError("; ".join(reasons)),) if reasons else (), tuple(copies))


def _family(name: str) -> object:
    """Return the numbering to which a file belongs: its stem and the number of files; or the name of another file."""
    match = SHARD_NAME.fullmatch(name)
    return match.group("stem", "count") if match else name


def _unnamed_shards(index: WeightIndex, candidates: Collection[str], read: Read) -> dict[str, Entries]:
    """Return the files of an index's numbering that it does not name, and whose tensors it does not name either."""
    families = set(map(_family, index.names))
    unnamed = [name for name in {*candidates} - {*index.names} if SHARD_NAME.fullmatch(name)]
    if index.files:
        unnamed = [name for name in unnamed if _family(name) in families]
    contents = _readable(unnamed, read, None)
    return {name: entries for name, entries in contents.items() if index.files.keys().isdisjoint(entries)}


def _complete_set(index: WeightIndex, candidates: Mapping[str, Entries]) -> Mapping[str, Entries] | None:
    """Return the files that have every tensor of an index once: one file, those of one numbering, or all that have any.

    Raises:
        DamageError: several such sets have them, and nothing tells which is meant.
    """
    # Every file that has tensors of the index, by its numbering.
    some = {name: entries for name, entries in candidates.items() if not index.files.keys().isdisjoint(entries)}
    families: defaultdict[object, dict[str, Entries]] = defaultdict(dict)
    for name, entries in some.items():
        families[_family(name)][name] = entries
    complete = [family for family in families.values() if _has_each_once(index, family)]
    if not complete and _has_each_once(index, some):
        complete = [some]
    if len(complete) > 1:
        several = "; ".join(listed(family) for family in complete)
        raise DamageError(
            f"the files that the index names are missing, and several others have all its tensors ({several}): give "
            "the path of the one that you mean, or remove the index"
        )
    return complete[0] if complete else None


def _has_each_once(index: WeightIndex, family: Mapping[str, Entries]) -> bool:
    keys = list(chain.from_iterable(family.values()))
    return len({*keys}) == len(keys) and {*index.files} <= {*keys}


def read_shards_without_index(folder: Location, names: Collection[str], ending: str, read: Read) -> Shards:
    """Read numbered files whose index is lost.

    Raises:
        DamageError: they are of several sets.
    """
    # All have to be of one numbering, which also says how many there were.
    shards = matches_in(names, SHARD_NAME, ending)
    reason = f"expected one index (*{ending}.index.json), found 0"
    if len({_family(match.string) for match in shards}) != 1:
        raise DamageError(f"{folder}: {reason}")
    contents, reasons = dict[str, Entries](), [reason]
    missing = int(shards[0]["count"]) - len(shards)
    if missing:
        reasons.append(f"{missing} of {shards[0]['count']} files are missing")
    for match in shards:
        try:
            contents[match.string] = read(match.string, None)
        except DamageError as error:
            reasons.append(str(error))
    # Without an index nothing says which copy of a tensor counts.
    keys = list(chain.from_iterable(contents.values()))
    if len({*keys}) < len(keys):
        raise DamageError(f"{folder}: {reason}, and a tensor is in several files")
    fault = UnlistedError if missing or len(contents) < len(shards) else MisdescribedError
    return Shards(contents, (fault("; ".join(reasons)),))


def _readable(names: Collection[str], read: Read, header_digest: str | None) -> dict[str, Entries]:
    """Return the tensors of the whole files, with a header of this digest if one is given."""
    contents = {}
    for name in sorted(names):
        with suppress(SourceError):
            contents[name] = read(name, header_digest)
    return contents
