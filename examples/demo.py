"""The main job, end to end: train on 4 ranks, save, reshard offline to 2 ranks, resume there, compare.

Gradients are added up in float64 (`sharding.shard`), where a sum of a few float32 numbers is exact, so its order does
not matter and the run that goes on on 2 ranks must be the run on 4 ranks, bit for bit.  That claim is measured too:
the 2-rank run is repeated with the batch dealt to the ranks in another order, and only as much difference as that
makes is allowed.  As a control, resuming with zeroed momentum must be visibly another run.

Exits 1 if anything differs that should not, or does not differ that should.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model import ModelConfig, Transformer
from sharding import shard
from text import global_batch, rank_rows, standard_library
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training import train_step

import muonckpt
from muonckpt.fingerprint import as_hex, fingerprint
from muonckpt.optimizer import Muon
from muonckpt.store import directory

OUT = Path(__file__).parents[1] / "out" / "demo"
SAVE_AT, LAST = 20, 40
ROWS, SEQ = 8, 128
COMMAND = Path(sys.executable).with_name("muonckpt")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: losses of its steps, final parameters in full, fingerprints of the momentum it began with, seconds."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    fingerprints: dict[str, str]
    train_seconds: float
    io_seconds: float


def build() -> tuple[Transformer, Muon]:
    """The sharded model, and Muon for its matrices beside AdamW for the rest."""
    model = Transformer(ModelConfig())
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), reduce_dtype=torch.float64)
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


def reference(rank: int, world: int) -> None:
    """Train to the end on 4 ranks, saving half-way."""
    with process_group(rank, world, "reference"):
        model, optimizer = build()
        begin = time.perf_counter()
        losses = train(model, optimizer, 0, SAVE_AT)
        trained = time.perf_counter() - begin
        begin = time.perf_counter()
        weights, state = get_state_dict(model, optimizer)
        muonckpt.save({"model": weights, "optimizer": state}, OUT / "four", provenance={"step": SAVE_AT})
        saved = time.perf_counter() - begin
        prints = momentum_fingerprints(state)
        begin = time.perf_counter()
        losses += train(model, optimizer, SAVE_AT, LAST)
        keep("reference", Outcome(losses, whole(model), prints, trained + time.perf_counter() - begin, saved))


def resumed(rank: int, world: int) -> None:
    """Resume on 2 ranks: as it should be, with the batch dealt otherwise, and with zeroed momentum."""
    with process_group(rank, world, "resumed"):
        for name, deal, zeroed in (("resumed", 0, False), ("dealt", 2, False), ("zeroed", 0, True)):
            model, optimizer = build()
            begin = time.perf_counter()
            weights, state = get_state_dict(model, optimizer)
            template = {"model": weights, "optimizer": state}
            muonckpt.load(template, OUT / "two")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=template["optimizer"])
            loaded = time.perf_counter() - begin
            prints = momentum_fingerprints(template["optimizer"])
            if zeroed:
                for slots in optimizer.state.values():
                    for slot in slots.keys() - {"step"}:
                        slots[slot].zero_()
            begin = time.perf_counter()
            losses = train(model, optimizer, SAVE_AT, LAST, deal)
            keep(name, Outcome(losses, whole(model), prints, time.perf_counter() - begin, loaded))


class process_group:
    """A gloo process group for the time of a phase."""

    def __init__(self, rank: int, world: int, phase: str) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(OUT / f"{phase}.store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()


def whole(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: full(parameter).clone() for name, parameter in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def momentum_fingerprints(state: dict[str, Any]) -> dict[str, str]:
    """Of every momentum as it lies in memory, by parameter name."""
    found = {}
    for name, slots in state["state"].items():
        if "momentum_buffer" in slots:
            words = full(slots["momentum_buffer"]).contiguous().view(torch.int32).numpy().view("u4")
            found[name] = as_hex(fingerprint(words, (0,) * words.ndim))
    return found


def keep(name: str, outcome: Outcome) -> None:
    if dist.get_rank() == 0:
        torch.save(outcome, OUT / f"{name}.pt")


def outcome(name: str) -> Outcome:
    found: Outcome = torch.load(OUT / f"{name}.pt", weights_only=False)  # written by this program, just now
    return found


def muonckpt_command(*arguments: str) -> float:
    """Run the real command, show what it prints, and return its seconds."""
    print(f"\n$ muonckpt {' '.join(arguments)}", flush=True)
    begin = time.perf_counter()
    subprocess.run([COMMAND, *arguments], check=True, cwd=OUT)
    return time.perf_counter() - begin


def stored_fingerprints(path: Path) -> dict[str, str | None]:
    return {t.name: t.fingerprint for t in directory.read(path).tensors if t.name and t.slot == "momentum_buffer"}


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    begin = time.perf_counter()

    print(f"training on 4 ranks: {LAST} steps, saving at step {SAVE_AT} …", flush=True)
    mp.spawn(reference, (4,), nprocs=4)
    muonckpt_command("inspect", "four")
    verify_seconds = muonckpt_command("verify", "four")
    reshard_seconds = muonckpt_command("reshard", "four", "two", "--mesh", "dp=2")
    muonckpt_command("verify", "two")
    print("\nresuming on 2 ranks: as saved; with the batch dealt otherwise; with zeroed momentum …", flush=True)
    mp.spawn(resumed, (2,), nprocs=2)

    runs = {name: outcome(name) for name in ("reference", "resumed", "dealt", "zeroed")}
    chart.draw(
        OUT / "losses.png",
        chart.Curve("4 ranks, uninterrupted", runs["reference"].losses),
        chart.Curve("resumed on 2 ranks", runs["resumed"].losses, SAVE_AT),
        chart.Curve("resumed with zeroed momentum", runs["zeroed"].losses, SAVE_AT),
        title=f"Saved on 4 ranks at step {SAVE_AT}, resharded offline, resumed on 2",
    )
    fine = report(runs, verify_seconds, reshard_seconds)
    print(f"\n{time.perf_counter() - begin:.0f} s in all; both loss curves: {os.path.relpath(OUT / 'losses.png')}")
    return 0 if fine else 1


def report(runs: dict[str, Outcome], verify_seconds: float, reshard_seconds: float) -> bool:
    """Print the tables and the verdict."""
    ref = runs["reference"]
    tail = ref.losses[SAVE_AT:]
    print(f"\n{'step':>6}  {'4 ranks':>12}  {'2 ranks':>12}  {'zeroed':>12}")
    for step in (*range(SAVE_AT, LAST, 4), LAST - 1):
        shown = (run.losses[step - SAVE_AT] for run in (runs["resumed"], runs["zeroed"]))
        print(f"{step:>6}  {ref.losses[step]:>12.8f}  " + "  ".join(f"{loss:>12.8f}" for loss in shown))

    differences = {
        name: (
            max(abs(a - b) for a, b in zip(run.losses, tail, strict=True)),
            distance(run.parameters, ref.parameters),
        )
        for name, run in runs.items()
        if name != "reference"
    }
    print("\nagainst the uninterrupted run   max |loss difference|   max |parameter difference|")
    for name, label in (
        ("resumed", "resumed on 2 ranks"),
        ("dealt", "  batch dealt in another order"),
        ("zeroed", "  control: zeroed momentum"),
    ):
        print(f"{label:<32}{differences[name][0]:<24.3g}{differences[name][1]:.3g}")

    four, two = stored_fingerprints(OUT / "four"), stored_fingerprints(OUT / "two")
    live = runs["resumed"].fingerprints
    print(f"\n{'momentum of':<36}{'saved by 4':<18}{'resharded for 2':<18}in memory on 2")
    for name, print_ in four.items():
        same = "" if print_ == two[name] == live[name] else "   DIFFERENT"
        print(f"{name:<36}{print_:<18}{two[name]:<18}{live[name]}{same}")

    print(
        f"\nsave {ref.io_seconds:.2f} s, verify {verify_seconds:.2f} s, reshard {reshard_seconds:.2f} s, "
        f"load {runs['resumed'].io_seconds:.2f} s; checkpoint {size_of(OUT / 'four'):,} bytes in 4 files, "
        f"{size_of(OUT / 'two'):,} in 2; training {ref.train_seconds / LAST:.2f} s a step on 4 ranks"
    )

    checks = {
        "every momentum has one fingerprint: on 4 ranks, in both checkpoints, in memory on 2 ranks": (
            four == two == live == ref.fingerprints
        ),
        f"2 ranks differ from 4 by no more than the order of reduction makes ({differences['dealt'][1]:.3g})": (
            differences["resumed"] <= differences["dealt"]
        ),
        "without its momentum the run is visibly another one": differences["zeroed"][1]
        > 1000 * max(differences["resumed"][1], 1e-6),
    }
    print()
    for what, fine in checks.items():
        print(f"{'ok' if fine else 'FAILED':<7}{what}")
    return all(checks.values())


if __name__ == "__main__":
    sys.exit(main())
