"""Momentum of convolutions: translated between programs, also where a script stored it as a matrix, and looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import muonckpt
from muonckpt import Translation
from muonckpt.optimizer import Muon

# The tests compute in float32, by the script's coefficients and rates, which the other side does not say.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*did not say options"),
    pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run"),
]

KERNELS = {"conv2d.weight": (6, 4, 3, 3), "conv1d.weight": (6, 4, 5)}
DION = {"lr": 0.1, "mu": 0.75, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "step": 3, "epsilon": 1e-8,
        "nesterov": True, "cautious_wd": False, "algorithm": "muon", "adjust_lr": "spectral_norm"}  # fmt: skip
EMA = {"to_dialect": "muonckpt", "translation": Translation(convention="ema")}
KELLER = {"lr": 0.1, "momentum": 0.75, "weight_decay": 0.0, "use_muon": True}


def random(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in KERNELS.items()}


def save(path: Path, slot: str, momenta: dict[str, torch.Tensor], **group: object) -> None:
    state = {name: {slot: momentum} for name, momentum in momenta.items()}
    optimizer = {"state": state, "param_groups": [{"params": [*KERNELS], **group}]}
    muonckpt.save({"model": random(0), "optimizer": optimizer}, path)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv2d, self.conv1d = nn.Conv2d(4, 6, 3, bias=False), nn.Conv1d(4, 6, 5, bias=False)


def resumed(path: Path, **group: object) -> tuple[Model, Muon]:
    """Load a checkpoint into a model and an optimizer that know nothing of it."""
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = Muon([{"params": [*model.parameters()], "flatten": True, "ns_dtype": "float32", **group}])
    weights, state = get_state_dict(model, optimizer)
    muonckpt.load({"model": weights, "optimizer": state}, path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, optimizer


def published(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, ema: bool, scale) -> torch.Tensor:
    """One step of the other program, by its formula and singular values, in float64; Keller's coefficients."""
    weight, momentum, gradient = weight.double(), momentum.double(), gradient.double()
    momentum = 0.75 * momentum + (0.25 * gradient if ema else gradient)
    look_ahead = 0.75 * momentum + (0.25 * gradient if ema else gradient)
    matrix = look_ahead.reshape(len(weight), -1)
    u, s, vh = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    update = (u @ torch.diag(s) @ vh) * scale(*matrix.shape)
    return weight - 0.1 * update.reshape(weight.shape)


SCALES = {
    "spectral": lambda rows, columns: (rows / columns) ** 0.5,
    "original": lambda rows, columns: max(1, rows / columns) ** 0.5,
}


def go_on_as_published(path: Path, momenta: dict[str, torch.Tensor], ema: bool, scale: str) -> None:
    """Take one step from a translated checkpoint, and compare it with the other program's from its own."""
    model, optimizer = resumed(path, ns_coefficients="keller", adjust_lr_fn=scale)
    for name, parameter in model.named_parameters():
        parameter.grad = random(9)[name].clone()
        assert torch.equal(parameter.detach(), random(0)[name])
    optimizer.step()
    for name, parameter in model.named_parameters():
        momentum = momenta[name].reshape(KERNELS[name])
        expected = published(random(0)[name], momentum, random(9)[name], ema, SCALES[scale])
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.filterwarnings("ignore:group . keeps the code's")
def test_dions_flattened_run_goes_on_here_and_back(tmp_path: Path) -> None:
    # dion keeps momentum in the dims of the parameter, and says in its groups that it is flattened.
    save(tmp_path / "theirs", "momentum", random(1), **DION, flatten=True)
    muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", to_dialect="muonckpt")
    with muonckpt.open(tmp_path / "ours") as checkpoint:
        [group] = checkpoint.groups.values()
        assert group["flatten"] is True and group["adjust_lr_fn"] == "spectral"
    go_on_as_published(tmp_path / "ours", random(1), ema=False, scale="spectral")
    report = muonckpt.convert(tmp_path / "ours", tmp_path / "back", to_dialect="dion")
    assert not any("flatten" in check.subject for check in report.checklist)
    with muonckpt.open(tmp_path / "back") as checkpoint:
        [group] = checkpoint.groups.values()
        assert group["flatten"] is True
        for name, momentum in random(1).items():
            stored = checkpoint.tensors[f"optimizer.state.{name}.momentum"].numpy()
            np.testing.assert_allclose(stored, momentum.numpy(), rtol=1e-6)


def test_stacks_stay_stacks_and_dims_that_no_stack_has_are_told(tmp_path: Path) -> None:
    # Without the option three dims are a stack in dion; four are stacks of stacks, which ours does not have.
    save(tmp_path / "theirs", "momentum", random(1), **DION, flatten=False)
    report = muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", to_dialect="muonckpt")
    [check] = [check for check in report.checklist if check.subject == "flatten of conv2d.weight"]
    assert check.values == ("False",) and "muonckpt has no option for it" in check.reason
    with muonckpt.open(tmp_path / "ours") as checkpoint:
        assert [group.get("flatten") for group in checkpoint.groups.values()] == [None]


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.filterwarnings("ignore:group . keeps the code's")
@pytest.mark.parametrize("is_matrix", [True, False])
def test_a_script_that_flattens_goes_on_here_however_it_stores_momentum(is_matrix: bool, tmp_path: Path) -> None:
    # Copies of Jordan's script from before his muon_update store the matrix, as Moonlight's do; newer ones the kernel.
    momenta = {name: m.flatten(1) if is_matrix else m for name, m in random(1).items()}
    save(tmp_path / "theirs", "momentum_buffer", momenta, **KELLER)
    report = muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", **EMA)
    checks = [check for check in report.checklist if check.subject.startswith("flatten of ")]
    assert {check.values for check in checks} == {("True",)}
    expected = "its momentum is stored as a matrix" if is_matrix else "the parameter has 4 dims"
    assert any(expected in check.reason for check in checks)
    with muonckpt.open(tmp_path / "ours") as checkpoint:
        flattened = {}
        for group in checkpoint.groups.values():
            flattened |= dict.fromkeys(group["params"], group.get("flatten"))
        # A kernel of three dims might be a stack, if nothing says that it is not.
        assert flattened == {"conv2d.weight": True, "conv1d.weight": True if is_matrix else None}
        for name, momentum in random(1).items():
            stored = checkpoint.tensors[f"optimizer.state.{name}.momentum_buffer"].numpy()
            assert np.array_equal(stored, momentum.numpy())
    go_on_as_published(tmp_path / "ours", momenta, ema=True, scale="original")


def test_in_its_own_keys_a_matrix_stays_one(tmp_path: Path) -> None:
    momenta = {name: momentum.flatten(1) for name, momentum in random(1).items()}
    save(tmp_path / "theirs", "momentum_buffer", momenta, **KELLER)
    muonckpt.reshard(tmp_path / "theirs", tmp_path / "two", mesh={"dp": 2})
    with muonckpt.open(tmp_path / "two") as checkpoint:
        for name, momentum in momenta.items():
            stored = checkpoint.tensors[f"optimizer.state.{name}.momentum_buffer"].numpy()
            assert np.array_equal(stored, momentum.numpy())


def test_a_matrix_in_parts_becomes_a_kernel(tmp_path: Path) -> None:
    """Cut amid the rows of kernels: a range of columns is several boxes of the kernel."""
    whole = random(1)["conv2d.weight"].flatten(1)
    cut = muonckpt.BoxedTensor((6, 36), {(0, 0): whole[:, :11].clone(), (0, 11): whole[:, 11:].clone()})
    save(tmp_path / "theirs", "momentum_buffer", {"conv2d.weight": cut}, **KELLER)  # type: ignore[dict-item]
    muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", **EMA)
    with muonckpt.open(tmp_path / "ours") as checkpoint:
        stored = checkpoint.tensors["optimizer.state.conv2d.weight.momentum_buffer"].numpy()
    assert np.array_equal(stored, random(1)["conv2d.weight"].numpy())


def test_a_program_that_cannot_say_it_is_told(tmp_path: Path) -> None:
    save(tmp_path / "theirs", "momentum", random(1), **DION, flatten=True)
    report = muonckpt.convert(tmp_path / "theirs", tmp_path / "torch", to_dialect="torch")
    [check] = [check for check in report.checklist if check.subject == "flatten of muon groups"]
    assert check.values == ("True",) and "torch has no option for it" in check.reason
    # XTuner has the same option, and keeps the rate's factor of the shape as state: of the flattened one.
    muonckpt.convert(tmp_path / "theirs", tmp_path / "xtuner", to_dialect="xtuner")
    with muonckpt.open(tmp_path / "xtuner") as checkpoint:
        ratios = [checkpoint.items[f"optimizer.state.{name}.lr_ratio"] for name in KERNELS]
        assert ratios == [(6 / 36) ** 0.5, (6 / 20) ** 0.5]
        assert [group["flatten"] for group in checkpoint.groups.values()] == [True]


def test_looking_takes_a_kernel_for_one_matrix(tmp_path: Path) -> None:
    momenta = {name: momentum.flatten(1) for name, momentum in random(1).items()}
    save(tmp_path / "matrices", "momentum_buffer", momenta, **KELLER)
    save(tmp_path / "kernels", "momentum_buffer", random(1), **KELLER)
    assert not [finding for finding in muonckpt.inspect(tmp_path / "matrices").symptoms if finding.kind == "shape"]
    # The spectrum of a kernel is that of the flattened matrix.
    spectra = []
    for folder in ("matrices", "kernels"):
        [tensor] = [
            tensor
            for tensor in muonckpt.stats(tmp_path / folder).tensors
            if tensor.key == "optimizer.state.conv2d.weight.momentum_buffer"
        ]
        spectra.append(tensor.spectrum)
    largest = torch.linalg.svdvals(momenta["conv2d.weight"].double())[0].item()
    assert spectra[0] == spectra[1] and spectra[0][0] == pytest.approx(largest, rel=1e-9)


def test_a_kernel_cut_unequally_is_no_stack(tmp_path: Path) -> None:
    save(tmp_path / "flattened", "momentum", random(1), **DION, flatten=True)
    save(tmp_path / "stacks", "momentum", random(1), **DION, flatten=False)
    kinds = []
    for folder in ("flattened", "stacks"):
        fit = muonckpt.fits(tmp_path / folder, {"dp": 4}, shard={"*": [("dp", 0)]})
        kinds.append({finding.kind for finding in fit.findings} & {"stack"})
    assert kinds == [set(), {"stack"}]
