"""Every format into every other, through the command: each element and each fingerprint arrives."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from support import sharded, sweep
from support.commands import run
from support.golden import golden
from support.sharded import bits
from support.translated import PEERS, SUMS, expected, words_apart
from support.whole import assemble

import muonckpt
from muonckpt.algebra.box import Box
from muonckpt.record.record import Manifest
from muonckpt.store.formats.registry import BUILT_IN

DOCS = Path(__file__).parents[2] / "docs"
WRITTEN = {form.written_as for form in BUILT_IN} - {None}

# Of every format some topology or arrangement of files; what `--format` and the other options say of it.
KINDS = {
    "rows": "--format dcp --mesh dp=3",
    "columns": "--format dcp --mesh dp=2,tp=2 --shard q*=tp:1,dp:0 --shard *=dp:0,tp:0",
    "experts and replicas": "--format dcp --mesh dp=2,ep=2 --shard e*=ep:0,dp:1 --shard *=dp:0",
    "flat": "--format dcp --mesh dp=4 --layout flat",
    "balanced": "--format dcp --mesh dp=2 --layout balanced",
    "padded buffers": "--format buffers --mesh dp=3 --layout padded-nscost",
    "compact buffers": "--format buffers --mesh dp=2,tp=2 --shard q*=tp:1 --layout decoupled-total-order",
    "flat buffers": "--format buffers --mesh dp=4 --layout flat",
    "torch_dist": "--format torch_dist --mesh dp=3",
    "a safetensors file": "--format safetensors --tensors-only",
    "safetensors in shards": "--format safetensors --shard-size 600 --tensors-only",
    "zarr": "--format zarr --tensors-only",
    "zarr in parts": "--format zarr --shard-size 300 --tensors-only",
}
SOURCES = (*KINDS, "stock")
_FOLDER = tempfile.TemporaryDirectory(prefix="muonckpt-tests-")


def tensors() -> dict[str, torch.Tensor]:
    """A stack of experts, a matrix of another type, one that no mesh divides, a vector and a number."""
    shapes = {"experts": (4, 6, 5), "q": (12, 8), "uneven": (7, 3), "bias": (9,), "step": ()}
    tensors = {name: sharded.some(shape, torch.float32, seed) for seed, (name, shape) in enumerate(shapes.items())}
    return tensors | {"q.half": sharded.some((10, 6), torch.bfloat16, 9)}


def rewrite(*arguments: object) -> None:
    assert run(["reshard", *map(str, arguments)]) == 0


@cache
def source(kind: str) -> Path:
    """A checkpoint of this kind, made of our own, which one process saved.  Do not change."""
    path = Path(_FOLDER.name) / kind.replace(" ", "-")
    if kind in KINDS:
        rewrite(source("own"), path, *KINDS[kind].split())
        return path
    muonckpt.save(tensors(), path)
    if kind == "stock":
        sharded.as_stock(path)
    return path


def held(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """What a checkpoint of any format says, and every element of it in row-major order."""
    with muonckpt.open(path) as checkpoint:
        manifest = checkpoint.manifest
        return manifest, {t.key: assemble(checkpoint.payloads, t, Box.of(t.shape)).tobytes() for t in manifest.tensors}


def fingerprints(manifest: Manifest) -> dict[str, str | None]:
    return {tensor.key: tensor.fingerprint for tensor in manifest.tensors}


TABLE = [(kind, target) for kind in SOURCES for target in KINDS]


@pytest.mark.parametrize(("kind", "target"), sweep(TABLE, *TABLE[::11]))  # every kind on both sides
def test_every_format_becomes_every_other(kind, target, tmp_path):
    rewrite(source(kind), tmp_path / "out", *KINDS[target].split())
    manifest, elements = held(tmp_path / "out")
    assert elements == {key: bits(value) for key, value in tensors().items()}
    assert fingerprints(manifest) == fingerprints(muonckpt.open(source("own")).outline)


def test_every_format_that_is_written_is_in_the_table():
    assert {options.split()[1] for options in KINDS.values()} == WRITTEN - {
        "universal"
    }  # it holds what DeepSpeed's optimizer has: `test_universal_files`


def test_every_format_has_a_page_and_each_word_for_it_stands_in_one():
    """The page is called as the file or folder of the reader is."""
    for form in BUILT_IN:
        [reader] = re.findall(r"muonckpt\.store\.formats\.(\w+)", form.reader)
        assert (DOCS / "formats" / f"{'manifest' if reader == 'native' else reader}.md").exists(), form.name
    pages = [*(DOCS / "formats").glob("*.md"), DOCS / "guide" / "migrations" / "overview.md"]
    words = {word for page in pages for word in re.findall(r"[\w-]+", page.read_text())}
    assert words >= WRITTEN


# --- in other words as well -------------------------------------------------------------------------------------------

FORMATS = (
    "dcp --mesh dp=3",
    "buffers --mesh dp=2 --layout padded-nscost",
    "safetensors --tensors-only",
    "dcp --mesh dp=2 --layout flat",
    "zarr --tensors-only",
)
PROGRAMS = ("torch", "dion", "xtuner", "titan")
PAIRS = [(one, other) for one in PROGRAMS for other in (*PROGRAMS, "veomni", "muonckpt") if one != other]
TRANSLATED = [(*pair, written) for pair, written in zip(PAIRS, cycle(FORMATS), strict=False)]


@pytest.mark.parametrize(
    ("peer", "target", "written"), sweep(TRANSLATED, *TRANSLATED[::3])
)  # every program on both sides
def test_checkpoints_of_other_programs_become_each_other_in_any_format(peer, target, written, tmp_path):
    """Against what each run had in memory: bit for bit, or within one rounding where the momentum is scaled."""
    rewrite(golden(PEERS[peer]) / "ckpt", tmp_path / "out", "--to", target, "--format", *written.split())
    manifest, tensors_of_keys = held(tmp_path / "out")
    want = expected(PEERS[peer], target)
    assert tensors_of_keys.keys() == want.keys()
    slot = "momentum" if target in SUMS else "momentum_buffer"
    matrices = {t.key for t in manifest.tensors if t.slot == slot and t.convention}
    for key, words in want.items():
        close = key in matrices and (peer in SUMS) != (target in SUMS)
        mine = np.frombuffer(tensors_of_keys[key], words.dtype)
        apart = words_apart(mine, words.reshape(-1)) if close else int(not np.array_equal(mine, words.reshape(-1)))
        assert apart <= close, key
    assert matrices and {t.convention for t in manifest.tensors if t.key in matrices} == {
        "sum" if target in SUMS else "ema"
    }
