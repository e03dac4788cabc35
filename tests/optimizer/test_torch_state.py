"""Muon's state dict, hooks and copies are those of any torch optimizer; what is saved is plain data."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.least_squares import ALGORITHMS, MATRIX, Line, contents, groups, normal, run_steps, same
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from muonckpt.optimizer import Muon


def halved(rows: int, columns: int) -> float:
    """A scale of a user's own."""
    return 0.5


def make(algorithm: str = "muon", lr: float | torch.Tensor = 0.0078125) -> tuple[Line, Muon]:
    net = Line()
    return net, Muon(groups(net.parameters(), algorithm), lr=lr)


def continues(net: Line, opt: Muon, twin_net: Line, twin: Muon) -> bool:
    """Whether two optimizers are in the same state, and stay so."""
    return same(contents(net, opt), contents(twin_net, twin)) and same(
        run_steps(net, opt, 2), run_steps(twin_net, twin, 2)
    )


def reloaded(state: dict) -> dict:
    """Through a file that is read without unpickling code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def is_plain(value) -> bool:
    """Numbers, strings, None, tensors, and containers of these."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


# --- state dicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_state_dict_is_plain_data_and_a_run_goes_on_from_it(algorithm):
    net, opt = make(algorithm)
    run_steps(net, opt, 3)
    state = reloaded(opt.state_dict())
    assert is_plain(state)
    twin_net, twin = make(algorithm)
    twin_net.load_state_dict(net.state_dict())
    twin.load_state_dict(copy.deepcopy(state))
    assert repr(twin.state_dict()) == repr(opt.state_dict()) == repr(state)
    assert continues(net, opt, twin_net, twin)


def test_functions_and_process_groups_are_not_in_the_state():
    nets = [Line() for _ in range(2)]
    opt, twin = (Muon([net.weight], adjust_lr_fn=halved, layout=None, replicas=None) for net in nets)
    state = reloaded(opt.state_dict())
    assert is_plain(state) and is_plain(opt.param_groups[0]["adjust_lr_fn"])
    twin.load_state_dict(state)
    run_steps(nets[0], opt, 1)
    run_steps(nets[1], twin, 1)
    assert torch.equal(nets[0].weight, nets[1].weight)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_state_saved_before_an_option_existed_can_be_loaded(algorithm):
    """Only what torch itself needs is left of the groups; the code says the rest."""
    net, opt = make(algorithm)
    run_steps(net, opt, 2)
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"] = [{"params": group["params"], "lr": group["lr"]} for group in state["param_groups"]]
    twin_net, twin = make(algorithm)
    twin_net.load_state_dict(net.state_dict())
    twin.load_state_dict(state)
    assert [group.keys() for group in twin.param_groups] == [group.keys() for group in opt.param_groups]
    assert continues(net, opt, twin_net, twin)


@pytest.mark.parametrize("named", [(True, True), (True, False), (False, True)], ids=str)
def test_named_parameters_are_stepped_and_loaded_as_others(named):
    pairs = []
    for with_names in named:
        net = Line()
        found = [("w", net.weight)] if with_names else [net.weight]
        pairs.append((net, Muon([{"params": found}], lr=0.01)))
    (net, opt), (twin_net, twin) = pairs
    run_steps(net, opt, 2)
    twin_net.load_state_dict(net.state_dict())
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert ("param_names" in opt.state_dict()["param_groups"][0]) == named[0]
    assert torch.equal(twin.state[twin_net.weight]["momentum_buffer"], opt.state[net.weight]["momentum_buffer"])
    assert same(run_steps(net, opt, 1)[:2], run_steps(twin_net, twin, 1)[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_dtype_of_state_survives_a_round_trip(algorithm, dtype):
    nets = [Line(dtype=dtype) for _ in range(2)]
    opts = [Muon(groups(net.parameters(), algorithm), lr=0.01) for net in nets]
    run_steps(nets[0], opts[0], 2)
    nets[1].load_state_dict(nets[0].state_dict())
    opts[1].load_state_dict(reloaded(opts[0].state_dict()))
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        for slot, value in opts[0].state[p].items():
            assert opts[1].state[q][slot].dtype == value.dtype, slot
    assert continues(nets[0], opts[0], nets[1], opts[1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_state_of_other_shapes_counts_or_types_is_refused(algorithm):
    net, opt = make(algorithm)
    run_steps(net, opt, 1)
    slot = "momentum_buffer" if algorithm in MATRIX else "exp_avg"
    for damage in (
        lambda s: s["state"][0].update({slot: torch.zeros(5, 10)}),
        lambda s: s["state"][0].update({slot: 1.0}),
        lambda s: s["state"].pop(0),
        lambda s: s["param_groups"][0]["params"].append(2),
        lambda s: s["param_groups"].append({"params": [], "lr": 0.1}),
    ):
        state, before = copy.deepcopy(opt.state_dict()), contents(net, opt)
        damage(state)
        with pytest.raises(ValueError):
            opt.load_state_dict(state)
        assert same(contents(net, opt), before)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_an_adamw_state_of_torchs_own_can_be_loaded():
    net, theirs_net = Line(), Line()
    theirs = torch.optim.AdamW(theirs_net.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(2):
        theirs.step(theirs_net.closure(theirs))
    opt = Muon([{"params": net.parameters(), "algorithm": "adamw"}])
    net.load_state_dict(theirs_net.state_dict())
    opt.load_state_dict(copy.deepcopy(theirs.state_dict()))
    opt.step(net.closure(opt))
    theirs.step(theirs_net.closure(theirs))
    assert torch.equal(net.weight, theirs_net.weight) and torch.equal(net.bias, theirs_net.bias)


# --- rates in tensors -------------------------------------------------------------------------------------------

RATES = {"number": lambda value: value, "tensor": lambda value: torch.tensor(value)}


def through_state_dict(net: Line, opt: Muon, twin_net: Line, twin: Muon, path: str) -> None:
    twin.load_state_dict(reloaded(opt.state_dict()))


def through_dcp(net: Line, opt: Muon, twin_net: Line, twin: Muon, path: str, flatten: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    dcp.save(get_optimizer_state_dict(net, opt, options=options), checkpoint_id=path)
    state = get_optimizer_state_dict(twin_net, twin, options=options)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(twin_net, twin, state, options=options)


def through_flat_dcp(*args) -> None:
    through_dcp(*args, flatten=True)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("way", [through_state_dict, through_dcp, through_flat_dcp])
@pytest.mark.parametrize("mine", RATES)
@pytest.mark.parametrize("saved", RATES)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_rate_is_saved_as_a_number_and_loaded_into_what_the_code_has(algorithm, saved, mine, way, tmp_path):
    net, opt = make(algorithm, RATES[saved](0.0078125))
    scheduler = schedulers.StepLR(opt, step_size=1, gamma=0.5)  # it adds `initial_lr`, a tensor like the rate
    run_steps(net, opt, 1)
    scheduler.step()
    assert all(type(group["lr"]) is type(group["initial_lr"]) is float for group in opt.state_dict()["param_groups"])
    twin_net, twin = make(algorithm, RATES[mine](0.5))
    schedulers.StepLR(twin, step_size=1, gamma=0.5)
    way(net, opt, twin_net, twin, str(tmp_path / "state"))
    for group, loaded in zip(opt.param_groups, twin.param_groups, strict=True):
        for key, value in (("lr", 0.00390625), ("initial_lr", 0.0078125)):
            assert isinstance(loaded[key], torch.Tensor) == (mine == "tensor"), key
            assert float(group[key]) == float(loaded[key]) == value, key
    twin_net.load_state_dict(net.state_dict())
    assert continues(net, opt, twin_net, twin)


def test_groups_do_not_share_the_tensor_of_a_loaded_rate():
    """A scheduler fills each group's tensor in place; a shared one would take the last group's rate."""
    _, opt = make(lr=torch.tensor(0.25))
    opt.param_groups[1]["lr"] = torch.tensor(0.5)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.param_groups[0]["lr"].fill_(0.125)
    assert opt.param_groups[1]["lr"] == 0.5


# --- hooks ------------------------------------------------------------------------------------------------------


def test_state_dict_hooks_run_in_order_and_may_replace_the_result():
    _, opt = make()
    seen = []
    opt.register_state_dict_pre_hook(lambda optimizer: seen.append("second"))
    opt.register_state_dict_pre_hook(lambda optimizer: seen.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda optimizer, state: {**state, "note": 1})
    handle = opt.register_state_dict_post_hook(lambda optimizer, state: {**state, "note": state["note"] + 1})
    assert opt.state_dict()["note"] == 2 and seen == ["first", "second"]
    handle.remove()
    assert opt.state_dict()["note"] == 1


def test_hooks_before_loading_may_mend_the_state_and_hooks_after_it_see_it_loaded():
    """As torch has it: what a hook returns is what is loaded, and so what is checked."""
    net, opt = make()
    run_steps(net, opt, 1)
    renamed = copy.deepcopy(opt.state_dict())
    renamed["state"][0]["buf"] = renamed["state"][0].pop("momentum_buffer")
    _, twin = make()
    with pytest.raises(ValueError, match="momentum_buffer"):
        twin.load_state_dict(renamed)

    def mend(optimizer, state):
        state["state"][0] = {"momentum_buffer": state["state"][0]["buf"]}
        return state

    seen = []
    twin.register_load_state_dict_pre_hook(mend)
    twin.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(optimizer.state_dict()["state"][0]["momentum_buffer"].clone())
    )
    twin.load_state_dict(renamed)
    assert same(seen, [opt.state[net.weight]["momentum_buffer"]])
    _, spoilt = make()
    spoilt.register_load_state_dict_pre_hook(lambda optimizer, state: {**state, "state": {}})
    with pytest.raises(ValueError, match="new, without state in the checkpoint"):
        spoilt.load_state_dict(copy.deepcopy(opt.state_dict()))


def test_step_hooks_run_in_torchs_order_and_may_replace_the_arguments():
    net, opt = make()
    seen = []
    closure = net.closure(opt)

    def own(optimizer, args, kwargs):
        seen.append("own before")
        return (optimizer, closure), kwargs

    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
        opt.register_step_pre_hook(own),
        opt.register_step_post_hook(lambda *_: seen.append("own after")),
    ]
    try:
        assert torch.equal(opt.step(), Line()())
        assert seen == ["all before", "own before", "own after", "all after"]
    finally:
        for handle in handles:
            handle.remove()
    opt.step()
    assert len(seen) == 4


# --- copies -----------------------------------------------------------------------------------------------------


def pickled(pair: tuple[Line, Muon]) -> tuple[Line, Muon]:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_copy_of_a_model_and_its_optimizer_trains_on_its_own(algorithm, copied):
    net, opt = make(algorithm)
    run_steps(net, opt, 2)
    twin_net, twin = copied((net, opt))
    assert {name for name in vars(twin) if name[0] != "_"} == {name for name in vars(opt) if name[0] != "_"}
    before = contents(net, opt)
    after = run_steps(twin_net, twin, 2)
    assert same(contents(net, opt), before) and same(run_steps(net, opt, 2), after)
    twin.add_param_group({"params": [nn.Parameter(normal(2, 2))], "adjust_lr_fn": "match_rms_adamw"})
    assert len(opt.param_groups) == len(twin.param_groups) - 1


def copied_with_replicas(rank: int, world: int) -> bool:
    net = Line()
    opt = Muon([net.weight], lr=0.01, replicas=dist.group.WORLD)
    run_steps(net, opt, 2)
    twin_net, twin = copy.deepcopy((net, opt))
    return same(run_steps(twin_net, twin, 2)[:2], run_steps(net, opt, 2)[:2])


def test_a_copy_uses_the_same_process_group():
    assert run(2, copied_with_replicas) == [True, True]
