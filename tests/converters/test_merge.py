"""Merged checkpoints, against sums of Python's own numbers, rounded by an oracle of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called

import muonckpt
from muonckpt import DestinationError, SourceError, TargetError
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


def summed(row: Sequence[float], weights: Sequence[Fraction], dtype: str) -> float:
    """The weighted sum of elements in float64, in their order, rounded to a type."""
    total, *products = (float(weight) * number for weight, number in zip(weights, row, strict=True))
    for product in products:
        total += product
    return nearest(Fraction(total), dtype)


@pytest.mark.parametrize("weights", [["1", "1"], ["1", "1", "1"], ["0.3", "0.7"], ["1e-9", "1", "3"]], ids=str)
def test_an_average_is_summed_in_float64_in_the_order_of_the_inputs(weights, tmp_path):
    """Among numbers of one binade ties are common; the others have all exponents, subnormal ones among them."""
    rng, sources = torch.Generator().manual_seed(len(weights)), []
    for number in range(len(weights)):
        model = {}
        for dtype in FORMATS:
            kind = getattr(torch, dtype)
            close = 1 + torch.rand(150, generator=rng, dtype=torch.float64)
            scattered = torch.randn(150, generator=rng, dtype=torch.float64)
            scattered *= 2.0 ** torch.randint(-24, 15, (150,), generator=rng)
            bits = torch.randint(0, 64, (60,), generator=rng).to(torch.uint8)
            tiny = torch.nn.functional.pad(bits[:, None], (0, kind.itemsize - 1)).flatten().view(kind)
            model[dtype] = torch.cat([close.to(kind), scattered.to(kind), tiny])
        muonckpt.save({"model": model}, tmp_path / f"{number}")
        sources.append((tmp_path / f"{number}", model))
    average = muonckpt.Average(None if len({*weights}) == 1 else weights)
    muonckpt.merge([path for path, _ in sources], tmp_path / "out", average=average, mesh={"dp": 2})
    fractions, orders = shares(len(weights), weights, None), []
    with muonckpt.open(tmp_path / "out") as merged:
        for dtype in FORMATS:
            rows = [*zip(*(model[dtype].double().tolist() for _, model in sources), strict=True)]
            found = merged.tensors[f"model.{dtype}"].numpy()
            np.testing.assert_array_equal(found, [summed(row, fractions, dtype) for row in rows])
            orders += [summed(row, fractions, dtype) == summed(row[::-1], fractions[::-1], dtype) for row in rows]
    assert all(orders) == (len(weights) == 2), "the order of more than two makes a difference"


def test_elements_that_all_inputs_have_alike_keep_their_bits(tmp_path):
    """Every finite number of 16 bits, and some of 32."""
    rng, words = torch.Generator().manual_seed(0), torch.arange(-(2**15), 2**15).to(torch.int16)
    model = {str(kind): words.view(kind) for kind in (torch.float16, torch.bfloat16)}
    model["float32"] = torch.randint(-(2**31), 2**31, (30_000,), generator=rng).to(torch.int32).view(torch.float32)
    model = {name: values[values.isfinite()] for name, values in model.items()}
    muonckpt.save({"model": model}, tmp_path / "one")
    for number, average in enumerate(({"proportions": [0.1, 0.2, 0.4, 1e-9, 7, 13, "1/3"]}, {"ema": 0.9})):
        out = tmp_path / f"{number}"
        muonckpt.merge([tmp_path / "one"] * 7, out, average=muonckpt.Average(**average))
        assert not muonckpt.diff(tmp_path / "one", out).differs


def test_what_is_not_finite_goes_through_as_through_any_sum(tmp_path):
    terms = [torch.tensor([torch.inf, torch.inf, torch.nan, 3.0]), torch.tensor([1.0, -torch.inf, 1.0, 4.0])]
    for number, term in enumerate(terms):
        muonckpt.save({dtype: term.to(getattr(torch, dtype)) for dtype in FORMATS}, tmp_path / f"{number}")
    muonckpt.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    with muonckpt.open(tmp_path / "out") as merged:
        for dtype in FORMATS:
            np.testing.assert_array_equal(merged.tensors[dtype].numpy(), [np.inf, np.nan, np.nan, 3.5])


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
    return np.reshape([summed(row, weights, dtype) for row in rows], tensors[0].shape)


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
    with pytest.raises(SourceError, match=r"differ in 1 counters.*'step'.*`others_from=.last.`"):
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


def test_what_select_leaves_out_is_not_judged(tmp_path):
    for number in range(2):
        state = {"w": torch.full((4,), float(number)), "rope": torch.ones(3, dtype=torch.complex64)}
        muonckpt.save(state, tmp_path / f"{number}")
    sources = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(SourceError, match="'rope' is complex64, which is not averaged"):
        muonckpt.merge(sources, tmp_path / "out")
    muonckpt.merge(sources, tmp_path / "out", select=["w"])
    with muonckpt.open(tmp_path / "out") as opened:
        assert {key: tensor.numpy().tolist() for key, tensor in opened.tensors.items()} == {"w": [0.5] * 4}


def test_a_name_that_is_too_long_is_an_error_of_the_destination(tmp_path):
    for number in range(2):
        muonckpt.save({"w": torch.ones(4)}, tmp_path / f"{number}")
    long = tmp_path / ("x" * 300)
    for write in (
        lambda: muonckpt.merge([tmp_path / "0", tmp_path / "1"], long),
        lambda: muonckpt.convert(tmp_path / "0", long, format="zarr"),
        lambda: muonckpt.reshard(tmp_path / "0", long, mesh={"dp": 2}),
    ):
        with pytest.raises(DestinationError, match=r"cannot write .*File name too long"):
            write()
