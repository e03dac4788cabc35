"""State in bfloat16 beside float32: the loss of a small model, bytes of state, and the time of a step.

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

DTYPES = "float32", "bfloat16"


def made(dtype: str) -> tuple[nn.Sequential, Muon]:
    """A model of the next token from the last one, and its optimizer."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *hidden, nn.Linear(WIDTH, VOCABULARY))
    matrices = [layer.weight for layer in hidden if isinstance(layer, nn.Linear)]
    other_params = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [
        {"params": matrices, "lr": 0.01, "momentum_dtype": dtype},
        {"params": other_params, "algorithm": "adamw", "lr": 3e-3, "state_dtype": dtype},
    ]
    return model, Muon(groups)


def losses(dtype: str) -> list[float]:
    model, optimizer = made(dtype)
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


def stepping(algorithm: str, dtype: str) -> Muon:
    name = "state_dtype" if algorithm == "adamw" else "momentum_dtype"
    group = {name: dtype, "algorithm": algorithm, "lr": 1e-3}
    params = [nn.Parameter(torch.zeros(512, 512)) for _ in range(8)]
    for number, param in enumerate(params):
        param.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(number))
    return Muon([{"params": params, **group}])


def main() -> None:
    torch.set_num_threads(1)
    print(describe())
    print(f"\n| state | bytes | {' | '.join(f'loss to step {step}' for step in SHOWN)} |\n|{'---|' * (len(SHOWN) + 2)}")
    for dtype in DTYPES:
        state_bytes = made(dtype)[1].report().state_bytes
        print(f"| {dtype} | {state_bytes:,} | {' | '.join(f'{loss:.4f}' for loss in losses(dtype))} |")
    print("\n| 8 matrices of 512 x 512 | muon, of float32 | adamw, of float32 |\n|---|---|---|")
    ratios: dict[tuple[str, str], list[float]] = {}
    for algorithm in ("muon", "adamw"):
        optimizers = {dtype: stepping(algorithm, dtype) for dtype in DTYPES}
        for turn in range(ROUNDS + 1):
            order = list(DTYPES)[:: 1 if turn % 2 else -1]
            seconds_of_dtype = {dtype: seconds(optimizers[dtype]) for dtype in order}
            if turn:
                for dtype in DTYPES:
                    ratios.setdefault((algorithm, dtype), []).append(
                        seconds_of_dtype[dtype] / seconds_of_dtype["float32"]
                    )
    for dtype in DTYPES:
        print(f"| {dtype} | {' | '.join(f'{statistics.median(ratios[a, dtype]):.2f}' for a in ('muon', 'adamw'))} |")


if __name__ == "__main__":
    main()
