"""Exports: what other programs load has every bit of the checkpoint's model, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.workers import run
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import muonckpt
from muonckpt import ArgumentError, DestinationError, Series, SourceError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 5).bfloat16(), torch.nn.BatchNorm1d(5))


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in safetensors.torch.load_file(file).items()
    }


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items()
    )


def _exported(rank: int, world: int, folder: str) -> list[Any]:
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    state = {"model": get_model_state_dict(sharded), "optimizer": {"momentum": torch.ones(7)}, "step": 3}
    series = Series(folder)
    series.save(1, state, also="hf")
    series.async_save(2, state, also="hf").result()
    refused = []
    for step, form, place in ((7, "hf", "new"), (1, "gguf", "new"), (1, "hf", f"new{rank}"), (1, "hf", "")):
        with pytest.raises((ArgumentError, DestinationError, SourceError)) as error:
            series.export(step, form, f"{folder}/{place}")
        refused.append(str(error.value))
    return [series.export(1, "hf", f"{folder}/small", shard_size=100), refused]


def test_all_ranks_export_the_model_bit_for_bit_from_the_call_and_from_the_thread(tmp_path):
    answers = run(3, _exported, str(tmp_path / "run"))
    assert answers[0] == answers[1] == answers[2]
    small, (no_step, no_form, differing, there) = answers[0]
    assert "step 7" in no_step and "'gguf'" in no_form and "destination" in differing and "exists" in there
    expected = model().state_dict()
    for name in ("step-00000001-hf", "step-00000002-hf", "small"):
        assert same_bits(contents(tmp_path / "run" / name), expected)
    assert len(list(Path(small).glob("*.safetensors"))) > 2
    saved = muonckpt.verify(tmp_path / "run" / "step-00000001").fingerprints
    exported = muonckpt.verify(small).fingerprints
    assert exported == {key.removeprefix("model."): value for key, value in saved.items() if key.startswith("model.")}
    assert Series(tmp_path / "run").latest().step == 2


def test_hugging_face_loads_an_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=11, num_key_value_heads=2)
    made = transformers.LlamaForCausalLM(config)
    series = Series(tmp_path)
    series.save(5, {"model": made.state_dict(), "extra": 1}, also="hf")
    config.save_pretrained(tmp_path / "step-00000005-hf")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "step-00000005-hf")
    assert same_bits(loaded.state_dict(), made.state_dict())


def test_tied_weights_and_other_dtypes_are_exported_as_they_are(tmp_path):
    """Weights that share memory are in the checkpoint under both names; a model that ties them takes either."""
    tied = torch.ones(3, 2, dtype=torch.bfloat16)
    weights = {"embed": tied, "head": tied, "fp8": torch.ones(4).to(torch.float8_e4m3fn), "count": torch.tensor(3)}
    Series(tmp_path).save(1, {"model": {**weights, "_extra_state": {"a": 1}}}, also="hf")
    assert same_bits(contents(tmp_path / "step-00000001-hf"), weights)


def test_a_model_elsewhere_is_asked_for_and_the_checkpoint_stays(tmp_path):
    series = Series(tmp_path)
    with pytest.raises(SourceError, match=r"step-00000001 is saved, but not exported: .*under 'model'.*under 'net'"):
        series.save(1, {"net": {"w": torch.ones(2)}}, also="hf")
    assert series.latest().step == 1
    for step, size in ((1, 0), (1, "5GB"), ("1", 100)):
        with pytest.raises(ArgumentError, match="integers"):
            series.export(step, shard_size=size)


def test_what_has_no_model_is_not_exported(tmp_path):
    series = Series(tmp_path)
    series.save(
        1, {"optimizer": {"state": {"w": {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"params": ["w"]}]}}
    )
    with pytest.raises(SourceError, match="expected weights of a model"):
        series.export(1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
