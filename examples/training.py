"""One step of training on a rank's rows of the global batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Tensor,
    global_rows: int,
    rows_per_pass: int = 2,
) -> float:
    """Update `model` once and return the loss before the update: the mean over the whole global batch.

    rows: int64 [rows, seq + 1], this rank's part of a global batch of `global_rows` rows.
    """
    loss = accumulate_gradients(model, rows, global_rows, rows_per_pass)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accumulate_gradients(model: nn.Module, rows: Tensor, global_rows: int, rows_per_pass: int = 2) -> float:
    """Leave the gradient of the global mean loss in the parameters, and return that loss.

    The rows go through the model `rows_per_pass` at a time, whatever the number of ranks: each pass computes
    the same bits on any topology, and that decides only the order in which the passes' gradients are added.
    A sharded model reduces its gradients once, in the last pass.
    """
    if len(rows) % rows_per_pass:
        raise ValueError(f"{len(rows)} rows of this rank are not a multiple of {rows_per_pass} rows per pass")
    targets = global_rows * (rows.shape[1] - 1)
    total = torch.zeros((), dtype=torch.float64)
    passes = torch.split(rows, rows_per_pass)
    for number, part in enumerate(passes, start=1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(passes))
        logits = model(part[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum") / targets
        torch.autograd.backward(loss)
        total += loss.detach()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()
