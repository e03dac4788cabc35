"""The drop-in class for dion: its formulas, a run of dion itself, its state, and the same bits on any mesh."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.checkouts import checkout
from support.every_kind import local_of
from support.golden import golden
from support.topologies import TOPOLOGIES, Home, part_of, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from muonckpt.compat.dion import Muon
from muonckpt.optimizer import COEFFICIENTS

SHAPES = [(24, 16), (16, 40), (12, 12), (3, 10, 8)]
FLOAT32 = {"ns_dtype": "float32"}
"""An option of ours, which dion does not have: so that only the formulas are compared."""


def random(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def polar(matrix: torch.Tensor, name: str) -> torch.Tensor:
    """Newton-Schulz in float64."""
    made = COEFFICIENTS[name]
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() * made.norm_scale)
    for a, b, c in made.steps[:5]:
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if wide.shape == matrix.shape else wide.T


SCALES = {
    "spectral_norm": lambda rows, columns: math.sqrt(rows / columns),
    "rms_norm": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    None: lambda rows, columns: 1.0,
}


def by_formula(weights: list[torch.Tensor], coefficients: str, blocks: Mapping[int, list[int]], **options) -> list:
    """Three steps of dion's Muon, as its paper and documentation have it, in float64."""
    lr, mu, decay = options.get("lr", 0.01), options.get("mu", 0.95), options.get("weight_decay", 0.01)
    scale = SCALES[options.get("adjust_lr", "spectral_norm")]
    weights = [weight.double() for weight in weights]
    sums = [torch.zeros_like(weight) for weight in weights]
    for step in (1, 2, 3):
        for weight, total, gradient in zip(weights, sums, random(step), strict=True):
            total.mul_(mu).add_(gradient)
            update = gradient + mu * total if options.get("nesterov") else total.clone()
            matrices = update.flatten(1)[None] if options.get("flatten") else update.view(-1, *update.shape[-2:])
            for matrix in matrices:
                for block in matrix.split(blocks.get(len(matrix), [len(matrix)])):
                    block.copy_(polar(block.clone(), coefficients) * scale(*block.shape))
            keep = (weight * update >= 0) if options.get("cautious_wd") else 1.0
            weight.sub_(lr * decay * weight * keep).sub_(lr * update)
    return weights


def step_thrice(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for step in (1, 2, 3):
        for param, gradient in zip(params, random(step), strict=True):
            param.grad = gradient
        optimizer.step()


def assert_updates_agree(params: list, before: list, expected: list, tolerance: float) -> None:
    """How far apart the updates are, as a part of the update."""
    for param, start, target in zip(params, before, expected, strict=True):
        wrong = (param.detach().double() - target).norm() / (target - start).norm()
        assert wrong < tolerance, f"{tuple(start.shape)}: {wrong:.2g}"


OPTIONS = {
    "defaults": {},
    "nesterov": {"nesterov": True},
    "rms_norm": {"adjust_lr": "rms_norm"},
    "no scale": {"adjust_lr": None},
    "cautious": {"cautious_wd": True, "weight_decay": 3.0},
    "quintic": {"use_polar_express": False},
    "flattened": {"flatten": True},
    "rates": {"lr": 0.3, "mu": 0.7, "weight_decay": 0.4, "use_triton": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_update_follows_the_formulas(name):
    options = OPTIONS[name]
    params = [nn.Parameter(weight) for weight in random(0)]
    step_thrice(Muon([{"params": params, **FLOAT32}], **options), params)
    coefficients = "polar_express_dion" if options.get("use_polar_express", True) else "quintic"
    assert_updates_agree(params, random(0), by_formula(random(0), coefficients, {}, **options), 2e-4)


def test_options_of_groups_are_those_of_dion():
    params = [nn.Parameter(weight) for weight in random(0)]
    groups = [
        {"params": params[:1], "num_heads": 4, **FLOAT32},
        {"params": params[1:2], "split_sizes": [8, 4, 4], **FLOAT32},
        {"params": params[2:], **FLOAT32},
    ]
    step_thrice(Muon(groups), params)
    blocks = {24: [6] * 4, 16: [8, 4, 4]}
    assert_updates_agree(params, random(0), by_formula(random(0), "polar_express_dion", blocks), 1e-4)


def test_the_gram_form_is_that_packages_coefficients_in_float16():
    params = [nn.Parameter(weight) for weight in random(0)]
    step_thrice(Muon(params, use_gram_newton_schulz=True), params)
    assert_updates_agree(params, random(0), by_formula(random(0), "polar_express_gram", {}), 5e-3)


def test_element_wise_groups_are_those_of_dion():
    """dion's AdamW is torch's; its Lion by formula, with the betas that it shares with AdamW."""
    shape = [(17,)]
    adamw, lion, reference = (nn.Parameter(random(0, shape)[0]) for _ in range(3))
    optimizer = Muon(
        [
            {"params": [adamw], "algorithm": "adamw", "beta1": 0.8},
            {"params": [lion], "algorithm": "lion", "weight_decay": 0.5, "mu": 0.3},
        ],
        lr=0.1,
        betas=(0.9, 0.97),
        epsilon=1e-3,
    )
    theirs = torch.optim.AdamW([reference], lr=0.1, betas=(0.8, 0.97), weight_decay=0.01, eps=1e-3)
    mean, expected = torch.zeros(17), random(0, shape)[0]
    for step in (1, 2, 3):
        [gradient] = random(step, shape)
        for param in (adamw, lion, reference):
            param.grad = gradient
        optimizer.step()
        theirs.step()
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * (0.9 * mean + 0.1 * gradient).sign()
        mean = 0.97 * mean + 0.03 * gradient
    torch.testing.assert_close(adamw, reference)
    torch.testing.assert_close(lion.detach(), expected)


# dion itself.


def golden_run(**options) -> tuple[dict[str, nn.Parameter], Muon, dict, dict]:
    """The run of the golden checkpoint by our class: parameters, optimizer, and what is known of theirs."""
    path = golden("dion_fsdp4")
    meta, truth = json.loads((path / "meta.json").read_text()), load_file(path / "truth.safetensors")
    names = [param["name"] for param in meta["params"]]

    def draw(seed: int) -> list[torch.Tensor]:
        return random(seed, [tuple(param["shape"]) for param in meta["params"]])

    starts = [1 + 0.1 * t if "norm" in name else 0.05 * t for name, t in zip(names, draw(0), strict=True)]
    params = dict(zip(names, map(nn.Parameter, starts), strict=True))
    groups = meta["param_groups"][0]
    optimizer = Muon([{**group, "params": [params[name] for name in group["params"]]} for group in groups], **options)
    for seed in (1, 2, 3):
        for param, gradient in zip(params.values(), draw(seed), strict=True):
            param.grad = 0.1 * gradient
        optimizer.step()
    return params, optimizer, meta, truth


def test_three_steps_are_those_that_dion_made():
    params, optimizer, _, truth = golden_run()
    for name, param in params.items():
        theirs, state = truth[f"param/{name}"], optimizer.state[param]
        if "exp_avg" in state:
            torch.testing.assert_close(param.detach(), theirs)
            torch.testing.assert_close(state["exp_avg"], truth[f"state/{name}/momentum"])
            torch.testing.assert_close(state["exp_avg_sq"], truth[f"state/{name}/variance"])
        else:
            # All products of dion are rounded to bfloat16, which makes more than 5 % in such small matrices.
            torch.testing.assert_close(param.detach(), theirs, rtol=0, atol=0.02)
            torch.testing.assert_close(state["momentum_buffer"], 0.05 * truth[f"state/{name}/momentum"])


def saved_by_dion() -> dict:
    """The state dict that dion had at the end of that run."""
    path = golden("dion_fsdp4")
    meta, truth = json.loads((path / "meta.json").read_text()), load_file(path / "truth.safetensors")
    order = [name for group in meta["param_groups"][0] for name in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {index: {} for index in range(len(order))}
    for key, value in truth.items():
        kind, *rest = key.split("/")
        if kind == "state":
            state[order.index(rest[0])][rest[1]] = value
    groups = [{**g, "params": [order.index(name) for name in g["params"]]} for g in meta["param_groups"][0]]
    return {"state": state, "param_groups": groups}


@pytest.mark.filterwarnings("error")
def test_dions_own_state_is_converted():
    params, optimizer, _, truth = golden_run()
    for slots in optimizer.state.values():
        for value in slots.values():
            value.zero_()
    for group in optimizer.param_groups:
        group["lr"] = 5.0
    saved = saved_by_dion()
    optimizer.load_state_dict(copy.deepcopy(saved))
    for name, param in params.items():
        state = optimizer.state[param]
        first = truth[f"state/{name}/momentum"]
        if "exp_avg" in state:
            assert torch.equal(state["exp_avg"], first) and state["step"] == 3
            assert torch.equal(state["exp_avg_sq"], truth[f"state/{name}/variance"])
        else:
            assert torch.equal(state["momentum_buffer"], (first.double() * (1 - 0.95)).float())
    assert [group["lr"] for group in optimizer.param_groups] == [g["lr"] for g in saved["param_groups"]]
    for group in saved["param_groups"]:
        if group["algorithm"] == "adamw":
            for key in group["params"]:
                del saved["state"][key]["step_dev"]
    optimizer.load_state_dict(saved)  # an older one counts steps in the group only
    assert all(slots["step"] == 3 for slots in optimizer.state.values() if "step" in slots)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    _, optimizer, _, _ = golden_run()
    before = copy.deepcopy(optimizer.state_dict())
    saved = saved_by_dion()
    del saved["state"][0]["momentum"]
    with pytest.raises(ValueError, match="new, without state in the checkpoint"):
        optimizer.load_state_dict(saved)
    saved = saved_by_dion()
    saved["param_groups"][0]["algorithm"] = "normuon"
    with pytest.raises(ValueError, match="algorithm='normuon': expected one of muon, adamw, lion"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, slots in before["state"].items():
        assert all(torch.equal(value, after["state"][key][slot]) for slot, value in slots.items())


def test_our_own_state_loads_as_it_is():
    params = [nn.Parameter(weight) for weight in random(0)]
    optimizer = Muon(params)
    step_thrice(optimizer, params)
    again = [nn.Parameter(weight) for weight in random(0)]
    loaded = Muon(again)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, other in zip(params, again, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], loaded.state[other]["momentum_buffer"])


@pytest.fixture
def theirs(monkeypatch):
    """The package dion, out of the folder that PEERS names; uncompiled, which is faster for so small matrices."""
    folder = checkout("dion")
    monkeypatch.setattr(torch, "compile", lambda made=None, **_: made or (lambda function: function))
    monkeypatch.syspath_prepend(folder)
    dion = pytest.importorskip("dion")
    yield dion
    for name in [name for name in sys.modules if name.split(".")[0] == "dion"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_update_is_that_of_the_package(theirs, name):
    """Their momentum, scales and decays, and their coefficients in float32."""
    from dion import newton_schulz_triton, polar_express

    options = OPTIONS[name] | {"use_triton": False}
    plain = newton_schulz_triton.zeropower_via_newtonschulz5
    chosen = polar_express.polar_express if options.get("use_polar_express", True) else plain

    def exact(matrices: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
        """Their function, whose casts to bfloat16 do nothing."""
        return chosen(Exact(matrices.float()), epsilon).as_subclass(torch.Tensor)

    params, others = ([nn.Parameter(weight) for weight in random(0)] for _ in range(2))
    step_thrice(Muon([{"params": params, **FLOAT32}], **options), params)
    step_thrice(theirs.Muon(others, newton_schulz_func=exact, **options), others)
    # What it orthogonalises has been rounded to bfloat16, which turns signs of small elements around.
    assert_updates_agree(params, random(0), [other.detach().double() for other in others], 0.03)


class Exact(torch.Tensor):
    """A tensor that does not become bfloat16."""

    def bfloat16(self):
        return self

    def to(self, *args, **kwargs):
        return self


# Any mesh.


def train(place, replicas=None) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(place(index, weight)) for index, weight in enumerate(random(0))]
    bias = nn.Parameter(place(len(params), random(9, [(7,)])[0]))
    groups = [
        {"params": params[:1], "num_heads": 4},
        {"params": params[1:], "adjust_lr": "rms_norm"},
        {"params": [bias], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups, replicas, nesterov=True)
    for step in (1, 2, 3):
        for index, (param, gradient) in enumerate(zip(params, random(step), strict=True)):
            param.grad = place(index, gradient)
        bias.grad = place(len(params), random(step + 10, [(7,)])[0])
        optimizer.step()
    return [*params, bias], optimizer


def differing(rank: int, world: int, homes: tuple[Home | None, ...], expected: list[torch.Tensor]) -> list[str]:
    params, optimizer = train(placer(homes), dist.group.WORLD)
    have = [tensor for param in params for tensor in (param, *optimizer.state[param].values())]
    return [
        str(tuple(tensor.shape))
        for tensor, whole in zip(have, expected, strict=True)
        if not torch.equal(local_of(tensor), part_of(whole, tensor))
    ]


@pytest.mark.parametrize(
    "name",
    ["FSDP2, rows, 3 ranks", "HSDP", "FSDP2 × TP, crosswise", "EP × FSDP2, rows", "DDP", "parts on different meshes"],
)
def test_the_bits_are_those_of_one_process_on_any_mesh(name):
    params, optimizer = train(lambda _, tensor: tensor)
    expected = [t.detach() for param in params for t in (param, *optimizer.state[param].values())]
    homes = TOPOLOGIES[name]
    assert run(world_of(homes), differing, homes, expected) == [[]] * world_of(homes)


def on_meshes(rank: int, world: int) -> list[str]:
    """What becomes of each kind of ``distributed_mesh``."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("x", "y"))
    outcomes = []
    for given in (mesh["x"], dist.group.WORLD, None, mesh, "x"):
        try:
            optimizer = Muon([nn.Parameter(torch.ones(4, 4)) for _ in range(4)], given)
        except (TypeError, ValueError) as error:
            outcomes.append(str(error))
            continue
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones(4, 4)
        optimizer.step()
        outcomes.append("steps")
    return outcomes


def test_a_mesh_of_one_axis_a_group_or_none():
    for outcomes in run(2, on_meshes):
        assert outcomes[:3] == ["steps"] * 3
        assert "expected a mesh of one axis, got 2" in outcomes[3] and "expected a DeviceMesh" in outcomes[4]


# What is written later.


@pytest.mark.parametrize("options", [{"mu": 0.5, "epsilon": 1e-3, "cautious_wd": True}, {"num_heads": 2}])
def test_an_option_written_into_a_group_is_taken_over(options):
    shapes = [(24, 16)]
    [param], [other], [third] = ([nn.Parameter(weight) for weight in random(0, shapes)] for _ in range(3))
    written, expected = Muon([param]), Muon([{"params": [other], **options}])
    written.param_groups[0].update(options)
    for optimizer, member in ((written, param), (expected, other), (Muon([third]), third)):
        for step in (1, 2, 3):
            member.grad = random(step, shapes)[0]
            optimizer.step()
    assert torch.equal(param, other) and not torch.equal(param, third)
    assert expected.state_dict()["param_groups"][0].items() <= written.state_dict()["param_groups"][0].items()
