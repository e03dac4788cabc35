"""Merged checkpoints, against exact fractions of what was saved, rounded by an oracle of its own."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called

import muonckpt
from muonckpt import SourceError, TargetError
from muonckpt.converters.compare.elements import as_float64
from muonckpt.converters.merge.exact_average import AverageWeights, averaged
from muonckpt.converters.merge.merged_outputs import shares
from muonckpt.converters.options import grouped

FORMATS = {
    "float16": (11, -24, 16),
    "bfloat16": (8, -133, 128),
    "float32": (24, -149, 128),
    "float64": (53, -1074, 1024),
}
"""Bits of the significand, the exponent of the smallest number, and the first exponent that is too large."""


def nearest(value: Fraction, dtype: str) -> float:
    """The nearest number of a type, ties to even: by integers alone."""
    digits, least, most = FORMATS[dtype]
    if value == 0:
        return 0.0
    exponent = max(abs(value).numerator.bit_length() - abs(value).denominator.bit_length() - digits, least)
    while abs(value) / Fraction(2) ** exponent >= 2**digits:
        exponent += 1
    while exponent > least and abs(value) / Fraction(2) ** (exponent - 1) < 2**digits:
        exponent -= 1
    rounded = round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent  # ties to even
    return float(rounded) if abs(rounded) < Fraction(2) ** most else float("inf") * (1 if value > 0 else -1)


def words_of(tensor: torch.Tensor) -> np.ndarray:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return raw.view(f"<u{tensor.element_size()}")


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("weights", [["1", "1"], ["1", "1", "1"], ["0.3", "0.7"], ["1e-9", "1", "3"]], ids=str)
def test_an_average_is_the_exact_one_rounded_once(dtype, weights):
    """Among numbers of one binade ties are common; the others have all exponents, subnormal ones among them."""
    kind, rng = getattr(torch, dtype), torch.Generator().manual_seed(len(weights))
    close = [1 + torch.rand(150, generator=rng, dtype=torch.float64) for _ in weights]
    scattered = [torch.randn(150, generator=rng, dtype=torch.float64) for _ in weights]
    scattered = [x * 2.0 ** torch.randint(-24, 15, (150,), generator=rng) for x in scattered]
    bits = [torch.randint(0, 64, (60,), generator=rng).to(torch.uint8) for _ in weights]  # tiny ones, by their bits
    tiny = [torch.nn.functional.pad(b[:, None], (0, kind.itemsize - 1)).flatten().view(kind) for b in bits]
    tensors = [torch.cat([a.to(kind), b.to(kind), c]) for a, b, c in zip(close, scattered, tiny, strict=True)]
    terms = [as_float64(words_of(t), dtype) for t in tensors]
    fractions = shares(len(weights), weights, None)
    result = as_float64(averaged(terms, AverageWeights.of(fractions), dtype), dtype)
    exact = [
        sum(w * Fraction(float(x)) for w, x in zip(fractions, row, strict=True)) for row in zip(*terms, strict=True)
    ]
    np.testing.assert_array_equal(result, [nearest(value, dtype) for value in exact])


def test_what_is_not_finite_goes_through_and_an_overflow_is_refused():
    pair = AverageWeights.of(shares(2, None, None))
    terms = [np.array([np.inf, np.inf, np.nan, 3.0]), np.array([1.0, -np.inf, 1.0, 4.0])]
    for dtype in FORMATS:
        result = as_float64(averaged(terms, pair, dtype), dtype)
        np.testing.assert_array_equal(result, [np.inf, np.nan, np.nan, 3.5])
    with pytest.raises(SourceError, match="overflows"):
        averaged([np.array([1.5e308])] * 2, pair, "float64")


def state(seed: int, step: int, lr: float = 0.02) -> dict:
    rng = torch.Generator().manual_seed(seed)
    names = ["layers.0.weight", "layers.1.weight"]
    model = {name: torch.randn(37, 11, generator=rng).bfloat16() for name in names}
    model |= {"scale": torch.randn((), generator=rng), "ids": torch.arange(5)}
    momenta = {name: {"momentum_buffer": torch.randn(37, 11, generator=rng)} for name in names}
    muon = {"params": names, "algorithm": "muon", "lr": lr, "momentum": 0.95, "convention": "ema"}
    return {"model": model, "optimizer": {"state": momenta, "param_groups": [muon]}, "step": step}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Three steps: ours on two meshes, and one of stock DCP without fingerprints."""
    folder = tmp_path_factory.mktemp("merge")
    muonckpt.save(state(0, 1), folder / "one", provenance={"step": 1})
    muonckpt.reshard(folder / "one", folder / "a", mesh={"dp": 3})
    muonckpt.save(state(1, 2), folder / "two", provenance={"step": 2})
    muonckpt.reshard(folder / "two", folder / "b", mesh={"dp": 2}, shard={"*weight*": [("dp", 1)]})
    dcp.save(state(2, 3, lr=0.01), checkpoint_id=folder / "c", no_dist=True)
    return [folder / name for name in "abc"]


def expected(get, weights) -> np.ndarray:
    tensors = [get(state(seed, 0)) for seed in range(len(weights))]
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    rows = zip(*(t.double().flatten().tolist() for t in tensors), strict=True)
    exact = [sum(w * Fraction(x) for w, x in zip(weights, row, strict=True)) for row in rows]
    return np.reshape([nearest(value, dtype) for value in exact], tensors[0].shape)


def test_inputs_on_any_meshes_give_one_checkpoint_on_another(runs, tmp_path):
    report = muonckpt.merge(
        runs,
        tmp_path / "out",
        **grouped(average=muonckpt.Average(ema="0.9", others_from="last"), mesh={"dp": 4}, verify=True),
    )
    weights = [Fraction(81, 100), Fraction(9, 100), Fraction(1, 10)]
    with muonckpt.open(tmp_path / "out") as merged:
        name = "layers.1.weight"
        for key, get in (
            (f"model.{name}", lambda s: s["model"][name]),
            ("model.scale", lambda s: s["model"]["scale"]),
            (f"optimizer.state.{name}.momentum_buffer", lambda s: s["optimizer"]["state"][name]["momentum_buffer"]),
        ):
            np.testing.assert_array_equal(merged.tensors[key].numpy(), expected(get, weights))
        assert merged.tensors[f"optimizer.state.{name}.momentum_buffer"].convention == "ema"
        assert list(merged.tensors["model.ids"].numpy()) == [0, 1, 2, 3, 4]
        assert (merged.items["step"], merged.items["optimizer.param_groups.0.lr"]) == (3, 0.01)
        inputs = merged.provenance["merged"][0]["inputs"]
        assert [(one["name"], one["weight"]) for one in inputs] == [("a", "81/100"), ("b", "9/100"), ("c", "1/10")]
        for path, one in zip(runs, inputs, strict=True):
            assert one["fingerprints"] == muonckpt.verify(path).fingerprints
    assert muonckpt.verify(tmp_path / "out").verdict == "whole" and "81/100 of" in " ".join(report.notes)


def test_the_average_of_one_checkpoint_with_itself_is_itself(runs, tmp_path):
    muonckpt.merge([runs[0]] * 3, tmp_path / "same", average=muonckpt.Average([0.1, 0.2, 0.4]), mesh={"dp": 2})
    found = muonckpt.diff(runs[0], tmp_path / "same")
    assert not found.differs and found.read == 0


def test_weights_alone_go_to_safetensors_whatever_the_state(runs, tmp_path):
    muonckpt.convert(
        runs[0], tmp_path / "a.safetensors", **grouped(format="safetensors", select=["model.*"], tensors_only=True)
    )
    done = called("merge", tmp_path / "a.safetensors", *runs[1:], tmp_path / "out.safetensors", "--model-only",
                  "--to-format", "safetensors", "--proportions", "1,2,1", "--memory", "64000", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == 4
    weights = [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)]
    with muonckpt.open(tmp_path / "out.safetensors") as merged:
        assert set(merged.tensors) == {
            f"model.{name}" for name in ("layers.0.weight", "layers.1.weight", "scale", "ids")
        }
        found = merged.tensors["model.layers.0.weight"].numpy()
        np.testing.assert_array_equal(found, expected(lambda s: s["model"]["layers.0.weight"], weights))


def test_what_has_no_average_is_refused_by_name(runs, tmp_path):
    with pytest.raises(SourceError, match=r"differ in 1 counters.*'step'.*--others-from last"):
        muonckpt.merge(runs[:2], tmp_path / "no")
    with pytest.raises(SourceError, match="momentum convention"):
        sums = state(1, 2)
        sums["optimizer"]["param_groups"][0].pop("convention")  # whatever wrote it does not say
        dcp.save(sums, checkpoint_id=tmp_path / "unknown", no_dist=True)
        muonckpt.merge([runs[1], tmp_path / "unknown"], tmp_path / "no", average=muonckpt.Average(others_from=0))
    done = called("merge", *[tmp_path / "unknown"] * 2, tmp_path / "said", "--from", "dcp", "--convention", "sum")
    assert done.returncode == 0, done.stderr
    tensors = muonckpt.open(tmp_path / "said").tensors.values()
    assert {tensor.convention for tensor in tensors if tensor.slot} == {"sum"}
    content = state(0, 1)
    content["model"]["layers.0.weight"] = content["model"]["layers.0.weight"].float()
    muonckpt.save(content, tmp_path / "wide")
    with pytest.raises(SourceError, match="the same dtype"):
        muonckpt.merge([runs[0], tmp_path / "wide"], tmp_path / "no")
    del content["model"]["layers.0.weight"]
    muonckpt.save(content, tmp_path / "less")
    with pytest.raises(SourceError, match=r"lacks, such as 'model\.layers\.0\.weight'"):
        muonckpt.merge([runs[0], tmp_path / "less"], tmp_path / "no")
    for wrong in ({"proportions": [1, 2, 3]}, {"proportions": [1, 0]}, {"ema": 1}, {"ema": "x"}, {"others_from": 2}):
        with pytest.raises(TargetError):
            muonckpt.merge(runs[:2], tmp_path / "no", average=muonckpt.Average(**wrong))
    assert called("merge", *runs[:1], tmp_path / "no").returncode == 2
    assert called("merge", *runs[:2], tmp_path / "no", "--ema", "2").returncode == 2
    assert not (tmp_path / "no").exists()


def test_damage_in_any_input_stops_it(runs, tmp_path):
    damaged = Path(shutil.copytree(runs[1], tmp_path / "damaged"))
    record = next(t for t in muonckpt.open(runs[1]).manifest.tensors if t.key == "model.layers.0.weight")
    payload = record.chunks[0].payload
    data = bytearray((damaged / payload.file).read_bytes())
    data[payload.offset] ^= 1
    (damaged / payload.file).write_bytes(bytes(data))
    done = called("merge", runs[0], damaged, tmp_path / "no", "--others-from", "first")
    assert done.returncode == 3 and f"damaged/{payload.file}" in done.stderr and not (tmp_path / "no").exists()
