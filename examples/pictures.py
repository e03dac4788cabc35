"""A residual network whose convolutions are Muon's, and a run of it that is killed and goes on as if it had not been.

    torchrun --nproc-per-node 2 pictures.py FOLDER

trains it under FSDP2 to tell generated pictures apart, and goes on from the last checkpoint in FOLDER, if there is one.

``python pictures.py FOLDER`` plays three of these: one runs through, one is killed by SIGKILL between two saves, and
one goes on from what that has left; then the checkpoints at both ends are compared.  It takes some seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stderr
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import muonckpt
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import MODULE_TYPES, Rule

STEPS, EVERY = 24, 4
"""Steps of the whole run, and from one save to the next."""

KILLED_AT = 14
"""The step at which a rank is killed: two steps after a save, and two before the next."""

RANKS, BATCH, SIZE = 2, 32, 12


class Block(nn.Module):
    """Mixes neighbours by a grouped convolution, then channels by one of a single pixel, and adds that to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.neighbours = nn.Conv2d(width, 2 * width, 3, padding=1, groups=4)
        self.channels = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.channels(F.relu(self.neighbours(self.norm(x))))


class Network(nn.Module):
    """A convolution of pixels, blocks at two resolutions, and a head over the mean of all places."""

    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.pixels = nn.Conv2d(1, width, 3, padding=1)
        self.fine = nn.ModuleList(Block(width) for _ in range(2))
        self.halve = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.coarse = nn.ModuleList(Block(2 * width) for _ in range(2))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pixels(x)
        for block in self.fine:
            x = block(x)
        x = self.halve(x)
        for block in self.coarse:
            x = block(x)
        return self.head(x.mean((2, 3)))


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of stripes, upright or lying, and of chequers, with the number of each one's kind."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(3, (BATCH,), generator=generator)
    places = torch.arange(SIZE)
    shifts = torch.randint(4, (2, BATCH, 1), generator=generator)
    columns, rows = ((places + shift) // 2 % 2 for shift in shifts)
    upright = columns[:, None, :].expand(-1, SIZE, -1)
    lying = rows[:, :, None].expand(-1, -1, SIZE)
    shapes = torch.stack([upright, lying, upright ^ lying], dim=1)[torch.arange(BATCH), kinds]
    return (shapes + 0.7 * torch.randn(shapes.shape, generator=generator)).unsqueeze(1), kinds


def train(folder: str, killed_at: int = STEPS) -> float:
    """Train to the last step, from the last checkpoint; return the share of unseen pictures classified right."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Network()
    for module in (*model.fine, *model.coarse, model):
        fully_shard(module)
    # Every convolution is Muon's by its type, with a matrix for each of its groups; input and output are AdamW's.
    rules = [[Rule("embedding", "pixels.weight")], MODULE_TYPES]
    optimizer = Muon.for_model(model, head="head", rules=rules, lr=0.02, adamw_lr=3e-3, weight_decay=0.0)

    def state() -> dict[str, object]:
        weights, optimizer_state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": optimizer_state}

    series = muonckpt.Series(folder)
    template = state()
    restored = series.restore(template)
    if restored is not None:
        set_state_dict(model, optimizer, model_state_dict=template["model"], optim_state_dict=template["optimizer"])
    first = 0 if restored is None else restored.step + 1
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, STEPS):
        if step == killed_at and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        images, kinds = pictures(step)
        loss = F.cross_entropy(model(images[rank::world]), kinds[rank::world])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            series.save(step, state())
    images, kinds = pictures(seed=STEPS)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == kinds).double().mean().item()
    if rank == 0:
        print(f"steps {first} to {STEPS - 1}: {right:.0%} of unseen pictures told apart", flush=True)
    return right


# One machine plays all.


def run_rank(rank: int, store: str, folder: str, killed_at: int) -> None:
    torch.set_num_threads(1)
    with Path(f"{store}.{rank}.log").open("w") as log, redirect_stderr(log):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        train(folder, killed_at)
        dist.destroy_process_group()


def start_ranks(folder: Path, attempt: int, killed_at: int = STEPS) -> None:
    """Train on several ranks; if one of them is killed, the others are ended, as torchrun does."""
    store = str(folder.parent / f"{folder.name}.{attempt}")
    context = get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, store, str(folder), killed_at)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    ranks[-1].join()
    if ranks[-1].exitcode == -signal.SIGKILL:
        for process in ranks:
            process.kill()
        print(f"killed at step {killed_at}", flush=True)
    for process in ranks:
        process.join()
    if any(process.exitcode not in (0, -signal.SIGKILL) for process in ranks):
        raise SystemExit(f"a rank has failed: see {store}.*.log")


def play(folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder.mkdir(parents=True)
    through, killed = folder / "through", folder / "killed"
    start_ranks(through, attempt=0)
    start_ranks(killed, attempt=0, killed_at=KILLED_AT)
    start_ranks(killed, attempt=1)
    ends = [muonckpt.Series(str(run)).latest().path for run in (through, killed)]
    difference = muonckpt.diff(*ends)
    print("both runs have ended with the same bits" if not difference.differs else str(difference))


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(sys.argv[1])
        dist.destroy_process_group()
    else:
        play(Path(sys.argv[1]))
