"""A run whose ranks copy their state to the memory of nodes: folders here, and ranks that are killed."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt import LostRankError, MuonckptError, Restored, Series

from .fsdp_model import build, steps
from .killed_saves import killed_at


def series(run: Path, node: Path) -> Series:
    return Series(run, memory=node)


def state(net: torch.nn.Module, opt: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(net, opt)
    return {
        "model": weights,
        "optimizer": moments,
        "trainer": {"step": step, "seen": [step, "tokens", torch.tensor(step)]},
    }


def train(
    rank: int,
    world: int,
    run: Path,
    nodes: list[Path],
    last: int,
    saved: int,
    killed: Callable[[int], object] = id,
) -> list[Any]:
    """Copy after every step, and save after one; return the fingerprints of all steps, and what copies have sent."""
    net, opt = build()
    checkpoints, prints, sent_bytes = series(run, nodes[rank]), list[Any](), list[int]()
    honest = dist.all_to_all_single

    def counted(receive: torch.Tensor, send: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent_bytes.append(send.nbytes)
        return honest(receive, send, *args, **kwargs)

    for step in range(last + 1):
        steps(net, opt, step, step + 1)
        current = state(net, opt, step)
        prints.append(muonckpt.fingerprints(current).tensors)
        if step == saved:
            checkpoints.save(step, current)
        if step == last:
            killed(rank)
        dist.all_to_all_single, sent_bytes = counted, []
        try:
            copy = checkpoints.async_copy(step, current)
            assert copy is not None
            copy.result()
        except LostRankError:
            return prints
        finally:
            dist.all_to_all_single = honest
    return [prints, sum(sent_bytes)]


def killed_in(event: str, name: str, node: list[int], rank: int) -> None:
    """Have the ranks of a node killed when the first of them is about to do something to a path with this ending."""
    if rank in node:
        killed_at(event, name)()


def restored(rank: int, world: int, run: Path, nodes: list[Path]) -> tuple[Any, ...]:
    """Restore into a model that has other values; return what, its fingerprints, and what was said."""
    net, opt = build()
    steps(net, opt, 90, 91)
    template = state(net, opt, -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored: Restored | None = series(run, nodes[rank]).restore(template)
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    trainer_step = template["trainer"]["step"]
    assert restored is not None and template["trainer"]["seen"] == [trainer_step, "tokens", torch.tensor(trainer_step)]
    names_left = sorted(path.name for path in nodes[rank].glob("*/*"))
    return restored.step, restored.memory, str(restored), muonckpt.fingerprints(template).tensors, messages, names_left


def copied_with_fault(
    rank: int, world: int, run: Path, nodes: list[Path], call: str, file: str
) -> tuple[str, list[str]]:
    """Copy twice; the second time a system call on a file fails on rank 1.  What is said, and what is there then."""
    copies = series(run, nodes[rank])
    state = {f"w{number}": torch.full((1000,), float(number)) for number in range(world)}
    first = copies.async_copy(1, state)
    assert first is not None
    first.result()
    dist.barrier()
    honest = getattr(os, call)

    def fail(descriptor: int, *args: Any) -> Any:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return honest(descriptor, *args)

    if rank == 1:
        setattr(os, call, fail)
    try:
        second = copies.async_copy(2, state)
        assert second is not None
        second.result()
        return "copied", []
    except MuonckptError as error:
        return f"{type(error).__name__}: {error}", [path.name[:13] for path in nodes[rank].glob("*/*")]
    finally:
        setattr(os, call, honest)
