"""State in bfloat16: the same bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.every_kind import local_of
from support.interpreted import kernels
from support.launches import launches
from support.layer_wise_training import Net, check, gradients, groups, pieces, run_each
from support.random_layouts import random_overlapping_layout
from support.topologies import STRIDED, TOPOLOGIES, part_of, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from muonckpt.algebra.box import row_major
from muonckpt.algebra.layout import TensorLayout
from muonckpt.optimizer import LayerWise, Muon
from muonckpt.optimizer.step import planner

BF16 = torch.bfloat16
KINDS = [
    ((13, 16), {"momentum_dtype": "bfloat16"}),
    ((33, 7), {"algorithm": "normuon", "momentum_dtype": "bfloat16"}),
    ((4, 9, 11), {"momentum_dtype": "bfloat16", "nesterov": False}),
    ((22, 16), {"algorithm": "adamw", "state_dtype": "bfloat16"}),
    ((41,), {"algorithm": "adamw", "state_dtype": "bfloat16"}),
    ((19, 3), {"algorithm": "lion", "state_dtype": "bfloat16"}),
]
WATCHED = ("", "momentum_buffer", "exp_avg", "exp_avg_sq")
"""A parameter itself, and what is kept of it in bfloat16."""


def values(seed: int) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape, _ in KINDS]


def made(place, **options) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(place(index, value)) for index, value in enumerate(values(0))]
    groups = [
        {"params": [(f"p{index}", param)], "lr": 0.02, **group}
        for index, (param, (_, group)) in enumerate(zip(params, KINDS, strict=True))
    ]
    return params, Muon(groups, **options)


def train(params: list[nn.Parameter], opt: Muon, place, steps: range) -> list[torch.Tensor]:
    for step in steps:
        for index, (param, gradient) in enumerate(zip(params, values(1 + step), strict=True)):
            param.grad = place(index, gradient)
        opt.step()
    return [t for p in params for t in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]


def here(index: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def alone() -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in train(*made(here), here, range(3))]


def differing(rank: int, world: int, homes, expected: list[torch.Tensor]) -> list[str]:
    place = placer(homes)
    found = train(*made(place, replicas=dist.group.WORLD), place, range(3))
    return [
        f"{tuple(have.shape)} {have.dtype}"
        for have, part in zip(map(local_of, found), map(part_of, expected, found), strict=True)
        if have.dtype != part.dtype or not torch.equal(have, part)
    ]


NAMES = ["FSDP2, rows, 3 ranks", "FSDP2 × TP, crosswise", "DDP", "FSDP2, columns", "HSDP", "EP × FSDP2, rows"]


@pytest.mark.parametrize("name", sweep(NAMES, *NAMES[:3]))
def test_bits_are_those_of_a_single_process(name):
    homes = TOPOLOGIES[name]
    assert not any(home and STRIDED in home.placements for home in homes)
    assert run(world_of(homes), differing, homes, alone()) == [[]] * world_of(homes)


def cut(rank: int, world: int, seeds: range, expected: list[torch.Tensor]) -> list[tuple[int, int]]:
    """The random layouts, with boxes cut in the middle of rows, and the tensors of which this rank has other bits."""
    mesh, wrong = init_device_mesh("cpu", (world,)), []

    def held(whole: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        boxes = [whole[tuple(map(slice, f.box.lo, f.box.hi))].reshape(-1) for f in layout.fragments_of(rank)]
        return torch.cat(boxes or [whole.new_empty(0)]).view(-1, *(1,) * (whole.ndim - 1))

    for seed in seeds:
        rng = np.random.default_rng(seed)
        layouts = {shape: random_overlapping_layout(rng, shape) for shape, _ in KINDS}

        def place(index: int, whole: torch.Tensor, layouts=layouts) -> torch.Tensor:
            local = held(whole, layouts[tuple(whole.shape)])
            size = {"shape": whole.shape, "stride": row_major(tuple(whole.shape))}
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **size)

        params, opt = made(place, layout=lambda param, of=layouts: of[tuple(param.shape)])
        found = train(params, opt, place, range(3))
        slots = [(index, slot) for index, p in enumerate(params) for slot in ("", *sorted(opt.state[p]))]
        for (number, slot), mine, whole in zip(slots, found, expected, strict=True):
            if slot in WATCHED and not torch.equal(local_of(mine), held(whole, layouts[whole.shape])):
                wrong.append((seed, number))
    return wrong


def test_bits_do_not_depend_on_where_boxes_end():
    assert run(4, cut, range(4), alone()) == [[]] * 4


def test_momentum_in_float32_of_weights_in_bfloat16_is_exact():
    start, gradient = (torch.randn(16, 24, generator=torch.Generator().manual_seed(s)).to(BF16) for s in (0, 1))
    kept = {}
    for weights in (BF16, torch.float32):
        param = nn.Parameter(start.to(weights))
        opt = Muon([{"params": [param], "momentum_dtype": "float32"}])
        for step in range(3):
            param.grad = (gradient * (step + 1)).to(weights)
            opt.step()
        kept[weights] = opt.state[param]["momentum_buffer"]
    assert kept[BF16].dtype == torch.float32
    assert torch.equal(*kept.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum_dtype": "float8"}, "momentum_dtype='float8': expected None, or one of"),
        ({"state_dtype": "bfloat16"}, "'muon' groups have no such option; .* momentum_dtype"),
        ({"algorithm": "adamw", "momentum_dtype": "bfloat16"}, "state_dtype"),
        ({"momentum_dtype": "8bit"}, "momentum_dtype='8bit': expected None, or one of"),
    ],
)
def test_what_cannot_be_kept_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Muon([{"params": [nn.Parameter(torch.zeros(4, 4))], **options}])


def test_a_dtype_cannot_change_under_its_state():
    param = nn.Parameter(torch.zeros(4, 4))
    opt = Muon([{"params": [param], "momentum_dtype": "bfloat16"}])
    opt.param_groups[0]["momentum_dtype"] = None
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="build a new optimizer, and load the state into it"):
        opt.step()


@pytest.mark.filterwarnings("ignore:group . keeps the code's")
def test_a_loaded_state_is_widened_and_narrowed():
    def stepped(dtype: str) -> tuple[nn.Parameter, Muon]:
        param = nn.Parameter(torch.zeros(4, 8))
        opt = Muon([{"params": [param], "momentum_dtype": dtype}])
        param.grad = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        opt.step()
        return param, opt

    (_, narrow), (_, wide) = stepped("bfloat16"), stepped("float32")
    for source in (narrow, wide):
        for dtype in ("float32", "bfloat16"):
            param, opt = stepped(dtype)
            opt.load_state_dict(source.state_dict())
            [saved], found = source.state.values(), opt.state[param]["momentum_buffer"]
            assert torch.equal(found, saved["momentum_buffer"].to(getattr(torch, dtype)))


def test_kernels_round_as_operators_do(monkeypatch):
    kernels("step.kernels")
    found = {}
    for by_kernels in (False, True):
        monkeypatch.setattr(planner, "has_kernels", lambda device, dtype, answer=by_kernels: answer)
        with launches() as names:
            found[by_kernels] = alone()
        assert ("_send" in names) == by_kernels
    assert all(map(torch.equal, found[False], found[True]))


def narrow_groups(net: Net) -> list[dict]:
    return [{**group, STATE_OPTION.get(group.get("algorithm"), "momentum_dtype"): "bfloat16"} for group in groups(net)]


STATE_OPTION = {"adamw": "state_dtype", "lion": "state_dtype"}


def layer_wise(rank: int, world: int, layout: str) -> dict:
    net = Net()
    opt = LayerWise(net, narrow_groups(net), layout=layout, average=False, bucket_size=700)
    for step in range(3):
        net(gradients(net, step, rank)).backward()
        opt.step()
    return pieces(net, opt)


def test_layer_wise_training_has_the_bits_of_one_process():
    net = Net()
    opt = Muon(narrow_groups(net))
    for step in range(3):
        for name, param in net.named_parameters():
            param.grad = sum(gradients(net, step, rank)[name] for rank in range(3))
        opt.step()
    expected = {name: param.detach() for name, param in net.named_parameters()}
    expected |= {f"{name}.{slot}": v for name, param in net.named_parameters() for slot, v in opt.state[param].items()}
    for layout, found in run_each(3, layer_wise):
        check(found, expected, layout)
