"""The tables of formats and programs in the docs: every cell is tried, and the page must say what was found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import saved_ranks, sharded, workers
from support.golden import golden
from support.rank_files import written

import muonckpt
from muonckpt import MuonckptError
from muonckpt.converters.options import grouped
from muonckpt.programs.registry import DIALECTS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "migrations" / "overview.md"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WHY_NOT_WRITTEN = {
    "moonlight": "only an example script reads it",
    "layer_wise": "only the run knows the order and the owners of numbers; write `torch_dist`",
}


def of_one_process(folder: Path) -> Path:
    """As Hugging Face's Trainer saves a model of a matrix and a vector under AdamW, and the names of the optimizer."""
    path = folder / "checkpoint-1"
    path.mkdir()
    weights = {"up.weight": torch.ones(4, 6), "norm.weight": torch.ones(6)}
    params = [torch.nn.Parameter(weight.clone()) for weight in weights.values()]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    save_file(weights, path / "model.safetensors")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    (path / "parameter_names.json").write_text(json.dumps([*weights]))
    return path


def of_ranks(folder: Path) -> Path:
    workers.run(2, saved_ranks.runs, folder)
    return folder / "verl"


FORMATS = {
    "muonckpt: DCP with a manifest": "dcp",
    "stock DCP, `fsdp_dtensor` included": "dcp",
    "flat buffers": "buffers",
    "Megatron's `torch_dist`": "torch_dist",
    "Megatron's `layer_wise_optimizer_{rank}.pt`": None,
    "`optimizer.pt`, `optimizer.bin` and weights of one process (Hugging Face, accelerate)": None,
    "files of each rank with DTensors (verl, accelerate without DCP)": None,
    "torch_checkpointing": None,
    "ZeRO's files of each rank (DeepSpeed)": None,
    "DeepSpeed's universal folders": "universal",
    "safetensors": "safetensors",
    "zarr v3": "zarr",
}

READ_ONLY = {
    "Megatron": (lambda folder: written(folder, "padded-numel", 2), WHY_NOT_WRITTEN["layer_wise"]),
    "`optimizer.pt`": (of_one_process, "only the run knows the order of numbers; write `dcp`"),
    "torch_checkpointing": (lambda _: golden("torch_checkpointing") / "ckpt", "torchtitan loads `dcp`"),
    "ZeRO": (lambda _: golden("deepspeed_zero2") / "global_step3", "DeepSpeed loads `universal`"),
    "files of each rank": (of_ranks, "their pickles name torch's classes, which change; write `dcp`"),
}
"""By how the name in the table begins: what makes one, and why it is not written."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), ("---",) * len(tuple(head)), *map(tuple, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tried(action: Callable[[], object]) -> str:
    try:
        action()
    except MuonckptError:
        return "no"
    return "yes"


def run() -> dict:
    """State of a matrix and a vector, in our keys."""
    state = {
        "up.weight": {"momentum_buffer": torch.ones(4, 6)},
        "norm.weight": {"exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6), "step": torch.tensor(3.0)},
    }
    muon = {"params": ["up.weight"], "algorithm": "muon", "convention": "ema", "momentum": 0.9,
            "adjust_lr_fn": "original", "ns_coefficients": "keller", "ns_steps": 5,
            "nesterov": True, "eps": 1e-7}  # fmt: skip
    adamw = {"params": ["norm.weight"], "algorithm": "adamw", "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [group | {"lr": 0.02, "weight_decay": 0.1} for group in (muon, adamw)]
    weights = {"up.weight": torch.ones(4, 6), "norm.weight": torch.ones(6)}
    return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}


def formats(folder: Path) -> str:
    own = folder / "own"
    muonckpt.save(run(), own)
    muonckpt.save(run(), folder / "stock")
    paths = {"dcp": sharded.as_stock(folder / "stock")}
    for name in ("buffers", "torch_dist", "safetensors", "zarr"):
        paths[name] = folder / f"as-{name}"
        muonckpt.convert(own, paths[name], format=name)
    paths["universal"] = folder / "universal"
    muonckpt.convert(own, paths["universal"], to_dialect="deepspeed")
    rows = []
    for number, (name, written_as) in enumerate(FORMATS.items()):
        if written_as is None:
            make, why = next(made for beginning, made in READ_ONLY.items() if name.startswith(beginning))
            path, to = make(folder), f"no: {why}"
        else:
            path, to = own if number == 0 else paths[written_as], f"`--to-format {written_as}`"
        rows.append(
            (
                name,
                tried(lambda path=path: muonckpt.inspect(path)),
                str(muonckpt.verify(path).verdict),
                tried(lambda path=path: muonckpt.reshard(path, folder / "x", **grouped(mesh={"dp": 2}, dry_run=True))),
                tried(lambda path=path: muonckpt.convert(path, folder / "x", **grouped(format="zarr", dry_run=True))),
                to,
            )
        )
    return table(("format", "inspect", "verify", "reshard", "convert from", "convert to"), rows)


def programs(folder: Path) -> str:
    rows = []
    for dialect in DIALECTS.values():
        options = {"to_dialect": dialect.name, "format": dialect.format}
        path = folder / f"for-{dialect.name}"
        to = tried(lambda options=options, path=path: muonckpt.convert(folder / "own", path, **grouped(**options)))
        assert (to == "no") == (dialect.name in WHY_NOT_WRITTEN), dialect.name
        back = {"convention": None if dialect.convention else "ema", "from_dialect": dialect.name, "step": 3}
        if to == "yes":
            muonckpt.convert(path, folder / f"of-{dialect.name}", **grouped(to_dialect="muonckpt", **back))
            arrived = muonckpt.open(folder / f"of-{dialect.name}").tensors
            for name, slots in run()["optimizer"]["state"].items():
                for slot, value in slots.items():
                    found = arrived[f"optimizer.state.{name}.{slot}"].numpy()
                    assert np.allclose(found, value.numpy(), rtol=1e-6), (dialect.name, slot)
        momentum = dialect.convention or "as `--convention` says"
        why = f"no: {WHY_NOT_WRITTEN[dialect.name]}" if to == "no" else to
        rows.append((f"`{dialect.name}`", dialect.who, momentum, f"`{dialect.keys.state_form}`", why))
    return table(("program", "who", "momentum", "state under", "written"), rows)


def test_the_tables_of_the_page_are_what_is_found(tmp_path):
    page = PAGE.read_text()
    for made in (formats(tmp_path), programs(tmp_path)):
        found = re.search(rf"^{re.escape(made.splitlines()[0])}\n(\|.*\n)*", page, re.MULTILINE)
        assert found and found[0].strip() == made, f"the page should have:\n{made}"
