"""Parameters of more than two dims that are flattened to one matrix: convolutions; published updates are the oracle."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.workers import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import muonckpt
from muonckpt import LayoutError
from muonckpt.optimizer import COEFFICIENTS, Muon

ROOT = Path(__file__).parents[2]
STEPS = 3
KELLER = (3.4445, -4.7750, 2.0315)


def gradients(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, generator=generator) for _ in range(STEPS + 1)]


def trained(shape: tuple[int, ...], place=lambda tensor: tensor, **options) -> tuple[nn.Parameter, Muon]:
    """Train one parameter for some steps, where ``place`` puts it."""
    first, *others = gradients(shape)
    parameter = nn.Parameter(place(first.clone()))
    optimizer = Muon([{"params": [parameter], "lr": 0.1, **options}])
    for gradient in others:
        parameter.grad = place(gradient.clone())
        optimizer.step()
    return parameter, optimizer


def polynomial(matrix: Tensor, triples: list[tuple[float, float, float]]) -> Tensor:
    """The orthogonalised matrix, in float64, by its singular values: no product of ours, and none of Newton-Schulz."""
    u, s, vh = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


def published(shape: tuple[int, ...], triples, scale, parts: int = 1, ema: bool = True) -> Tensor:
    """The weights after some steps of the published update: Nesterov's momentum of the tensor, flattened by its first
    dim, in ``parts`` equal parts of rows, each orthogonalised and scaled by its own two sides.
    """
    weight, *others = (gradient.double() for gradient in gradients(shape))
    momentum = torch.zeros_like(weight)
    for gradient in others:
        if ema:
            momentum = 0.95 * momentum + 0.05 * gradient
            look_ahead = 0.95 * momentum + 0.05 * gradient
        else:
            momentum = 0.95 * momentum + gradient
            look_ahead = 0.95 * momentum + gradient
        matrices = look_ahead.reshape(shape[0], -1).chunk(parts)
        blocks = [polynomial(matrix, triples) * scale(*matrix.shape) for matrix in matrices]
        weight = (1 - 0.1 * 0.1) * weight - 0.1 * torch.cat(blocks).reshape(shape)
    return weight


SHAPES = {
    "conv1d": (8, 3, 5),
    "conv2d, the first of a network": (64, 3, 3, 3),
    "conv2d": (6, 8, 3, 2),
    "conv3d": (5, 2, 3, 2, 2),
    "a patch embedding": (16, 3, 4, 4),
    "transposed": (8, 2, 3, 3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_convolution_is_updated_as_keller_jordan_and_dion_publish_it(shape: tuple[int, ...]) -> None:
    # The root of rows / columns, where rows are more: of the flattened matrix, as his text has it.
    mine, _ = trained(shape, flatten=True, ns_coefficients="keller", ns_dtype="float32")
    theirs = published(shape, [KELLER] * 5, lambda m, n: math.sqrt(max(1, m / n)))
    torch.testing.assert_close(mine.detach().double(), theirs, rtol=0, atol=2e-5)
    # dion keeps the sum of gradients, and scales by the root of fan out / fan in, both of the flattened matrix.
    mine, _ = trained(shape, flatten=True, ns_dtype="float32", adjust_lr_fn="spectral")
    quintic = COEFFICIENTS["quintic"].schedule(5)
    theirs = published(shape, quintic, lambda m, n: math.sqrt(m / n), ema=False)
    torch.testing.assert_close(mine.detach().double(), theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("groups", [2, 4])
def test_the_groups_of_a_convolution_are_a_stack_of_matrices(groups: int) -> None:
    # [out, in / groups, height, width]: the map of all channels is block-diagonal, with a block for each group.
    shape = (8, 2, 3, 3)
    pieces = (shape[0] // groups,) * groups
    mine, _ = trained(shape, flatten=True, pieces=pieces, ns_coefficients="keller", ns_dtype="float32")
    theirs = published(shape, [KELLER] * 5, lambda m, n: math.sqrt(max(1, m / n)), parts=groups)
    torch.testing.assert_close(mine.detach().double(), theirs, rtol=0, atol=2e-5)


def test_the_scale_is_that_of_the_flattened_matrix_and_not_of_the_last_two_dims() -> None:
    # A depthwise convolution of 256 channels as one matrix: by the last two dims it would be 5.3 times too small.
    mine, optimizer = trained((256, 1, 3, 3), flatten=True, ns_dtype="float32", weight_decay=0.0)
    plain, _ = trained((256, 1, 3, 3), flatten=True, ns_dtype="float32", weight_decay=0.0, adjust_lr_fn="none")
    start = gradients((256, 1, 3, 3))[0]
    assert ((mine - start).norm() / (plain - start).norm()).item() == pytest.approx(math.sqrt(256 / 9), rel=1e-5)
    assert math.sqrt(256 / 9) == pytest.approx(5.33, abs=0.01)
    [group] = optimizer.report().groups
    assert (group.matrices, group.elements) == (1, 256 * 9)


METHODS = [
    {},
    {"algorithm": "normuon"},
    {"algorithm": "adamuon"},
    {"algorithm": "hyperball"},
    {"momentum_dtype": "bfloat16"},
]


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("pieces", [None, (2, 4)])
def test_it_has_the_bits_of_the_same_matrix_in_two_dims(options: dict, pieces: tuple[int, ...] | None) -> None:
    four, four_optimizer = trained((6, 4, 3, 2), flatten=True, pieces=pieces, **options)

    def in_two_dims(tensor: Tensor) -> Tensor:
        return tensor.reshape(6, -1)

    two, two_optimizer = trained((6, 4, 3, 2), in_two_dims, pieces=pieces, **options)
    assert torch.equal(four.reshape(6, -1), two)
    for slot, tensor in two_optimizer.state[two].items():
        assert torch.equal(four_optimizer.state[four][slot].reshape(tensor.shape), tensor), slot


def test_channels_last_is_a_matter_of_memory() -> None:
    shape = (6, 4, 3, 2)
    expected, _ = trained(shape, flatten=True)
    parameter, optimizer = trained(shape, lambda t: t.to(memory_format=torch.channels_last), flatten=True)
    assert parameter.is_contiguous(memory_format=torch.channels_last) and torch.equal(parameter, expected)
    optimizer.step()


def test_state_that_means_a_stack_is_not_loaded_for_a_matrix(tmp_path) -> None:
    """The statistics of 4 rows have one shape, whether each is a matrix of its own or all are one."""
    _, stack = trained((4, 1, 5), algorithm="normuon")
    _, matrix = trained((4, 1, 5), algorithm="normuon", flatten=True)
    for one, other, text in ((stack, matrix, "flatten=False in the checkpoint, True now"),
                             (matrix, stack, "flatten=True in the checkpoint, False now")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(one.state_dict())
        saved = {
            "state": {"w": one.state_dict()["state"][0]},
            "param_groups": [{**one.param_groups[0], "params": ["w"]}],
        }
        muonckpt.save({"optimizer": saved}, tmp_path / text[:13])
        template = {"state": {"w": other.state_dict()["state"][0]}, "param_groups": [{**other.param_groups[0]}]}
        template["param_groups"][0]["params"] = ["w"]
        with pytest.raises(muonckpt.SourceError, match=f"{text}: w"):
            muonckpt.load({"optimizer": template}, tmp_path / text[:13])
    # Momentum alone means the same, and a warning says which is computed from now on.
    _, stack = trained((4, 1, 5))
    _, matrix = trained((4, 1, 5), flatten=True)
    with pytest.warns(UserWarning, match=r"keeps the code's flatten=True \(saved False\)"):
        matrix.load_state_dict(stack.state_dict())
    assert matrix.param_groups[0]["flatten"] is True


def test_three_dims_are_a_stack_unless_the_group_says_flatten() -> None:
    stack, stack_optimizer = trained((4, 6, 5))
    matrix, optimizer = trained((4, 6, 5), flatten=True)
    assert [group.matrices for group in stack_optimizer.report().groups] == [4]
    assert [group.matrices for group in optimizer.report().groups] == [1]
    assert not torch.equal(stack, matrix)
    # Two dims are what they are, and a group that is not flattened has no such option, whoever says so.
    assert torch.equal(trained((4, 6), flatten=True)[0], trained((4, 6))[0])
    groups = Muon([{"params": [nn.Parameter(torch.ones(4, 6))], "flatten": False}]).param_groups
    assert "flatten" not in groups[0]


def test_what_has_no_rows_and_columns_is_refused_with_the_cure() -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 2, 2))
    with pytest.raises(LayoutError, match=r"a convolution is the matrix 4 x 12.*'flatten': True.*'adamw' group"):
        Muon([kernel])
    Muon([{"params": [kernel], "flatten": True}])  # as it says
    with pytest.raises(LayoutError, match=r"columns \(6, 6\) cut one dim, and flatten=True makes columns of 3"):
        Muon([{"params": [kernel], "flatten": True, "columns": (6, 6)}])
    with pytest.raises(LayoutError, match=r"pieces \(3, 2\).*4 rows"):
        Muon([{"params": [kernel], "flatten": True, "pieces": (3, 2)}])
    with pytest.raises(ValueError, match="flatten='yes': expected True or False"):
        Muon([{"params": [kernel], "flatten": "yes"}])
    with pytest.raises(ValueError, match="'adamw' groups have no such option"):
        Muon([{"params": [kernel], "algorithm": "adamw", "lr": 0.1, "flatten": True}])


def test_flatten_cannot_change_once_there_is_state_of_another_shape() -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 2))
    optimizer = Muon([{"params": [kernel], "flatten": True, "algorithm": "normuon"}])
    optimizer.param_groups[0]["flatten"] = False
    kernel.grad = torch.ones_like(kernel)
    with pytest.raises(ValueError, match="need a second_moment of shape"):
        optimizer.step()


# --- on several ranks -----------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class Network(nn.Module):
    """A convolution cut along its in-channels, a grouped one, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, (1, 3), groups=2)


def built(placements: tuple[Placement, ...], world: int) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    model, mesh = Network(), init_device_mesh("cpu", (world,))
    for module in (model.first, model.second):
        for name, value in [*module.named_parameters()]:
            fitting = [Shard(0) if value.dim() == 1 and isinstance(p, Shard) else p for p in placements]
            setattr(module, name, nn.Parameter(distribute_tensor(value.detach(), mesh, fitting, src_data_rank=None)))
    kernels = [{"params": [model.first.weight], "flatten": True, "algorithm": "normuon"}]
    kernels += [{"params": [model.second.weight], "flatten": True, "pieces": (4, 4)}]
    biases = {"params": [model.first.bias, model.second.bias], "algorithm": "adamw", "lr": 1e-3}
    return model, Muon([*kernels, biases], lr=0.1)


def steps(model: nn.Module, optimizer: Muon, first: int, last: int) -> None:
    for step in range(first, last):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        optimizer.step()


def everything(model: nn.Module, optimizer: Muon) -> list[Tensor]:
    tensors = []
    for parameter in model.parameters():
        tensors += [whole(parameter), *map(whole, optimizer.state[parameter].values())]
    return tensors


def saved(rank: int, world: int, path: str) -> list[Tensor]:
    model, optimizer = built((Shard(1),), world)
    steps(model, optimizer, 0, 2)
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, path)
    steps(model, optimizer, 2, 4)
    return everything(model, optimizer)


def resumed(rank: int, world: int, path: str) -> list[Tensor]:
    model, optimizer = built((Shard(0),), world)
    weights, state = get_state_dict(model, optimizer)
    muonckpt.load({"model": weights, "optimizer": state}, path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    steps(model, optimizer, 2, 4)
    return everything(model, optimizer)


def test_momentum_of_convolutions_goes_on_on_another_mesh_as_the_uninterrupted_run(tmp_path) -> None:
    path = str(tmp_path / "checkpoint")
    expected = run(2, saved, path)[0]
    with muonckpt.open(path) as checkpoint:
        # In the file the momentum has the dims of its parameter.
        assert checkpoint.tensors["optimizer.state.first.weight.momentum_buffer"].shape == (6, 4, 3, 3)
    for tensors in run(3, resumed, path):
        assert [torch.equal(*pair) for pair in zip(tensors, expected, strict=True)] == [True] * len(expected)


@pytest.mark.exhaustive  # torchrun starts it twice, and its processes import torch
def test_the_example_goes_on_after_a_kill_as_if_there_had_been_none(tmp_path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "pictures.py"), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    logs = "".join(path.read_text()[-2000:] for path in sorted((tmp_path / "runs").glob("*.log")))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    told_apart = [int(percent) for percent in re.findall(r"(\d+)% of unseen pictures", done.stdout)]
    assert len(told_apart) == 2 and min(told_apart) > 80  # a guess is right for a third
    assert done.stdout.endswith("both runs have ended with the same bits\n")
