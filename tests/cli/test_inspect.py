"""What `inspect` says of layouts: their words, the flat buffers that are recorded, and whose keys a checkpoint has."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import called, on_terminal
from support.golden import golden
from support.layer_wise_training import Net, groups
from support.manifest_json import manifest_at
from support.workers import run
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt.cli.main import run as muonckpt_command
from muonckpt.converters.look.buffer_summary import buffer_summary, labelled_buffers
from muonckpt.layouts.buffers.algorithms import balanced
from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter, newton_schulz
from muonckpt.layouts.buffers.records import to_json
from muonckpt.optimizer import LayerWise

MATRICES = ["qkv", "proj", "up", "down", "stack"]


def inspected(path: Path, *options: str) -> str:
    done = called("inspect", path, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def summary(path: Path) -> dict:
    return json.loads(inspected(path, "--json"))


def saved(rank: int, world: int, path: str) -> None:
    net = Net()
    opt = LayerWise(net, groups(net), layout="padded-nscost", bucket_size=700)
    model, optimizer = get_state_dict(net, opt)
    muonckpt.save({"model": model, "optimizer": optimizer}, path, provenance=opt.provenance())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Saved by a layer-wise run on 3 ranks."""
    path = tmp_path_factory.mktemp("inspect") / "trained"
    run(3, saved, str(path))
    return path


@pytest.fixture(scope="module")
def owned(trained) -> Path:
    """The same with balanced owners, over 2 ranks for each of 2 halves of all matrices."""
    rule = ["--shard", "*momentum_buffer=tp:0"]
    arguments = [str(trained), str(trained.parent / "balanced"), "--mesh", "dp=2,tp=2", "--layout", "balanced", *rule]
    assert muonckpt_command(["reshard", *arguments]) == 0
    return trained.parent / "balanced"


def test_padding_and_balance_are_those_of_the_chunks(owned):
    """An oracle that never looks at buffers: who holds what is in the files' names."""
    manifest = manifest_at(owned / "muonckpt.json")
    elements, work = defaultdict(int), defaultdict(int)
    for tensor in manifest["tensors"]:
        for chunk in tensor["chunks"] if tensor["slot"] == "momentum_buffer" else ():
            shape = tuple(hi - lo for lo, hi in zip(chunk["lo"], chunk["hi"], strict=True))
            part, rank = Parameter("part", shape, "float32"), int(chunk["file"].split("_")[2])
            elements[rank] += part.numel
            work[rank] += newton_schulz(part)
    [found] = [entry for entry in summary(owned)["buffers"] if entry["of"] == "momentum_buffer"]
    assert found["ranks"] == [
        {"rank": rank, "elements": elements[rank], "newton_schulz": work[rank]} for rank in range(4)
    ]
    mean = sum(work.values()) / 4
    assert found["busiest"]["newton_schulz"] == round(max(work.values()) / mean, 3) > 1
    assert found["elements"] == sum(elements.values()) and found["buffers"] == 2
    recorded = [buffer for buffer in manifest["provenance"]["buffers"] if buffer["slot"] == "momentum_buffer"]
    assert found["padding"] == sum(buffer["numel"] for buffer in recorded) - found["elements"] > 0
    assert found["padding_bytes"] == 4 * found["padding"]


def test_the_buffers_of_the_run_that_saved_are_shown_until_there_are_others(trained, owned):
    found = summary(trained)["buffers"]
    assert [(entry["algorithm"], entry["version"], len(entry["ranks"])) for entry in found] == [
        ("padded-nscost", 1, 3),
        ("distributed-optimizer", 1, 3),
    ]
    assert found[0]["padding"] > 0 and found[0]["busiest"]["newton_schulz"] > 1
    assert found[1]["busiest"]["newton_schulz"] is None and found[1]["busiest"]["elements"] >= 1
    assert {entry["algorithm"] for entry in summary(owned)["buffers"]} == {"balanced", "distributed-optimizer"}


def test_balance_is_of_ranks_whose_experts_are_recorded():
    """Two groups of experts; a run records those of rank 0, with ranks 0 and 2."""
    shapes = {"a": (64, 16), "b": (32, 32), "c": (16, 16), "d": (8, 16)}
    dense = [Parameter(name, shape, "float32") for name, shape in shapes.items()]
    expert = [Parameter(f"expert {name}", shape, "float32", expert=True) for name, shape in shapes.items()]
    buffers = balanced([*dense, *expert], GroupSizes(4, 2))
    run = {"layout": "balanced", "buffers": [*map(to_json, buffers)], "ranks": [[0, 1, 2, 3], [0, 2]]}
    [entry] = buffer_summary(labelled_buffers({"layer_wise": run}))
    owners = {name: owner for buffer in buffers for name, owner in buffer.owners.items()}
    mine = {0: [p for p in dense if owners[p.name] == 0] + [p for p in expert if owners[p.name] == 0]}
    mine[2] = [p for p in dense if owners[p.name] == 2] + [p for p in expert if owners[p.name] == 1]
    assert entry["ranks"] == [
        {"rank": rank, "elements": sum(p.numel for p in held), "newton_schulz": sum(map(newton_schulz, held))}
        for rank, held in mine.items()
    ]


def test_owners_are_listed_with_tensors(trained, owned):
    recorded = json.loads((trained / "muonckpt.json").read_text())["provenance"]["layer_wise"]["buffers"]
    owners = {each["name"]: each["owner"] for buffer in recorded for each in buffer["parameters"]}
    rows = [line.split("  ") for line in inspected(trained, "--tensors").splitlines()]
    shown = {row[0]: row[-1].strip() for row in rows if row[0] in owners}
    assert shown == {name: "-" if owner is None else str(owner) for name, owner in owners.items()}
    assert all(shown[name] != "-" for name in MATRICES)
    # Two halves of each matrix, with ranks 0 and 2 (tp 0) and 1 and 3.
    rows = [line.split() for line in inspected(owned, "--tensors").splitlines() if "qkv.momentum_buffer" in line]
    assert [int(row[-1]) % 2 for row in rows if "balanced" in row] == [0, 1]


def test_layouts_are_said_in_words(owned, tmp_path):
    layouts = [line.split(maxsplit=3)[3] for line in inspected(owned).splitlines() if line.startswith("layout ")]
    assert sorted(layouts) == [
        "by balanced v1 on mesh dp=2 x tp=2",
        "by balanced v1 on mesh dp=2 x tp=2, tp cuts dim 0",
        "by distributed-optimizer v1 on mesh dp=2 x tp=2",
    ]
    arguments = [str(owned), str(tmp_path / "rows"), "--mesh", "dp=2,tp=2", "--shard", "*=tp:0,dp:0"]
    assert muonckpt_command(["reshard", *arguments, "--select", "*.qkv*"]) == 0
    assert "2 tensors on mesh tp=2 x dp=2: Shard(0), Shard(0)" in inspected(tmp_path / "rows")


def test_a_line_for_every_rank_if_there_are_few_or_it_is_asked_for(trained, tmp_path):
    assert muonckpt_command(["reshard", str(trained), str(tmp_path / "many"), "--mesh=dp=30", "--layout=balanced"]) == 0
    many = tmp_path / "many"
    for path, options, some in ((trained, (), True), (many, (), False), (many, ("--ranks",), True)):
        rows = [line for line in inspected(path, *options).splitlines() if line.startswith(("0  ", "29 "))]
        assert bool(rows) is some


def test_what_is_recorded_of_buffers_is_printed_with_tensors_only(trained, owned):
    for path, key in ((trained, "layer_wise"), (owned, "buffers")):
        assert '"shards"' not in inspected(path) + inspected(path, "--json")
        assert json.loads(inspected(path, "--json", "--tensors"))["manifest"]["provenance"][key]
    assert summary(trained)["provenance"]["layer_wise"] == {"layout": "padded-nscost"}


def elements_at(folder: Path, parts: list[dict], tensor) -> np.ndarray:
    """The elements of a box as a program reads them that knows nothing but these bytes."""
    lo = np.min([part["lo"] for part in parts], axis=0)
    hi = np.max([part["hi"] for part in parts], axis=0)
    kind = np.dtype("uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    box = np.zeros(hi - lo, kind)
    for part in parts:
        sizes = np.subtract(part["hi"], part["lo"])
        elements = np.zeros(sizes, kind)
        with (folder / part["file"]).open("rb") as file:
            for index in np.ndindex(*sizes):
                file.seek(part["offset"] + sum(np.multiply(index, part["strides"])))
                elements[index] = np.frombuffer(file.read(kind.itemsize), kind)[0]
        box[tuple(slice(a, b) for a, b in zip(part["lo"] - lo, part["hi"] - lo, strict=True))] = elements
    return box


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("dion_fsdp4/ckpt", ""),
        ("titan_fsdp4/ckpt", "layers.0.experts.w13"),
        ("xtuner_fsdp4/ckpt", ""),
        ("megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010", ""),
        ("megatron/layer_wise/ws4_padded/torch_dist", ""),
        ("dcp", ""),
        ("safetensors", ""),
        ("zarr", ""),
    ],
)
def test_a_range_is_found_in_the_files_at_the_bytes_that_are_named(name, key, owned, tmp_path):
    if name in ("dcp", "safetensors", "zarr"):
        made, options = tmp_path / "made", ["--mesh", "dp=3"] * (name == "dcp")
        assert muonckpt_command(["reshard", str(owned), str(made), "--to-format", name, *options]) == 0
        path = made
    else:
        path = golden(name)
    opened = muonckpt.open(path)
    matrices = [t for t in opened.tensors.values() if len(t.shape) >= 2 and min(t.shape) > 2]
    tensor = opened.tensors[key] if key else max(matrices, key=lambda t: (len(t.record.chunks), t.key))
    rows, columns = tensor.shape[-2:]
    text = f"[..., {rows // 3}:{-1}, -2:]"
    found = json.loads(inspected(path, "--tensor", tensor.key + text, "--json"))
    folder = path if path.is_dir() else path.parent
    expected = tensor.bits()[..., rows // 3 : -1, columns - 2 :]
    assert expected.size and (elements_at(folder, found["parts"], tensor).view(expected.dtype) == expected).all()
    # The runs are the same bytes in the same order.
    for part in tensor.parts((..., slice(rows // 3, -1), slice(-2, None))):
        raw = (folder / part.file).read_bytes()
        bytes_of_runs = b"".join(raw[start : start + length] for start, length in part.extents())
        inside = tensor.bits()[tuple(map(slice, part.box.lo, part.box.hi))]
        assert bytes_of_runs == inside.tobytes() and part.runs * part.run == part.bytes


@pytest.mark.parametrize(
    ("selection", "box"),
    [("[3]", [[3, 0], [4, 16]]), ("[-1, 2]", [[15, 2], [16, 3]]), ("[4:-8]", [[4, 0], [8, 16]]),
     ("[:, 90:100]", [[0, 16], [16, 16]]), ("[..., :3]", [[0, 0], [16, 3]]), ("[12:3]", [[12, 0], [12, 16]])],
)  # fmt: skip
def test_indices_are_those_of_numpy(selection, box, tmp_path):
    muonckpt.save({"w": torch.arange(256.0).reshape(16, 16)}, tmp_path / "run")
    tensor = muonckpt.open(tmp_path / "run").tensors["w"]
    found = json.loads(inspected(tmp_path / "run", "--tensor", f"w{selection}", "--json"))["parts"]
    lo, hi = box
    expected = tensor.numpy()[tuple(map(slice, lo, hi))]
    assert sum(part["bytes"] for part in found) == expected.nbytes
    assert not expected.size or ([part["lo"] for part in found], [part["hi"] for part in found]) == ([lo], [hi])


@pytest.mark.parametrize("selection", ["[16]", "[-17]", "[1, 2, 3]", "[1:8:2]", "[a]", "[..., ...]"])
def test_indices_that_a_tensor_does_not_have_are_a_mistake_of_usage(selection, tmp_path):
    muonckpt.save({"w": torch.ones(16, 16)}, tmp_path / "run")
    done = called("inspect", tmp_path / "run", "--tensor", f"w{selection}")
    assert done.returncode == 2 and ("16" in done.stderr or "indices" in done.stderr)


@pytest.mark.parametrize(
    ("name", "who", "reason", "slot"),
    [
        ("xtuner_fsdp4/ckpt", "xtuner (InternLM/XTuner)", "only it writes the slot 'lr_ratio'", "momentum"),
        ("titan_fsdp4/ckpt", "titan (", "with parameters at the top", "momentum_buffer"),
        ("megatron/fsdp_dtensor/dp4/iter_0000010", "fsdp_dtensor (", "its state is under keys such as", "exp_avg"),
        ("megatron/layer_wise/ws4_padded/torch_dist", "torch_dist (", "", "momentum_buffer"),
    ],
)
def test_the_dialect_of_keys_is_shown_and_has_a_reason_and_names_the_slots(name, who, reason, slot):
    assert f", keys of {who}" in inspected(golden(name))
    found = summary(golden(name))
    assert reason in "; ".join(found["dialect"]["reasons"])
    assert slot in {entry["slot"] for entry in found["slots"]}


FITTING = [f"{name}/ckpt" for name in ("torch_fsdp4", "torch_hsdp2x2", "dion_fsdp4", "titan_fsdp4", "xtuner_fsdp4")]
FITTING += ["megatron/fsdp_dtensor/dp4/iter_0000010", "megatron/layer_wise/ws4_padded/torch_dist"]


@pytest.mark.parametrize("name", FITTING)
def test_a_look_at_a_checkpoint_of_any_program_fits_a_screen_of_80_by_24(name):
    assert len(on_terminal(80, "inspect", golden(name)).stdout.splitlines()) <= 24


def test_keys_of_nobody_are_no_error(tmp_path):
    muonckpt.save({"w": torch.ones(3), "part": {"b": torch.ones(2)}}, tmp_path / "plain")
    assert "unknown" in inspected(tmp_path / "plain")
    assert "name one with --from of muonckpt.convert" in inspected(tmp_path / "plain")
    assert summary(tmp_path / "plain")["dialect"]["name"] is None


@pytest.mark.parametrize(
    "damage",
    [
        {"buffers": 3},
        {"buffers": [{}]},
        {"layer_wise": {"layout": "padded-nscost"}},
        lambda buffer: buffer.update(padding=0),
        lambda buffer: buffer.update(group=[0]),
        lambda buffer: buffer["shards"].pop(),
        lambda buffer: buffer["parameters"][0].update(owner=7),
    ],
)
def test_damaged_records_are_refused(damage, owned, tmp_path, capsys):
    manifest = json.loads((owned / "muonckpt.json").read_text())
    if callable(damage):
        damage(manifest["provenance"]["buffers"][0])
    else:
        manifest["provenance"] = damage
    del manifest["digest"]
    (tmp_path / "muonckpt.json").write_text(json.dumps(manifest))
    (tmp_path / ".metadata").write_bytes((owned / ".metadata").read_bytes())
    assert muonckpt_command(["inspect", str(tmp_path)]) == 1
    assert "damaged" in capsys.readouterr().out
