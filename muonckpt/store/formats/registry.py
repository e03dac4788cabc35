"""The table of formats, the format of a checkpoint, and the formats of plug-ins.

Built-in formats and plug-ins are `Format` values alike, whose readers and writers are imported when used.  A package
names its formats in the entry points ``muonckpt.formats``::

    [project.entry-points."muonckpt.formats"]
    npy = "npy_folder:FORMAT"

where ``FORMAT`` is a `Format`.  Plug-ins are looked for only where no built-in format will do, so they cannot take over
a built-in one, and cost nothing elsewhere.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from typing import Any

from ...names.errors import SourceError
from ...names.plugins import load_plugins
from ...programs import signs
from ...record import record
from ..io.location import Location, entries_of, folders_with, kind_of, names_in, refuse_lost_link, source_errors
from ..io.regular import open_regular
from ..reading.payloads import Reader


@dataclass(frozen=True, slots=True)
class Format:
    """Registers one format, built in or of a plug-in.

    A function that is slow to import may be named as in an entry point, ``"package.module:attribute"``; it is imported
    when used.

    Attributes:
        name: for users.
        reader: reads a checkpoint's metadata, also of one with faults, as far as it goes: a function of its `Location`
            that returns a `Reader`, or its import path.
        signs: shell patterns of file names by which a directory, or a file, shows the format.
        weaker_signs: more such patterns, which count only where no format shows a stronger sign; strongest first.
        written_as: the word for ``--format``, if the format is written too.
        writer: a function that returns a `Container` (``converters/engine/container.py``), or its import path.  It is
            called without arguments, or with ``shard_bytes`` if the container is not of ranks and a size was given.
    """

    name: str
    reader: Callable[[Location], Reader] | str
    signs: tuple[str, ...] = ()
    weaker_signs: tuple[tuple[str, ...], ...] = ()
    written_as: str | None = None
    writer: Callable[..., Any] | str | None = None

    def read(self, path: Location) -> Reader:
        """Read a checkpoint's metadata.

        Raises:
            SourceError: they are missing or damaged.
            UnavailableError: the file system or the store cannot read them.
        """
        reader: Callable[[Location], Reader] = import_named(self.reader)
        with source_errors(path):
            return reader(path)


def import_named(value: Any) -> Any:
    """Import what a path names; return other values as they are."""
    if not isinstance(value, str):
        return value
    module, _, attribute = value.partition(":")
    return getattr(import_module(module), attribute)


ENTRY_POINTS = "muonckpt.formats"

_FORMATS = "muonckpt.store.formats"
_WRITERS = "muonckpt.converters.engine"

OWN = Format(
    "muonckpt",
    f"{_FORMATS}.native:reader",
    (record.MANIFEST_FILE,),
    written_as="dcp",
    writer=f"{_WRITERS}.rank_files:DcpFiles",
)
LAYER_WISE = Format(
    "Megatron's layer-wise files",
    f"{_FORMATS}.layer_wise:reader",
    signs.LAYER_WISE_FILES,
    weaker_signs=((), ("layer_wise_optimizer_[0-9]*.pt",)),
)
DCP = Format("stock DCP", f"{_FORMATS}.dcp:reader", (signs.METADATA_FILE,))
SIBLINGS = Format("stock DCP in sibling folders", f"{_FORMATS}.dcp:siblings_reader")
BUFFERS = Format(
    "flat buffers",
    f"{_FORMATS}.flat_buffers:reader",
    (signs.FLAT_BUFFERS_FILE,),
    written_as="buffers",
    writer=f"{_WRITERS}.buffer_files:BufferFiles",
)
TORCH_DIST = Format(  # read as DCP, which it is
    "Megatron's torch_dist",
    f"{_FORMATS}.dcp:reader",
    written_as="torch_dist",
    writer=f"{_WRITERS}.rank_files:TorchDistFiles",
)
ZARR = Format(
    "zarr",
    f"{_FORMATS}.zarr:reader",
    (signs.ZARR_FILE,),
    written_as="zarr",
    writer=f"{_WRITERS}.whole_files:ZarrFiles",
)
RANK_STATE = Format(
    "torch.save's files of ranks with DTensors",
    f"{_FORMATS}.trainers.rank_state:reader",
    (
        "model_world_size_[0-9]*_rank_[0-9]*.pt",
        "optim_world_size_[0-9]*_rank_[0-9]*.pt",
        "pytorch_model_fsdp*_rank[0-9]*.bin",
        "optimizer*_rank[0-9]*.bin",
    ),
    weaker_signs=((), ("[A-Za-z]*_0.pt",)),
)
PROCESS_FILES = Format(
    "torch.save's files of one process",
    f"{_FORMATS}.trainers.process_files:reader",
    ("optimizer.pt", "optimizer.bin", "optimizer_[0-9]*.bin"),
    weaker_signs=(
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
        ("pytorch_model*.bin", "pytorch_model*.bin.index*.json", "adapter_model.bin"),
    ),
)
SAFETENSORS = Format(  # of several files of weights those count that transformers takes first: `weight_files`
    "safetensors",
    f"{_FORMATS}.safetensors:reader",
    ("model.safetensors", "model.safetensors.index.json"),
    weaker_signs=(("*.safetensors", "*.safetensors.index*.json"),),
    written_as="safetensors",
    writer=f"{_WRITERS}.whole_files:SafetensorsFiles",
)
ZERO = Format(
    "DeepSpeed's ZeRO files",
    f"{_FORMATS}.trainers.zero_state:reader",
    weaker_signs=(("*_optim_states.pt", "*_model_states.pt"),),
)
UNIVERSAL = Format(
    "DeepSpeed's universal folder",
    f"{_FORMATS}.trainers.process_files:universal_reader",
    weaker_signs=(("zero",),),
    written_as="universal",
    writer=f"{_WRITERS}.universal_files:UniversalFiles",
)

BUILT_IN = (
    OWN,
    LAYER_WISE,
    DCP,
    SIBLINGS,
    BUFFERS,
    TORCH_DIST,
    ZARR,
    RANK_STATE,
    PROCESS_FILES,
    SAFETENSORS,
    UNIVERSAL,
    ZERO,
)
"""The built-in formats; of several that show equally strong signs, the first counts.

Safetensors files may lie beside our manifest and DCP's metadata, some programs leave Megatron's per-rank files
beside other checkpoints, and DeepSpeed copies model states into universal folders."""


_NEEDS_FOLDER = (
    *(*OWN.signs, *LAYER_WISE.signs, *DCP.signs, *BUFFERS.signs, *ZARR.signs),
    *("*.distcp", signs.BUFFER_FILES, signs.TORCH_CHECKPOINTING_FILE),
    *(sign for sign in signs.UNREAD if not sign.startswith("*")),
)
"""Files that say nothing without those beside them."""


def format_of(path: Location) -> Format:
    """Return the format of a checkpoint; DCP's if it shows no sign of any, because its reader names the missing files.

    Raises:
        SourceError: there is nothing, or a plug-in is broken.
        UnavailableError: it cannot be listed, or the file cannot be read.
    """
    # A file shows its format by its name, or by its first bytes; many say nothing without their folder.
    kind = kind_of(path)
    if kind == "file":
        if any(fnmatch.fnmatch(path.name, sign) for sign in SAFETENSORS.weaker_signs[0]):
            return SAFETENSORS
        if fnmatch.fnmatch(path.name, "*.bin.index*.json"):
            return PROCESS_FILES
        if any(fnmatch.fnmatchcase(path.name, sign) for sign in _NEEDS_FOLDER):
            raise SourceError(f"{path} is one file of a checkpoint: give its folder, {path.parent}")
        with open_regular(path) as file:
            if file.read(0, min(file.size, 4)) in signs.TORCH_SAVE:
                return PROCESS_FILES
        return _find_plugin_format([path.name]) or SAFETENSORS
    # A folder shows it by the names in it.
    if kind != "folder":  # said now: it may be published before the next look, and seem to lack what was not there
        refuse_lost_link(path)
        # Later attempts at a step of a run supersede the first.
        entries = entries_of(path.parent) if kind_of(path.parent) == "folder" else []
        attempts = [entry for entry in entries if re.fullmatch(rf"{re.escape(path.name)}\.[0-9]+", entry.name)]
        advice = f"; that step was saved again as {max(attempts, key=str)}" if attempts else ""
        raise SourceError(f"expected a checkpoint directory, found no directory {path}{advice}")
    with source_errors(path):
        if (shown := format_shown(path)) is not None:
            return shown
        # It may have lost the file that shows it; DCP's reader knows its own files.
        if any(fnmatch.fnmatchcase(name, signs.BUFFER_FILES) for name in names_in(path)):
            return BUFFERS
        from .zarr import lacks_root  # not needed where nothing is wrong

        return ZARR if lacks_root(path) else DCP


def format_shown(path: Location) -> Format | None:
    """Return the format whose sign a directory shows; None if it shows none.

    Raises:
        SourceError: there is no such directory, or a plug-in is broken.
        UnavailableError: it cannot be listed.
    """
    with source_errors(path):
        names = names_in(path)
        shown = next(_find_formats(names, BUILT_IN), None) or (_find_plugin_format(names) if names else None)
        return SIBLINGS if shown is None and len(folders_with(path, signs.METADATA_FILE)) > 1 else shown


def format_written_as(word: str) -> Format | None:
    """Return the format, built in or of a plug-in, for this word after ``--format``; None if there is none.

    Raises:
        SourceError: a plug-in is broken.
    """
    formats = {format.written_as: format for format in BUILT_IN}
    if word not in formats:
        formats = {format.written_as: format for format in load_plugins(ENTRY_POINTS, Format, "formats").values()}
    return formats.get(word)


def _find_formats(names: Sequence[str], formats: Iterable[Format]) -> Iterator[Format]:
    # The strong signs of all formats, then their weaker ones.
    for strength in zip_longest(*((format.signs, *format.weaker_signs) for format in formats), fillvalue=()):
        for format, patterns in zip(formats, strength, strict=True):
            if any(fnmatch.filter(names, pattern) for pattern in patterns):
                yield format


def _find_plugin_format(names: Sequence[str]) -> Format | None:
    # Two plug-ins that read the same files would give different checkpoints.
    formats_by_plugin: dict[str, Format] = {}
    for plugin, format in load_plugins(ENTRY_POINTS, Format, "formats").items():
        if any(_find_formats(names, (format,))):
            formats_by_plugin[plugin] = format
    if len(formats_by_plugin) > 1:
        raise SourceError(f"several plug-ins read such files: {'; '.join(formats_by_plugin)}: uninstall all but one")
    return next(iter(formats_by_plugin.values()), None)
