"""The methods beside their formulas in float64 or published code, and what a method from outside is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonckpt.optimizer import MatrixMethod, MethodSlot, Muon, Option, WholeMatrix, orthogonalize

EXACT = {"ns_dtype": "float32", "weight_decay": 0.0}


def gradients(shape: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 10 ** (-step % 3) for step in range(steps)]


def stepped(start: torch.Tensor, given: list[torch.Tensor], **group: Any) -> torch.Tensor:
    param = nn.Parameter(start.clone())
    opt = Muon([{"params": [param], **group}], lr=0.1)
    for gradient in given:
        param.grad = gradient.clone()
        opt.step()
    return param.detach()


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """What five iterations of Newton-Schulz make of a matrix, in float64."""
    return orthogonalize(matrix.double(), dtype=torch.float64)


def averages(given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Momentum with Nesterov's look ahead, as Muon's groups have it by default."""
    mean, ahead = torch.zeros_like(given[0], dtype=torch.float64), []
    for gradient in given:
        mean = mean.lerp(gradient.double(), 0.05)
        ahead.append(gradient.double().lerp(mean, 0.95))
    return ahead


@pytest.mark.parametrize("shape", [(6, 10), (9, 4)])
def test_adamuon_is_its_algorithm(shape):
    """Algorithm 1 of arXiv 2507.11005, with Nesterov's momentum."""
    start, given = torch.zeros(shape), gradients(shape, 4)
    squares, weight = torch.zeros(shape, dtype=torch.float64), start.double()
    for momentum in averages(given):
        matrix = polar(momentum.sign())
        squares = 0.95 * squares + 0.05 * matrix**2
        adapted = matrix / (squares.sqrt() + 1e-8)
        weight = weight - 0.1 * 0.2 * (shape[0] * shape[1]) ** 0.5 * adapted / adapted.norm()
    torch.testing.assert_close(
        stepped(start, given, algorithm="adamuon", **EXACT).double(), weight, rtol=1e-4, atol=1e-5
    )


def test_hyperball_is_its_formula_and_keeps_the_norm():
    """W' = r Norm(W - lr r Norm(U)) with the first norm r (Wen et al. 2025); in 16 bits errors do not add up."""
    start, given = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)), gradients((6, 10), 40)
    radius, weight = start.double().norm(), start.double()
    for momentum in averages(given):
        update = polar(momentum)
        moved = weight - 0.1 * radius * update / update.norm()
        weight = radius * moved / moved.norm()
    found = stepped(start, given, algorithm="hyperball", ns_dtype="float32")
    torch.testing.assert_close(found.double(), weight, rtol=1e-3, atol=1e-4)
    rounded = stepped(start, given, algorithm="hyperball").double()
    assert abs(rounded.norm() / radius - 1) < 1e-4


@pytest.mark.parametrize("update_norm", ["muon", "rms"])
def test_zeros_make_no_nan_of_normuon(update_norm):
    given = [torch.zeros(128, 128)]
    found = stepped(torch.ones(128, 128), given, algorithm="normuon", update_norm=update_norm, weight_decay=0.0)
    assert torch.equal(found, torch.ones(128, 128))


def test_a_rate_of_zero_leaves_a_hyperball_where_it_is():
    start = torch.randn(4, 6)
    param = nn.Parameter(start.clone())
    opt = Muon([{"params": [param], "algorithm": "hyperball"}], lr=0.0)
    param.grad = torch.randn(4, 6)
    opt.step()
    assert torch.equal(param, start)


# --- From outside -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["normuon", "adamuon", "hyperball"])
def test_equal_matrices_together_have_the_bits_of_each_alone(monkeypatch, algorithm):
    """Seven of an odd shape, two of them in another group, and a parameter in 16 bits, whose weight travels as such."""
    dtypes = [torch.float32] * 4 + [torch.bfloat16] + [torch.float32] * 2

    def trained() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        drawn = partial(torch.randn, (5, 33), generator=generator)
        params = [nn.Parameter(drawn().to(dtype)) for dtype in dtypes]
        opt = Muon([{"params": some, "algorithm": algorithm} for some in (params[:5], params[5:])], lr=0.1)
        for _ in range(3):
            for param in params:
                param.grad = drawn().to(param.dtype)
            opt.step()
        return [held for param in params for held in (param.detach(), *opt.state[param].values())]

    together = trained()
    monkeypatch.setattr("muonckpt.optimizer.step.step.MAX_STACK_ELEMENTS", 1)
    for one, other in zip(trained(), together, strict=True):
        assert torch.equal(one, other)


def halved(whole: WholeMatrix) -> torch.Tensor:
    whole.state["seen"].add_(1)
    return whole.matrix * whole.options["share"]


MINE = MatrixMethod(
    "mine",
    halved,
    slots={"seen": MethodSlot("[1, 1]"), "columns": MethodSlot("[1, n]", torch.bfloat16)},
    options={"share": Option(0.5, lambda share: 0 < share <= 1, "a share in (0, 1]")},
    takes="momentum",
)


def test_a_method_from_outside_has_its_options_and_state_and_state_dicts_name_it():
    param = nn.Parameter(torch.zeros(3, 4))
    opt = Muon([{"params": [param], "algorithm": MINE, "share": 0.25, "adjust_lr_fn": "none"}], lr=1.0, nesterov=False)
    param.grad = torch.ones(3, 4)
    opt.step()
    torch.testing.assert_close(param.detach(), torch.full((3, 4), -0.05 * 0.25))
    assert opt.state[param]["seen"].item() == 1
    assert opt.state[param]["columns"].shape == (1, 4) and opt.state[param]["columns"].dtype == torch.bfloat16
    [group] = opt.state_dict()["param_groups"]
    assert group["algorithm"] == "mine" and group["share"] == 0.25 and "ns_steps" not in group


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"share": 2}, "share=2: expected a share in"),
        ({"ns_steps": 3}, "ns_steps=3: 'mine' groups have no such option"),
        ({"algorithm": "yours"}, "unknown algorithm 'yours'"),
        ({"algorithm": MatrixMethod("muon", halved)}, "two different methods are called 'muon'"),
    ],
)
def test_options_that_a_method_lacks_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.zeros(3, 4))], "algorithm": MINE, **group}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "[n, m]"}, "expected one of"),
        ({"dtype": torch.int64}, "expected a floating-point dtype"),
    ],
)
def test_state_that_nobody_could_keep_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MethodSlot(**arguments)


def of_another_shape(whole: WholeMatrix) -> torch.Tensor:
    return whole.matrix[:1]


def of_another_dtype(whole: WholeMatrix) -> torch.Tensor:
    whole.state["rows"] = whole.state["rows"].double()
    return whole.matrix


def without_a_slot(whole: WholeMatrix) -> torch.Tensor:
    whole.state.pop("rows")
    return whole.matrix


def no_number(whole: WholeMatrix) -> torch.Tensor:
    return whole.matrix * float("nan")


def raising(whole: WholeMatrix) -> torch.Tensor:
    raise KeyError("nothing here")


WRONG = {
    of_another_shape: "the update is torch.float32 (1, 4), expected floats of shape (5, 4)",
    of_another_dtype: "rows is torch.float64, declared is torch.float32",
    without_a_slot: "has slots rows, and it left none",
    no_number: "the update of a finite matrix is not finite",
    raising: "KeyError: 'nothing here'",
}


def told(rank: int, world: int) -> list[str]:
    mesh, texts = init_device_mesh("cpu", (world,)), []
    for update in WRONG:
        value = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)], src_data_rank=None)
        param = nn.Parameter(value)
        method = MatrixMethod("wrong", update, slots={"rows": MethodSlot("[m, 1]")}, takes="gradient")
        opt = Muon([{"params": [("up.weight", param)], "algorithm": method}])
        param.grad = value.clone()
        try:
            opt.step()
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_a_method_that_breaks_its_word_stops_the_step_on_all_ranks_by_name():
    for texts in run(2, told):
        for text, message in zip(texts, WRONG.values(), strict=True):
            assert message in text and "'up.weight', method 'wrong'" in text


def test_state_of_another_method_is_refused():
    saved = Muon([{"params": [("up", nn.Parameter(torch.zeros(3, 4)))], "algorithm": MINE}])
    other = Muon([{"params": [("up", nn.Parameter(torch.zeros(3, 4)))], "algorithm": "adamuon"}])
    with pytest.raises(ValueError, match="moved from 'mine' to 'adamuon': up"):
        other.load_state_dict(saved.state_dict())
    report = other.load_state_dict(saved.state_dict(), fresh=["up"])
    assert report.fresh == ("up",)
