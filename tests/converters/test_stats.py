"""The figures of a checkpoint against numpy's of the whole tensors, and what is said to be odd."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
import torch
from support.commands import called

import muonckpt
from muonckpt.converters.compare.figures import SKETCH, ElementFigures, spectra_of
from muonckpt.names.wording import as_json

GENERATOR = torch.Generator().manual_seed(0)


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Singular values that fall as 1, 1/2, 1/3, …"""
    short = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, short, generator=GENERATOR, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, short, generator=GENERATOR, dtype=torch.float64))
    return (left / torch.arange(1, short + 1) @ right.T).float()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of four layers at steps 10 and 20; in the later one several things are wrong."""
    folder = tmp_path_factory.mktemp("runs")
    names = [f"layers.{layer}.up.weight" for layer in range(4)]
    model = {name: matrix(60, 40) for name in names} | {"experts": torch.stack([matrix(20, 30) for _ in range(3)])}
    momentum = {name: {"momentum_buffer": matrix(*weight.shape[-2:]).expand(weight.shape).clone()}
                for name, weight in model.items()}  # fmt: skip
    group = {"params": list(model), "algorithm": "muon", "lr": 0.02, "convention": "ema"}

    def save(name: str, step: int) -> None:
        state = {"state": momentum, "param_groups": [group]}
        muonckpt.save({"model": model, "optimizer": state}, folder / name, provenance={"step": step})

    save("early", 10)
    for name in names[:3]:
        model[name] = model[name] + 10 * 0.02 / np.sqrt(60)  # ten steps of a factor of 1
    model["experts"] = model["experts"] * 1.5
    momentum[names[1]]["momentum_buffer"] = torch.zeros(60, 40)
    momentum[names[2]]["momentum_buffer"] = 100 * momentum[names[2]]["momentum_buffer"]
    momentum[names[3]]["momentum_buffer"][5, 7] = torch.nan
    save("late", 20)
    muonckpt.reshard(folder / "late", folder / "cut", mesh={"dp": 7})
    return folder


@pytest.mark.parametrize("memory", [1 << 26, 64_000])
def test_figures_are_those_of_whole_tensors(runs, memory):
    """Also where a matrix does not fit into the memory, and is read several times."""
    with muonckpt.open(runs / "cut") as checkpoint:
        whole = {key: checkpoint.tensors[key].numpy() for key in checkpoint.tensors}
    found = {t.key: t for t in muonckpt.stats(runs / "cut", memory=memory, jobs=1).tensors}
    assert found.keys() == whole.keys()
    for key, tensor in found.items():
        numbers = whole[key].astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        figures = tensor.figures
        assert figures.norm == pytest.approx(np.linalg.norm(finite), rel=1e-12)
        assert figures.rms == pytest.approx(np.sqrt(np.mean(finite**2)), rel=1e-12)
        assert (figures.largest, figures.zeros) == (np.abs(finite).max(), np.count_nonzero(finite == 0))
        assert (figures.nan, figures.infinite) == (np.count_nonzero(np.isnan(numbers)), 0)
        if figures.nan:
            assert not tensor.spectra
            continue
        for spectrum, each in zip(tensor.spectra, numbers.reshape(-1, *numbers.shape[-2:]), strict=True):
            values = np.linalg.svd(each, compute_uv=False)[:SKETCH]
            assert spectrum.values[:3] == pytest.approx(values[:3], rel=1e-2) if values[0] else not spectrum.values
            assert all(sketched <= value * (1 + 1e-6) for sketched, value in zip(spectrum.values, values, strict=False))


@pytest.mark.parametrize("shape", [(1 << 21,), (1, 1 << 20), (3, 1 << 19)])
def test_long_vectors_and_rows_are_measured_in_the_memory_that_was_given(shape, tmp_path):
    numbers = torch.randn(shape, generator=GENERATOR)
    muonckpt.save({"model": {"w": numbers}}, tmp_path / "c")
    muonckpt.stats(tmp_path / "c", memory=1 << 20, jobs=1)  # imports what it needs
    tracemalloc.start()
    (found,) = muonckpt.stats(tmp_path / "c", memory=1 << 20, jobs=1).tensors
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20  # of which 2 are those that are compared with checksums at a time
    assert found.figures.norm == pytest.approx(torch.linalg.vector_norm(numbers.double()).item(), rel=1e-12)
    if len(shape) > 1:
        values = torch.linalg.svdvals(numbers.double()).tolist()
        assert found.spectrum == pytest.approx(values, rel=1e-9)


def test_a_matrix_of_few_columns_is_measured_exactly():
    numbers = np.random.default_rng(1).normal(size=(50, SKETCH)) * 1e-180
    figures = ElementFigures(numbers.size, 1.0, float(np.abs(numbers).max()))
    [found] = spectra_of(SKETCH, lambda: iter((numbers[np.newaxis, :20], numbers[np.newaxis, 20:])), [figures])
    assert found.values == pytest.approx(np.linalg.svd(numbers * 1e180, compute_uv=False) * 1e-180, rel=1e-9)


def test_what_is_wrong_is_found_and_nothing_else(runs):
    early = muonckpt.stats(runs / "early")
    assert early.health == ()
    late = muonckpt.stats(runs / "late", since=runs / "early")
    momentum = "optimizer.state.layers.{}.up.weight.momentum_buffer"
    assert {finding.kind: finding.names for finding in late.health} == {
        "nonfinite": (momentum.format(3),),
        "zero_momentum": (momentum.format(1),),
        "outlier_rms": (momentum.format(2),),
        "still": ("model.layers.3.up.weight",),
    }
    updates = {update.key: update for update in late.updates}
    assert updates["model.layers.0.up.weight"].factor == pytest.approx(1, rel=1e-3)
    assert updates["model.layers.0.up.weight"].lr == 0.02 and late.steps == (10, 20)
    [folded] = [row for row in late.folded() if row["pattern"] == "model.layers.*.up.weight"]
    assert folded["tensors"] == 4 and folded["nonfinite"] == 0


def test_the_command_prints_what_the_function_returns(runs):
    shown = called("stats", runs / "late", "*momentum*", "--since", runs / "early")
    assert shown.returncode == 3 and "no weights" in shown.stderr
    shown = called("stats", runs / "late", "--since", runs / "early")
    assert shown.returncode == 0 and "look at: 1 momentum is all zeros" in shown.stdout and "frozen" in shown.stdout
    assert "\nmodel.layers.2.up.weight " in called("stats", runs / "late", "--all", "--no-spectra").stdout
    found = json.loads(called("stats", runs / "late", "--json").stdout)
    assert found.pop("seconds") > 0 and found == json.loads(json.dumps(muonckpt.stats(runs / "late"), default=as_json))
    assert called("stats", runs / "late", "*momentun*").returncode == 2
