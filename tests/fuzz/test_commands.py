"""Commands get descriptions with random JSON, file names and folder names: none ends with an internal error.

The suite tries a few, always the same.  ``make trust`` tries more; ``MUONCKPT_SEED`` changes which.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import called
from support.resharded import grouped
from support.trials import SEED, count, tally

import muonckpt
from muonckpt.layouts.buffers.records import GROUP

TRIED = count(30, 1500)

READ = ("resharded", "layer_wise", "not_read", "buffers", "exported", "world", "step", "not_kept",
        "numbered_parameters", "axes", "mesh", "cuts", "placements", "algorithm", "version")  # fmt: skip
"""Keys that some reader looks for."""

NAMES = (*READ, "layout", "ranks", "source", "items_digest", "format", "tensors", "x", "", "\x1b[31m", "\ud800")

ODD_TEXTS = ("", "x", "\ud800", "a\0b", "\x1b]0;title\x07\x1b[31m", "../x", "a/../b", "/etc", "9" * 200, "mesh", "rows",
             "ema", "__" + "9" * 200 + "_0.distcp", "line\nbreak\u2028\u202e", "[b]", "float32", "é" * 300)  # fmt: skip
LEAVES = (None, True, False, -1, 0, 1, 2, 1.5, 1 << 62, 10**30, -(10**400), float("inf"), float("nan"), *ODD_TEXTS)

ODD_FILES = (b"\xff\xfe.txt", b"\x1b[31mred", b"line\nbreak", b"model_world_size_" + b"9" * 200 + b"_rank_0.pt",
             b"optimizer_" + b"9" * 200 + b".bin", b"rank_" + b"9" * 200 + b".bin", b"iter_" + b"9" * 200,
             b"pytorch_model_fsdp_x_rank0.bin", b"layer_wise_optimizer_" + b"9" * 200 + b".pt",
             b"optim_" + b"9" * 200 + b"_rank0.pt", b"model-00001-of-99999.safetensors")  # fmt: skip
PICKLED = ((b"__0_0", b"a\0b_0"), (b"__0_0", b"\x1b[31m"), (b"__0_0", b"\xed\xa0\x80_0"), (b"__0_0", b"../_0"),
           (b"a.weight", b"\xed\xa0\x80\x1b[31m"), (b"a.weight", b"a.wei\0\n\r"),
           (b"a.weight", b"../../.."))  # fmt: skip
"""Text of the same length for text in ``.metadata``."""

ODD_FOLDERS = (b"\x1b[31mred\x1b[0m", b"\xff\xfe", b"line\nbreak", b"step-" + b"9" * 200, "\u202eabc".encode())


def value(rng: random.Random, depth: int = 3) -> Any:
    """Random JSON, with what JSON in Python takes besides."""
    kind = rng.randrange(6) if depth else 0
    if kind < 3:
        return rng.choice(LEAVES)
    if kind == 3:
        return {rng.choice(NAMES): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    same = rng.random() < 0.5
    length = rng.randrange(4)
    return [value(rng, depth - 1)] * length if same else [value(rng, depth - 1) for _ in range(length)]


def changed(rng: random.Random, whole: Any) -> Any:
    """JSON with another value somewhere; a name that a reader looks for comes up often."""
    if isinstance(whole, dict) and whole and rng.random() < 0.85:
        name = rng.choice([*whole])
        return {**whole, name: changed(rng, whole[name])}
    if isinstance(whole, list) and whole and rng.random() < 0.85:
        at = rng.randrange(len(whole))
        return [*whole[:at], changed(rng, whole[at]), *whole[at + 1 :]]
    if isinstance(whole, dict) and rng.random() < 0.7:
        return {**whole, rng.choice(NAMES): value(rng)}
    return value(rng)


PARTS = ("provenance", "provenance", "provenance", "layouts", "layouts", "tensors", "blobs", "data_files", "boxes")


def change_description(rng: random.Random, file: Path) -> None:
    """Change some JSON in a description of ours, whose digest goes, as if somebody had edited it."""
    description = json.loads(file.read_text())
    fields = description["attributes"]["muonckpt"] if file.name == "zarr.json" else description
    fields.pop("digest", None)
    fields.pop("files", None)
    part = rng.choice([part for part in PARTS if part in fields])
    if part == "provenance" and rng.random() < 0.4:
        fields[part] = {**fields[part], rng.choice(READ): value(rng)}
    elif part == "layouts" and fields[part] and rng.random() < 0.5:
        fields[part][0] = {**fields[part][0], rng.choice((*fields[part][0], *NAMES)): value(rng)}
    else:
        fields[part] = changed(rng, fields[part])
    file.write_text(json.dumps(description))


DESCRIPTIONS = {"rows": "muonckpt.json", "laid": "muonckpt.json", "run": "muonckpt.json",
                "buffers": "flat_buffers.json", "zarr": "zarr.json", "stock": None, "ranks": None,
                "plain": None}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Checkpoints of several formats, by the names in `DESCRIPTIONS`."""
    folder = tmp_path_factory.mktemp("sources")
    weights = {"a.weight": torch.arange(24.0).reshape(6, 4), "b.weight": torch.ones(4, 4)}
    state = {name: {"momentum_buffer": weight / 2} for name, weight in weights.items()}
    group = {"params": [*weights], "algorithm": "muon", "lr": 0.02, "convention": "ema"}
    whole = {"model": weights, "optimizer": {"state": state, "param_groups": [group]}}
    muonckpt.save(whole, folder / "saved", provenance={"step": 3})
    rows = {"mesh": {"dp": 2, "tp": 2}, "shard": {"*": [("dp", 0), ("tp", 1)]}}
    muonckpt.reshard(folder / "saved", folder / "rows", **grouped(**rows))
    muonckpt.reshard(folder / "saved", folder / "laid", mesh={"dp": 2}, layout="balanced")
    muonckpt.reshard(folder / "saved", folder / "buffers", mesh={"dp": 2}, layout="balanced", format="buffers")
    muonckpt.reshard(folder / "saved", folder / "zarr", format="zarr", mesh={"dp": 1})
    shutil.copytree(folder / "rows", folder / "stock")
    (folder / "stock" / "muonckpt.json").unlink()
    shutil.copytree(folder / "saved", folder / "run")
    own = json.loads((folder / "laid" / "muonckpt.json").read_text())["provenance"]["buffers"]
    laid = [{name: field for name, field in buffer.items() if name not in GROUP} for buffer in own]
    run = json.loads((folder / "run" / "muonckpt.json").read_text())
    run["provenance"]["layer_wise"] = {"layout": "balanced", "buffers": laid, "ranks": [[0, 1] for _ in laid]}
    del run["digest"]
    (folder / "run" / "muonckpt.json").write_text(json.dumps(run))
    (folder / "ranks").mkdir()
    torch.save(weights, folder / "ranks" / "model_world_size_1_rank_0.pt")
    (folder / "plain").mkdir()
    torch.save(weights, folder / "plain" / "pytorch_model.bin")
    return folder


def commands(path: Path, other: Path, out: Path) -> list[list[object]]:
    """Every command on a checkpoint; ``other`` is a whole one of the same tensors."""
    rewritten = ["--mesh", "dp=2"]
    return [
        ["inspect", path], ["inspect", path, "--json"], ["inspect", path, "--items"], ["inspect", path, "--tensors"],
        ["inspect", path, "--ranks"], ["verify", path], ["verify", path, "--json"], ["diff", path, other],
        ["diff", other, path, "--json"], ["diff", path, other, "--read"],
        ["lab", "plan", "--ckpt", path, "--mesh", "dp=2"], ["stats", path], ["stats", path, "--json"],
        ["report", path, "--out", out], ["reshard", path, out, *rewritten],
        ["reshard", path, out, *rewritten, "--layout", "balanced"],
        ["reshard", path, out, *rewritten, "--layout", "padded-nscost", "--format", "buffers"],
        ["convert", path, out, "--to", "torch"], ["convert", path, out, "--format", "zarr"],
        ["convert", path, out, "--format", "safetensors"],
    ]  # fmt: skip


def odd(rng: random.Random, sources: Path, folder: Path) -> Path:
    """A copy of a source, odd in its description, the names of its files, or its own name."""
    name, description = rng.choice([*DESCRIPTIONS.items(), *([*DESCRIPTIONS.items()][:5] * 2)])
    place = folder / (os.fsdecode(rng.choice(ODD_FOLDERS)) if rng.random() < 0.15 else "checkpoint")
    shutil.copytree(sources / name, place)
    if description and rng.random() < 0.9:
        change_description(rng, place / description)
    if not description or rng.random() < 0.15:
        stray = place / os.fsdecode(rng.choice(ODD_FILES))
        stray.mkdir() if rng.random() < 0.2 else stray.write_bytes(rng.choice((b"", b"PK", b"{}")))
    if name == "stock":
        old, new = rng.choice(PICKLED)
        metadata = (place / ".metadata").read_bytes()
        (place / ".metadata").write_bytes(metadata.replace(old, new, rng.choice((1, -1))))
    if name == "ranks" and rng.random() < 0.5:
        (place / "model_world_size_1_rank_0.pt").unlink()
    return place


@pytest.mark.filterwarnings("ignore")
def test_no_command_ends_with_an_internal_error(sources, tmp_path):
    with tally("random JSON and names, any command") as row:
        for trial in range(TRIED):
            rng, folder = random.Random(f"{SEED} {trial}"), tmp_path / str(trial)
            folder.mkdir()
            place = odd(rng, sources, folder)
            command = rng.choice(commands(place, sources / "saved", folder / "out"))
            done = called(*command)
            said = done.stdout + done.stderr
            controls = sorted({character for character in said if ord(character) < 32 and character != "\n"})
            fault = said[-300:] if done.returncode == 70 else f"printed {controls}" if controls else None
            row.add(f"{SEED} {trial}: {' '.join(map(str, command))[:300]!r}", fault)
            shutil.rmtree(folder)
