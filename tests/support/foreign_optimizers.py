"""Stand-ins for other programs' optimizers: their classes by name, options and state, with updates by their formulas.

Newton-Schulz is rounded to bfloat16 at every step, as in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from muonckpt.names.coefficients import COEFFICIENTS


def orthogonalized(matrix: Tensor, name: str, steps: int = 5, eps: float = 1e-7, schedule=None) -> Tensor:
    """Newton-Schulz of each matrix of the last two dims, in bfloat16, by the set's schedule or another."""
    made = COEFFICIENTS[name]
    wide = matrix.bfloat16()
    if matrix.size(-2) > matrix.size(-1):
        wide = wide.mT
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) * made.norm_scale + eps)
    for a, b, c in schedule or made.schedule(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if matrix.size(-2) > matrix.size(-1) else wide


def adam(param: Tensor, slots: dict, names: tuple[str, str], count: int, group: dict, betas, eps: float) -> None:
    first, second = (slots.setdefault(name, torch.zeros_like(param)) for name in names)
    first.lerp_(param.grad, 1 - betas[0])
    second.lerp_(param.grad.square(), 1 - betas[1])
    update = first / (1 - betas[0] ** count) / ((second / (1 - betas[1] ** count)).sqrt() + eps)
    param.add_(update, alpha=-float(group["lr"]))


class SingleDeviceMuonWithAuxAdam(torch.optim.Optimizer):
    """Keller Jordan's script: an average, Nesterov, and rows over columns; kernels of four dims are flattened."""

    NESTEROV = True
    SCALES_BY_KERNEL = False

    def __init__(self, groups: Iterable[dict]) -> None:
        defaults = {True: {"lr": 0.02, "momentum": 0.95}, False: {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10}}
        super().__init__([{**defaults[g["use_muon"]], "weight_decay": 0, **g} for g in groups], {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                slots = self.state[param]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                if not group["use_muon"]:
                    slots["step"] = slots.get("step", 0) + 1
                    adam(param, slots, ("exp_avg", "exp_avg_sq"), slots["step"], group, group["betas"], group["eps"])
                    continue
                momentum = slots.setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                mixed = param.grad.lerp(momentum, group["momentum"]) if self.NESTEROV else momentum
                matrix = mixed.flatten(1) if mixed.ndim == 4 else mixed
                rows, columns = (mixed if self.SCALES_BY_KERNEL else matrix).shape[-2:]
                update = orthogonalized(matrix, "keller") * max(1, rows / columns) ** 0.5
                param.add_(update.reshape(param.shape), alpha=-group["lr"])


class AlteredMuon(SingleDeviceMuonWithAuxAdam):
    """A copy of that script in which somebody has left Nesterov out."""

    NESTEROV = False


class FormerMuon(SingleDeviceMuonWithAuxAdam):
    """A copy of that script from before January 2026, which scales flattened kernels by their last two dims."""

    SCALES_BY_KERNEL = True


for copied in (AlteredMuon, FormerMuon):
    copied.__name__ = copied.__qualname__ = "SingleDeviceMuonWithAuxAdam"


def polar_express(matrix: Tensor, epsilon: float) -> Tensor:
    return orthogonalized(matrix, "polar_express_dion", eps=epsilon)


def zeropower_via_newtonschulz5(matrix: Tensor, epsilon: float) -> Tensor:
    return orthogonalized(matrix, "quintic", eps=epsilon)


class DionMuon(torch.optim.Optimizer):
    """microsoft/dion: a sum, blocks of rows, decay where signs agree; rates may be tensors."""

    def __init__(self, params, use_polar_express: bool = True, **options) -> None:
        self._newton_schulz_func = polar_express if use_polar_express else zeropower_via_newtonschulz5
        own = {"lr": 0.01, "mu": 0.95, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "cautious_wd": False,
               "algorithm": "muon", "step": 0, "epsilon": 1e-8, "nesterov": False, "flatten": False,
               "adjust_lr": "spectral_norm"}  # fmt: skip
        super().__init__(params, {**own, **options})
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))  # on the default device, as theirs

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                lr, slots = float(group["lr"]), self.state[param]
                if group["algorithm"] == "adamw":
                    param.mul_(1 - lr * group["weight_decay"])
                    betas = group["beta1"], group["beta2"]
                    adam(param, slots, ("momentum", "variance"), group["step"], group, betas, group["epsilon"])
                    continue
                momentum = slots.setdefault("momentum", torch.zeros_like(param))
                if group["algorithm"] == "lion":
                    sign = momentum.lerp(param.grad, 1 - group["beta1"]).sign()
                    momentum.lerp_(param.grad, 1 - group["beta2"])
                    param.mul_(1 - lr * group["weight_decay"]).sub_(lr * sign)
                    continue
                momentum.mul_(group["mu"]).add_(param.grad)
                mixed = param.grad + group["mu"] * momentum if group["nesterov"] else momentum
                matrix = mixed.flatten(1) if group["flatten"] else mixed
                blocks = group.get("split_sizes") or [matrix.shape[-2]]
                update = torch.cat([self._update(part, group) for part in matrix.split(list(blocks), dim=-2)], dim=-2)
                update = update.reshape(param.shape)
                keep = (param * update >= 0) if group["cautious_wd"] else 1.0
                param.sub_(lr * group["weight_decay"] * param * keep).sub_(lr * update)

    def _update(self, matrix: Tensor, group: dict) -> Tensor:
        rows, columns = matrix.shape[-2:]
        scales = {
            "spectral_norm": math.sqrt(rows / columns),
            "rms_norm": 0.2 * math.sqrt(max(rows, columns)),
            None: 1.0,
        }
        return self._newton_schulz_func(matrix, group["epsilon"]).to(matrix.dtype) * scales[group["adjust_lr"]]


DionMuon.__module__, DionMuon.__name__ = "dion.muon", "Muon"


class ToyMuon(torch.optim.Optimizer):
    """Moonlight's: one group for both methods, told by a flag in the state; a sum."""

    def __init__(self, muon_params, adamw_params, lr: float = 1e-3, wd: float = 0.1) -> None:
        options = {"lr": lr, "wd": wd, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
        super().__init__([*muon_params, *adamw_params], {**options, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8})
        for flag, params in ((True, muon_params), (False, adamw_params)):
            for param in params:
                self.state[param]["use_muon"] = flag

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                slots = self.state[param]
                param.mul_(1 - group["lr"] * group["wd"])
                if not slots["use_muon"]:
                    slots["step"] = slots.get("step", 0) + 1
                    adam(param, slots, ("moment1", "moment2"), slots["step"], group, group["adamw_betas"], 1e-8)
                    continue
                momentum = slots.setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.mul_(group["momentum"]).add_(param.grad)
                mixed = param.grad.add(momentum, alpha=group["momentum"])
                update = orthogonalized(mixed, "keller", group["ns_steps"]) * 0.2 * math.sqrt(max(param.shape))
                param.add_(update, alpha=-group["lr"])


ToyMuon.__module__, ToyMuon.__name__ = "toy_train", "Muon"


class EmergingMuon(torch.optim.Optimizer):
    """Emerging-Optimizers': all but rates and momentum are in a closure."""

    def __init__(self, params, lr=3e-4, momentum=0.95, weight_decay=0.01, *, nesterov=False, coefficient_type="quintic",
                 num_ns_steps=5, scale_mode="spectral", extra_scale_factor=1.0) -> None:  # fmt: skip
        def scaled_orthogonalize_fn(matrix: Tensor) -> Tensor:
            rows, columns = matrix.shape
            factors = {"shape_scaling": max(1, rows / columns), "spectral": max(rows, columns)}
            factor = {**factors, "unit_rms_norm": rows / columns}[scale_mode] ** 0.5 * extra_scale_factor
            name = {"deepseekv4": "deepseek_v4"}.get(coefficient_type, coefficient_type)
            published = COEFFICIENTS[name].steps  # begun again past the end, or its last one repeated
            past_end = published[-1:] if coefficient_type == "deepseekv4" else published
            schedule = [*published, *past_end * num_ns_steps][:num_ns_steps]
            return orthogonalized(matrix, name, num_ns_steps, 1e-15, schedule) * factor

        self.nesterov, self.scaled_orthogonalize_fn = nesterov, scaled_orthogonalize_fn
        self.weight_decay_method = "decoupled"
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                mixed = param.grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum
                param.add_(self.scaled_orthogonalize_fn(mixed), alpha=-group["lr"])


EmergingMuon.__module__ = "emerging_optimizers.orthogonalized_optimizers.muon"
EmergingMuon.__name__ = "Muon"
