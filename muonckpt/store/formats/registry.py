"""Detection of a checkpoint's format by its files, and the reader of each format.

A reader is imported when a checkpoint of its format is opened.
"""

from __future__ import annotations

import fnmatch
import re
import warnings

from ... import record
from ...errors import SourceError
from ..io.location import Location
from ..io.regular import open_regular
from ..reading.payloads import Payloads
from ..reading.reader import Format, LocatedReader, Reader
from . import native, plugins, signs


def _own(path: Location) -> Reader:
    return LocatedReader(native.read_native(path), Payloads(path))


def _dcp(path: Location) -> Reader:
    from .dcp import directory

    return directory.DcpReader(path)


def _siblings(path: Location) -> Reader:
    from .dcp import siblings

    return siblings.SiblingsReader(path)


def _flat_buffers(path: Location) -> Reader:
    from . import flat_buffers

    return flat_buffers.reader(path)


def _safetensors(path: Location) -> Reader:
    from .safetensors import folder as safetensors

    _refuse_stray(path)
    return LocatedReader(safetensors.read_safetensors(path), Payloads(safetensors.folder(path)))


_OF_RUN = re.compile(r"(iter_|checkpoint-|step-|global_step)[0-9]+(\.[0-9]+)?")
"""Names of the folders in which programs keep the checkpoints of a run: Megatron, Hugging Face, ours, DeepSpeed."""


def _refuse_stray(path: Location) -> None:
    """Refuse a file of tensors in a folder of checkpoints by step, where it is hardly what was meant.

    A model of several files cannot be named otherwise than by its folder, so for that there is a warning.

    Raises:
        SourceError: the folder has one file of tensors, and checkpoints.
    """
    if not path.is_dir():
        return
    entries: list[Location] = list(path.iterdir())
    steps = sorted(entry.name for entry in entries if _OF_RUN.fullmatch(entry.name) and entry.is_dir())
    files = sorted(entry.name for entry in entries if entry.name.endswith((".safetensors", ".safetensors.index.json")))
    if not steps:
        return
    held = f"{path} holds the checkpoints {', '.join(steps[:4])}{', …' * (len(steps) > 4)} of a run, and {files[0]}"
    if len(files) == 1:
        raise SourceError(f"{held}: name the checkpoint that you mean, or {path / files[0]}")
    warnings.warn(f"{held}, which is read; name a checkpoint of the run if you mean that", stacklevel=2)


def _zarr(path: Location) -> Reader:
    from .zarr import hierarchy

    return hierarchy.reader(path)


def _layer_wise(path: Location) -> Reader:
    from .megatron import layer_wise

    return layer_wise.reader(path)


def _process_files(path: Location) -> Reader:
    from .trainers import process_files

    _refuse_stray(path)
    return process_files.reader(path)


def _rank_state(path: Location) -> Reader:
    from .trainers import rank_state

    return rank_state.reader(path)


def _nanochat(path: Location) -> Reader:
    from .trainers import nanochat_state

    return nanochat_state.reader(path)


def _universal(path: Location) -> Reader:
    from .trainers import universal_state

    return universal_state.reader(path)


def _zero(path: Location) -> Reader:
    raise SourceError(
        f"{path} holds files of DeepSpeed's ZeRO, flat partitions of each rank, which are not read: make a universal "
        "checkpoint of them, by ds_to_universal.py of DeepSpeed, which is (docs/formats/trainers.md)"
    )


_NANOCHAT_STEP = re.compile(r"model_([0-9]{6,12})\.pt")


def _of_file(path: Location) -> Format:
    """The format of a file, by its name or its first bytes; safetensors if nothing says another."""
    if fnmatch.fnmatch(path.name, "*.safetensors"):
        return SAFETENSORS
    if (match := _NANOCHAT_STEP.fullmatch(path.name)) and (path.parent / f"optim_{match[1]}_rank0.pt").is_file():
        return NANOCHAT
    with open_regular(path) as file:
        if file.read(0, min(file.size, 4)) in signs.TORCH_SAVE:
            return PROCESS_FILES
    return plugins.format_of_plugin([path.name]) or SAFETENSORS


OWN = Format("muonckpt", _own)
DCP = Format("stock DCP", _dcp)
SIBLINGS = Format("stock DCP in sibling folders", _siblings)
BUFFERS = Format("flat buffers", _flat_buffers)
SAFETENSORS = Format("safetensors", _safetensors)
ZARR = Format("zarr", _zarr)
PROCESS_FILES = Format("torch.save's files of one process", _process_files)
RANK_STATE = Format("torch.save's files of ranks with DTensors", _rank_state)
NANOCHAT = Format("nanochat's files of ranks", _nanochat)
UNIVERSAL = Format("DeepSpeed's universal folder", _universal)
ZERO = Format("DeepSpeed's ZeRO files", _zero)
LAYER_WISE = Format("Megatron's layer-wise files", _layer_wise)


SIGNS: tuple[tuple[str, Format], ...] = (
    (record.MANIFEST_FILE, OWN),
    *((name, LAYER_WISE) for name in signs.LAYER_WISE_FILES),
    (signs.METADATA_FILE, DCP),
    (signs.FLAT_BUFFERS_FILE, BUFFERS),
    (signs.ZARR_FILE, ZARR),
    ("model_world_size_[0-9]*_rank_[0-9]*.pt", RANK_STATE),
    ("optim_world_size_[0-9]*_rank_[0-9]*.pt", RANK_STATE),
    ("pytorch_model_fsdp*_rank[0-9]*.bin", RANK_STATE),
    ("optimizer*_rank[0-9]*.bin", RANK_STATE),
    ("optim_[0-9][0-9][0-9][0-9][0-9][0-9]*_rank[0-9]*.pt", NANOCHAT),
    ("model_[0-9][0-9][0-9][0-9][0-9][0-9]*.pt", NANOCHAT),
    ("optimizer.pt", PROCESS_FILES),
    ("optimizer.bin", PROCESS_FILES),
    ("optimizer_[0-9]*.bin", PROCESS_FILES),
    ("*.safetensors", SAFETENSORS),
    ("*.safetensors.index.json", SAFETENSORS),
    ("layer_wise_optimizer_[0-9]*.pt", LAYER_WISE),
    ("pytorch_model*.bin", PROCESS_FILES),
    ("pytorch_model.bin.index.json", PROCESS_FILES),
    ("*_optim_states.pt", ZERO),
    ("zero", UNIVERSAL),
    ("[A-Za-z]*_0.pt", RANK_STATE),
)
"""Shell patterns of file names by which a directory shows its format; the first match counts.

Safetensors files may lie beside our manifest and DCP's metadata, and some programs leave Megatron's per-rank files
beside other checkpoints."""


def format_of(path: Location) -> Format:
    """The format of a checkpoint.

    A directory without any sign of ours is shown to plug-ins, then looked into for folders of DCP; if there are none,
    DCP's reader says what is missing.

    Raises:
        SourceError: the directory cannot be listed, or a plug-in is broken.
    """
    try:
        if path.is_file():
            return _of_file(path)
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
        found = next((kind for sign, kind in SIGNS if fnmatch.filter(names, sign)), None)
        if found is None and names:
            found = plugins.format_of_plugin(names)
        if found is None and names and len(signs.folders_of_dcp(path)) > 1:
            return SIBLINGS
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    return found or DCP
