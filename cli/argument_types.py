"""Arguments and options that several commands take, and their types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from warnings import catch_warnings, simplefilter

import click
from click.shell_completion import CompletionItem

from ..names.errors import did_you_mean
from ..store.io.location import Location, location

Function = TypeVar("Function", bound=Callable[..., Any])
Cuts = tuple[tuple[str, int], ...]
ShardRule = tuple[str, Cuts]


class CheckpointType(click.ParamType):  # type: ignore[type-arg]  # generic in new releases of click only
    """The place of a checkpoint: a path, or a URL of an object store."""

    name = "path or url"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> Location:
        try:
            return location(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class RulesType(click.ParamType):  # type: ignore[type-arg]
    """The name of a ready-made table of rules, or a file with one."""

    name = "table"

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from ..converters.translate.names import READY_MADE  # not needed to parse

        tables = [*READY_MADE, *map("inverse:{}".format, READY_MADE)]
        matches = [CompletionItem(table) for table in tables if table.startswith(incomplete)]
        return matches or [CompletionItem(incomplete, type="file")]


CHECKPOINT = CheckpointType()


class KeyType(click.ParamType):  # type: ignore[type-arg]
    """A key of the checkpoint that stands before it on the command line, or a pattern of keys."""

    name = "key"

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete a key, or the end of one; nothing where that checkpoint cannot be read at once."""
        words: list[object] = []
        for values in context.params.values():
            words += values if isinstance(values, list | tuple) else [values]
        words += context.args
        keys: list[str] = []
        with suppress(Exception), catch_warnings():  # a shell is no place for errors
            simplefilter("ignore")
            places = (Path(word) for word in words if isinstance(word, Path | str))
            all_keys = _keys_in(next(place for place in places if place.exists()))
            keys = [key for key in all_keys if key.startswith(incomplete)]
            # None begins so: without what comes first, those in which a part does.
            inner = f".{incomplete}"
            keys = keys or list(dict.fromkeys(key[key.index(inner) + 1 :] for key in all_keys if inner in key))
        return [CompletionItem(key) for key in keys if key.isprintable()]  # others would control the terminal


def _keys_in(place: Path) -> list[str]:
    """Return the keys of a checkpoint, or of the last one in the folder of a run."""
    from ..names.errors import SourceError
    from ..store.open_checkpoint import OpenCheckpoint  # not needed to parse

    try:
        manifest = OpenCheckpoint(place).outline
    except SourceError:
        manifest = OpenCheckpoint(max(entry for entry in place.iterdir() if entry.is_dir())).outline
    return [tensor.key for tensor in manifest.tensors] + [blob.key for blob in manifest.blobs]


KEY = KeyType()

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_MAX_SIZE_DIGITS = 6


class ByteCountType(click.ParamType):  # type: ignore[type-arg]  # generic in new releases of click only
    """A number of bytes with an optional unit, such as 256MiB."""

    name = "bytes"

    def __init__(self, minimum: int = 1) -> None:
        self.minimum = minimum

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]{1,18})\s*([A-Za-z]*)", str(value))
        if not match or match[2].lower() not in _UNITS:
            self.fail(f"{value!r} is not a number of bytes; write for example 256MiB", param, context)
        count = int(match[1]) * _UNITS[match[2].lower()]
        if count < self.minimum:
            self.fail(f"{value!r} is too little; expected at least {self.minimum} bytes", param, context)
        return count


class RateType(ByteCountType):
    """Bytes a second, such as 50MiB/s."""

    name = "bytes a second"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return super().convert(str(value).removesuffix("/s"), param, context)
        except click.BadParameter:
            self.fail(f"{value!r} is no rate; write for example 50MiB/s", param, context)


_MIN_MEMORY = 64_000
"""Bytes below which buffers would hold single rows."""


def memory_option(default: int, help: str = "Memory.", **arguments: Any) -> Callable[[Function], Function]:
    """Return ``--memory``, which by default is so many bytes."""
    kind = ByteCountType(_MIN_MEMORY)
    return click.option("--memory", type=kind, default=f"{default >> 20}MiB", show_default=True, help=help, **arguments)


def jobs_option(default: int = 2, help: str = "Threads.", **arguments: Any) -> Callable[[Function], Function]:
    kind = click.IntRange(1, 1024)
    return click.option("--jobs", type=kind, default=default, show_default=True, metavar="N", help=help, **arguments)


class MeshType(click.ParamType):  # type: ignore[type-arg]
    """Sizes of mesh axes by name, the outermost first, such as dp=8,tp=2."""

    name = "mesh"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        sizes: dict[str, int] = {}
        for part in str(value).split(","):
            match = re.fullmatch(r"([A-Za-z_]\w*)=([0-9]{1,18})", part.strip())
            if not match:
                self.fail(f"{part.strip()!r} is not an axis and its size; write for example dp=8,tp=2", param, context)
            if match[1] in sizes:
                self.fail(f"axis {match[1]} is named twice in {value!r}; name each once", param, context)
            if not 0 < int(match[2]) < 10**_MAX_SIZE_DIGITS:
                max_size = 10**_MAX_SIZE_DIGITS - 1
                self.fail(f"axis {match[1]} has {match[2]} ranks; expected 1 to {max_size}", param, context)
            sizes[match[1]] = int(match[2])
        return sizes


class ShardRuleType(click.ParamType):  # type: ignore[type-arg]
    """A rule that says which axes cut which dims of matching tensors: '*experts*=ep:0,dp:1'; none: '*='."""

    name = "glob=axis:dim,..."

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> ShardRule:
        glob, equals, cuts_text = str(value).rpartition("=")  # a key may contain "=", an axis cannot
        parts = cuts_text.split(",") if cuts_text else []
        matches = [re.fullmatch(r"([A-Za-z_]\w*):([0-9]{1,2})", part.strip()) for part in parts]
        cuts = tuple((match[1], int(match[2])) for match in matches if match)
        if not glob or not equals or len(cuts) != len(parts):
            self.fail(f"{value!r} is not a rule; write for example '*experts*=ep:0,dp:1'", param, context)
        return glob, cuts


def shard_option(help: str) -> Callable[[Function], Function]:
    """Return ``--shard``, which gives rules by pattern, in their order; of equal patterns the first counts."""

    def first_cuts(_: click.Context, __: click.Parameter, rules: Sequence[ShardRule]) -> Mapping[str, Cuts]:
        cuts: dict[str, Cuts] = {}
        for pattern, axes in rules:
            cuts.setdefault(pattern, axes)
        return cuts

    kind, metavar = ShardRuleType(), "GLOB=AXIS:DIM,..."
    return click.option("--shard", type=kind, multiple=True, callback=first_cuts, metavar=metavar, help=help)


class WordType(click.Choice):  # type: ignore[type-arg]
    """A choice that answers an unknown word with those that come close."""

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        words = list(map(str, self.choices))
        if str(value) not in words:
            close = did_you_mean(str(value), words)
            self.fail(f"{value!r} is not one of {', '.join(map(repr, words))}{close}", param, context)
        return str(value)


class ProgramType(WordType):
    """A program, built in (those among the choices) or of a plug-in."""

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        from ..programs.registry import DIALECTS, with_plugins  # not needed to parse others

        plugins = with_plugins().keys() - DIALECTS.keys() if str(value) not in DIALECTS else ()
        return str(value) if str(value) in plugins else super().convert(value, param, context)
