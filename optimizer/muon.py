"""Muon: momentum orthogonalised by Newton-Schulz, for matrices that are sharded in any supported way.

A step updates momentum where it rests, sends it (16 bits an element) to the owner of each matrix, orthogonalises there,
sends the result back along the same boxes, and applies it in full precision where the parameter rests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..layouts.tensors import local_of
from .exchange import Ranks, Wire, agree, group_of, ranks_of
from .newton_schulz import COEFFICIENTS, orthogonalize
from .scalar import adamw_step
from .schedule import Schedule, device_of, make_schedule
from .state import ADAMW, SLOTS, fault, fresh_state, laid_out_alike, merged, pieces_of, placing

ADJUST_LR: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "none": lambda m, n: 1.0,
}
"""Learning-rate factor of an ``m x n`` matrix.  "original": Jordan et al. 2024; "match_rms_adamw": Liu et al. 2025
(arXiv 2502.16982), so that AdamW's rate and decay carry over; "spectral": Bernstein & Newhouse (arXiv 2410.21265)."""

NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Muon(Optimizer):
    """Muon for matrices and AdamW for the rest, in one optimizer.

    Each parameter group chooses ``algorithm="muon"`` (the default) or ``"adamw"``.  Parameters may be plain tensors or
    DTensors on any mesh (``Shard`` of any dim, even, uneven or empty; ``_StridedShard``; ``Replicate``).  The update of
    a matrix does not depend on how it is sharded: the same global gradients give the same bits on any mesh.

    A parameter of three or more dims is a stack of matrices (experts).  ``pieces=(q, k, v)`` in a group says that the
    rows of its parameters are fused; each piece is orthogonalised and scaled on its own.

    State exists from construction on, for every parameter, in the parameter's layout: ``momentum_buffer`` (an
    exponential moving average, ``m = momentum * m + (1 - momentum) * g``) or ``exp_avg``, ``exp_avg_sq`` and ``step``.
    So stock ``get_optimizer_state_dict`` and DCP save and load all of it, gradients seen or not.  A parameter without
    a gradient is skipped, as in torch; its gradient must be missing on all ranks that hold it.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr, weight_decay: defaults of all groups.  Decay is decoupled: ``p *= 1 - lr * weight_decay``.
        momentum, nesterov: of "muon" groups.
        adjust_lr: a key of ``ADJUST_LR``: how the rate grows with the matrix's shape.
        ns, ns_steps, ns_dtype, eps: coefficient set, iterations, dtype ("bfloat16" or "float32"; also what travels)
            and smallest norm of Newton-Schulz.
        pieces: rows fused in each parameter of the group, or None.
        replicas: process group over which *plain* tensors are replicated (DDP); their matrices are shared out over it.
            None: this process orthogonalises its plain tensors itself.

    Raises:
        ValueError: an unknown algorithm, scale, coefficient set or dtype, or a hyper-parameter out of range.
        LayoutError: a parameter that is no matrix, or pieces that do not add up to its rows.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr: str = "original",
        ns: str = "quintic",
        ns_steps: int = 5,
        ns_dtype: str = "bfloat16",
        eps: float = 1e-7,
        pieces: tuple[int, ...] | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._replicas = replicas
        self._process_groups: dict[Ranks, dist.ProcessGroup | None] = {}
        self._made: list[Schedule] | None = None
        self._muon = {
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr": adjust_lr,
            "ns": ns,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "eps": eps,
            "pieces": pieces,
            "convention": "ema",
        }
        super().__init__(params, {"algorithm": "muon", "lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create the state of its parameters.  If it is refused, the optimizer is as it was."""
        algorithm = param_group.get("algorithm", "muon")
        if algorithm not in SLOTS:
            raise ValueError(f"unknown algorithm {algorithm!r}; expected one of {sorted(SLOTS)}")
        super().add_param_group({**(self._muon if algorithm == "muon" else ADAMW), **param_group})
        group = self.param_groups[-1]
        try:
            _check(group)
            fresh = {param: fresh_state(param, group) for param in group["params"]}
        except Exception:
            self.param_groups.pop()
            raise
        for param, slots in fresh.items():
            self.state[param].update(slots)
        self._made = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: schedules refer to the original's parameters, so a copy makes its own."""
        return {
            **super().__getstate__(),
            "_muon": self._muon,
            "_replicas": self._replicas,
            "_process_groups": {},
            "_made": None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, and those hyper-parameters that belong to the run (`RESTORED`); if refused, nothing is changed.

        What says how to compute (``algorithm``, ``ns``, ``pieces``, …) stays as the code has it; a difference is
        warned of.  A parameter with ``requires_grad=False`` may be missing, as stock DCP leaves it out when it sets a
        state dict; it keeps the state it has.

        Raises:
            ValueError: names every parameter whose state is incomplete or laid out otherwise than the parameter, or a
                group of another algorithm, or the momentum convention if it is not "ema".
        """
        state, groups = state_dict["state"], state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in side] for side in (self.param_groups, groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the state has groups of {sizes[1]} parameters, this optimizer of {sizes[0]}")
        hyper, wanted, problems = [], dict(state), []
        for number, (mine, saved) in enumerate(zip(self.param_groups, groups, strict=True)):
            hyper.append(merged(number, mine, saved))
            for index, (param, key) in enumerate(zip(mine["params"], saved["params"], strict=True)):
                if key not in state and not param.requires_grad:
                    wanted[key] = self.state[param]
                found = wanted.get(key, {})
                why = fault(self.state[param], found)
                if why:
                    problems.append(f"group {number} parameter {index} {tuple(param.shape)}: {why}")
        if problems:
            raise ValueError("the state does not fit, training would go on wrongly: " + "; ".join(problems))
        super().load_state_dict({"state": wanted, "param_groups": hyper})
        self._made = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update.  Collective: every rank that holds a parameter must call it.

        Raises:
            RuntimeError: on all ranks, if a gradient is missing on some of the ranks that hold its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                check_gradient(param, param.grad)
        hyper = {param: group for group in self.param_groups for param in group["params"]}
        for schedule in self._schedules():
            self._muon_step(schedule, [hyper[param] for param in schedule.params])
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                adamw_step(group, self.state)
        return loss

    def _muon_step(self, schedule: Schedule, hyper: list[dict[str, Any]]) -> None:
        dtype, device = NS_DTYPES[hyper[0]["ns_dtype"]], device_of(schedule)
        active = [param.grad is not None for param in schedule.params]
        intent = bytes(active)

        out = Wire(schedule.gather, dtype, device, schedule.group)
        for number, (param, group) in enumerate(zip(schedule.params, hyper, strict=True)):
            if active[number]:
                out.pack(number, self._accumulate(param, group))
        out.run(intent)

        back = Wire(schedule.scatter, dtype, device, schedule.group)
        for number in schedule.owned:
            unit = schedule.units[number]
            if active[unit.param]:
                # A fresh buffer: dense and aligned alike on every topology, as the bits of a product may depend on it.
                matrix = torch.empty(unit.shape, dtype=dtype, device=device)
                for strip, values in out.unpack(number):
                    strip.of(matrix).copy_(values)
                group = hyper[unit.param]
                back.pack(
                    number,
                    orthogonalize(
                        matrix.view(unit.rows_columns),
                        coefficients=group["ns"],
                        steps=group["ns_steps"],
                        dtype=dtype,
                        eps=group["eps"],
                    ),
                )
        back.run(intent)

        for number, (param, group) in enumerate(zip(schedule.params, hyper, strict=True)):
            if active[number]:
                _apply(local_of(param), schedule, back, number, group)

    def _accumulate(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the gradient into the momentum; return the local part of what is to be orthogonalised, contiguous."""
        momentum = local_of(self.state[param]["momentum_buffer"])
        gradient = local_of(param.grad).to(momentum.dtype)  # type: ignore[arg-type]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]).contiguous() if group["nesterov"] else momentum.contiguous()

    def _schedules(self) -> list[Schedule]:
        """One schedule per set of ranks and wire dtype; made at the first step, and anew when groups change."""
        if self._made is None:
            found: defaultdict[tuple[Ranks, str], list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
            for group in self.param_groups:
                if group["algorithm"] == "muon":
                    for param in group["params"]:
                        found[ranks_of(param, self._replicas), group["ns_dtype"]].append((param, group))
            self._made = []
            # Sorted: every rank makes and uses the groups that it shares with others in one global order.
            for (ranks, _), members in sorted(found.items(), key=lambda item: item[0]):
                params = [param for param, _ in members]
                if ranks not in self._process_groups:
                    self._process_groups[ranks] = group_of(ranks, params[0])
                pieces = [pieces_of(group) for _, group in members]
                steps = [group["ns_steps"] for _, group in members]
                schedule = make_schedule(params, pieces, steps, self._process_groups[ranks])
                agree(schedule.digest, schedule.group, device_of(schedule))
                self._made.append(schedule)
        return self._made


def _apply(local: Tensor, schedule: Schedule, arrived: Wire, number: int, group: dict[str, Any]) -> None:
    """Decay, scale and subtract, in float32 at least, whatever the parameter's dtype."""
    precision = torch.promote_types(local.dtype, torch.float32)
    update = torch.empty(local.shape, dtype=precision, device=local.device)
    for strip, values in arrived.unpack(number):
        scale = ADJUST_LR[group["adjust_lr"]](*schedule.units[strip.plan].rows_columns)
        torch.mul(values.to(precision), scale, out=strip.of(update))
    lr = float(group["lr"])
    result = local.to(precision)
    result.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
    if result is not local:
        local.copy_(result)


def _check(group: dict[str, Any]) -> None:
    def need(name: str, fine: bool, expected: str) -> None:
        if not fine:
            raise ValueError(f"{name}={group[name]!r}: expected {expected}")

    need("lr", float(group["lr"]) >= 0, "a rate >= 0")
    need("weight_decay", group["weight_decay"] >= 0, "a decay >= 0")
    if group["algorithm"] == "adamw":
        need("betas", all(0 <= beta < 1 for beta in group["betas"]), "two numbers in [0, 1)")
        return
    need("momentum", 0 <= group["momentum"] < 1, "a number in [0, 1)")
    need("adjust_lr", group["adjust_lr"] in ADJUST_LR, f"one of {sorted(ADJUST_LR)}")
    need("ns", group["ns"] in COEFFICIENTS, f"one of {sorted(COEFFICIENTS)}")
    need("ns_steps", group["ns_steps"] >= 1, "at least one step")
    need("ns_dtype", group["ns_dtype"] in NS_DTYPES, f"one of {sorted(NS_DTYPES)}")
    need("eps", group["eps"] > 0, "a positive number")


def check_gradient(param: Tensor, gradient: Tensor | None) -> None:
    """Refuse a gradient that is not laid out exactly as its parameter; elements would go to wrong places."""
    if gradient is None:
        return
    if gradient.is_sparse:
        raise RuntimeError(f"Muon does not take sparse gradients (parameter of shape {tuple(param.shape)})")
    if not laid_out_alike(gradient, param):
        found, expected = placing(gradient), placing(param)
        raise RuntimeError(f"a gradient is {found}, its parameter {expected}; redistribute the gradient first")
