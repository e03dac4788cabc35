"""Real programs trained, saved by stock DCP, converted, continued by ours on other meshes, and back: the same updates.

torch is always there; the optimizers of dion, XTuner and VeOmni are taken from checkouts in the folder that PEERS names
(or that it is).  ``-s`` prints the table of the docs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.continued import (
    EXACT,
    Exact,
    Model,
    exact_torch_muon,
    furthest,
    load_ours,
    load_stock,
    train,
    weights_of,
    whole,
)
from support.workers import run
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import muonckpt
from muonckpt.converters.options import grouped
from muonckpt.optimizer import Muon

MESHES = {"fsdp2": (2,), "fsdp3": (3,), "hsdp2x2": (2, 2)}
PIECES = (12, 4, 4)


def falling(step: int) -> float:
    return 0.9**step


def torchs(model: Model, module: None) -> list:
    muon = torch.optim.Muon(model.matrices, lr=0.02, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(model.vectors, lr=0.01)]


def dions(model: Model, module: Any) -> list:
    from dion import polar_express

    def exact(matrices: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
        return polar_express.polar_express(Exact(matrices.float()), epsilon).as_subclass(torch.Tensor)

    groups = [
        {"params": [model.qkv], "split_sizes": PIECES},
        {"params": [model.up, model.down]},
        {"params": model.vectors, "algorithm": "adamw", "lr": 0.01},
    ]
    options = {"lr": 0.02, "nesterov": True, "weight_decay": 0.1, "cautious_wd": True, "use_triton": False}
    return [module.Muon(groups, newton_schulz_func=exact, **options)]


def xtuners(model: Model, module: Any) -> list:
    """It takes DTensors only: those of FSDP2 on one rank.  The rows are an argument, and in no option."""
    if not isinstance(model.qkv, DTensor):
        fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))

    def exact(matrices: torch.Tensor, epsilon: torch.Tensor, num_experts: int) -> torch.Tensor:
        return module.zeropower_via_newtonschulz5(Exact(matrices.float()), epsilon, num_experts).as_subclass(
            torch.Tensor
        )

    groups = [{"params": model.matrices}, {"params": model.vectors, "algorithm": "adamw", "lr": 0.01}]
    options = {"lr": 0.02, "nesterov": True, "weight_decay": 0.1, "muon_split_sizes": {model.qkv: PIECES}}
    return [module.Muon(groups, newton_schulz_func=exact, **options)]


def veomnis(model: Model, module: Any) -> list:
    muon = module.DistributedMuon(model.matrices, lr=0.02, adjust_lr_fn="match_rms_adamw", ns_implementation="std")
    return [muon, torch.optim.AdamW(model.vectors, lr=0.01)]


@dataclass(frozen=True)
class Peer:
    """A program: how it makes optimizers, and what of ours computes the same.

    ``module`` is what is imported of a checkout, without running what the packages in ``bare`` import by themselves.
    ``forms`` are those of its keys; what it saves ``itself`` is its own state dict, and not torch's.
    """

    make: Callable[[Model, Any], list]
    ours: dict[str, object]
    betas: tuple[float, float]
    pieces: tuple[int, ...] | None = None
    scalar_decay: float = 0.1
    sums: bool = False
    module: str = ""
    bare: tuple[str, ...] = ()
    forms: tuple[str, ...] = ("nested", "flat")
    itself: bool = False


PEERS = {
    "torch": Peer(
        torchs, {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "keller"}, (0.9, 0.999), scalar_decay=0.01
    ),
    "dion": Peer(
        dions,
        {"adjust_lr_fn": "spectral", "ns_coefficients": "polar_express_dion", "cautious": True},
        (0.9, 0.95),
        pieces=PIECES,
        sums=True,
        module="dion",
    ),
    "xtuner": Peer(
        xtuners,
        {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "quintic"},
        (0.9, 0.95),
        pieces=PIECES,
        sums=True,
        module="xtuner.v1.optim.muon",
        bare=("xtuner", "xtuner.v1", "xtuner.v1.optim", "xtuner.v1.utils"),
        forms=("nested",),
    ),
    "veomni": Peer(
        veomnis,
        {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "keller"},
        (0.9, 0.999),
        scalar_decay=0.01,
        module="veomni.optim.optimizer",
        bare=("veomni", "veomni.optim"),
        forms=("flat",),
        itself=True,
    ),
}


def ours(model: Model, name: str, lr: float = 7.0) -> Muon:
    """Other groups in another order; rates of its own only where nothing is loaded."""
    groups = [
        {"params": model.vectors, "algorithm": "adamw", "lr": lr / 2},
        {"params": [model.down, model.up]},
        {"params": [model.qkv], "pieces": PEERS[name].pieces},
    ]
    return Muon(groups, lr=lr, **PEERS[name].ours, **EXACT)


def continued(rank: int, world: int, peer: str, mesh: tuple[int, ...], source: str, destination: str) -> dict:
    """Steps 3 to 5 on a mesh, of what was converted; whole weights, and the result saved."""
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("r", "s")[-len(mesh) :]))
    optimizer = ours(model, peer)
    load_ours(model, optimizer, source)
    train(model, [optimizer], range(3, 6), [LambdaLR(optimizer, falling, last_epoch=2)])
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, destination)
    return weights_of(model)


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
def package(request, monkeypatch, tmp_path):
    """The peer's module; uncompiled, and in float32."""
    peer = PEERS[request.param]
    if not peer.module:
        with exact_torch_muon(monkeypatch):
            yield None
        return
    first = peer.module.partition(".")[0]
    folder = Path(os.environ["PEERS"]) if "PEERS" in os.environ else None
    places = [folder, *sorted(folder.iterdir())] if folder is not None else []
    root = next((place for place in places if (place / first / "__init__.py").is_file()), None)
    if root is None:
        pytest.skip(f"PEERS does not name a folder with a checkout of {first}")
    monkeypatch.setattr(torch, "compile", lambda made=None, **_: made or (lambda function: function))
    monkeypatch.syspath_prepend(root)
    for name in peer.bare:
        shell = ModuleType(name)
        shell.__path__ = [str(root.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, shell)
    module = importlib.import_module(peer.module)
    if request.param == "veomni":
        muon = importlib.import_module("veomni.optim.muon")
        monkeypatch.setattr(muon, "run_newton_schulz", partial(muon.run_newton_schulz, compute_dtype=torch.float32))
    if request.param == "xtuner":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield module
    if request.param == "xtuner":
        dist.destroy_process_group()
    for name in [name for name in sys.modules if name.split(".")[0] == first]:
        del sys.modules[name]


CASES = [(name, form) for name, peer in PEERS.items() for form in peer.forms]


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*did not say options", "ignore:group ")
@pytest.mark.parametrize(("package", "name", "keys"), [(n, n, k) for n, k in CASES], indirect=["package"])
def test_a_run_goes_on_in_ours_on_other_meshes_and_back(package, name, keys, tmp_path):
    peer, model = PEERS[name], Model()
    optimizers = peer.make(model, package)
    schedules = [LambdaLR(optimizer, falling) for optimizer in optimizers]
    begin = weights_of(model)
    # The floor: the same steps from scratch by both, which differ by their rounding.
    scratch = Model()
    own = ours(scratch, name, 0.02)
    for group in own.param_groups:
        group["weight_decay"] = peer.scalar_decay if group["algorithm"] == "adamw" else 0.1
        group |= {"eps": 1e-8, "betas": peer.betas} if group["algorithm"] == "adamw" else {}
    train(model, optimizers, range(3), schedules)
    train(scratch, [own], range(3), [LambdaLR(own, falling)])
    floor = furthest(model, scratch, begin)

    def together(optimizers: list, model: Model) -> Any:
        """The container in which the program keeps several optimizers."""
        return package.MultiOptimizer(model, {"muon": optimizers[0], "adamw": optimizers[1]}, ["muon", "adamw"])

    options = StateDictOptions(flatten_optimizer_state_dict=keys == "flat")
    weights, state = get_state_dict(model, optimizers, options=options)
    if peer.itself:
        state = together(optimizers, model).state_dict()
    dcp_save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    momenta = {name: optimizers[0].state[getattr(model, name)] for name in ("qkv", "up", "down")}
    momenta = {
        name: whole(next(v for k, v in slots.items() if "momentum" in k)).clone() for name, slots in momenta.items()
    }
    start = weights_of(model)
    train(model, optimizers, range(3, 6), schedules)

    muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", to_dialect="muonckpt")
    with muonckpt.open(tmp_path / "ours") as checkpoint:
        for key, theirs in momenta.items():
            found = torch.from_numpy(checkpoint.tensors[f"optimizer.state.{key}.momentum_buffer"].numpy().copy())
            assert torch.equal(found, (theirs.double() * (1 - 0.95)).float() if peer.sums else theirs), key
    for mesh, sizes in MESHES.items():
        world = sizes[0] * (sizes[-1] if len(sizes) > 1 else 1)
        saved = tmp_path / mesh
        there = with_weights(run(world, continued, name, sizes, str(tmp_path / "ours"), str(saved))[0])
        forth = furthest(model, there, start)

        if keys == "flat":
            muonckpt.convert(saved, tmp_path / f"{mesh} flat", **grouped(to_dialect=name, keys="flat", step=6))
            slot = "momentum" if peer.sums else "momentum_buffer"
            paths = {tensor.path for tensor in muonckpt.open(tmp_path / f"{mesh} flat").outline.tensors}
            assert ("optimizer", f"state.qkv.{slot}") in paths
        back, twin = Model(), Model()
        like = groups_of(back, peer.make(back, package))
        again = peer.make(back, package)
        muonckpt.convert(saved, tmp_path / f"{mesh} back", **grouped(to_dialect=name, step=6, like=like))
        if peer.itself:
            both = together(again, back)
            load_stock(back, again, tmp_path / f"{mesh} back", both.state_dict, both.load_state_dict)
        else:
            load_stock(back, again, tmp_path / f"{mesh} back")
        optimizer = ours(twin, name)
        load_ours(twin, optimizer, saved)
        onward = weights_of(twin)
        assert all(torch.equal(onward[key], value) for key, value in weights_of(back).items())
        train(back, again, range(6, 9))
        train(twin, [optimizer], range(6, 9))
        home = furthest(twin, back, onward)
        print(f"| {name}, {keys} | {mesh} | {forth:.1e} | {home:.1e} | {floor:.1e} |")
        assert forth < 1e-5 + 2 * floor and home < 1e-5 + 2 * floor
