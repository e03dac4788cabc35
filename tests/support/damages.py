"""Random damages to a checkpoint, and what may become of one: it is found, or it makes no difference."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import muonckpt
from muonckpt import DamageError, MuonckptError, SourceError
from support.sharded import bits

Damage = Callable[[random.Random, Path, Path], str]
"""Damages a checkpoint; gets another save of it, too.  Says what it did."""


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def flip_last_bit(checkpoint: Path) -> None:
    """Change one bit of the last element of a checkpoint's last tensor."""
    with muonckpt.open(checkpoint) as opened:
        payload = opened.outline.tensors[-1].chunks[-1].payload
    raw = bytearray((checkpoint / payload.file).read_bytes())
    raw[payload.end - 1] ^= 1
    (checkpoint / payload.file).write_bytes(raw)


def flipped(rng: random.Random, path: Path, other_path: Path) -> str:
    """One bit of a file, each file as often as any other, so that descriptions are hit as often as elements."""
    bit = 1 << rng.randrange(8)
    return _edited(rng, path, lambda raw, at: raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :])


def misspelt(rng: random.Random, path: Path, other_path: Path) -> str:
    """One letter of a key, of an option or of anything else that is spelt out in a description."""
    for _ in range(99):
        file = rng.choice(files(path))
        raw = file.read_bytes()
        word = rng.choice((b"weight", b"momentum", b"float32", b"bias", b"shape", b"optimizer", b"ema", b"lr", b"0, "))
        places = [at for at in range(len(raw)) if raw.startswith(word, at)] if len(raw) < 1 << 20 else []
        if places:
            at = rng.choice(places) + rng.randrange(len(word))
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(3)]) + raw[at + 1 :])
            return f"{word.decode()} at byte {at} of {file.name} misspelt"
    return flipped(rng, path, other_path)


def zeroed(rng: random.Random, path: Path, other_path: Path) -> str:
    """A range, as of a block that never reached the disk."""
    return _edited(rng, path, lambda raw, at: raw[:at] + bytes(len(raw[at : at + 64])) + raw[at + 64 :])


def cut(rng: random.Random, path: Path, other_path: Path) -> str:
    return _edited(rng, path, lambda raw, at: raw[:at])


def deleted(rng: random.Random, path: Path, other_path: Path) -> str:
    file = rng.choice(files(path))
    file.unlink()
    return f"{file.relative_to(path)} deleted"


def swapped(rng: random.Random, path: Path, other_path: Path) -> str:
    """A file of another save of the same run in the place of the same file."""
    file = rng.choice(files(path))
    shutil.copyfile(other_path / file.relative_to(path), file)
    return f"{file.relative_to(path)} of another save"


def duplicated(rng: random.Random, path: Path, other_path: Path) -> str:
    """A file in the place of another of the same checkpoint."""
    first, second = rng.choices(files(path), k=2)
    if first != second:
        shutil.copyfile(first, second)
    return f"{first.relative_to(path)} in the place of {second.relative_to(path)}"


DAMAGES: tuple[Damage, ...] = (*(flipped, misspelt, zeroed, cut, deleted, swapped, duplicated),)


def _edited(rng: random.Random, path: Path, change: Callable[[bytes, int], bytes]) -> str:
    file = rng.choice(files(path))
    raw = file.read_bytes()
    at = rng.randrange(len(raw)) if raw else 0
    file.write_bytes(change(raw, at) if raw else b"?")
    return f"byte {at} of {len(raw)} of {file.name}"


def content(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, and what it says of it."""
    with muonckpt.open(path) as checkpoint:
        contents: dict[str, Any] = {}
        for key, tensor in checkpoint.tensors.items():
            facts = (tensor.shape, tensor.dtype, tensor.name, tensor.slot, tensor.convention, tensor.record.path)
            contents[key] = (*facts, tensor.bits().tobytes())
        return contents | {key: checkpoint.items[key] for key in checkpoint.items}


def tensors_of(contents: dict[str, Any]) -> dict[str, Any]:
    return {key: value[-1] for key, value in contents.items() if isinstance(value, tuple) and len(value) == 7}


Outcome = tuple[str, str | None]
"""What came of it, in a word; and what is wrong with that, if anything."""


def load_fault(path: Path, contents: dict[str, Any]) -> Outcome:
    """A load gives what was saved, or raises, and says so where it has overwritten anything."""
    template: dict[str, Any] = {}
    for key, (shape, dtype, *_) in ((key, contents[key]) for key in tensors_of(contents)):
        template[key] = torch.full(shape, 77, dtype=getattr(torch, dtype))
    try:
        muonckpt.load(template, path, allow_extra=True)
    except MuonckptError as error:
        touched = [key for key, tensor in template.items() if not bool((tensor == 77).all())]
        is_silent = touched and not error.has_overwritten
        return "refused", f"it raised, and had overwritten {touched}" if is_silent else None
    wrong = [key for key, elements in tensors_of(contents).items() if bits(template[key]) != elements]
    return "loaded", f"other elements of {wrong}" if wrong else None


def reshard_fault(path: Path, contents: dict[str, Any], out: Path) -> Outcome:
    """A reshard gives what was saved, or raises and leaves nothing."""
    try:
        muonckpt.reshard(path, out, mesh={"dp": 2})
    except MuonckptError:
        return "refused", "it left something" if out.exists() else None
    return "written", None if tensors_of(content(out)) == tensors_of(contents) else "it gave other tensors"


def verify_fault(path: Path, contents: dict[str, Any], may_refuse: Iterable[str]) -> Outcome:
    """What is called whole holds what was saved; other damage is a finding, or of a file that cannot be opened."""
    try:
        report = muonckpt.verify(path, jobs=1)
    except SourceError as error:
        named = any(words in str(error) for words in may_refuse) and not isinstance(error, DamageError)
        return "refused", None if named else f"expected findings, found {type(error).__name__}: {error}"
    if report.verdict == "whole" and content(path) != contents:
        return "whole", "it holds something else"
    return report.verdict, "it has checksums" if report.verdict == "readable, unchecked" else None
