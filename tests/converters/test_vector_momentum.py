"""Momentum of parameters of one dim, as Megatron-FSDP's Muon keeps it (Megatron-LM #6425): named, and never Muon's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.continued import load_ours

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.look.contents import groups_as_data
from muonckpt.converters.options import grouped
from muonckpt.optimizer import Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*did not say options")

SHAPES = {"wq": (8, 4), "norm": (8,), "bias": (8,), "scale": ()}
VECTORS = sorted(name for name, shape in SHAPES.items() if len(shape) < 2)


def saved(path, stateful=tuple(SHAPES)):
    """Save a model whose one group is Muon's, in the keys of torch's nested state dicts."""
    weights = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    state = {name: {"momentum_buffer": torch.rand(SHAPES[name])} for name in stateful}
    group = {"params": [*SHAPES], "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
    dcp.save({"model": weights, "optimizer": {"state": state, "param_groups": [group]}}, checkpoint_id=path)
    return path


def test_inspect_names_them_and_counts_them_to_no_method(tmp_path):
    inspection = muonckpt.inspect(saved(tmp_path / "run"))
    assert [(row["method"], row["parameters"]) for row in inspection.optimizer] == [("unknown", 3), ("muon", 1)]
    (symptom,) = [symptom for symptom in inspection.symptoms if symptom.kind == "vector_momentum"]
    assert sorted(symptom.names) == VECTORS and "plain momentum SGD: not Muon" in symptom.message


@pytest.mark.parametrize("target", ["muonckpt", "torch", "fsdp_dtensor"])
def test_no_conversion_takes_them_for_muon_and_the_cure_trains(target, tmp_path):
    path, out = saved(tmp_path / "run"), tmp_path / "out"
    with pytest.raises(SourceError, match=r"'?norm.*in no Muon group.*select=.*fresh=") as refusal:
        muonckpt.convert(path, out, **grouped(to_dialect=target, convention="ema"))
    assert all(name in str(refusal.value) for name in VECTORS)
    # The cure of the message.
    chosen = ["model.*", "optimizer.state.wq.*", "optimizer.param_groups.*"]
    muonckpt.convert(path, tmp_path / "copy", **grouped(select=chosen))
    muonckpt.convert(tmp_path / "copy", out, **grouped(to_dialect=target, convention="ema"))
    with muonckpt.open(out) as opened:
        listed = [name for group in groups_as_data(opened.outline, opened.values) for name in group["params"]]
    assert listed == ["wq"]
    if target == "muonckpt":
        model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        vectors = [(name, model[name]) for name in VECTORS]
        optimizer = Muon(
            [{"params": [("wq", model["wq"])]}, {"params": vectors, "algorithm": "adamw", "lr": 1e-3}], lr=0.02
        )
        load_ours(model, optimizer, out, fresh=VECTORS)
        with muonckpt.open(path) as before:
            for name, parameter in model.items():
                assert torch.equal(parameter.data, torch.as_tensor(before.tensors[f"model.{name}"].numpy()))
            momentum = before.tensors["optimizer.state.wq.momentum_buffer"].numpy()
        assert torch.equal(optimizer.state[model["wq"]]["momentum_buffer"], torch.from_numpy(momentum))
        assert all(not optimizer.state[model[name]]["exp_avg"].any() for name in VECTORS)


def test_a_vector_without_state_does_not_join_the_muon_group_of_its_siblings(tmp_path):
    path = saved(tmp_path / "run", ["wq"])
    options = grouped(to_dialect="muonckpt", convention="ema", fill_missing=True)
    report = muonckpt.convert(path, tmp_path / "out", **options)
    with muonckpt.open(tmp_path / "out") as opened:
        (group,) = groups_as_data(opened.outline, opened.values)
        assert group["params"] == ["wq"]
        assert [key for key in opened.tensors if key.startswith("optimizer.")] == ["optimizer.state.wq.momentum_buffer"]
    assert any("norm has no state" in note for note in report.notes)


def test_they_are_resharded_as_they_are(tmp_path):
    path = saved(tmp_path / "run")
    muonckpt.reshard(path, tmp_path / "out", mesh={"dp": 2})
    assert not muonckpt.diff(path, tmp_path / "out").differs
