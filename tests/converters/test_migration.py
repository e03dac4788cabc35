"""Real programs trained, saved by stock DCP, converted, continued by ours on other meshes, and back: the same updates.

torch is always there; dion is taken from the checkout in the folder that PEERS names.  ``-s`` prints the table of the
docs.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from support.continued import EXACT, Exact, Model, exact_torch_muon, furthest, load_ours, load_stock, train, weights_of
from support.workers import run
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

import muonckpt
from muonckpt.optimizer import Muon

MESHES = {"fsdp2": (2,), "fsdp3": (3,), "hsdp2x2": (2, 2)}


def falling(step: int) -> float:
    return 0.9**step


def torchs(model: Model, dion=None) -> list:
    muon = torch.optim.Muon(model.matrices, lr=0.02, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(model.vectors, lr=0.01)]


def dions(model: Model, dion) -> list:
    from dion import polar_express

    def exact(matrices: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
        return polar_express.polar_express(Exact(matrices.float()), epsilon).as_subclass(torch.Tensor)

    groups = [
        {"params": [model.qkv], "split_sizes": (12, 4, 4)},
        {"params": [model.up, model.down]},
        {"params": model.vectors, "algorithm": "adamw", "lr": 0.01},
    ]
    options = {"lr": 0.02, "nesterov": True, "weight_decay": 0.1, "cautious_wd": True, "use_triton": False}
    return [dion.Muon(groups, newton_schulz_func=exact, **options)]


OURS = {
    "torch": {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "keller"},
    "dion": {"adjust_lr_fn": "spectral", "ns_coefficients": "polar_express_dion", "cautious": True},
}
BETAS = {"torch": (0.9, 0.999), "dion": (0.9, 0.95)}
PEERS = {"torch": torchs, "dion": dions}


def ours(model: Model, peer: str, lr: float = 7.0) -> Muon:
    """Other groups in another order; rates of its own only where nothing is loaded."""
    pieces = (12, 4, 4) if peer == "dion" else None
    groups = [
        {"params": model.vectors, "algorithm": "adamw", "lr": lr / 2},
        {"params": [model.down, model.up]},
        {"params": [model.qkv], "pieces": pieces},
    ]
    return Muon(groups, lr=lr, **OURS[peer], **EXACT)


def continued(rank: int, world: int, peer: str, mesh: tuple[int, ...], source: str, destination: str) -> dict:
    """Steps 3 to 5 on a mesh, of what was converted; whole weights, and the result saved."""
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("r", "s")[-len(mesh) :]))
    optimizer = ours(model, peer)
    load_ours(model, optimizer, source)
    schedule = LambdaLR(optimizer, falling, last_epoch=2)
    for step in range(3, 6):
        generator = torch.Generator().manual_seed(1000 + step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        optimizer.step()
        schedule.step()
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, destination)
    return {n: p.detach().full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}


def with_weights(weights: dict[str, torch.Tensor]) -> Model:
    model = Model()
    for name, value in weights.items():
        getattr(model, name).data.copy_(value)
    return model


def groups_of(model: Model, optimizers: list) -> dict[str, list]:
    """The template for ``like``: the groups of a run, as the guide has it, with numbers in the place of tensors."""
    groups = get_state_dict(model, optimizers)[1]["param_groups"]
    return {"param_groups": [{k: v.item() if isinstance(v, torch.Tensor) else v for k, v in g.items()} for g in groups]}


@pytest.fixture
def package(request, monkeypatch):
    """The peer's package; uncompiled."""
    if request.param == "torch":
        with exact_torch_muon(monkeypatch):
            yield None
        return
    folder = os.environ.get("PEERS")
    if not folder:
        pytest.skip("PEERS does not name a folder with a checkout of microsoft/dion")
    monkeypatch.setattr(torch, "compile", lambda made=None, **_: made or (lambda function: function))
    monkeypatch.syspath_prepend(folder)
    yield pytest.importorskip("dion")
    for name in [name for name in sys.modules if name.split(".")[0] == "dion"]:
        del sys.modules[name]


CASES = [("torch", "nested"), ("torch", "flat"), ("dion", "nested"), ("dion", "flat")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*does not say options", "ignore:group ")
@pytest.mark.parametrize(("package", "peer", "keys"), [(p, p, k) for p, k in CASES], indirect=["package"])
def test_a_run_goes_on_in_ours_on_other_meshes_and_back(package, peer, keys, tmp_path):
    model = Model()
    optimizers = PEERS[peer](model, package)
    schedules = [LambdaLR(optimizer, falling) for optimizer in optimizers]
    begin = weights_of(model)
    # The floor: the same steps from scratch by both, which differ by their rounding.
    scratch = Model()
    own = ours(scratch, peer, 0.02)
    for group in own.param_groups:
        group["weight_decay"] = 0.01 if peer == "torch" and group["algorithm"] == "adamw" else 0.1
        group |= {"eps": 1e-8, "betas": BETAS[peer]} if group["algorithm"] == "adamw" else {}
    train(model, optimizers, range(3), schedules)
    train(scratch, [own], range(3), [LambdaLR(own, falling)])
    floor = furthest(model, scratch, begin)
    options = StateDictOptions(flatten_optimizer_state_dict=keys == "flat")
    weights, state = get_state_dict(model, optimizers, options=options)
    dcp_save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    momenta = {name: optimizers[0].state[getattr(model, name)] for name in ("qkv", "up", "down")}
    momenta = {name: next(v for k, v in slots.items() if "momentum" in k).clone() for name, slots in momenta.items()}
    start = weights_of(model)
    train(model, optimizers, range(3, 6), schedules)

    muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", to_dialect="muonckpt")
    factor = 1 - 0.95 if peer == "dion" else 1.0
    with muonckpt.open(tmp_path / "ours") as checkpoint:
        for name, theirs in momenta.items():
            found = torch.from_numpy(checkpoint.tensors[f"optimizer.state.{name}.momentum_buffer"].numpy().copy())
            exactly = (theirs.double() * factor).float() if peer == "dion" else theirs
            assert torch.equal(found, exactly), name
    for mesh, sizes in MESHES.items():
        world = sizes[0] * (sizes[-1] if len(sizes) > 1 else 1)
        saved = tmp_path / mesh
        there = with_weights(run(world, continued, peer, sizes, str(tmp_path / "ours"), str(saved))[0])
        forth = furthest(model, there, start)

        if keys == "flat":
            muonckpt.convert(saved, tmp_path / f"{mesh} flat", to_dialect=peer, keys="flat", step=6)
            slot = "momentum" if peer == "dion" else "momentum_buffer"
            paths = {tensor.path for tensor in muonckpt.open(tmp_path / f"{mesh} flat").outline.tensors}
            assert ("optimizer", f"state.qkv.{slot}") in paths
        back, twin = Model(), Model()
        like = groups_of(back, PEERS[peer](back, package))
        again = PEERS[peer](back, package)
        muonckpt.convert(saved, tmp_path / f"{mesh} back", to_dialect=peer, step=6, like=like)
        load_stock(back, again, tmp_path / f"{mesh} back")
        optimizer = ours(twin, peer)
        load_ours(twin, optimizer, saved)
        onward = weights_of(twin)
        assert all(torch.equal(onward[name], value) for name, value in weights_of(back).items())
        train(back, again, range(6, 9))
        train(twin, [optimizer], range(6, 9))
        home = furthest(twin, back, onward)
        print(f"| {peer}, {keys} | {mesh} | {forth:.1e} | {home:.1e} | {floor:.1e} |")
        assert forth < 1e-5 + 2 * floor and home < 1e-5 + 2 * floor
