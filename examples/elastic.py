"""A run that loses a machine while it saves, goes on without it, and takes it back; then every step is accounted for.

    torchrun --nnodes 3:4 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint HOST:29400 elastic.py FOLDER

on each of four machines trains, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment: else torch 2.13 meets the
addresses of ranks that have ended, where ranks are started again.

``python elastic.py FOLDER`` plays all of this on one machine: four launchers, one of which is killed with its rank, by
SIGKILL, while all save, and is started again when the others have gone on.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt
from muonckpt.optimizer import Muon

NODES, LEAST = 4, 3
STEPS, EVERY = 24, 4
"""Steps of the whole run, and from one save to the next."""

LOST_AT = 11
"""The step in whose save a machine is lost: it ends on a multiple of `EVERY`."""

BACK_AT = 15
"""The step after which it comes back."""

LOG = "steps.jsonl"


class Model(nn.Module):
    """A matrix in rows over all ranks, which is to become the targets' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = nn.Parameter(distribute_tensor(torch.zeros(10, 6), self.mesh, [Shard(0)]))

    def forward(self, target: Tensor) -> Tensor:
        return (self.weight - distribute_tensor(target, self.mesh, [Shard(0)])).square().sum() / 2


class PowerCut:
    """Ends this rank and its launcher when it is written."""

    has_been_seen = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if self.has_been_seen:  # the first time it is only looked at
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        self.has_been_seen = True
        return OrderedDict, ()


def train(folder: str) -> None:
    """Train on one rank, each time that it is started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Model()
    optimizer = Muon(model.named_parameters(), lr=0.05)

    def state() -> dict[str, Any]:
        weights, slots = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": slots}

    with muonckpt.Series(f"{folder}/run", on=(signal.SIGTERM,)) as series:
        template = state()
        restored = series.restore(template)
        if restored is not None:
            set_state_dict(model, optimizer, model_state_dict=template["model"], optim_state_dict=template["optimizer"])
        first = 0 if restored is None else restored.step + 1
        for step in range(first, STEPS):
            before = muonckpt.fingerprints(state()).tensors
            optimizer.zero_grad()
            model(torch.randn(10, 6, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            if rank == 0:
                note(folder, step, first, ranks, before)
            while step > BACK_AT and ranks < NODES and not series.due(step):
                time.sleep(0.1)  # torchrun sends SIGTERM when the machine is back
            if step % EVERY == EVERY - 1 or series.due(step):
                cut = {f"cut {rank}": PowerCut()} if (step, first, rank) == (LOST_AT, 0, NODES - 1) else {}
                series.save(step, {**state(), **cut})
    dist.barrier()
    dist.destroy_process_group()


def note(folder: str, step: int, first: int, ranks: int, before: Mapping[str, Any]) -> None:
    """Write down a step, the first one since the ranks were started, and the state from which the step began."""
    prints = [before[key].fingerprint for key in sorted(before)]
    began = hashlib.blake2b(repr(prints).encode(), digest_size=4).hexdigest()
    with Path(folder, LOG).open("a") as log:
        log.write(json.dumps({"step": step, "first": first, "ranks": ranks, "from": began}) + "\n")


# --- Four machines, played by one -------------------------------------------------------------------------------------


def launch(folder: str, port: int) -> None:
    """Launch the ranks of one machine, as torchrun does."""
    config = LaunchConfig(
        min_nodes=LEAST,
        max_nodes=NODES,
        nproc_per_node=1,
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"last_call_timeout": 2, "keep_alive_interval": 1, "is_host": False},
        max_restarts=9,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, train_in_fork)(folder)


def train_in_fork(folder: str) -> None:
    """Train in a fork of a launcher, without its handler of SIGTERM; a program that torchrun starts has none."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    train(folder)


def play(folder: str) -> None:
    """Start four launchers, wait for one to be lost, and start it again."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meeting = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    nodes = [start_node(folder, port) for _ in range(NODES)]
    while all(node.is_alive() for node in nodes):
        time.sleep(0.1)
    while not any(entry["first"] and entry["step"] >= BACK_AT for entry in steps(folder)):
        time.sleep(0.1)
    nodes.append(start_node(folder, port))
    for node in nodes:
        node.join()
    del meeting


def start_node(folder: str, port: int) -> ForkProcess:
    node = get_context("fork").Process(target=launch, args=(folder, port))
    node.start()
    return node


def steps(folder: str) -> list[dict[str, Any]]:
    """Return the log's entries, in order."""
    log = Path(folder, LOG)
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def account(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each time that the ranks were started: its steps, and which of these were repeated.

    Raises:
        ValueError: a step was left out, or repeated from another state than the first time.
    """
    lives: dict[tuple[int, int], list[int]] = {}
    began: dict[int, str] = {}
    lines = []
    for entry in entries:
        if began.setdefault(entry["step"], entry["from"]) != entry["from"]:
            raise ValueError(f"step {entry['step']} was repeated from another state")
        lives.setdefault((entry["first"], entry["ranks"]), []).append(entry["step"])
    if sorted(began) != [*range(STEPS)]:
        raise ValueError(f"steps were left out: {sorted({*range(STEPS)} - {*began})}")
    earlier_steps: set[int] = set()
    for (first, ranks), life_steps in lives.items():
        again = sorted(earlier_steps & {*life_steps})
        source = f"the checkpoint of step {first - 1}" if first else "nothing"
        repeated = f"of which {again[0]} to {again[-1]} again, from the same states" if again else "none of them again"
        lines.append(f"{ranks} ranks, from {source}: steps {life_steps[0]} to {life_steps[-1]}, {repeated}")
        earlier_steps |= {*life_steps}
    return lines


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        train(sys.argv[1])
    else:
        Path(sys.argv[1]).mkdir(parents=True)
        play(sys.argv[1])
        print("\n".join(account(steps(sys.argv[1]))))
