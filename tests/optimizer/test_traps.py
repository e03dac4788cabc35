"""Bugs that other distributed Muons have or had, as far as no other file tests what must hold here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.every_kind import assert_same_bits, whole
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from muonckpt.optimizer import Muon, orthogonalize

# --- a small model of everything: matrices, experts and vectors, under every algorithm --------------------------

SHAPES = {"muon": (7, 10), "normuon": (10, 6), "experts": (5, 6, 4), "adamw": (9, 5), "lion": (11,)}
ALGORITHM = {name: "normuon" if name == "experts" else name for name in SHAPES}


def uneven_rows(name: str, seed: int) -> torch.Tensor:
    """Rows of very different sizes, which a norm of a part of them does not show."""
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    sizes = torch.logspace(-2, 2, values.shape[-2] if values.ndim > 1 else 1)
    return values * (sizes[:, None] if values.ndim > 1 else sizes)


def everywhere(shape: tuple[int, ...], placements: tuple[Placement, ...], names: tuple[str, ...]):
    """What places a tensor on a mesh; a dim that a tensor does not have is its last."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        fit = [Shard(min(p.dim % 3, tensor.ndim - 1)) if type(p) is Shard else p for p in placements]
        return distribute_tensor(tensor, mesh, fit, src_data_rank=None)

    return place


def stepped(place, steps: int = 3) -> list[torch.Tensor]:
    """Parameters and state after some steps, whole."""
    params = {name: nn.Parameter(place(uneven_rows(name, 0))) for name in SHAPES}
    opt = Muon([{"params": [p], "algorithm": ALGORITHM[name], "lr": 0.02} for name, p in params.items()])
    for step in range(steps):
        for name, p in params.items():
            p.grad = place(uneven_rows(name, 1 + step))
        opt.step()
    return [whole(t).clone() for p in params.values() for t in (p, *(opt.state[p][s] for s in sorted(opt.state[p])))]


def stepped_on(rank: int, world: int, *mesh) -> list[torch.Tensor]:
    return stepped(everywhere(*mesh))


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def same_bits_on(*mesh) -> None:
    """As one process gives."""
    expected = stepped(alone)
    for found in run(torch.Size(mesh[0]).numel(), stepped_on, *mesh):
        assert_same_bits(found, expected)


S, R = Shard, Replicate()


# --- the rows ---------------------------------------------------------------------------------------------------


def experts_of(place, split: bool) -> torch.Tensor:
    """The experts of one 3-D parameter, or each as a matrix of its own, after some steps."""
    start, *gradients = (uneven_rows("experts", seed) for seed in range(4))
    params = [nn.Parameter(place(t.clone())) for t in (start if split else [start])]
    opt = Muon(params, lr=0.02)
    for gradient in gradients:
        for p, g in zip(params, gradient if split else [gradient], strict=True):
            p.grad = place(g)
        opt.step()
    return torch.stack([whole(p) for p in params]) if split else whole(params[0])


def experts_on(rank: int, world: int, *mesh) -> torch.Tensor:
    return experts_of(everywhere(*mesh), split=False)


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((4,), (S(0),)), ((3,), (S(1),)), ((3,), (S(2),)), ((2, 2), (S(0), S(1))), ((2, 2), (S(0), S(0)))],
    ids=["experts", "rows", "columns", "experts x rows", "experts twice"],
)
def test_three_dim_experts_are_so_many_matrices_however_they_are_sharded(shape, placements):
    expected = experts_of(alone, split=True)
    for found in run(torch.Size(shape).numel(), experts_on, shape, placements, ("x", "y")[: len(shape)]):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_the_scale_after_a_resume_is_the_one_of_the_new_configuration():
    saved, resumed, fresh = (nn.Parameter(uneven_rows("muon", 0)) for _ in range(3))
    old = Muon([saved], adjust_lr_fn="match_rms_adamw", lr=0.5)
    saved.grad = uneven_rows("muon", 1)
    old.step()
    new, control = Muon([resumed], adjust_lr_fn="spectral"), Muon([fresh], adjust_lr_fn="spectral", lr=0.5)
    with pytest.warns(UserWarning, match="adjust_lr_fn='spectral'"):
        new.load_state_dict(old.state_dict())
    control.state[fresh]["momentum_buffer"].copy_(old.state[saved]["momentum_buffer"])
    for p, opt in ((resumed, new), (fresh, control)):
        p.grad = uneven_rows("muon", 2)
        opt.step()
    assert torch.equal(resumed, fresh)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gram_form_without_restarts_is_refused_when_the_optimizer_is_built(dtype):
    with pytest.raises(ValueError, match="gram"):
        Muon([nn.Parameter(torch.ones(4, 16))], gram=(), ns_dtype=dtype)


def test_what_is_compiled_is_called():
    products, calls = [], []

    def counting(graph, inputs):
        products.append(sum("mm" in str(node.target) or "matmul" in str(node.target) for node in graph.graph.nodes))

        def called(*args):
            calls.append(len(products))
            return graph(*args)

        return called

    torch._dynamo.reset()
    compiled = torch.compile(orthogonalize, backend=counting, dynamic=False)
    matrix = uneven_rows("muon", 0)
    for _ in range(3):
        assert torch.equal(compiled(matrix), orthogonalize(matrix))
    # Each of five steps has three products, and every call runs what was compiled once.
    assert sum(products) == 15 and len(calls) == 3 * len(products)


PLACES = [
    ((4,), (S(0),)),
    ((2, 2), (R, S(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), S(0))),
    ((2, 2), (S(0), S(1))),
]


@pytest.mark.parametrize(
    ("shape", "placements"),
    sweep(PLACES, *PLACES[2:]),
    ids=["rows", "HSDP", "FSDP x TP", "crosswise"],
)
def test_the_state_of_rows_is_that_of_whole_rows_and_whole_matrices(shape, placements):
    same_bits_on(shape, placements, ("x", "y")[: len(shape)])


@pytest.mark.parametrize("world", [2, 4])
def test_rows_may_be_cut_in_their_last_dim(world):
    same_bits_on((world,), (S(-1),), ("x",))


class Sixteen(nn.Module):
    """A bf16 model under every algorithm."""

    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(uneven_rows(name, 0).bfloat16()))

    def forward(self) -> torch.Tensor:
        return sum(p.square().sum() for p in self.parameters())


def build() -> tuple[Sixteen, Muon]:
    net = Sixteen()
    fully_shard(net, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    named = dict(net.named_parameters())
    return net, Muon([{"params": [named[name]], "algorithm": ALGORITHM[name], "lr": 0.02} for name in SHAPES])


def train(net: Sixteen, opt: Muon, first: int, last: int) -> list[torch.Tensor]:
    for step in range(first, last):
        for name, p in net.named_parameters():
            p.grad = distribute_tensor(
                uneven_rows(name, 1 + step).bfloat16(), p.device_mesh, p.placements, src_data_rank=None
            )
        opt.step()
    params = list(net.parameters())
    return [whole(t).clone() for p in params for t in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]


def saved(rank: int, world: int, path: str) -> list[torch.Tensor]:
    net, opt = build()
    train(net, opt, 0, 2)
    for slots in opt.state.values():
        if "step" in slots:
            slots["step"].fill_(257)  # which bf16 does not have
    model, state = get_state_dict(net, opt)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=path)
    return train(net, opt, 2, 4)


def resumed(rank: int, world: int, path: str) -> list[torch.Tensor]:
    net, opt = build()
    model, state = get_state_dict(net, opt)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=path)
    set_state_dict(net, opt, model_state_dict=model, optim_state_dict=state)
    return train(net, opt, 2, 4)


@pytest.mark.parametrize("world", sweep([1, 3], 3))
def test_stock_dcp_reshards_all_state_of_a_16_bit_model_and_counters_stay_float32(world, tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = run(4, saved, path)[0]
    for found in run(world, resumed, path):
        assert_same_bits(found, expected)
    counters = [t for t in expected if t.shape == () and t.dtype == torch.float32]
    assert [t.item() for t in counters] == [259.0]


def state_placement(rank: int, world: int) -> list[str]:
    """What is wrong with where the state lies, or with what groups hold."""
    place = everywhere((2, 2), (S(0), S(1)), ("x", "y"))
    params = {name: nn.Parameter(place(uneven_rows(name, 0))) for name in SHAPES if len(SHAPES[name]) > 1}
    opt = Muon([{"params": [p], "algorithm": ALGORITHM[name], "lr": 0.02} for name, p in params.items()])
    wrong = []
    for name, p in params.items():
        for slot in opt.state[p].keys() - {"step"}:
            value = opt.state[p][slot]
            placed = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
            wrong += [f"{name}.{slot}"] * (placed != (p.device_mesh, p.placements))
    for group in opt.param_groups:
        wrong += [key for key, value in group.items() if key != "params" and not plain(value)]
    return wrong


def plain(value) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or all(map(plain, value))


def test_state_lies_where_its_parameter_does_and_groups_hold_plain_values():
    assert run(4, state_placement) == [[]] * 4


AXES = [("tp", "fsdp"), ("fsdp", "tp"), ("ep", "dp_replicate"), ("", " ")]


@pytest.mark.parametrize(("outer", "inner"), sweep(AXES, AXES[2]))
def test_the_names_of_axes_never_matter(outer, inner):
    same_bits_on((2, 2), (R, S(0)), (outer, inner))
    same_bits_on((2, 2), (S(0), S(1)), (outer, inner))


UNEVEN = [((7,), (S(0),)), ((5,), (S(1),)), ((3, 2), (S(0), S(1))), ((2, 3), (S(0), S(0))), ((8,), (S(2),))]


@pytest.mark.parametrize(
    ("shape", "placements"),
    sweep(UNEVEN, UNEVEN[0], UNEVEN[3]),
    ids=["7 ranks", "5 ranks", "EP 3 x FSDP 2", "2 x 3, same dim", "more ranks than columns"],
)
def test_nothing_has_to_divide_anything(shape, placements):
    """Sizes 5, 6, 7, 9, 10 and 11, with 5 experts, on numbers of ranks that divide none or few of them."""
    same_bits_on(shape, placements, ("x", "y")[: len(shape)])
