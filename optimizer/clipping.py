"""Clipping of gradients by their global norm, each element counted once, on any meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..layouts.tensors import is_first_copy, local_of
from ..names.errors import ArgumentError, called_like
from ..names.wording import listed
from .ground.tensors import cut_portions, rounded_once
from .planning.schedule import Ranks
from .state import check_gradients
from .step.exchange import gather_numbers
from .step.rank_sets import collective_order, group_of, groups_of_mesh, ranks_of

NORM_EPS = 1e-6
"""The number that is added to the norm before division, as `torch.nn.utils.clip_grad_norm_` does."""

IN_BUFFERS = WeakIdKeyDictionary()
"""Parameters whose gradients a `LayerWise` moves to its buffers."""


@torch.no_grad()
@called_like("clip_grad_norm_(model.parameters(), 1.0)")
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
    pipeline: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that their total 2-norm is at most ``max_norm``.

    Parameters may be plain tensors and DTensors on any meshes, in any mixture (FSDP, HSDP, tensor and expert
    parallelism), which torch's function of this name refuses.  Every element counts once, however many ranks hold it.
    A plain tensor is the same on all ranks (DDP), or belongs to this rank's pipeline stage.

    Collective: all ranks that hold a parameter must call it, with its gradient or without.  All get the same bits, or
    an error: parameters that differ between ranks must be on a mesh that says so.  Squares are added up in float64 and
    the norm is rounded to float32, so another sharding gives the same norm, except about once in ten million, when it
    gives its neighbour.  16-bit gradients are scaled in float32 and rounded once.

    Args:
        parameters: the same ones, in the same order, on every rank that shares them.
        error_if_nonfinite: raise if the norm is not finite, which reads it back from the device; otherwise scale by it,
            as torch does.
        pipeline: process group of one rank of each pipeline stage, whose squares are added up too.

    Returns:
        The norm before clipping, float32, 0-d.

    Raises:
        ArgumentError: ranks that share a parameter do not have the same norm, as they have others on a mesh of only
            some of them; or their sets of ranks overlap in part, so that this cannot be seen; or gradients are in the
            buffers of a `LayerWise`.
        RuntimeError: ``max_norm`` is not the same on all ranks; a gradient is not laid out as its parameter; or the
            norm is not finite and ``error_if_nonfinite``.  The gradients are unchanged then.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if num_in_buffers := sum(param in IN_BUFFERS for param in params if IN_BUFFERS):
        raise ArgumentError(
            f"{num_in_buffers} of {len(params)} parameters have their gradients in the buffers of a LayerWise "
            "optimizer, where they would be neither counted nor clipped. Write optimizer.clip_grad_norm_(max_norm)"
        )
    check_gradients(params, [param.grad for param in params])
    # The sum of squares over all ranks, and over pipeline stages.
    total = _sum_over_ranks(params, max_norm)
    squares, differs, limits, widest = total.squares, total.differs, total.limits, total.widest_ranks
    if pipeline is not None:
        received = gather_numbers([squares, differs.to(squares), *limits], pipeline)
        squares, differs = received[:, 0].sum(), received[:, 1].any()
        limits = [received[:, 2].amin(), received[:, 3].amax()]
    # All must give one limit, and scale what they share by one norm.
    if pipeline is not None or any(widest):
        refuse_other_limits(max_norm, torch.stack(limits))
    if any(widest) and differs:
        peers = " and ".join(f"ranks {listed(ranks)}" for ranks in widest if ranks) or "another pipeline stage"
        raise ArgumentError(
            f"ranks would scale gradients by different norms, and what they share would drift apart: of {peers} some "
            "have gradients that others lack, such as experts, or other values of shared parameters. Put such "
            "parameters on a mesh of all these ranks, or reduce the gradients first"
        )
    gradients = [local_of(param.grad) for param in params if param.grad is not None]
    return clip_with(gradients, squares, max_norm, error_if_nonfinite)


def clip_with(gradients: Sequence[Tensor], squares: Tensor, max_norm: float, error_if_nonfinite: bool) -> Tensor:
    """Scale this rank's part of the gradients, given the sum of the squares of all of them; return their norm."""
    norm = squares.sqrt().float()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped; skip this step, or give "
            "error_if_nonfinite=False to scale them by it anyway"
        )
    factor = (max_norm / (norm + NORM_EPS)).clamp(max=1.0)
    # Many at once: 16-bit gradients go through float32 copies, a portion at a time.
    by_kind: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_kind[gradient.device, gradient.dtype].append(gradient)
    for (device, _), tensors in by_kind.items():
        for portion in cut_portions([tensors]):
            with rounded_once(*portion) as [exact]:
                torch._foreach_mul_(exact, factor.to(device, exact[0].dtype))
    return norm


def refuse_other_limits(max_norm: float, limits: Tensor) -> None:
    """Raise RuntimeError unless ``limits``, the ``max_norm`` of all ranks or their range, are this rank's."""
    if differing := sorted({*limits.tolist()} - {float(max_norm)}):
        raise RuntimeError(
            f"gradients are not clipped: max_norm is {float(max_norm)} on rank {dist.get_rank()}, and {differing[0]} "
            "on others. Every rank must give the same; the gradients are as they were"
        )


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements of tensors, float64, 0-d, on ``device``."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


@dataclass(frozen=True, slots=True, eq=False)
class _Total:
    """The sum of the squares of all gradients, and what tells whether the ranks agree on it.

    Attributes:
        differs: whether some rank that has a part of the sum has another sum.
        limits: the least and the greatest ``max_norm``.
        widest_ranks: the widest sets of ranks that share parameters with this one.
    """

    squares: Tensor
    differs: Tensor
    limits: list[Tensor]
    widest_ranks: list[Ranks]


def _sum_over_ranks(params: Sequence[Tensor], max_norm: float) -> _Total:
    """Sum up the squares of all gradients, on the device of the first parameter.  Collective."""
    # Parameters by the ranks that share them, on any mesh; the widest of the sets receive the sums of all others.
    by_mesh: defaultdict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for param in params:
        by_mesh[param.device_mesh if isinstance(param, DTensor) else None].append(param)
    sharing: defaultdict[Ranks, list[Tensor]] = defaultdict(list)
    for members in by_mesh.values():
        sharing[ranks_of(members[0], None)] += members
    widest = []
    for ranks in sharing:
        if not any({*ranks} < {*other_ranks} for other_ranks in sharing):
            widest.append(ranks)
    device = params[0].device if params else torch.device("cpu")
    terms = [torch.zeros((), dtype=torch.float64, device=device)]
    differs = torch.zeros((), dtype=torch.bool, device=device)
    limits = [terms[0] + max_norm] * 2
    # Sorted: every rank uses the groups that it shares with others in one global order.
    for ranks, members in sorted(sharing.items(), key=lambda item: collective_order(item[0])):
        # Each gradient counts where its first copy is.
        gradients = [local_of(p.grad) for p in members if p.grad is not None and is_first_copy(p.grad)]
        squares = sum_of_squares(gradients, members[0].device)
        mesh = members[0].device_mesh if isinstance(members[0], DTensor) else None
        if (group := group_of(ranks, *groups_of_mesh(mesh))) is not None:
            # The sums of smaller sets are complete, if all of their ranks are in this one.
            numbers = [squares, _sum_in_order(terms), squares.new_tensor(len(widest)), *limits]
            received = gather_numbers([number.to(squares) for number in numbers], group)
            squares, sums = received[:, 0].sum(), received[:, 1]
            limits = [received[:, 3].amin().to(device), received[:, 4].amax().to(device)]
            if ranks in widest:
                are_equal = ((sums == sums[0]) | (sums.isnan() & sums[0].isnan())) & (received[:, 2] == 1)
                differs = differs | ~are_equal.all().to(device)
        terms.append(squares.to(device))
    return _Total(_sum_in_order(terms), differs, limits, widest_ranks=widest)


def _sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """Add up from the smallest to the largest, as ranks may have the same terms in different orders."""
    return torch.stack([*terms]).sort().values.sum()
