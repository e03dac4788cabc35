"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, which is renewed once in a period of steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...names.vocabulary import SOAP as OPTIONS, ParamGroup
from .form import FRACTION, POSITIVE, MatrixMethod, MethodSlot, Option, WholeMatrix
from .muon import UPDATE_RMS

LEFT, RIGHT, LEFT_BASIS, RIGHT_BASIS = "left", "right", "left_basis", "right_basis"
"""Slots: means of ``G Gᵀ`` and ``Gᵀ G``, and their approximate eigenvectors, by falling eigenvalue."""

MEAN, SQUARES, COUNT = "mean", "rotated_squares", "count"
"""Slots: the mean of gradients, the mean squares of rotated ones, and the number of updates begun."""


def _in_eigenbasis(whole: WholeMatrix) -> Tensor:
    """Return the update of Vyas et al. 2024 (arXiv 2409.11321, algorithm 3), as the authors' code orders its parts.

    The first gradient makes the bases and no update.  Later ones update with the bases of the steps before, and then
    take part in the preconditioner.
    """
    gradient, options = whole.matrix, whole.options
    mean, squares, count = whole.state[MEAN], whole.state[SQUARES], whole.state[COUNT]
    left, right = whole.state[LEFT_BASIS], whole.state[RIGHT_BASIS]
    beta1, beta2 = options["betas"]
    num_updates = round(count.item())

    # Adam in the bases of the steps before.
    update = torch.zeros_like(gradient)
    if num_updates:
        mean.lerp_(gradient, 1 - beta1)
        squares.lerp_((left.T @ gradient @ right).square_(), 1 - beta2)
        rotated = (left.T @ mean @ right) / squares.sqrt().add_(options["eps"])
        correction = math.sqrt(1 - beta2**num_updates) / (1 - beta1**num_updates)
        update = (left @ rotated @ right.T) * correction

    # The preconditioner, and its eigenvectors: exact ones at first, then renewed once in a period.
    for slot, outer in ((LEFT, gradient @ gradient.T), (RIGHT, gradient.T @ gradient)):
        whole.state[slot].lerp_(outer, 1 - options["shampoo_beta"])
    if not num_updates:
        for slot, basis in ((LEFT, left), (RIGHT, right)):
            basis.copy_(torch.linalg.eigh(whole.state[slot])[1].flip(1))
    elif num_updates % options["period"] == 0:
        squares.copy_(squares[_renew(left, whole.state[LEFT])][:, _renew(right, whole.state[RIGHT])])
    count.add_(1)
    return update


def _renew(basis: Tensor, preconditioner: Tensor) -> Tensor:
    """Renew a basis by one power iteration and QR (algorithm 4); return the order of its former vectors."""
    product = preconditioner @ basis
    order = (basis * product).sum(dim=0).argsort(descending=True, stable=True)
    basis.copy_(torch.linalg.qr(product[:, order])[0])
    return order


def _flops(m: int, n: int, group: ParamGroup) -> float:
    """Return the FLOPs of a step: four products of each of the sides ``m m n`` and ``m n n``, and a share of a square
    product and QR, ``2 s³ + 10/3 s³`` (Golub & Van Loan).
    """
    share = 1 / float(group["period"])
    return 8 * m * n * (m + n) + share * 16 / 3 * (m**3 + n**3)


SOAP = MatrixMethod(
    "soap",
    _in_eigenbasis,
    slots={
        MEAN: MethodSlot("[m, n]", at_owner=True),
        SQUARES: MethodSlot("[m, n]", at_owner=True),
        LEFT: MethodSlot("[m, m]", at_owner=True),
        RIGHT: MethodSlot("[n, n]", at_owner=True),
        LEFT_BASIS: MethodSlot("[m, m]", at_owner=True),
        RIGHT_BASIS: MethodSlot("[n, n]", at_owner=True),
        COUNT: MethodSlot("[1, 1]", at_owner=True),
    },
    options={
        "betas": Option(
            OPTIONS["betas"],
            lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            "two numbers in [0, 1)",
        ),
        "shampoo_beta": Option(OPTIONS["shampoo_beta"], *FRACTION),
        "eps": Option(OPTIONS["eps"], *POSITIVE),
        "period": Option(OPTIONS["period"], lambda steps: steps >= 1 and steps == int(steps), "a number of steps"),
        "adjust_lr_fn": Option(OPTIONS["adjust_lr_fn"]),
    },
    takes="gradient",
    cost=_flops,
    rms=lambda m, n, group: UPDATE_RMS,
)
