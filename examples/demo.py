"""The main job, end to end: train on 4 ranks as EP x FSDP, save, reshard offline to 2 ranks, resume there, compare.

Gradients are added up in float64 (`sharding.shard`), where a sum of a few float32 numbers is exact, so its order does
not matter and the run that goes on on 2 ranks must be the run on 4 ranks, bit for bit, with the experts split over the
two or not.  That claim is measured too: the 2-rank run is repeated with the batch given to the ranks in another order,
and only as much difference as that makes is allowed.  As a control, a run whose momentum, an average, is
as large as the sum that other programs keep must be visibly another run, and learn less.

Exits 1 if anything differs that should not, or does not differ that should.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model import ModelConfig, Transformer
from report import Distance, Outcome, print_checks, show_distances, show_fingerprints, show_losses, stored_fingerprints
from sharding import shard
from text import global_batch, rank_rows, standard_library
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from training import train_step

import muonckpt
from muonckpt.algebra.fingerprint import as_hex, fingerprint
from muonckpt.optimizer import Muon

OUT = Path(__file__).parents[1] / "out" / "demo"
CHART = OUT / "losses.png"
SAVE_AT, LAST = 20, 40
ROWS, SEQ = 8, 128
COMMAND = Path(sys.executable).with_name("muonckpt")


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a run goes on on 2 ranks.

    Attributes:
        ep: so many of them share the experts.
        deal: rotates the rows of the batch.
        wrong: as if the momentum, taken for an average, were a sum, which is larger by ``1 / (1 - momentum)``.
    """

    label: str
    ep: int = 1
    deal: int = 0
    wrong: bool = False


CONTINUATIONS = {
    "resumed": Continuation("resumed on 2 ranks, ep=1 fsdp=2"),
    "split": Continuation("resumed on 2 ranks, ep=2 fsdp=1", ep=2),
    "reordered": Continuation("  batch in another order", deal=2),
    "wrong": Continuation("  control: sum read as ema", wrong=True),
}


def build(ep: int) -> tuple[Transformer, Muon]:
    """The sharded model, its experts split over `ep` ranks, and Muon for its matrices beside AdamW for the rest."""
    model = Transformer(ModelConfig())
    shard(model, ep, reduce_dtype=torch.float64)
    groups = []
    for weight in model.weights():
        if weight.kind in ("matrix", "experts"):
            groups.append({"params": [weight.parameter], "lr": 0.01, "pieces": weight.row_blocks or None})
        else:
            groups.append({"params": [weight.parameter], "lr": 3e-3, "algorithm": "adamw"})
    return model, Muon(groups)


def train(model: Transformer, optimizer: Muon, first: int, last: int, deal: int = 0) -> list[float]:
    """Steps ``first … last - 1``; ``deal`` rotates which rank gets which rows."""
    text = standard_library()
    losses = []
    for step in range(first, last):
        batch = global_batch(text, seed=0, step=step, rows=ROWS, seq=SEQ).roll(deal, 0)
        losses.append(train_step(model, optimizer, rank_rows(batch, dist.get_rank(), dist.get_world_size()), ROWS))
    return losses


def reference() -> None:
    """Train to the end, saving half-way while training goes on."""
    model, optimizer = build(ep=2)
    begin = time.perf_counter()
    losses = train(model, optimizer, 0, SAVE_AT)
    trained = time.perf_counter() - begin
    weights, state = get_state_dict(model, optimizer)
    prints = momentum_fingerprints(state)
    begin = time.perf_counter()
    saving = muonckpt.async_save({"model": weights, "optimizer": state}, OUT / "four", provenance={"step": SAVE_AT})
    saved = time.perf_counter() - begin
    begin = time.perf_counter()
    losses += train(model, optimizer, SAVE_AT, LAST)
    saving.result()
    save_outcome("reference", Outcome(losses, whole(model), prints, trained + time.perf_counter() - begin, saved))


def resumed() -> None:
    """Resume every continuation from the resharded checkpoint."""
    for name, continuation in CONTINUATIONS.items():
        model, optimizer = build(continuation.ep)
        begin = time.perf_counter()
        weights, state = get_state_dict(model, optimizer)
        muonckpt.load({"model": weights, "optimizer": state}, OUT / "two")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        loaded = time.perf_counter() - begin
        prints = momentum_fingerprints(state)
        if continuation.wrong:
            for group in optimizer.param_groups:
                for parameter in group["params"] if group["algorithm"] == "muon" else ():
                    optimizer.state[parameter]["momentum_buffer"] /= 1 - group["momentum"]
        begin = time.perf_counter()
        losses = train(model, optimizer, SAVE_AT, LAST, continuation.deal)
        save_outcome(name, Outcome(losses, whole(model), prints, time.perf_counter() - begin, loaded))


def on_ranks(world: int, phase: Callable[[], None]) -> None:
    """Run a phase on `world` processes with a gloo process group."""
    mp.start_processes(run_rank, (world, phase), nprocs=world, start_method="fork")  # torch is imported once


def run_rank(rank: int, world: int, phase: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(OUT / f"{phase.__name__}.store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    phase()
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads outlive their group; if one of them drops a tensor while the interpreter shuts down, the process
    # aborts (github.com/pytorch/pytorch/issues/190489).  So it ends without shutting down.
    os._exit(0)


def whole(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: full(parameter).clone() for name, parameter in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def momentum_fingerprints(state: dict[str, Any]) -> dict[str, str]:
    """Return the fingerprint of every momentum as it lies in memory, by parameter name."""
    prints = {}
    for name, slots in state["state"].items():
        if "momentum_buffer" in slots:
            words = full(slots["momentum_buffer"]).contiguous().view(torch.int32).numpy().view("u4")
            prints[name] = as_hex(fingerprint(words, (0,) * words.ndim))
    return prints


def save_outcome(name: str, outcome: Outcome) -> None:
    if dist.get_rank() == 0:
        outcome.save(OUT / f"{name}.pt")


def muonckpt_command(*arguments: str) -> float:
    """Run the real command, show what it prints, and return its seconds."""
    print(f"\n$ muonckpt {' '.join(arguments)}", flush=True)
    begin = time.perf_counter()
    subprocess.run([COMMAND, *arguments], check=True, cwd=OUT)
    return time.perf_counter() - begin


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    begin = time.perf_counter()

    print(f"training on 4 ranks, ep=2 fsdp=2: {LAST} steps, saving at step {SAVE_AT} …", flush=True)
    on_ranks(4, reference)
    muonckpt_command("inspect", "four")
    verify_seconds = muonckpt_command("verify", "four")
    reshard_seconds = muonckpt_command("reshard", "four", "two", "--mesh", "dp=2")
    muonckpt_command("verify", "two")
    print(
        "\nresuming on 2 ranks: ep=1; ep=2; with the batch in another order; with the momentum misinterpreted …",
        flush=True,
    )
    on_ranks(2, resumed)

    runs = {name: Outcome.load(OUT / f"{name}.pt") for name in ("reference", *CONTINUATIONS)}
    draw(runs)
    fine = report(runs, verify_seconds, reshard_seconds)
    print(f"\n{time.perf_counter() - begin:.0f} s in all; both loss curves: {os.path.relpath(CHART)}")
    return 0 if fine else 1


def draw(runs: dict[str, Outcome]) -> None:
    chart.draw(
        CHART,
        chart.Curve("4 ranks (ep=2 fsdp=2), uninterrupted", runs["reference"].losses),
        chart.Curve("resumed on 2 ranks (ep=1 fsdp=2)", runs["resumed"].losses, SAVE_AT),
        chart.Curve("resumed with a sum read as an average", runs["wrong"].losses, SAVE_AT),
        title=f"Saved on 4 ranks at step {SAVE_AT}, resharded offline, resumed on 2",
    )


def report(runs: dict[str, Outcome], verify_seconds: float, reshard_seconds: float) -> bool:
    """Print the tables and the verdict."""
    saved, loaded, split, wrong = (runs[name] for name in ("reference", "resumed", "split", "wrong"))
    show_losses({"4 ranks": saved, "2, ep=1": loaded, "2, ep=2": split, "wrong": wrong}, SAVE_AT, LAST)
    distances = {name: Distance.between(runs[name], saved) for name in CONTINUATIONS}
    show_distances({continuation.label: distances[name] for name, continuation in CONTINUATIONS.items()})
    same_momentum = show_fingerprints(
        {
            "saved by 4": stored_fingerprints(OUT / "four"),
            "resharded for 2": stored_fingerprints(OUT / "two"),
            "in memory, ep=1": loaded.fingerprints,
            "in memory, ep=2": split.fingerprints,
        }
    )
    print(
        f"\nsaving took {saved.io_seconds:.2f} s of training; verify {verify_seconds:.2f} s, "
        f"reshard {reshard_seconds:.2f} s, "
        f"load {loaded.io_seconds:.2f} s; checkpoint {size_of(OUT / 'four'):,} bytes in 4 files, "
        f"{size_of(OUT / 'two'):,} in 2; training {saved.train_seconds / LAST:.2f} s a step on 4 ranks\n"
    )
    order, worst = distances["reordered"], max(distances["resumed"].parameters, distances["split"].parameters)
    return print_checks(
        {
            "every momentum has one fingerprint: on 4 ranks, in both checkpoints, in memory on 2 ranks": (
                same_momentum and saved.fingerprints == loaded.fingerprints
            ),
            f"2 ranks differ from 4 by no more than the order of reduction makes ({order.parameters:.3g})": (
                distances["resumed"].within(order) and distances["split"].within(order)
            ),
            "with its momentum misinterpreted the run is visibly another one, and learns less": (
                distances["wrong"].parameters > 1000 * max(worst, 1e-6)
                and sum(wrong.losses) > sum(saved.losses[SAVE_AT:])
            ),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
