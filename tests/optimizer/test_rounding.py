"""State in bfloat16, rounded to the nearest or with noise of the global index: unbiased, the same bits everywhere."""

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

from muonckpt import load, save
from muonckpt.algebra.box import Box, row_major
from muonckpt.algebra.layout import Fragment, Place, TensorLayout
from muonckpt.optimizer import LayerWise, Muon
from muonckpt.optimizer.ground.codecs import Noise, NoisyBox
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


def made(place, seed: int | None, **options) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(place(index, value)) for index, value in enumerate(values(0))]
    groups = [
        {"params": [(f"p{index}", param)], "lr": 0.02, "rounding_seed": seed, **group}
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


def alone(seed: int | None, steps: int = 3) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in train(*made(here, seed), here, range(steps))]


def test_noise_is_uniform_and_independent_of_its_neighbours():
    shape = (64, 64)
    part = NoisyBox(shape, Fragment(Box.of(shape), Place(0, 0, row_major(shape))))
    noise = torch.stack([part.noise(Noise(seed, 3).key("m"), torch.device("cpu")) for seed in range(400)]).double()
    assert noise.min() >= 0
    assert noise.max() < 2**16
    noise = noise / 2**16 - 0.5 + 2**-17
    count = noise.numel()
    assert abs(noise.mean()) < 5 * 12**-0.5 * count**-0.5
    assert abs(noise.square().mean() * 12 - 1) < 5 * count**-0.5
    neighbours = [noise[:, 1:] * noise[:, :-1], noise[..., 1:] * noise[..., :-1], noise[1:] * noise[:-1]]
    for product in neighbours:
        assert abs(product.mean()) * 12 < 5 * product.numel() ** -0.5
    later = part.noise(Noise(0, 4).key("m"), torch.device("cpu"))
    other = part.noise(Noise(0, 3).key("v"), torch.device("cpu"))
    assert (later == noise[0]).sum() + (other == later).sum() < 8


def test_rounding_is_unbiased_to_a_neighbour_and_keeps_what_is_not_finite():
    given = torch.randn(8, 128).exp() * torch.randn(8, 128).sign()
    part = NoisyBox((8, 128), Fragment(Box.of((8, 128)), Place(0, 0, (128, 1))))
    tries = torch.stack([part.rounded(given, Noise(7, step).key("m")) for step in range(4000)])
    assert torch.equal(tries, tries.to(BF16).float())
    unit = 2.0 ** (given.abs().log2().floor() - 7)
    assert ((tries - given).abs() < unit).all()
    bias = (tries.double() - given).mean(dim=0) / unit
    assert bias.abs().max() < 5 * 0.5 * 4000**-0.5
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.5] * 20).view(1, 120)
    odd[0, 2::12] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    part = NoisyBox((1, 120), Fragment(Box.of((1, 120)), Place(0, 0, (120, 1))))
    found = part.rounded(odd, Noise(0, 0).key("m"))
    assert torch.equal(found.nan_to_num(7.0), odd.nan_to_num(7.0))
    assert torch.equal(found.signbit()[~odd.isnan()], odd.signbit()[~odd.isnan()])


def test_an_average_of_small_changes_moves_only_with_noise():
    """A gradient of 2^-12 beside a momentum of 1 is lost by rounding to the nearest, at every step."""
    ends = {}
    for seed in (None, 0):
        param = nn.Parameter(torch.zeros(64, 64))
        opt = Muon([{"params": [param], "momentum": 0.999, "momentum_dtype": "bfloat16", "rounding_seed": seed}])
        opt.state[param]["momentum_buffer"].fill_(1.0)
        for _ in range(200):
            param.grad = torch.full_like(param, 0.5)
            opt.step()
        ends[seed] = opt.state[param]["momentum_buffer"].double().mean().item()
    assert ends[None] == 1
    assert abs(ends[0] - (0.5 + 0.5 * 0.999**200)) < 2e-3


def differing(rank: int, world: int, homes, expected: list[torch.Tensor]) -> list[str]:
    place = placer(homes)
    found = train(*made(place, 5, replicas=dist.group.WORLD), place, range(3))
    return [
        f"{tuple(have.shape)} {have.dtype}"
        for have, part in zip(map(local_of, found), map(part_of, expected, found), strict=True)
        if have.dtype != part.dtype or not torch.equal(have, part)
    ]


NAMES = ["FSDP2, rows, 3 ranks", "FSDP2 × TP, crosswise", "DDP", "FSDP2, columns", "HSDP", "EP × FSDP2, rows"]


@pytest.mark.parametrize("name", sweep(NAMES, *NAMES[:3]))
def test_bits_with_noise_are_those_of_a_single_process(name):
    homes = TOPOLOGIES[name]
    assert not any(home and STRIDED in home.placements for home in homes)
    assert run(world_of(homes), differing, homes, alone(5)) == [[]] * world_of(homes)


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

        params, opt = made(place, 5, layout=lambda param, of=layouts: of[tuple(param.shape)])
        found = train(params, opt, place, range(3))
        slots = [(index, slot) for index, p in enumerate(params) for slot in ("", *sorted(opt.state[p]))]
        for (number, slot), mine, whole in zip(slots, found, expected, strict=True):
            if slot in WATCHED and not torch.equal(local_of(mine), held(whole, layouts[whole.shape])):
                wrong.append((seed, number))
    return wrong


def test_bits_with_noise_do_not_depend_on_where_boxes_end():
    assert run(4, cut, range(4), alone(5)) == [[]] * 4


def resumed(rank: int, world: int, directory: str, names: list[str], expected: list[torch.Tensor]) -> list[str]:
    """Train two steps on the first topology, save, go on with the second one from the checkpoint, and compare."""
    first, second = (placer(TOPOLOGIES[name]) for name in names)
    params, opt = made(first, 5, replicas=dist.group.WORLD)
    train(params, opt, first, range(2))
    state = {"model": {f"p{index}": p for index, p in enumerate(params)}, "optimizer": opt.state_dict()}
    save(state, directory)
    params, opt = made(second, 5, replicas=dist.group.WORLD)
    state = {"model": {f"p{index}": p.data for index, p in enumerate(params)}, "optimizer": opt.state_dict()}
    load(state, directory)
    opt.load_state_dict(state["optimizer"])
    counts = {group["steps_taken"] for group in opt.param_groups}
    found = train(params, opt, second, range(2, 4))
    return [f"{count} steps" for count in counts - {2}] + [
        f"{tuple(have.shape)} {have.dtype}"
        for have, part in zip(map(local_of, found), map(part_of, expected, found), strict=True)
        if have.dtype != part.dtype or not torch.equal(have, part)
    ]


def test_noise_goes_on_after_a_resume_on_another_topology(tmp_path):
    names = ["HSDP", "FSDP2 × TP, crosswise"]
    assert run(4, resumed, str(tmp_path / "c"), names, alone(5, 4)) == [[]] * 4


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
        ({"rounding_seed": 0}, "rounding_seed=0 of a parameter of shape .* noise is for state in bfloat16"),
        ({"momentum_dtype": "bfloat16", "rounding_seed": "a"}, "rounding_seed='a': expected an integer"),
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


def test_kernels_leave_noise_to_operators_and_round_to_the_nearest_alike(monkeypatch):
    kernels("step.kernels")
    for seed in (None, 5):
        found = {}
        for by_kernels in (False, True):
            monkeypatch.setattr(planner, "has_kernels", lambda device, dtype, answer=by_kernels: answer)
            with launches() as names:
                found[by_kernels] = alone(seed, 2)
            assert ("_send" in names) == by_kernels
        assert all(map(torch.equal, found[False], found[True]))


def narrow_groups(net: Net) -> list[dict]:
    return [
        {**group, "rounding_seed": 5, STATE_OPTION.get(group.get("algorithm"), "momentum_dtype"): "bfloat16"}
        for group in groups(net)
    ]


STATE_OPTION = {"adamw": "state_dtype", "lion": "state_dtype"}


def layer_wise(rank: int, world: int, layout: str) -> dict:
    net = Net()
    opt = LayerWise(net, narrow_groups(net), layout=layout, average=False, bucket_size=700)
    for step in range(3):
        net(gradients(net, step, rank)).backward()
        opt.step()
    assert {group["steps_taken"] for group in opt.param_groups} == {3}
    return pieces(net, opt)


def test_noise_of_layer_wise_training_is_that_of_one_process():
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
