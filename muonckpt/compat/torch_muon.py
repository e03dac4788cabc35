"""``Muon`` with the arguments of ``torch.optim.Muon``, and updates equal to its own up to rounding, on any mesh."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .. import optimizer
from ..names.coefficients import coefficient_set

TORCH_SCALES = (None, "original", "match_rms_adamw")
"""Values of torch's ``adjust_lr_fn``."""


class Muon(optimizer.Muon):
    """``torch.optim.Muon``, drop-in.

    Groups take torch's options and those of `optimizer.Muon`.  State is the same in both: a state dict of either loads
    into the other.

    Differences: state exists from construction on, not from a parameter's first gradient on; loading an incomplete one
    is refused; and parameters may be sharded in any way, with the same bits as in one process.

    Args:
        params, lr, weight_decay, momentum, nesterov, eps, ns_steps: as in torch, and as for `optimizer.Muon`.
        ns_coefficients: of every step of Newton-Schulz.
        adjust_lr_fn: "original", which is also what None means, or "match_rms_adamw".
        replicas: as for `optimizer.Muon`; torch has no such argument.

    Raises:
        ValueError: a parameter does not have two dims, torch does not have the scale, or `optimizer.Muon` refuses.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        if adjust_lr_fn not in TORCH_SCALES:
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: expected None, 'original' or 'match_rms_adamw'")
        super().__init__(
            params,
            lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            replicas=replicas,
        )
        # torch refuses other dims at the same place.
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim != 2:
                    raise ValueError(
                        f"a parameter of shape {tuple(param.shape)}: torch.optim.Muon takes two dims only; use "
                        "muonckpt.optimizer.Muon for stacks of matrices, and with an 'adamw' group for all others"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return `optimizer.Muon.state_dict`, with coefficients as numbers, as torch has them."""
        state = super().state_dict()
        for group in state["param_groups"]:
            # torch has only numbers, the same in every step
            polynomials = coefficient_set(group["ns_coefficients"])
            if polynomials.steps == (polynomials.tail,) and polynomials.norm_scale == 1:
                group["ns_coefficients"] = polynomials.tail
        return state
