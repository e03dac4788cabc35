"""Checkpoints of Megatron-FSDP: any number of optimizers, the wrappers of every kind of run, steps in groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.continued import load_ours
from support.golden import golden
from support.megatron_fsdp_run import ROOTS, WRAPPERS, FusedAdam, MegatronRun, zero_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import muonckpt
from muonckpt import SourceError, TargetError
from muonckpt.converters.options import grouped
from muonckpt.optimizer import Muon
from muonckpt.programs.detection import detect

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*did not say options")

LAYERS = [f"layers.{layer}." for layer in range(4)]
MATRICES = ("qkv.weight", "fc1.weight", "fc2.weight")
OTHERS = ("norm.weight", "scalar")


def members(layers: list[str], matrices: bool) -> list[str]:
    return [layer + name for layer in layers for name in (MATRICES if matrices else OTHERS)]


def ends(chunk: int, chunks: int) -> list[str]:
    return ["embedding.weight"] * (chunk == 0) + ["head.weight"] * (chunk == chunks - 1)


def chain(chunks: int, adam_first: bool = False, by_kind: bool = False) -> list[list[str]]:
    """The parameters of each optimizer of a pipeline of this many chunks, in the order of the chain."""
    size = len(LAYERS) // chunks
    parts = [LAYERS[chunk * size : (chunk + 1) * size] for chunk in range(chunks)]
    muon = [members(part, True) for part in parts]
    adam = [ends(chunk, chunks) + members(part, False) for chunk, part in enumerate(parts)]
    pairs = [[a, m] if adam_first else [m, a] for m, a in zip(muon, adam, strict=True)]
    if by_kind:
        return [*adam, *muon] if adam_first else [*muon, *adam]
    return [names for pair in pairs for names in pair]


CHAINS = {
    "one": chain(1),
    "Adam first": chain(1, adam_first=True),
    "two chunks": chain(2),
    "two chunks, all of Muon first": chain(2, by_kind=True),
    "four chunks, Adam first": chain(4, adam_first=True),
    "Adam alone": [[*ends(0, 1), *members(LAYERS, True), *members(LAYERS, False)]],
}


def trained(kind: str, optimizers: list[list[str]], steps: int = 3, dtype=torch.float32) -> MegatronRun:
    run = MegatronRun.of(kind, optimizers, dtype)
    generator = torch.Generator().manual_seed(0)
    for param in run.names:
        param.data.copy_(torch.randn(param.shape, generator=generator))
    run.train(range(steps))
    return run


def elements(path) -> dict[str, np.ndarray]:
    with muonckpt.open(path) as opened:
        return {key: tensor.bits() for key, tensor in opened.tensors.items()}


def items(path) -> dict[str, object]:
    with muonckpt.open(path) as opened:
        return {blob.key: opened.values.read(blob) for blob in opened.outline.blobs}


def assert_same_elements(path, other) -> None:
    found, expected = elements(path), elements(other)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


CASES = [(case, kind) for case in CHAINS for kind in WRAPPERS]
KEPT = [(case, [*WRAPPERS][number % 4]) for number, case in enumerate(CHAINS)]


@pytest.mark.parametrize(("case", "kind"), sweep(CASES, *KEPT))
def test_every_chain_under_every_wrapper_is_read_and_kept(case, kind, tmp_path):
    """Each parameter under its bare name, with its state and its options; a copy has the keys of the source."""
    run = trained(kind, CHAINS[case])
    theirs = run.save(tmp_path / "theirs")
    found = detect(muonckpt.open(theirs).manifest)
    assert found.dialect.name == "fsdp_dtensor"
    report = muonckpt.inspect(theirs)
    assert not report.symptoms
    assert muonckpt.verify(theirs).verdict == "whole"
    muonckpt.reshard(theirs, tmp_path / "two", mesh={"dp": 2})
    muonckpt.convert(theirs, tmp_path / "same", to_dialect="fsdp_dtensor")
    for copy in ("two", "same"):
        assert_same_elements(tmp_path / copy, theirs)
        assert items(tmp_path / copy) == items(theirs)
    muonckpt.convert(theirs, tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    ours = elements(tmp_path / "ours")
    for param, name in run.names.items():
        assert np.array_equal(ours[f"model.{name}"].view("<f4"), param.detach().numpy())
    for optimizer in run.optimizers:
        for param, slots in optimizer.state.items():
            for slot, tensor in slots.items():
                state = ours[f"optimizer.state.{run.names[param]}.{slot}"]
                assert np.array_equal(state.view("<f4"), tensor.numpy())
    with muonckpt.open(tmp_path / "ours") as opened:
        groups = {name: group for group in opened.groups.values() for name in group["params"]}
    assert groups.keys() == {*run.names.values()}
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                options = groups[run.names[param]]
                for option in {"lr", "weight_decay", "momentum", "betas", "eps"} & group.keys():
                    assert options[option] == group[option] or option == "eps"
                assert "betas" not in group or ours[f"optimizer.state.{run.names[param]}.step"].view("<f4") == 3


@pytest.mark.parametrize(("program", "kind"), [*zip(["torch", "muonckpt"] * 2, WRAPPERS, strict=True)])
def test_a_chained_run_goes_on_from_what_was_written_for_it(program, kind, tmp_path):
    """Its strict loader takes every key, and training ends with the bits of the run without interruption."""
    whole = trained(kind, CHAINS["one"], steps=6)
    trained(kind, CHAINS["one"]).save(tmp_path / "theirs")
    muonckpt.convert(tmp_path / "theirs", tmp_path / "other", **grouped(to_dialect=program, convention="ema"))
    muonckpt.convert(tmp_path / "other", tmp_path / "back", **grouped(to_dialect="fsdp_dtensor", roots=ROOTS[kind]))
    resumed = MegatronRun.of(kind, CHAINS["one"])
    resumed.load(tmp_path / "back")
    resumed.train(range(3, 6))
    for name, weight in whole.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


@pytest.mark.filterwarnings("ignore:hyper-parameters are", "ignore:group ")
def test_a_chained_run_goes_on_in_ours_and_ours_in_a_chained_run(tmp_path):
    """With the bits that the same state gives by way of torch's own keys."""
    names = CHAINS["one"]

    def ours() -> tuple[torch.nn.Module, Muon]:
        model = zero_model()
        params = dict(model.named_parameters())
        groups = [{"params": [params[name] for name in names[0]], "nesterov": True, "ns_coefficients": "keller"}]
        adam = [[params[n] for n in names[1] if (params[n].ndim == 2) == is_matrix] for is_matrix in (True, False)]
        return model, Muon([*groups, *({"params": part, "algorithm": "adamw", "lr": 7.0} for part in adam)])

    def step(model, optimizer) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        return {name: param.detach() for name, param in model.named_parameters()}

    # Theirs in ours, and once more with counters that torch keeps.
    theirs = trained("v1 bf16", names)
    theirs.save(tmp_path / "theirs")
    muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    model, optimizer = ours()
    load_ours(model, optimizer, str(tmp_path / "ours"))
    for param, slots in ((p, s) for o in theirs.optimizers for p, s in o.state.items()):
        loaded = optimizer.state[dict(model.named_parameters())[theirs.names[param]]]
        assert all(torch.equal(loaded[slot], value) for slot, value in slots.items())
    for group, expected in zip(
        optimizer.param_groups, (g for o in theirs.optimizers for g in o.param_groups), strict=True
    ):
        assert all(group[o] == expected[o] for o in ("lr", "weight_decay", "momentum", "betas") if o in expected)
    step(model, optimizer)
    # Ours in theirs.
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "newer")
    muonckpt.convert(tmp_path / "newer", tmp_path / "chained", **grouped(to_dialect="fsdp_dtensor"))
    resumed = MegatronRun.of("v1 bf16", names)
    resumed.load(tmp_path / "chained")
    muonckpt.convert(tmp_path / "newer", tmp_path / "torch", **grouped(to_dialect="torch"))
    plain = MegatronRun.of("v1 bf16", names)
    params = dict(plain.model.named_parameters())
    matrices = [params[name] for name in names[0]]
    others = [{"params": [params[n] for n in names[1] if (params[n].ndim == 2) == matrix]} for matrix in (True, False)]
    made = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    weights, state = get_state_dict(plain.model, made)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "torch", no_dist=True)
    set_state_dict(plain.model, made, model_state_dict=weights, optim_state_dict=state)
    plain.optimizers = made
    resumed.train(range(2))
    plain.train(range(2))
    for name, weight in plain.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


def test_the_golden_chain_is_whole_and_comes_back_under_its_keys(tmp_path):
    """As Megatron-LM #4486 chains Muon and Adam, in boxes that Megatron-FSDP itself made on three ranks."""
    source = golden("upstream/mfsdp_v1_chained_muon_adam/ckpt")
    assert not muonckpt.inspect(source).symptoms
    muonckpt.reshard(source, tmp_path / "five", mesh={"dp": 5})
    assert_same_elements(tmp_path / "five", source)
    for program in ("torch", "muonckpt", "torch_dist_chained"):
        options = grouped(to_dialect=program, convention="ema")
        muonckpt.convert(tmp_path / "five", tmp_path / program, **options)
        muonckpt.convert(tmp_path / program, tmp_path / f"{program} back", **grouped(to_dialect="fsdp_dtensor"))
        assert_same_elements(tmp_path / f"{program} back", source)


def test_a_copy_of_the_tensors_alone_is_known_by_the_wrappers(tmp_path):
    source = golden("upstream/mfsdp_v1_chained_muon_adam/ckpt")
    muonckpt.convert(source, tmp_path / "tensors", **grouped(tensors_only=True))
    found = detect(muonckpt.open(tmp_path / "tensors").manifest)
    assert found.dialect.name == "fsdp_dtensor" and found.dialect.chained
    muonckpt.convert(tmp_path / "tensors", tmp_path / "o", **grouped(to_dialect="muonckpt", convention="ema", step=3))
    assert "optimizer.state.output_layer.weight.exp_avg" in elements(tmp_path / "o")


def test_options_without_any_state_are_known_by_their_form(tmp_path):
    run = MegatronRun.of("v2 fp32", CHAINS["two chunks"])
    state = run.state_dict()
    for part in state["optimizer"].values():
        del part["state"]
    dcp.save(state, checkpoint_id=tmp_path / "new", no_dist=True)
    found = detect(muonckpt.open(tmp_path / "new").manifest)
    assert found.dialect.name == "fsdp_dtensor" and found.dialect.keys.model_form == "model.{name}"


def test_a_parameter_without_state_stays_in_its_optimizer(tmp_path):
    """It never had a gradient; its optimizer tells the method, so that it keeps its options."""
    run = trained("v1 bf16", CHAINS["two chunks"])
    for param, name in run.names.items():
        if name in ("layers.2.qkv.weight", "layers.0.norm.weight"):
            for optimizer in run.optimizers:
                optimizer.state.pop(param, None)
    theirs = run.save(tmp_path / "theirs")
    muonckpt.convert(theirs, tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    with muonckpt.open(tmp_path / "ours") as opened:
        methods = {name: g["algorithm"] for g in opened.groups.values() for name in g["params"]}
    assert (methods["layers.2.qkv.weight"], methods["layers.0.norm.weight"]) == ("muon", "adamw")
    filled = grouped(to_dialect="muonckpt", convention="ema", fill_missing=True)
    muonckpt.convert(theirs, tmp_path / "filled", **filled)
    ours = elements(tmp_path / "filled")
    assert not ours["optimizer.state.layers.2.qkv.weight.momentum_buffer"].any()
    muonckpt.convert(theirs, tmp_path / "same", **grouped(fill_missing=True))
    copy = elements(tmp_path / "same")
    assert not copy["optimizer.2.state.module.module.module.layers.2.qkv.weight.momentum_buffer"].any()
    assert not copy["optimizer.1.state.module.module.module.layers.0.norm.weight.exp_avg"].any()


def test_a_model_that_calls_a_part_of_itself_module_keeps_that_name(tmp_path):
    """Only what all names have is a wrapper's, and what frozen weights lack is none."""
    tensor = torch.arange(12.0).reshape(4, 3)
    for number, frozen in enumerate((["frozen"], [], ["module.module.frozen"])):
        names = ["module.a", "module.module.b"]
        optimizer = {
            "state": {f"module.module.{name}": {"momentum_buffer": tensor + 1} for name in names},
            "param_to_group_meta": {f"module.module.{name}": {"lr": 0.1, "momentum": 0.9} for name in names},
        }
        state = {"model": {f"module.{name}": tensor for name in (*names, *frozen)}, "optimizer": optimizer}
        path = tmp_path / str(number)
        dcp.save(state, checkpoint_id=path, no_dist=True)
        ours = tmp_path / f"{number} ours"
        muonckpt.convert(path, ours, **grouped(to_dialect="muonckpt", convention="ema"))
        keys = elements(ours).keys()
        # Without weights that lack it, a name that all have cannot be told from a wrapper.
        weights = {key.removeprefix("model.") for key in keys if key.startswith("model.")}
        stateful = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in keys - {*weights}}
        wrapper = "" if "frozen" in frozen else "module."
        assert weights == {name.removeprefix(wrapper) for name in (*names, *frozen)}
        assert {name.removeprefix(wrapper) for name in names} <= stateful


@pytest.mark.parametrize("kind", WRAPPERS)
def test_weights_alone_are_written_under_the_wrappers_of_the_source(kind, tmp_path):
    run = trained(kind, CHAINS["one"])
    theirs = run.save(tmp_path / "theirs")
    options = grouped(to_dialect="fsdp_dtensor", model_only=True)
    muonckpt.convert(theirs, tmp_path / "weights", **options)
    assert elements(tmp_path / "weights").keys() == {f"model.{key}" for key in run.state_dict()["model"]}


def test_weights_in_bfloat16_and_state_in_float32_stay_so(tmp_path):
    run = trained("v2 bf16", CHAINS["two chunks"])
    for param in run.names:
        param.data = param.data.bfloat16()
    theirs = run.save(tmp_path / "theirs")
    muonckpt.convert(theirs, tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    roots = ROOTS["v2 bf16"]
    muonckpt.convert(tmp_path / "ours", tmp_path / "back", **grouped(to_dialect="fsdp_dtensor", roots=roots))
    back = elements(tmp_path / "back")
    for key, words in elements(theirs).items():  # the chunks are one pipeline's no more: one Muon, one Adam
        parts = key.split(".")
        chained = [parts[0], str(int(parts[1]) % 2), *parts[2:]] if parts[0] == "optimizer" else parts
        assert np.array_equal(back[".".join(chained)], words)


def test_one_optimizer_is_written_where_a_root_is_given_and_other_programs_have_no_such_root(tmp_path):
    theirs = trained("v1 bf16", CHAINS["one"]).save(tmp_path / "theirs")
    roots = {"optimizer": "optimizer", "parameters": ""}
    muonckpt.convert(theirs, tmp_path / "flat", **grouped(to_dialect="fsdp_dtensor", roots=roots))
    assert "optimizer.state.head.weight.exp_avg" in elements(tmp_path / "flat")
    assert detect(muonckpt.open(tmp_path / "flat").manifest).dialect.name == "fsdp_dtensor"
    explicit = {"model": "model.module", "parameters": "module.module.module"}
    v2 = trained("v2 fp32", CHAINS["one"]).save(tmp_path / "v2")
    muonckpt.convert(v2, tmp_path / "v1", **grouped(to_dialect="fsdp_dtensor", roots=explicit))
    assert_same_elements(tmp_path / "v1", theirs)
    with pytest.raises(TargetError, match="so parameters have no root"):
        muonckpt.convert(theirs, tmp_path / "x", **grouped(to_dialect="torch", roots={"parameters": "module"}))


# Steps.


@pytest.mark.parametrize("count", [None, 5])
def test_adamw_without_a_slot_for_steps_is_counted_by_its_group_or_by_the_user(count, tmp_path):
    """As Megatron-FSDP v2 saves Transformer Engine's FusedAdam, in torch's keys."""
    model = zero_model(2)
    params = dict(model.named_parameters())
    matrices = [p for name, p in params.items() if name.endswith(MATRICES)]
    others = [p for name, p in params.items() if not name.endswith(MATRICES)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), FusedAdam(others, lr=0.01)]
    for param in params.values():
        param.grad = torch.ones_like(param)
    for optimizer in optimizers:
        optimizer.step()
    weights, state = get_state_dict(model, optimizers)
    for group in state["param_groups"]:
        if "betas" in group:
            group.pop("step", None)
            group.update({} if count is None else {"step": count})
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    # Nothing is needed, and nothing added, as long as nothing is counted by parameter.
    muonckpt.convert(tmp_path / "theirs", tmp_path / "same", to_dialect=detect_name(tmp_path / "theirs"))
    assert items(tmp_path / "same") == items(tmp_path / "theirs")
    assert_same_elements(tmp_path / "same", tmp_path / "theirs")
    for program in ("muonckpt", "titan", "dion", "fsdp_dtensor"):
        asked = {"to_dialect": program, "convention": "ema"}
        if count is None:
            with pytest.raises(SourceError, match="which neither its state nor its group says; give `step=`"):
                muonckpt.convert(tmp_path / "theirs", tmp_path / program, **grouped(**asked))
            asked["step"] = 5  # the cure that the error prints
        muonckpt.convert(tmp_path / "theirs", tmp_path / program, **grouped(**asked))
        counters = {key: w for key, w in elements(tmp_path / program).items() if key.endswith((".step", ".step_dev"))}
        options = {key: v for key, v in items(tmp_path / program).items() if key.endswith("head.weight.step")}
        found = counters or options
        assert found and all(np.asarray(v).view("<f4") == 5 if counters else v == 5 for v in found.values()), program


def detect_name(path) -> str:
    return detect(muonckpt.open(path).manifest).dialect.name


@pytest.mark.parametrize("wrapped", [True, False])
def test_steps_that_the_user_gives_stand_where_the_program_counts(wrapped, tmp_path):
    """In groups of either form, whether they had a number before or not; never as a slot that was not there."""
    source = golden(f"upstream/mfsdp_{'v1_chained_muon_adam' if wrapped else 'v2_dcp_muon_adam_nostep'}/ckpt")
    muonckpt.convert(source, tmp_path / "counted", **grouped(step=1234))
    assert_same_elements(tmp_path / "counted", source)
    steps = {key: value for key, value in items(tmp_path / "counted").items() if key.endswith(".step")}
    assert {*steps.values()} == {1234}
    expected = {key for key in items(source) if key.endswith(".step")} if wrapped else {"optimizer.param_groups.1.step"}
    assert steps.keys() == expected
    muonckpt.convert(tmp_path / "counted", tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    counters = [words.view("<f4") for key, words in elements(tmp_path / "ours").items() if key.endswith(".step")]
    assert len(counters) == 5 and all(counter == 1234 for counter in counters)


@pytest.mark.parametrize("kind", sweep(WRAPPERS, "v1 bf16", "v2 fp32"))
def test_what_came_from_a_run_goes_back_with_its_wrappers_and_its_optimizers(kind, tmp_path):
    """Also by way of several copies, and of one optimizer that has both methods; roots that are given count more."""
    both = trained(kind, CHAINS["one"]).state_dict()
    one = {field: both["optimizer"]["0"][field] | both["optimizer"]["1"][field] for field in both["optimizer"]["0"]}
    dcp.save({**both, "optimizer": one}, checkpoint_id=tmp_path / "one", no_dist=True)
    trained(kind, CHAINS["one"]).save(tmp_path / "two")
    for source in ("one", "two"):
        ours, copy, back = (tmp_path / f"{source} {name}" for name in ("ours", "copy", "back"))
        muonckpt.convert(tmp_path / source, ours, **grouped(to_dialect="muonckpt", convention="ema"))
        muonckpt.reshard(ours, copy, mesh={"dp": 2})
        muonckpt.convert(copy, back, to_dialect="fsdp_dtensor")
        assert_same_elements(back, tmp_path / source)
        roots = grouped(to_dialect="fsdp_dtensor", roots={"parameters": "module.module.module"})
        muonckpt.convert(ours, tmp_path / f"{source} asked", **roots)
        assert "optimizer.1.state.module.module.module.head.weight.exp_avg" in elements(tmp_path / f"{source} asked")


# Chunks of a virtual pipeline under keys of their own.


def in_chunks(state: dict, chunks: int, local: bool) -> dict:
    """The state dict of a run whose model is ``model0``, ``model1``, …; its layers may be numbered in each chunk."""
    size = len(LAYERS) // chunks

    def chunk_of(name: str) -> int:
        return chunks - 1 if "head." in name else int(name.split("layers.")[1][0]) // size if "layers." in name else 0

    def renamed(name: str) -> str:
        head, layers, tail = name.partition("layers.")
        return f"{head}{layers}{int(tail[0]) % size}{tail[1:]}" if local and layers else name

    model = state.pop("model")
    for name, tensor in model.items():
        state.setdefault(f"model{chunk_of(name)}", {})[renamed(name)] = tensor
    for part in state["optimizer"].values():
        for field in part:
            part[field] = {renamed(name): value for name, value in part[field].items()}
    return state


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("case", "kind"), [("two chunks", "v1 bf16"), ("two chunks, all of Muon first", "v2 fp32")])
def test_chunks_under_keys_of_their_own_are_one_model(case, kind, local, tmp_path):
    """Names that several chunks have are told apart by the chunk; a copy has every key of the source."""
    run = trained(kind, CHAINS[case])
    dcp.save(in_chunks(run.state_dict(), 2, local), checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert not muonckpt.inspect(tmp_path / "theirs").symptoms
    muonckpt.convert(tmp_path / "theirs", tmp_path / "same", **grouped(step=3))
    muonckpt.convert(tmp_path / "theirs", tmp_path / "weights", **grouped(to_dialect="fsdp_dtensor", model_only=True))
    assert_same_elements(tmp_path / "same", tmp_path / "theirs")
    assert items(tmp_path / "same") == items(tmp_path / "theirs")
    muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    ours = elements(tmp_path / "ours")
    with muonckpt.open(tmp_path / "ours") as opened:
        rates = {name: group["lr"] for group in opened.groups.values() for name in group["params"]}
    for optimizer in run.optimizers:
        for param, slots in optimizer.state.items():
            name = run.names[param]
            if local:
                number = int(name.split(".")[1]) if name.startswith("layers.") else 3 * (name == "head.weight")
                name = f"model{number // 2}." + name.replace(f"layers.{number}", f"layers.{number % 2}")
            assert np.array_equal(ours[f"model.{name}"].view("<f4"), param.detach().numpy())
            assert rates[name] == optimizer.param_groups[0]["lr"]
            for slot, tensor in slots.items():
                assert np.array_equal(ours[f"optimizer.state.{name}.{slot}"].view("<f4"), tensor.numpy())
    assert elements(tmp_path / "weights").keys() == {key for key in elements(tmp_path / "theirs") if key[:5] == "model"}


def test_chunks_whose_optimizers_cannot_be_told_are_refused_with_a_cure(tmp_path):
    state = in_chunks(trained("v1 bf16", CHAINS["two chunks"]).state_dict(), 2, local=True)
    del state["optimizer"]["1"]
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(SourceError, match="nothing says whose it is; make a copy of each chunk with its optimizers"):
        muonckpt.convert(tmp_path / "theirs", tmp_path / "x", **grouped(to_dialect="muonckpt", convention="ema"))
    for chunk, optimizers in (("0", ["0"]), ("1", ["2", "3"])):
        select = [f"model{chunk}.*", *(f"optimizer.{number}.*" for number in optimizers)]
        muonckpt.convert(tmp_path / "theirs", tmp_path / chunk, select=select)
        muonckpt.convert(tmp_path / chunk, tmp_path / f"o{chunk}", **grouped(to_dialect="muonckpt", convention="ema"))
        assert "optimizer.state.layers.1.qkv.weight.momentum_buffer" in elements(tmp_path / f"o{chunk}")


# Options that are not where the state is.


def test_options_of_another_optimizer_are_not_taken_for_those_of_a_parameter(tmp_path):
    """A parameter that two optimizers list has the options of the one that has its state; without any it is refused."""
    state = trained("v1 bf16", CHAINS["one"]).state_dict()
    muon, adam = state["optimizer"]["0"]["param_to_group_meta"], state["optimizer"]["1"]["param_to_group_meta"]
    name = "module.module.module.layers.0.qkv.weight"
    adam[name] = {**muon[name], "lr": 7.0}
    dcp.save(state, checkpoint_id=tmp_path / "twice", no_dist=True)
    muonckpt.convert(tmp_path / "twice", tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    with muonckpt.open(tmp_path / "ours") as opened:
        rates = [group["lr"] for group in opened.groups.values() if "layers.0.qkv.weight" in group["params"]]
    assert rates == [0.02]
    del muon[name]
    dcp.save(state, checkpoint_id=tmp_path / "elsewhere", no_dist=True)
    with pytest.raises(SourceError, match=r"state of layers.0.qkv.weight, which no parameter group of fsdp_dtensor"):
        muonckpt.convert(tmp_path / "elsewhere", tmp_path / "x", **grouped(to_dialect="muonckpt", convention="ema"))


def test_an_optimizer_without_state_keeps_its_options(tmp_path):
    state = trained("v1 bf16", CHAINS["one"]).state_dict()
    state["optimizer"]["1"]["state"] = {}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    muonckpt.convert(tmp_path / "theirs", tmp_path / "same", **grouped(step=3))
    assert items(tmp_path / "same") == items(tmp_path / "theirs")
    muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    assert "optimizer.state.layers.0.qkv.weight.momentum_buffer" in elements(tmp_path / "ours")
