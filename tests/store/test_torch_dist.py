"""Megatron's ``torch_dist``, written: its structure, and Megatron itself loading it where the package is installed."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import run
from support.golden import golden
from support.rank_files import MODEL, value_of, written
from support.resharded import grouped
from support.translated import TORCH, W, nested, truth_of

import muonckpt
from muonckpt import SourceError
from muonckpt.names.vocabulary import Convention
from muonckpt.optimizer import Muon
from muonckpt.programs.detection import with_slots
from muonckpt.programs.signs import COMMON_FILE, COMMON_STATE, MEGATRON_FILE
from muonckpt.store.formats.dcp_metadata import parse_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = ("ws4_padded", "ws4_pingpong")


def resharded(source, path, *more: str) -> Path:
    assert run(["reshard", str(source), str(path), "--mesh", "dp=3", "--format", "torch_dist", *more]) == 0
    return path


@pytest.mark.parametrize("name", NAMES)
def test_it_has_what_megatrons_own_has(name, tmp_path):
    """The same keys, shapes, dtypes and items; other boxes, since the matrices are now cut by rows."""
    theirs = golden(f"megatron/layer_wise/{name}") / "torch_dist"
    mine = resharded(theirs, tmp_path / "out")
    assert json.loads((mine / MEGATRON_FILE).read_text()) == json.loads((theirs / MEGATRON_FILE).read_text())
    ours, other = (parse_metadata((path / ".metadata").read_bytes()) for path in (mine, theirs))
    assert {key: (t.dtype, t.size) for key, t in ours.tensors.items()} == {
        key: (t.dtype, t.size) for key, t in other.tensors.items()
    }
    assert ours.blobs == other.blobs == (COMMON_STATE,)
    (blob,), (same,) = muonckpt.open(mine).outline.blobs, muonckpt.open(theirs).outline.blobs
    raw, want = ((p / b.item.file).read_bytes()[b.item.offset : b.item.end] for p, b in ((mine, blob), (theirs, same)))
    assert raw == want
    state = {key: torch.zeros(t.size, dtype=getattr(torch, t.dtype)) for key, t in other.tensors.items()}
    dcp.load(state, checkpoint_id=mine, no_dist=True)
    for key, words in truth_of(f"megatron/layer_wise/{name}").items():
        assert np.array_equal(state[key].view(torch.int16).numpy(), words.view("<i2")), key
    assert {tensor.slot for tensor in with_slots(muonckpt.open(theirs).outline).tensors} == {
        None,
        "momentum_buffer",
        "fp32_param",
    }


@pytest.mark.parametrize("source", ["torch_dist", "torch"])
def test_megatron_loads_it(source, tmp_path):
    """Into its real optimizer on one rank, strictly: weights, masters, momentum and groups, bit for bit."""
    folder = golden("megatron/layer_wise/ws4_padded")
    path, more = folder / source, ()
    if source == "torch":  # the ranks' files, without names; and the weights as a model's file
        path, more = shutil.copytree(path, tmp_path / "files"), ("--to", "torch_dist")
        words = {key: w for key, w in truth_of("megatron/layer_wise/ws4_padded").items() if "." not in key}
        weights = {key: torch.from_numpy(w.view("<i2").copy()).view(torch.bfloat16) for key, w in words.items()}
        listed = json.loads((folder / "meta.json").read_text())["model_params"]
        torch.save({"model": {name: weights[name] for name, _ in listed}}, path / "model_optim_rng.pt")
        (path / "layer_wise.toml").write_text(
            "algorithm = 'padded-numel'\nmodel = 'model_optim_rng.pt'\n[[group]]\nnames = ['l*']\n"
        )
    memory = loaded_by_megatron(resharded(path, tmp_path / "out", *more))
    truth = truth_of("megatron/layer_wise/ws4_padded")
    assert memory["tensors"].keys() == truth.keys()
    for key, words in truth.items():
        assert np.array_equal(memory["tensors"][key].contiguous().view(torch.int16).numpy(), words.view("<i2")), key
    (group,) = memory["groups"]
    assert (group["lr"], group["momentum"], group["weight_decay"], group["max_lr"]) == (0.1, 0.9, 0.0, 0.1)


def test_megatron_loads_two_optimizers(tmp_path):
    """Muon and AdamW, after its prefixes, from the files of three ranks; with the step."""
    checkpoint = resharded(written(tmp_path, "legacy-pingpong", 3), tmp_path / "out", "--to", "torch_dist_chained")
    memory = loaded_by_megatron(checkpoint)
    stored = memory["tensors"]
    assert stored.pop("optimizer.state.step.norm") == 3.0
    for name, shape in MODEL:
        assert torch.equal(stored.pop(name), value_of(name, "fp32_param", shape).bfloat16())
        for slot in ("fp32_param", *(("exp_avg", "exp_avg_sq") if len(shape) == 1 else ("momentum_buffer",))):
            assert torch.equal(stored.pop(f"optimizer.state.{slot}.{name}"), value_of(name, slot, shape))
    assert not stored
    assert [group["lr"] for group in memory["groups"]] == [0.1, 0.5]


def test_megatron_loads_lion_and_steps_as_ours(tmp_path):
    """Muon and Lion of ours, after its prefixes; Emerging-Optimizers' Lion rounds the decay once more."""
    matrix, vector = torch.rand(8, 4), torch.rand(8)
    state = {
        "w": {"momentum_buffer": torch.rand(8, 4), "fp32_param": matrix},
        "norm": {"exp_avg": torch.rand(8) - 0.5, "fp32_param": vector},
    }
    groups = [
        {"params": ["w"], "algorithm": "muon", "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "convention": "ema"},
        {"params": ["norm"], "algorithm": "lion", "lr": 0.001, "weight_decay": 0.1, "betas": (0.9, 0.98)},
    ]
    # Megatron tells groups apart by the bounds of a schedule, too.
    groups = [{**group, "cautious": False, "max_lr": 0.1, "min_lr": 0.0} for group in groups]
    weights = {"w": matrix.bfloat16(), "norm": vector.bfloat16()}
    muonckpt.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "ours")
    options = grouped(to_dialect="torch_dist_chained", format="torch_dist")
    muonckpt.convert(tmp_path / "ours", tmp_path / "out", **options)
    memory = loaded_by_megatron(tmp_path / "out", "lion")
    for name, slots in state.items():
        for slot, tensor in slots.items():
            assert torch.equal(memory["tensors"][f"optimizer.state.{slot}.{name}"], tensor), (name, slot)
    parameter = torch.nn.Parameter(vector.clone())
    lion = Muon([{"params": [parameter], "algorithm": "lion", "lr": 0.001, "weight_decay": 0.1, "betas": (0.9, 0.98)}])
    lion.state[parameter]["exp_avg"].copy_(state["norm"]["exp_avg"])
    parameter.grad = torch.linspace(-1, 1, 8)
    lion.step()
    torch.testing.assert_close(memory["stepped"]["norm"], parameter.detach(), rtol=3e-7, atol=0)


def loaded_by_megatron(checkpoint: Path, *scalar: str) -> dict:
    """What its optimizer has in memory then; skips the test where it is not installed."""
    if not find_spec("megatron"):  # before a program is started for it
        pytest.skip("megatron-core is not installed")
    program, out = Path(__file__).parents[1] / "support" / "upstream_torch_dist.py", checkpoint.parent / "memory.pt"
    done = subprocess.run([sys.executable, "-P", program, checkpoint, out, *scalar], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(f"megatron-core cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def test_a_program_without_megatrons_words_gets_its_fresh_ones(tmp_path):
    state = nested({"momentum_buffer": W.clone()}, **(TORCH | {"lr": 0.25, "momentum": 0.9})) | {"iteration": 7}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    out = resharded(tmp_path / "in", tmp_path / "out", "--to", "torch_dist")
    blobs = {blob.key: blob for blob in muonckpt.open(out).outline.blobs}
    assert blobs.keys() == {COMMON_STATE, "iteration/shard_0_1"}  # as Megatron calls what is in one piece
    (common,) = muonckpt.open(out).values.read(blobs[COMMON_STATE])
    (group,) = common["optimizer"]["optimizer"]["param_groups"]
    assert group == {"lr": 0.25, "weight_decay": 0.0, "momentum": 0.9, "wd_mult": 1.0, "lr_mult": 1.0,
                     "is_expert_parallel": False, "is_decoupled_lr": False}  # fmt: skip
    assert {tensor.key for tensor in muonckpt.open(out).outline.tensors} == {"w", "optimizer.state.momentum_buffer.w"}


def test_weights_alone_get_an_empty_common_state(tmp_path):
    """Without one Megatron loads nothing."""
    dcp.save({"w": W}, checkpoint_id=tmp_path / "in", no_dist=True)
    out = resharded(tmp_path / "in", tmp_path / "out")
    assert torch.load(out / COMMON_FILE, weights_only=True) == {}
    assert set(parse_metadata((out / ".metadata").read_bytes()).tensors) == {"w"}
    assert run(["verify", str(out)]) == 0
    (blob,) = muonckpt.open(resharded(out, tmp_path / "again")).outline.blobs
    assert blob.item.file == COMMON_FILE


def test_common_state_in_a_file_stays_one_and_is_never_lost(tmp_path):
    """As Megatron wrote it before core 0.19; what DCP does not know of is an item all the same."""
    common = {"iteration": 10, "optimizer": {"param_groups": [{"lr": 0.1}]}}
    dcp.save({"w": W}, checkpoint_id=tmp_path / "in", no_dist=True)
    torch.save(common, tmp_path / "in" / COMMON_FILE)
    plain = tmp_path / "plain"
    assert run(["reshard", str(tmp_path / "in"), str(plain), "--mesh", "dp=2"]) == 0
    assert not (plain / COMMON_FILE).exists()
    out = resharded(plain, tmp_path / "out")
    assert (out / COMMON_FILE).read_bytes() == (tmp_path / "in" / COMMON_FILE).read_bytes()
    assert not parse_metadata((out / ".metadata").read_bytes()).blobs
    for path in (tmp_path / "in", plain, out):
        (blob,) = muonckpt.open(path).outline.blobs
        assert muonckpt.open(path).values.read(blob) == common
        assert run(["verify", str(path)]) == 0


def test_another_program_gets_its_groups(tmp_path):
    """Of each optimizer that has one group only; whatever else is in the common state is neither read nor run."""
    two = resharded(written(tmp_path, "legacy-pingpong", 2), tmp_path / "two", "--to", "torch_dist_chained")
    for source in (golden("megatron/layer_wise/ws4_padded/torch_dist"), two):
        out = tmp_path / f"{source.name} in torch"
        assert run(["reshard", str(source), str(out), "--mesh", "dp=2", "--to", "dion", "--convention", "ema",
                    "--drop", "fp32_param", "--step", "3"]) == 0  # fmt: skip
        manifest = muonckpt.open(out).manifest
        values, blobs = muonckpt.open(out).values, {blob.key: blob for blob in manifest.blobs}
        assert values.read(blobs["optimizer.param_groups.0.mu"]) == 0.9
        assert len(values.read(blobs["optimizer.param_groups.0.params"])) == len(
            [tensor for tensor in manifest.tensors if tensor.slot == "momentum" and len(tensor.shape) == 2]
        )
    assert values.read(blobs["optimizer.param_groups.1.beta2"]) == 0.95
    assert values.read(blobs["optimizer.param_groups.1.params"]) == ["norm"]


def test_a_common_state_of_megatrons_objects_is_read_but_not_run(tmp_path):
    class Danger:
        def __reduce__(self):
            return (open, (str(tmp_path / "run"), "w"))

    groups = [{"lr": 0.5, "momentum": 0.75}]
    common = {"args": Danger(), "optimizer": {"optimizer": {"param_groups": groups, "state": {}}}}
    dcp.save({"w": W, "optimizer.state.momentum_buffer.w": W.clone()}, checkpoint_id=tmp_path / "in", no_dist=True)
    torch.save(common, tmp_path / "in" / COMMON_FILE)
    out = tmp_path / "out"
    assert (
        run(["reshard", str(tmp_path / "in"), str(out), "--mesh", "dp=1", "--to", "dion", "--convention", "ema"]) == 0
    )
    tensors = {"optimizer.state.w.momentum": torch.zeros(2, 3)}
    dcp.load(tensors, checkpoint_id=out, no_dist=True)
    assert torch.equal(tensors["optimizer.state.w.momentum"], W / 0.25)
    assert not (tmp_path / "run").exists()


def test_megatron_fsdps_options_and_halves_become_its_groups_and_wholes(tmp_path):
    """One vocabulary: no option is lost.  Groups that differ stay apart, such as that of experts."""
    source = golden("megatron/fsdp_dtensor/dp4/iter_0000010")
    out = resharded(source, tmp_path / "out", "--to", "torch_dist_chained", "--rules", "megatron-swiglu")
    named = {}
    for blob in muonckpt.open(source).outline.blobs:
        if blob.path[:2] == ("optimizer", "param_to_group_meta"):
            named.setdefault(blob.path[2], {})[blob.path[3]] = muonckpt.open(source).values.read(blob)
    manifest = muonckpt.open(out).outline
    (common,) = (muonckpt.open(out).values.read(blob)[0] for blob in manifest.blobs if blob.key == COMMON_STATE)
    groups = [group for child in common["optimizer"].values() for group in child["optimizer"]["param_groups"]]
    assert sorted(map(repr, map(sorted, map(dict.items, groups)))) == sorted(
        {repr(sorted(options.items())) for options in named.values()}
    )
    fc1 = "chained_0.optimizer.state.momentum_buffer.decoder.layers.0.mlp.linear_fc1.weight"
    assert {tensor.key: tensor.shape for tensor in manifest.tensors}[fc1] == (80, 16)


def test_buckets_without_names_are_carried_for_megatron_and_refused_for_others(tmp_path):
    bucket = "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_bf16.bucket_idx_0.exp_avg"
    state = {"w": torch.ones(4, 4), "chained_0.optimizer.state.momentum_buffer.w": torch.ones(4, 4)}
    muonckpt.save({**state, bucket: torch.ones(9)}, tmp_path / "theirs")
    muonckpt.convert(tmp_path / "theirs", tmp_path / "same", format="torch_dist")
    assert bucket in muonckpt.open(tmp_path / "same").tensors
    with pytest.raises(SourceError, match="which parameter lies where, so muonckpt cannot take it"):
        muonckpt.convert(tmp_path / "theirs", tmp_path / "other", **grouped(to_dialect="muonckpt", convention="ema"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"muon_tp_mode": "blockwise", "tensor_model_parallel_size": 4}, ("muon_tp_mode='blockwise'", "pieces=4")),
        ({"tensor_model_parallel_size": 2}, ("does not say --muon-tp-mode", "pieces=2")),  # of an older Megatron
        (None, ("does not say --muon-tp-mode", "pieces=N")),
        ({"muon_tp_mode": "blockwise", "tensor_model_parallel_size": 1}, None),
        ({"muon_tp_mode": "duplicated", "tensor_model_parallel_size": 4}, None),
    ],
)
def test_a_run_whose_ranks_orthogonalised_blocks_is_told(arguments, said, tmp_path):
    """Megatron's default changed (#6380), so the arguments of the run say what an update was, or nothing does."""
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    common = {"optimizer": {"optimizer": {"param_groups": [group]}}}
    stored = common if arguments is None else common | {"args": Namespace(**arguments)}
    dcp.save({"w": W, "optimizer.state.momentum_buffer.w": W}, checkpoint_id=tmp_path / "in", no_dist=True)
    torch.save(stored, tmp_path / "in" / COMMON_FILE)
    (tmp_path / "in" / MEGATRON_FILE).write_text(json.dumps({"sharded_backend": "torch_dist"}))
    options = grouped(to_dialect="muonckpt", convention=Convention.EMA)
    report = muonckpt.convert(tmp_path / "in", tmp_path / "out", **options)
    told = [str(check) for check in report.checklist if "tensor parallelism" in check.subject]
    assert len(told) == (said is not None) and all(part in told[0] for part in said or ())


def test_files_of_ranks_beside_a_torch_dist_checkpoint_are_left_alone(tmp_path):
    """Megatron-Bridge #2307: they are redundant there, and may be of another step."""
    path = shutil.copytree(golden("megatron/layer_wise/ws4_padded") / "torch_dist", tmp_path / "in")
    (path / "layer_wise_optimizer_0.pt").write_bytes(b"of another step")
    report = muonckpt.verify(path)
    assert report.verdict == "whole"
    assert [note for note in report.notes if "layer_wise_optimizer_0.pt" in note] != []


def test_megatrons_sums_of_whole_files_are_compared(tmp_path):
    """As ``save_integrity_manifest`` writes them; they also cover what no item of DCP does."""
    path = shutil.copytree(golden("megatron/layer_wise/ws4_padded") / "torch_dist", tmp_path / "in")
    (path / "run_config.yaml").write_text("tp: 2")
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
    (path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))
    assert muonckpt.verify(path).verdict == "whole"
    (path / "run_config.yaml").write_text("tp: 4")
    (path / "metadata.json").rename(path / "lost.json")
    report = muonckpt.verify(path)
    assert [finding.kind for finding in report.findings] == ["integrity"] * 2
    told = " ".join(finding.message for finding in report.findings)
    assert (
        "run_config.yaml: SHA-256" in told and "'metadata.json'" in told and "integrity.json" in str(report.diagnosis)
    )
    for strange in ([], {"algorithm": "sha256", "files": [[1, "x"]]}, {"algorithm": "sha256", "files": None}):
        (path / "integrity.json").write_text(json.dumps(strange))
        (finding,) = muonckpt.verify(path).findings
        assert "expected JSON with algorithm and files" in finding.message


def test_chunks_whose_offset_and_size_have_other_dims_are_refused(tmp_path):
    """As Megatron planned them for experts (#7162): a prepended axis in the offsets, and none in the sizes."""
    dcp.save({"w": W}, checkpoint_id=tmp_path / "in", no_dist=True)
    with (tmp_path / "in" / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (chunk,) = metadata.state_dict_metadata["w"].chunks
    chunk.offsets = torch.Size([0, *chunk.offsets])
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SourceError, match=r"dims|offset"):
        muonckpt.open(tmp_path / "in")


def test_bounds_of_each_group_stay_with_its_parameters(tmp_path):
    """Megatron overwrote them when it loaded (#7173, #4705), and lost which group is which (#2625)."""
    meta = {name: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "max_lr": high, "min_lr": high / 10}
            for name, high in (("a", 1.0), ("b", 5.0), ("c", 1.0))}  # fmt: skip
    name = "module.module.module.{}".format
    optimizer = {
        "state": {name(own): {"momentum_buffer": W.clone()} for own in meta},
        "param_to_group_meta": {name(own): options for own, options in meta.items()},
    }
    state = {"model": {f"module.{own}": W.clone() for own in meta}, "optimizer": optimizer}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    muonckpt.reshard(tmp_path / "in", tmp_path / "two", mesh={"dp": 2})
    muonckpt.convert(tmp_path / "two", tmp_path / "ours", **grouped(to_dialect="muonckpt", convention=Convention.EMA))
    with muonckpt.open(tmp_path / "ours") as ours:
        bounds = {tuple(group["params"]): (group["max_lr"], group["min_lr"]) for group in ours.groups.values()}
    assert bounds == {("a", "c"): (1.0, 0.1), ("b",): (5.0, 0.5)}
    muonckpt.convert(tmp_path / "ours", tmp_path / "back", **grouped(to_dialect="fsdp_dtensor"))
    with muonckpt.open(tmp_path / "back") as back:
        key = "optimizer.param_to_group_meta.module.module.module.{}.max_lr".format
        blobs = {blob.key: blob for blob in back.outline.blobs}
        assert {own: back.values.item(blobs[key(own)]) for own in meta} == {"a": 1.0, "b": 5.0, "c": 1.0}
