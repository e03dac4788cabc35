"""State in 8 bits: codes and scales of one process on every topology, and nothing takes codes for numbers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.layer_wise_training import Net, check, gradients, groups, pieces, run_each
from support.random_topologies import has_part
from support.topologies import TOPOLOGIES, Home, placer
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonckpt import load, save
from muonckpt.names.errors import LayoutError, SourceError
from muonckpt.optimizer import LayerWise, Muon
from muonckpt.optimizer.ground.codecs import Blocks, CodeTable, magnitudes

KINDS = [
    ((13, 128), {"momentum_dtype": "8bit"}),
    ((9, 128), {"algorithm": "normuon", "momentum_dtype": "8bit", "columns": (12, 116)}),
    ((4, 9, 44), {"momentum_dtype": "8bit", "nesterov": False}),
    ((3, 4, 128), {"algorithm": "adamuon", "momentum_dtype": "8bit"}),
    ((22, 128), {"algorithm": "adamw", "state_dtype": "8bit"}),
    ((128,), {"algorithm": "adamw", "state_dtype": "8bit"}),
    ((3, 21), {"algorithm": "lion", "state_dtype": "8bit"}),
]


def values(seed: int) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape, _ in KINDS]


def made(place, seed: int | None, **options) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(place(index, value)) for index, value in enumerate(values(0))]
    groups = [
        {"params": [(f"p{index}", param)], "lr": 0.02, "rounding_seed": seed, "block_size": 8, **group}
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


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    return [
        f"{tuple(have.shape)} {have.dtype}"
        for have, whole in zip(found, expected, strict=True)
        if have.dtype != whole.dtype or not has_part(have, whole)
    ]


# Codes.


@pytest.mark.parametrize("bits", [7, 8])
def test_codes_are_those_of_dynamic_tree_quantization(bits):
    """Zeros before the first one are the exponent of ten, what follows it a linear fraction of (0.1, 1]."""
    expected = [0.0]
    for code in range(1, 2**bits):
        pattern = f"{code:0{bits}b}"
        zeros, _, fraction = pattern.partition("1")
        share = (int(fraction or "0", 2) + 1) / 2 ** len(fraction)
        expected.append(10.0 ** -len(zeros) * (0.1 + 0.9 * share))
    assert magnitudes(bits) == pytest.approx(expected, rel=1e-15)
    assert magnitudes(bits) == sorted(magnitudes(bits))
    assert magnitudes(bits)[-1] == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_each_number_becomes_the_nearest_code_and_stays_it(dtype):
    given = torch.randn(7, 37).exp() * torch.randn(7, 37) ** 3
    given = given if dtype is torch.int8 else given.square()
    given[2, 16:24] = 0
    codes, blocks = torch.zeros(7, 37, dtype=dtype), Blocks(torch.zeros(7, 5), 8)
    blocks.encode(codes, given)
    assert torch.equal(blocks.scales[:, 4], given[:, 32:].abs().amax(1))
    found, table = blocks.decode(codes), CodeTable.of(dtype, torch.device("cpu")).values
    every = table * blocks.scales.repeat_interleave(8, 1)[:, :37].unsqueeze(-1)
    nearest = (every - given.unsqueeze(-1)).abs().amin(-1)
    kept = given != 0 if dtype is torch.int8 else (given > 0) & (codes > 1)
    torch.testing.assert_close((found - given).abs()[kept], nearest[kept], rtol=1e-6, atol=0)
    assert not found[given == 0].any()
    again = torch.zeros_like(codes), Blocks(torch.zeros(7, 5), 8)
    again[1].encode(again[0], found)
    assert torch.equal(codes, again[0])
    assert torch.equal(blocks.scales, again[1].scales)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_number_next_to_the_middle_of_two_codes_falls_on_its_side(dtype):
    table = CodeTable.of(dtype, torch.device("cpu"))
    middles = table.midpoints[:-1]
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (2.0, -2.0)]
    given = torch.cat([middles, *beside, table.values, torch.tensor([torch.nan, -0.0])])
    assert torch.equal(table.nearest(given), torch.bucketize(given, middles, out_int32=True))


def test_a_square_beside_large_ones_does_not_become_zero():
    """AdamW would divide its mean by eps."""
    given = torch.tensor([[1.0, 1e-12, 0.0, 1e-30]])
    codes, blocks = torch.zeros(1, 4, dtype=torch.uint8), Blocks(torch.zeros(1, 1), 8)
    blocks.encode(codes, given)
    assert codes.tolist() == [[255, 1, 0, 1]]


def test_noise_rounds_to_either_neighbour_and_is_unbiased():
    given = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    codes, dice, tries = torch.zeros(1, 64, dtype=torch.int8), torch.Generator().manual_seed(1), []
    for _ in range(600):
        noise = torch.randint(0, 2**16, (1, 64), generator=dice)
        blocks = Blocks(torch.zeros(1, 8), 8, lambda noise=noise: noise)
        blocks.encode(codes, given)
        tries.append(blocks.decode(codes))
    found = torch.stack(tries).double()
    width = found.amax(0) - found.amin(0)
    assert ((found.mean(0) - given).abs() <= 5 * 0.5 * width / 600**0.5 + 1e-6).all()
    assert ((found.amin(0) <= given + 1e-6) & (found.amax(0) >= given - 1e-6)).all()


def test_what_is_not_finite_is_seen():
    given = torch.ones(1, 24)
    given[0, 3], given[0, 9] = torch.nan, torch.inf
    codes, blocks = torch.zeros(1, 24, dtype=torch.int8), Blocks(torch.zeros(1, 3), 8)
    blocks.encode(codes, given)
    found = blocks.decode(codes)
    assert not found[0, [3, 9]].isfinite().any()
    assert torch.equal(found[0, 16:], given[0, 16:])


# Topologies.


def homes(world: int, seed: int) -> tuple[Home | None, ...]:
    """A home for each parameter, on meshes of which only axes of two or four ranks cut the last dim."""
    dice = random.Random(f"{world} {seed}")
    meshes = {3: [(3,)], 4: [(4,), (2, 2)], 6: [(6,), (3, 2), (2, 3)], 8: [(8,), (2, 4), (2, 2, 2)]}[world]

    def home(shape: tuple[int, ...]) -> Home | None:
        mesh, last = dice.choice(meshes), len(shape) - 1
        fits = shape[-1] == 128 and all(size in (2, 4, 8) for size in mesh)
        dims = [dim for dim in range(last + 1) if dim < last or fits]
        places = [
            dice.choice([Replicate(), *map(Shard, dims), *(_StridedShard(dim, split_factor=2) for dim in dims)])
            for _ in mesh
        ]
        striped = [place.dim for place in places if isinstance(place, _StridedShard)]
        # Stripes of stripes do not say in which order they were cut.
        places = [Replicate() if striped.count(place.dim) > 1 else place for place in places] if striped else places
        return None if dice.random() < 0.1 else Home(mesh, tuple(places))

    return tuple(home(shape) for shape, _ in KINDS)


def differing(rank: int, world: int, seeds: range, expected: dict[int | None, list[torch.Tensor]]) -> list[str]:
    wrong = []
    for number in seeds:
        seed = list(expected)[number % len(expected)]
        place = placer(homes(world, number))
        params, opt = made(place, seed, replicas=dist.group.WORLD)
        wrong += [f"{number}: {what}" for what in apart(train(params, opt, place, range(3)), expected[seed])]
    return wrong


def test_bits_on_random_topologies_are_those_of_one_process():
    assert run(4, differing, range(2), {seed: alone(seed) for seed in (None, 5)}) == [[]] * 4


def resumed(rank: int, world: int, directory: str, names: list[str], expected: list[torch.Tensor]) -> list[str]:
    """Train two steps on one topology, go on from its checkpoint with another, and again with the first by DCP."""
    wrong = []
    for step, (name, other) in enumerate([names, names[::-1]]):
        first, second = placer(homes_of(name)), placer(homes_of(other))
        params, opt = made(first, 5, replicas=dist.group.WORLD)
        train(params, opt, first, range(2))
        state = {"model": {f"p{i}": p.data for i, p in enumerate(params)}, "optimizer": opt.state_dict()}
        write, read = ((save, load), (dcp_save, dcp_load))[step]
        write(state, f"{directory}/{step}")
        params, opt = made(second, 5, replicas=dist.group.WORLD)
        state = {"model": {f"p{i}": p.data for i, p in enumerate(params)}, "optimizer": opt.state_dict()}
        read(state, f"{directory}/{step}")
        opt.load_state_dict(state["optimizer"])
        wrong += apart(train(params, opt, second, range(2, 4)), expected)
    return wrong


def homes_of(name: str) -> tuple[Home | None, ...]:
    return tuple(Home(home.mesh, home.placements[: len(home.mesh)]) for home in TOPOLOGIES[name])


def dcp_save(state: dict, path: str) -> None:
    dcp.save(state, checkpoint_id=path)


def dcp_load(state: dict, path: str) -> None:
    dcp.load(state, checkpoint_id=path)


def test_bits_go_on_after_a_resume_on_another_topology(tmp_path):
    assert run(4, resumed, str(tmp_path), ["HSDP", "FSDP2, rows"], alone(5, 4)) == [[]] * 4


def layer_wise(rank: int, world: int, layout: str) -> dict:
    net = Net()
    opt = LayerWise(net, in_eight_bits(net), layout=layout, average=False, bucket_size=700)
    for step in range(3):
        net(gradients(net, step, rank)).backward()
        opt.step()
    return pieces(net, opt)


def in_eight_bits(net: Net) -> list[dict]:
    own = {"momentum_dtype": "8bit", "block_size": 8}
    return [{**group, **({} if group.get("algorithm") in ("adamw", "lion") else own)} for group in groups(net)]


def test_layer_wise_owners_have_whole_blocks():
    net = Net()
    opt = Muon(in_eight_bits(net))
    for step in range(3):
        for name, param in net.named_parameters():
            param.grad = sum(gradients(net, step, rank)[name] for rank in range(3))
        opt.step()
    expected = {name: param.detach() for name, param in net.named_parameters()}
    expected |= {f"{name}.{slot}": v for name, param in net.named_parameters() for slot, v in opt.state[param].items()}
    for layout, found in run_each(3, layer_wise):
        check(found, expected, layout)


# What does not fit.


def cut(rank: int, world: int) -> list[str]:
    place = placer((Home((2,), (Shard(1),)),))
    said = []
    for columns, options in ((96, {}), (20, {}), (96, {"block_size": 16})):
        whole = nn.Parameter(place(0, torch.zeros(4, columns)))
        try:
            Muon([{"params": [("layers.0.up", whole)], "momentum_dtype": "8bit", **options}])
        except LayoutError as error:
            said.append(str(error))
    return said


def test_a_sharding_that_cuts_a_block_is_refused_with_the_size_that_fits():
    (sixteen, none), other = run(2, cut)
    assert other == [sixteen, none]
    assert sixteen.startswith("layers.0.up: ranks hold a tensor of shape (4, 96) from column 48 on")
    assert "block_size=16, the largest that fits" in sixteen
    assert "no block size fits: keep its state in bfloat16" in none


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum_dtype": "8bit", "block_size": 100}, "block_size=100: expected a power of two from 8 to 65536"),
        ({"momentum_dtype": "bfloat16", "block_size": 64}, "expected it with momentum_dtype= or state_dtype='8bit'"),
        ({"algorithm": "adamw", "momentum_dtype": "8bit"}, "state_dtype"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Muon([{"params": [nn.Parameter(torch.zeros(4, 4))], **options}])


def test_layouts_that_end_anywhere_are_refused():
    from muonckpt.layouts.tensors import layout_of

    with pytest.raises(LayoutError, match="p: with layout=, where flat buffers end anywhere"):
        Muon([{"params": [("p", nn.Parameter(torch.zeros(4, 8)))], "momentum_dtype": "8bit"}], layout=layout_of)
    net = Net()
    everything = [{**g, "state_dtype": "8bit"} if g.get("algorithm") == "adamw" else g for g in groups(net)]
    with pytest.raises(ValueError, match="buffers cut parameters of AdamW and Lion anywhere"):
        LayerWise(net, everything)


def test_a_block_size_cannot_change_under_its_state():
    param = nn.Parameter(torch.zeros(4, 64))
    opt = Muon([{"params": [param], "momentum_dtype": "8bit", "block_size": 16}])
    param.grad = torch.ones_like(param)
    opt.param_groups[0]["block_size"] = 8
    with pytest.raises(ValueError, match="build a new optimizer, and load the state into it"):
        opt.step()
    del opt.param_groups[0]["momentum_dtype"], opt.param_groups[0]["block_size"]
    with pytest.raises(
        ValueError, match=r"in 8 bits with scales of shape .4, 4., and the group's options ask for torch"
    ):
        opt.step()


# State of other dtypes.


def trained(dtype: str, block: int | None = None) -> tuple[dict[str, torch.Tensor], Muon]:
    own = {} if block is None else {"block_size": block}
    torch.manual_seed(0)
    params = [("m", nn.Parameter(torch.randn(8, 48))), ("v", nn.Parameter(torch.randn(40)))]
    opt = Muon(
        [
            {"params": params[:1], "lr": 0.02, "momentum_dtype": dtype, **own},
            {"params": params[1:], "lr": 1e-3, "algorithm": "adamw", "state_dtype": dtype, **own},
        ]
    )
    for _ in range(2):
        for _, param in params:
            param.grad = torch.randn(param.shape)
        opt.step()
    return dict(params), opt


@pytest.mark.filterwarnings("ignore:group . keeps the code's")
def test_a_loaded_state_is_widened_and_narrowed():
    kept, opt = trained("8bit", 16)
    wide, other = trained("float32")
    other.load_state_dict(opt.state_dict())
    for name, slot in (("m", "momentum_buffer"), ("v", "exp_avg"), ("v", "exp_avg_sq")):
        slots = opt.state[kept[name]]
        expected = Blocks(slots[f"{slot}_scales"], 16).decode(slots[f"{slot}_codes"])
        assert torch.equal(other.state[wide[name]][slot], expected)
    for block in (16, 8):
        params, back = trained("8bit", block)
        back.load_state_dict(other.state_dict())
        for name, param in params.items():
            for slot, value in back.state[param].items():
                if block == 16:
                    assert torch.equal(value, opt.state[kept[name]][slot]), slot
    again = trained("8bit", 8)
    again[1].load_state_dict(opt.state_dict())
    for name, param in again[0].items():
        assert all(torch.equal(value, back.state[params[name]][slot]) for slot, value in again[1].state[param].items())


def test_codes_without_their_scales_are_refused():
    _, opt = trained("8bit")
    state = opt.state_dict()
    state["state"][0] = {k: v for k, v in state["state"][0].items() if k != "momentum_buffer_scales"}
    for dtype, slots in (("8bit", "momentum_buffer_codes, momentum_buffer_scales"), ("float32", "momentum_buffer")):
        with pytest.raises(ValueError, match=f"with momentum_buffer_codes in the checkpoint, expected {slots}"):
            trained(dtype)[1].load_state_dict(state)


def test_a_checkpoint_of_another_dtype_is_refused_by_every_reader(tmp_path):
    """Codes have slots of their own, so stock DCP cannot take them for numbers either."""
    for saved, asked in (("8bit", "float32"), ("float32", "8bit")):
        path = str(tmp_path / saved)
        save({"optimizer": trained(saved)[1].state_dict()}, path)
        with pytest.raises(SourceError, match="momentum_buffer"):
            load({"optimizer": trained(asked)[1].state_dict()}, path)
        with pytest.raises(CheckpointException, match="momentum_buffer"):
            dcp_load({"optimizer": trained(asked)[1].state_dict()}, path)
