"""Another program's checkpoint, translated and written, and loaded by stock DCP into the program that it is now for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.golden import golden
from support.resharded import make_job
from support.translated import MEGATRON, executed, expected, read, translate, translated
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import Target
from muonckpt.converters.translate.names import load_rules
from muonckpt.programs.registry import DIALECTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SWIGLU, EXPERTS = load_rules("megatron-swiglu"), load_rules("megatron-experts")
CASES = [
    ("torch_fsdp4/ckpt", "titan", {}, 3),
    ("dion_fsdp4/ckpt", "torch", {}, 3),
    ("titan_fsdp4/ckpt", "xtuner", {}, 2),
    ("xtuner_fsdp4/ckpt", "dion", {}, 5),
    (MEGATRON.format("dp4tp2ep2"), "dcp", {"rules": SWIGLU + EXPERTS}, 3),
    (MEGATRON.format("dp4"), "fsdp_dtensor", {"rules": SWIGLU + SWIGLU.inverse()}, 8),
]


def written(name: str, target: str, path, ranks: int = 3, **how):
    """The translation, after a reshard has written it to ``path``."""
    job = make_job(
        read(name)[0],
        Target({"dp": ranks}),
        make_outputs=lambda source: translate(source.manifest, source.values, DIALECTS[target], **how),
    )
    run_job(job, path)
    return translated(name, target, **how)


@pytest.mark.parametrize("name, target, how, ranks", CASES, ids=[f"{case[0]} to {case[1]}" for case in CASES])
def test_what_is_written_is_what_was_translated(name, target, how, ranks, tmp_path):
    result = written(name, target, tmp_path / "out", ranks, **how)
    want = executed(read(name)[0], result)
    records = [output.record for output in result.tensors]
    state = {record.key: torch.zeros(record.shape, dtype=getattr(torch, record.dtype)) for record in records}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    for key, tensor in state.items():
        found = tensor.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(found, np.ascontiguousarray(want[key]).reshape(-1).view(np.uint8)), key


def model_of(meta: dict) -> torch.nn.Module:
    """A module with parameters of these names and shapes."""
    root = torch.nn.Module()
    for entry in meta["params"]:
        *path, last = entry["name"].split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(torch.ones(entry["shape"])))
    return root


def test_torch_itself_loads_the_momentum_of_xtuner(tmp_path):
    """Strictly, with stock DCP: every key that new optimizers of torch look for is there, and says what it should."""
    written("xtuner_fsdp4/ckpt", "torch", tmp_path / "out")
    meta = json.loads((golden("xtuner_fsdp4") / "meta.json").read_text())
    model = model_of(meta)
    params = dict(model.named_parameters())
    groups = [[params[name] for name in group["params"]] for group in meta["param_groups"][0]]
    muon = torch.optim.Muon([{"params": group} for group in groups[:-1]])
    adamw = torch.optim.AdamW(groups[-1])
    for param in params.values():
        param.grad = torch.zeros_like(param)
    muon.step()
    adamw.step()
    state = {"optimizer": get_optimizer_state_dict(model, [muon, adamw])}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_optimizer_state_dict(model, [muon, adamw], state["optimizer"])
    want = expected("xtuner_fsdp4", "torch")
    for optimizer in (muon, adamw):
        for name, param in params.items():
            for slot, value in optimizer.state.get(param, {}).items():
                truth = want[f"optimizer.state.{name}.{slot}"].view("<f4")
                np.testing.assert_allclose(value.numpy(), truth, rtol=2e-7, atol=0)
    assert {group["momentum"] for group in muon.param_groups} == {0.95}
    assert {group["adjust_lr_fn"] for group in muon.param_groups} == {"match_rms_adamw"}
    assert adamw.param_groups[0]["betas"] == (0.9, 0.95)
    assert {int(adamw.state[param]["step"]) for param in groups[-1]} == {3}
