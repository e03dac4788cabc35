"""State in bfloat16 and in 8 bits beside float32: the loss of a small model, bytes of state, and the time of a step.

A step's time is a median of ratios to float32 of every round; steps alternate, in turning order.
"""

from __future__ import annotations

import statistics
import time

import torch
from machine import describe
from torch import nn

from muonckpt.optimizer import Muon

WIDTH, VOCABULARY, TOKENS = 64, 128, 512
SHOWN = (1, 50, 100, 200, 400)
ROUNDS = 15

KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, rounding_seed=0": {"dtype": "bfloat16", "rounding_seed": 0},
    "8bit": {"dtype": "8bit"},
    "8bit, rounding_seed=0": {"dtype": "8bit", "rounding_seed": 0},
}


def made(kind: str) -> tuple[nn.Sequential, Muon]:
    """A model of the next token from the last one, and its optimizer."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *hidden, nn.Linear(WIDTH, VOCABULARY))
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", "float32")
    matrices = [layer.weight for layer in hidden if isinstance(layer, nn.Linear)]
    other_params = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [
        {"params": matrices, "lr": 0.01, "momentum_dtype": dtype, **options},
        {"params": other_params, "algorithm": "adamw", "lr": 3e-3, "state_dtype": dtype, **options},
    ]
    return model, Muon(groups)


def losses(kind: str) -> list[float]:
    model, optimizer = made(kind)
    generator = torch.Generator().manual_seed(1)
    likely = torch.randn(VOCABULARY, VOCABULARY, generator=generator).mul_(2).softmax(dim=1)
    table_rows = []
    for _ in range(max(SHOWN)):
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        following = torch.multinomial(likely[tokens], 1, generator=generator).squeeze(1)
        loss = nn.functional.cross_entropy(model(tokens), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        table_rows.append(loss.item())
    return [statistics.fmean(table_rows[max(0, step - 20) : step]) for step in SHOWN]


def seconds(optimizer: Muon) -> float:
    begin = time.process_time()
    optimizer.step()
    return time.process_time() - begin


def stepping(algorithm: str, kind: str) -> Muon:
    options = dict(KINDS[kind])
    name = "state_dtype" if algorithm == "adamw" else "momentum_dtype"
    group = {name: options.pop("dtype", "float32"), "algorithm": algorithm, "lr": 1e-3, **options}
    params = [nn.Parameter(torch.zeros(512, 512)) for _ in range(8)]
    for number, param in enumerate(params):
        param.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(number))
    return Muon([{"params": params, **group}])


def main() -> None:
    torch.set_num_threads(1)
    print(describe())
    print(f"\n| state | bytes | {' | '.join(f'loss to step {step}' for step in SHOWN)} |\n|{'---|' * (len(SHOWN) + 2)}")
    for kind in KINDS:
        state_bytes = made(kind)[1].report().state_bytes
        print(f"| {kind} | {state_bytes:,} | {' | '.join(f'{loss:.4f}' for loss in losses(kind))} |")
    print("\n| 8 matrices of 512 x 512 | muon, of float32 | adamw, of float32 |\n|---|---|---|")
    ratios: dict[tuple[str, str], list[float]] = {}
    for algorithm in ("muon", "adamw"):
        optimizers = {kind: stepping(algorithm, kind) for kind in KINDS}
        for turn in range(ROUNDS + 1):
            order = list(KINDS)[:: 1 if turn % 2 else -1]
            seconds_of_kind = {kind: seconds(optimizers[kind]) for kind in order}
            if turn:
                for kind in KINDS:
                    ratios.setdefault((algorithm, kind), []).append(seconds_of_kind[kind] / seconds_of_kind["float32"])
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(f'{statistics.median(ratios[a, kind]):.2f}' for a in ('muon', 'adamw'))} |")


if __name__ == "__main__":
    main()
