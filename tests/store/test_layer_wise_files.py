"""Megatron's per-rank files of the layer-wise optimizer: whose state is under which number, and what contradicts it."""

from __future__ import annotations

import collections
import json
import shutil

import numpy as np
import pytest
import torch
from support.commands import run
from support.golden import golden
from support.rank_files import MODEL, WORDS, described, value_of, written
from support.translated import truth_of

import muonckpt
from muonckpt import DamageError, SourceError
from muonckpt.layouts.buffers.parameters import Parameter
from muonckpt.layouts.buffers.records import GroupBuffer
from muonckpt.store.formats.layer_wise_names import Description, ListedParameter, distribute
from muonckpt.store.formats.registry import LAYER_WISE, format_of

GOLDEN = {"ws4_padded": "padded-numel", "ws4_pingpong": "legacy-pingpong"}
PUBLISHED = {"padded-numel": "padded_numel", "padded-nscost": "padded_ns_cost", "legacy-pingpong": "pingpong_legacy",
             "decoupled-total-order": "pingpong_total_order"}  # fmt: skip


def read(path):
    return muonckpt.open(path).manifest


def elements_of(path) -> dict[str, np.ndarray]:
    """Every tensor, as words, read through its format."""
    return {key: tensor.bits() for key, tensor in muonckpt.open(path).tensors.items()}


def real(name: str, tmp_path, **other):
    """A golden run's files with the description that fits, but for ``other``; and its meta data."""
    meta = json.loads((golden(f"megatron/layer_wise/{name}") / "meta.json").read_text())
    folder = shutil.copytree(golden(f"megatron/layer_wise/{name}") / "torch", tmp_path / name)
    parameters = [{"name": called, "shape": shape} for called, shape in meta["model_params"]]
    return described(folder, **{"algorithm": GOLDEN[name], "parameter": parameters, **other}), meta


@pytest.mark.parametrize("name", GOLDEN)
def test_real_files_are_read_under_their_names(name, tmp_path):
    path, meta = real(name, tmp_path)
    assert format_of(path) is LAYER_WISE
    actual = elements_of(path)
    expected = {key: words for key, words in truth_of(f"megatron/layer_wise/{name}").items() if "optimizer" in key}
    assert {key.split(".")[2] for key in actual} == {key.split(".")[3] for key in expected}
    for key, words in expected.items():
        _, _, slot, param = key.split(".")
        assert np.array_equal(actual[f"layer_wise.state.{param}.{slot}"], words), key
    for data in read(path).provenance["buffers"]:
        buffer = GroupBuffer.from_json(data)
        owners = {key.split(".")[2]: rank for key, rank in buffer.layout.owners.items()}
        assert owners == meta["owner"]
        assert (buffer.layout.algorithm, buffer.layout.version) == (GOLDEN[name], 1)


def test_parameters_taken_from_a_whole_checkpoint_are_those_of_its_model(tmp_path):
    """Its optimizer state fits the pattern as well."""
    model = str(golden("megatron/layer_wise/ws4_padded") / "torch_dist")
    path, _ = real("ws4_padded", tmp_path, parameter=[], model=model, group=[{"names": ["*"]}])
    other, _ = real("ws4_padded", tmp_path / "listed")
    actual, expected = elements_of(path), elements_of(other)
    assert actual.keys() == expected.keys() and all(np.array_equal(actual[key], expected[key]) for key in actual)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_command_makes_of_them_what_megatron_itself_saved(name, tmp_path, capsys):
    """Its own ``torch_dist`` of the same run: tensors, groups, and nothing else of the optimizer."""
    path, _ = real(name, tmp_path)
    code = run(["reshard", str(path), str(tmp_path / "out"), "--mesh", "dp=3", "--to", "torch_dist",
                "--format", "torch_dist", "--layout", "balanced"])  # fmt: skip
    assert code == 0, capsys.readouterr().err
    mine, theirs = tmp_path / "out", golden(f"megatron/layer_wise/{name}") / "torch_dist"
    (ours,), (other,) = (read(each).blobs for each in (mine, theirs))
    assert ours.key == other.key and muonckpt.open(mine).values.read(ours) == muonckpt.open(theirs).values.read(other)
    actual, expected = elements_of(mine), elements_of(theirs)
    assert actual.keys() == {key for key in expected if "optimizer" in key}
    assert all(np.array_equal(actual[key], expected[key]) for key in actual)
    assert run(["verify", str(mine)]) == run(["verify", str(path)]) == 0


# Who owns what.


def walked(algorithm: str, members: list[ListedParameter], ranks: int, experts: int, owners: dict[str, int], places):
    """(rank, group) -> names, as upstream's loops append them."""
    listed = sorted(members, key=lambda member: member.group)
    if algorithm == "legacy-pingpong":
        listed.sort(key=lambda member: member.parameter.numel)
    elif algorithm == "decoupled-total-order":
        listed.sort(key=lambda member: (member.parameter.numel, *places[member.parameter.name]))
    shares = collections.defaultdict(list)
    for member in listed:
        owner = owners[member.parameter.name]
        rank = owner * experts + member.part if member.parameter.expert else owner
        shares[rank, member.group].append(member.parameter.name)
    return {where: tuple(names) for where, names in shares.items()}


@pytest.mark.parametrize("algorithm", PUBLISHED)
def test_parameters_are_dealt_as_megatron_does(algorithm):
    """On all stored models: owners from its own code, the order of numbers from loops like its own."""
    used = 0
    for case in json.loads(golden("megatron/layouts_shared.json").read_text())["cases"]:
        dp, expert_dp = case["dp"], case.get("expert_dp", 1)
        has_experts = any(given.get("expert") for given in case["params"])
        if has_experts and (dp % expert_dp or "param_groups" in case):
            continue
        experts = dp // expert_dp if has_experts else 1
        groups = case.get("param_groups") or [range(len(case["params"]))]
        group_of = {index: number for number, group in enumerate(groups) for index in group}
        members, owners, places = [], {}, {}
        for index, given in enumerate(case["params"]):
            expert = given.get("expert", False)
            for part in range(experts if expert else 1):
                seen = Parameter(f"{index}@{part}", tuple(given["shape"]), expert=expert, chunk=given.get("chunk", 0),
                                 tied=given.get("shared_embedding", False))  # fmt: skip
                members.append(ListedParameter(seen, 1 if expert else group_of[index], part))
                owners[seen.name] = case[PUBLISHED[algorithm]]["owner"][index]
        for number, (buffer, lies) in enumerate(zip(case["buffers"], case["compact_buffer"]["buffers"], strict=True)):
            for index, (start, _, _) in zip(buffer["params"], lies["index_map"], strict=True):
                chunk = case["params"][index].get("chunk", 0)
                places |= {f"{index}@{part}": (chunk, number, start) for part in range(experts)}
        if any(list(group) != sorted(group) for group in groups):
            continue  # upstream's groups list parameters in forward order
        description = Description(algorithm, tuple(members), bucket_size=case["bucket_size"], experts=experts,
                           busbw=case.get("busbw", False))  # fmt: skip
        assert distribute(description, description.members, dp).names == walked(
            algorithm, members, dp, experts, owners, places
        )
        used += 1
    assert used > 40


# Files of our own making, with everything that real runs have in them.


@pytest.mark.parametrize("algorithm", PUBLISHED)
@pytest.mark.parametrize("ranks", [1, 3, 13])
def test_every_algorithm_and_a_model_beside_the_files(algorithm, ranks, tmp_path):
    """More ranks than matrices too: some own nothing."""
    path = written(tmp_path, algorithm, ranks)
    actual = elements_of(path)
    for name, shape in MODEL:
        weight = value_of(name, "fp32_param", shape).bfloat16().view(torch.uint16).numpy()
        assert np.array_equal(actual.pop(f"model.{name}"), weight)
        adam = len(shape) == 1
        if adam and algorithm != "legacy-pingpong":
            continue
        for slot in ("fp32_param", *(("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",))):
            expected = value_of(name, slot, shape).view(torch.int32).numpy().view("<u4")
            assert np.array_equal(actual.pop(f"layer_wise.state.{name}.{slot}"), expected), (name, slot)
    assert all(key.endswith(".step") for key in actual)
    values = muonckpt.open(path).values
    options = {blob.path[2:]: values.read(blob) for blob in read(path).blobs}
    assert options[0, "params"] == [name for name, shape in MODEL if len(shape) == 2]
    assert options[0, "momentum"] == 0.9
    assert algorithm != "legacy-pingpong" or (options[1, "betas"], options[1, "params"]) == ((0.9, 0.95), ["norm"])


def test_experts_of_two_expert_parallel_ranks(tmp_path):
    """Four data-parallel ranks in two folders, as Megatron names them: ranks 0 and 2 have the experts of part 0."""
    dense = [ListedParameter(Parameter(f"dense.{n}", (4, 2))) for n in range(3)]
    experts = [ListedParameter(Parameter(f"expert.{n}", (3, 2), expert=True), 1, n // 3) for n in range(6)]
    shares = distribute(Description("padded-numel", (*dense, *experts), experts=2), (*dense, *experts), 4).names
    shapes = {each.parameter.name: each.parameter.shape for each in (*dense, *experts)}
    assert {rank for (rank, _), names in shares.items() if {"expert.0", "expert.1", "expert.2"} & {*names}} == {0, 2}
    files = [f"mp_rank_00_00{rank % 2}/layer_wise_optimizer_{rank}.pt" for rank in range(4)]
    for rank, file in enumerate(files):
        names = [shares.get((rank, group), ()) for group in (0, 1)]
        state = {n: {"momentum_buffer": value_of(name, "m", shapes[name])} for n, name in enumerate(sum(names, ()))}
        ids = [list(range(len(names[0]))), list(range(len(names[0]), len(state)))]
        groups = [{"lr": 0.1, "is_expert_parallel": bool(n), "params": mine} for n, mine in enumerate(ids)]
        (tmp_path / file).parent.mkdir(exist_ok=True)
        torch.save({"state": state, "param_groups": groups}, tmp_path / file)
    listed = [{"name": each.parameter.name, "shape": list(each.parameter.shape), "expert": each.parameter.expert,
               "group": each.group, "part": each.part} for each in (*dense, *experts)]  # fmt: skip
    actual = elements_of(described(tmp_path, algorithm="padded-numel", experts=2, files=files, parameter=listed))
    assert len(actual) == len(shapes)
    for name, shape in shapes.items():
        expected = value_of(name, "m", shape).view(torch.int32).numpy().view("<u4")
        assert np.array_equal(actual[f"layer_wise.state.{name}.momentum_buffer"], expected)
    listed[0]["expert"] = True
    with pytest.raises(SourceError, match=r"group 0 of .* says is_expert_parallel=False"):
        read(described(tmp_path, algorithm="padded-numel", experts=2, files=files, parameter=listed))


def test_two_optimizers_become_megatrons_chained_ones(tmp_path):
    path, out = written(tmp_path, "legacy-pingpong", 3), tmp_path / "out"
    assert run(["reshard", str(path), str(out), "--mesh", "dp=2", "--to", "torch_dist_chained",
                "--format", "torch_dist"]) == 0  # fmt: skip
    manifest = muonckpt.open(out).outline
    keys = {tensor.key for tensor in manifest.tensors}
    assert keys >= {
        "norm",
        "chained_0.optimizer.state.fp32_param.layers.1.fc",
        "chained_1.optimizer.state.exp_avg.norm",
    }
    assert not [key for key in keys if key.endswith("step")]
    (common,) = (muonckpt.open(out).values.read(blob)[0] for blob in manifest.blobs)
    muon, adam = common["optimizer"][0]["optimizer"], common["optimizer"][1]["optimizer"]
    assert muon == {"param_groups": [{"lr": 0.1, "momentum": 0.9, **WORDS}]}
    assert adam == {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), **WORDS}], "state": {"common_step": 3}}
    # And under other names in the same dialect: the prefixes and the common state stay.
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nfrom = 'layers.{i}.fc'\nto = 'layers.fc'\neach = 'i'\nstacked = true\n")
    assert run(["reshard", str(out), str(tmp_path / "more"), "--mesh", "dp=3", "--rules", str(rules)]) == 0
    stacked = {tensor.key: tensor for tensor in muonckpt.open(tmp_path / "more").outline.tensors}
    assert stacked["chained_0.optimizer.state.momentum_buffer.layers.fc"].shape == (3, 8, 3)
    assert "chained_1.optimizer.state.exp_avg.norm" in stacked and stacked["layers.fc"].dtype == "bfloat16"


def test_another_program_gets_the_groups_too(tmp_path):
    path, out = written(tmp_path, "legacy-pingpong", 2), tmp_path / "out"
    assert run(["reshard", str(path), str(out), "--mesh", "dp=2", "--to", "torch", "--convention", "ema",
                "--drop", "fp32_param"]) == 0  # fmt: skip
    manifest = read(out)
    values, blobs = muonckpt.open(out).values, {blob.key: blob for blob in manifest.blobs}
    assert values.read(blobs["optimizer.param_groups.0.momentum"]) == 0.9
    assert values.read(blobs["optimizer.param_groups.1.betas"]) == (0.9, 0.95)
    steps = [values.read(tensor) for tensor in manifest.tensors if tensor.slot == "step"]
    assert steps == [3.0]


# What contradicts the description, or itself.


def test_another_algorithm_is_refused(tmp_path):
    path, _ = real("ws4_padded", tmp_path, algorithm="legacy-pingpong")
    with pytest.raises(SourceError, match=r"with legacy-pingpong its rank owns 3.*or the parameters differ"):
        read(path)


def test_masters_tell_parameters_of_one_shape_apart(tmp_path):
    """Counts and shapes agree, names do not: only the bits of the weights can tell."""
    path = written(tmp_path, "padded-numel", 3)
    other = [("layers.1.qkv", "layers.0.qkv"), ("layers.0.qkv", "layers.1.qkv")]
    listed = [{"name": dict(other).get(name, name), "shape": shape} for name, shape in MODEL if len(shape) == 2]
    description = {"algorithm": "padded-numel", "bucket_size": 40, "parameter": listed}
    assert read(described(path, **description))
    with pytest.raises(SourceError, match=r"the master of 'layers.[01].qkv' in layer_wise_optimizer_.* another"):
        read(described(path, **description, model="model_optim_rng.pt"))


TOLD, A = {"algorithm": "padded-numel"}, {"name": "a", "shape": [2]}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda path: (path / "layer_wise.json").unlink(), "neither names nor owners: write layer_wise.toml"),
        (lambda path: (path / "layer_wise_optimizer_1.pt").unlink(), r"every rank from 0, found those of 0, 2, 3"),
        (lambda path: (path / "layer_wise.json").write_text("{"), "layer_wise.json: "),
        (lambda path: described(path, algorithm="padded"), "no algorithm 'padded'; there are padded-nscost"),
        (lambda path: described(path, **TOLD), r"either \[\[parameter\]\] tables, or a model"),
        (lambda path: described(path, **TOLD, bucket=3), "'bucket' cannot be 3; there are algorithm"),
        (lambda path: described(path, **TOLD, parameter=[A, A]), "'a' twice"),
        (lambda path: described(path, **TOLD, parameter=[A]), "owns 1"),
        (lambda path: described(path, **TOLD, parameter=[A | {"group": 1}]), "the description has 2"),
        (lambda path: described(path, **TOLD, parameter=[A | {"part": 1}]), "'a' is in part 1 of 1"),
        (lambda path: described(path, **TOLD, parameter=[A], experts=3), "4 ranks do not divide into 3"),
        (lambda path: torch.save({"a": 1}, path / "layer_wise_optimizer_2.pt"), "layer-wise optimizer: no 'state'"),
        (lambda path: (path / "layer_wise_optimizer_2.pt").write_bytes(b"PK"), r"layer_wise_optimizer_2.pt: expected"),
        (lambda path: shutil.copy(path / "layer_wise_optimizer_0.pt", path / "layer_wise_optimizer_3.pt"), "found"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, message, tmp_path):
    path, _ = real("ws4_padded", tmp_path)
    change(path)
    with pytest.raises(SourceError, match=message):
        muonckpt.open(path)


def test_a_lost_file_of_a_rank_is_damage(tmp_path):
    path, _ = real("ws4_padded", tmp_path)
    (path / "layer_wise_optimizer_1.pt").unlink()
    report = muonckpt.verify(path)
    assert report.verdict == "faulty" and "found those of 0, 2, 3" in report.diagnosis.sentence
    with pytest.raises(DamageError, match="muonckpt verify COPY"):
        muonckpt.open(path)


def test_ranks_that_disagree_about_an_option_are_refused(tmp_path):
    path = written(tmp_path, "padded-nscost", 3)
    saved = torch.load(path / "layer_wise_optimizer_2.pt", weights_only=False)
    saved["optimizer"]["param_groups"][0]["lr"] = 0.2
    torch.save(saved, path / "layer_wise_optimizer_2.pt")
    with pytest.raises(SourceError, match=r"group 0: layer_wise_optimizer_0.pt and .*_2.pt differ in \('lr', 0.1\)"):
        read(path)


def test_files_left_beside_another_checkpoint_do_not_count(tmp_path):
    """Some programs write them in the root of a ``torch_dist`` checkpoint too."""
    path = shutil.copytree(golden("megatron/layer_wise/ws4_padded/torch_dist"), tmp_path / "both")
    shutil.copy(golden("megatron/layer_wise/ws4_padded/torch") / "layer_wise_optimizer_0.pt", path)
    assert format_of(path).name == "stock DCP"


def test_recorded_owners_are_kept_by_the_same_layout(tmp_path):
    path, meta = real("ws4_pingpong", tmp_path)
    out = tmp_path / "out"
    line = ["reshard", str(path), str(out), "--format", "buffers", "--layout", "legacy-pingpong", "--mesh", "dp=4"]
    assert run(line) == 0
    recorded = [GroupBuffer.from_json(each) for each in record_of(out)]
    assert [buffer.slot for buffer in recorded] == ["momentum_buffer", "fp32_param"]
    for buffer in recorded:
        assert {key.split(".")[2]: rank for key, rank in buffer.layout.owners.items()} == meta["owner"]
    assert {key: words.tolist() for key, words in elements_of(out).items()} == {
        key: words.tolist() for key, words in elements_of(path).items()
    }


def record_of(path) -> list[dict]:
    """What a checkpoint of flat buffers records of them, without where they are."""
    stored = read(path).provenance["buffers"]
    return [{key: value for key, value in buffer.items() if key != "files"} for buffer in stored]


@pytest.mark.parametrize("name", ["x\0", "x\ud800", "../x", "x" * 300])
@pytest.mark.parametrize("option", ["files", "model", "tensor_parallel"])
def test_a_description_that_names_what_cannot_be_a_file_is_refused(option, name, tmp_path):
    listed = {"parameter": [{"name": "w", "shape": [4, 4]}]}
    options = {
        "files": {**listed, "files": [name]},
        "model": {"model": name, "group": [{"names": ["*"]}]},
        "tensor_parallel": {**listed, "tensor_parallel": [name], "cut": [{"names": ["*"], "dim": 0}]},
    }
    (tmp_path / "layer_wise.json").write_text(json.dumps({"algorithm": "padded-nscost", **options[option]}))
    with pytest.raises(SourceError, match=r"layer_wise\.json: refused file name" if option != "model" else None):
        muonckpt.open(tmp_path)
