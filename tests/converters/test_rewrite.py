"""`muonckpt.reshard` and `muonckpt.convert`: what they do, return and refuse."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import called
from support.resharded import contents, saved
from support.sharded import bits, elements_of
from support.trees import tree

import muonckpt
from muonckpt import ArgumentError, DestinationError, Execution, SourceError, TargetError, Translation
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.names import NameRule, NameRules
from muonckpt.names.wording import as_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEP = 1.0 / 3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Two matrices with momentum, and what is no tensor.  Do not change."""
    path = tmp_path_factory.mktemp("source") / "run"
    weights = {name: torch.arange(24.0).reshape(6, 4) + at for at, name in enumerate("ab")}
    state = {name: {"momentum_buffer": STEP * value} for name, value in weights.items()}
    groups = [{"params": list(weights), "lr": 0.1, "momentum": 0.75, "algorithm": "muon"}]
    muonckpt.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, path)
    return path


def test_the_function_and_the_command_write_and_tell_the_same(source, tmp_path):
    cut = {"model.*": [("tp", 1)], "*": [("dp", 0)]}
    report = muonckpt.reshard(source, tmp_path / "a" / "out", **grouped(mesh={"dp": 2, "tp": 2}, shard=cut))
    (tmp_path / "b").mkdir()
    line = ["--mesh", "dp=2,tp=2", "--shard", "model.*=tp:1", "--shard", "*=dp:0", "--json"]
    told = json.loads(called("reshard", source, tmp_path / "b" / "out", *line).stdout)
    assert contents(tmp_path / "a" / "out") == contents(tmp_path / "b" / "out")
    assert told.pop("seconds") > 0
    assert {**json.loads(json.dumps(report, default=as_json)), "destination": ""} == {**told, "destination": ""}
    assert (report.ranks, report.mesh, report.format, report.tensors) == (4, {"dp": 2, "tp": 2}, "dcp", 4)
    assert report.fingerprints == {t.key: t.fingerprint for t in muonckpt.open(source).outline.tensors}
    with pytest.raises(FrozenInstanceError):
        report.tensors = 0


def test_a_dry_run_is_told_and_not_done(source, tmp_path):
    plan = muonckpt.reshard(source, tmp_path / "out", **grouped(mesh={"dp": 3}, dry_run=True))
    assert plan.fingerprints is None and list(tmp_path.iterdir()) == []
    done = muonckpt.reshard(str(source), str(tmp_path / "out"), mesh={"dp": 3})
    assert done.files == plan.files and sum(file.bytes for file in plan.files) == plan.written
    assert {file.file: file.bytes for file in plan.files} == {
        name: len(data) for name, data in tree(tmp_path / "out").items() if name.endswith(".distcp")
    }


def test_convert_needs_no_mesh(source, tmp_path):
    told: list[tuple[int, int]] = []
    report = muonckpt.convert(source, tmp_path / "one", **grouped(progress=lambda *step: told.append(step)))
    assert (report.ranks, [file.file for file in report.files]) == (1, ["__0_0.distcp"])
    assert {total for _, total in told} == {sum(count for count, _ in told)} == {report.checked + report.read}
    report = muonckpt.convert(
        tmp_path / "one", tmp_path / "w.safetensors", **grouped(format="safetensors", tensors_only=True)
    )
    assert (report.ranks, report.mesh, report.layout) == (None, None, None)
    muonckpt.reshard(tmp_path / "w.safetensors", tmp_path / "back", mesh={"dp": 2})
    assert elements_of(tmp_path / "back") == elements_of(source)


def test_rules_are_tables_by_name_files_or_values(source, tmp_path):
    rules = NameRules((NameRule(("a", "b"), ("ab",)),))
    (tmp_path / "rules.toml").write_text(rules.to_toml())
    for number, how in enumerate((rules, str(tmp_path / "rules.toml"), [rules], ["hf-qkv", rules])):
        out = tmp_path / str(number)
        report = muonckpt.convert(source, out, **grouped(rules=how, to_dialect="dion", convention="ema"))
        found = elements_of(out)
        assert found["model.ab"] == elements_of(source)["model.a"] + elements_of(source)["model.b"]
        momentum = torch.cat([STEP * (torch.arange(24.0) + at) for at in range(2)]).double()
        assert found["optimizer.state.ab.momentum"] == bits((momentum / 0.25).float())
        assert "1 momentum is multiplied by 4.0, each element rounded once" in report.notes


WRONG = {
    "format": ({"format": "tar"}, "unknown format 'tar'; expected one of dcp, buffers"),
    "mesh": ({}, "dcp has a file for each rank.*`mesh=`"),
    "program": ({"to_dialect": "x"}, "`to_dialect=`: unknown program 'x'; expected one of torch"),
    "source program": ({"from_dialect": "x"}, "`from_dialect=`: unknown program 'x'"),
    "rules": ({"rules": "x"}, "cannot read rules 'x'"),
    "convention": ({"convention": "mean"}, "unknown momentum convention 'mean'; expected one of ema, sum"),
    "layout": ({"mesh": {"dp": 2}, "layout": "x"}, "unknown layout 'x'; expected one of rows"),
    "shard size": ({"mesh": {"dp": 2}, "shard_size": 7}, "has no meaning for format dcp"),
    "layout of whole tensors": ({"format": "zarr", "layout": "flat"}, "`layout=` has no meaning for format zarr"),
    "axis": ({"mesh": {"dp": 2}, "shard": {"*": [("tp", 0)]}}, "expected axes of the mesh \\(dp\\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written(case, source, tmp_path):
    options, message = WRONG[case]
    with pytest.raises(TargetError, match=message):
        muonckpt.reshard(source, tmp_path / "out", **grouped(**options))
    assert list(tmp_path.iterdir()) == []


OTHER_KINDS: list[tuple[type, str, list[Any]]] = [
    (Translation, "from_dialect", [3, True]),
    (Translation, "roots", ["model", {"model": 3}]),
    (Translation, "rules", [None, [3]]),
    (Translation, "mu", ["0.9", True]),
    (Translation, "step", ["3", 2.5, -1]),
    (Translation, "drop", ["step", [3]]),
    (Translation, "model_only", ["no", 1]),
    (Translation, "like", [3]),
    (Execution, "memory", ["1GiB", 0]),
    (Execution, "jobs", [1.5, 0]),
    (Execution, "dry_run", [1]),
    (Execution, "timeout", [None, -1.0, float("nan")]),
    (Execution, "progress", ["bar"]),
]


@pytest.mark.parametrize(("kind", "name", "values"), OTHER_KINDS)
def test_options_of_another_kind_are_refused_where_they_are_given(kind, name, values):
    for value in values:
        with pytest.raises(ArgumentError, match=rf"\b{name}="):
            kind(**{name: value})


@pytest.mark.parametrize("rewrite", [muonckpt.reshard, muonckpt.convert])
def test_arguments_of_another_kind_are_refused_with_the_call_to_write(rewrite, source, tmp_path):
    for options in ({"translation": {"mu": 0.9}}, {"execution": 8}, {"mesh": 8}):
        [name] = options
        with pytest.raises(ArgumentError, match=rf"{name}=.*Write muonckpt\.{rewrite.__name__}\("):
            rewrite(source, tmp_path / "out", **options)


def test_places_that_cannot_be_are_errors_of_their_side(source, tmp_path):
    with pytest.raises(SourceError, match="nowhere"):
        muonckpt.convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(SourceError, match="nosuch"):
        muonckpt.convert("nosuch://bucket/run", tmp_path / "out")
    with pytest.raises(DestinationError, match="nosuch"):
        muonckpt.convert(source, "nosuch://bucket/run")
    with pytest.raises(DestinationError, match="exists already"):
        muonckpt.convert(source, tmp_path)


def test_what_the_source_is_that_ranks_write_the_destination_is_too(tmp_path):
    muonckpt.convert(saved("own rows3"), tmp_path / "a", format="buffers")
    assert muonckpt.convert(tmp_path / "a", tmp_path / "b").format == "buffers"
    assert muonckpt.convert(tmp_path / "a", tmp_path / "c", format="dcp").format == "dcp"
