"""How fast fingerprints of live tensors are taken, beside a copy on the same device.

    python benchmarks/attest.py [--limit 20]

On an NVIDIA GPU the matrices of a large model; without one, smaller ones on the CPU.  Bytes of the tensor divided by
time, for both: the copy reads them and writes as many.  Every fingerprint is first compared with numpy's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from machine import describe

from muonckpt.algebra.fingerprint import fingerprint
from muonckpt.checkpoint.bits import bits_of, share_by_torch, share_of, unsigned

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors of one shape and dtype; ``shrink`` is by what the first dim is divided where there is no GPU."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    shrink: int = 16

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        shape = self.shape if device.type == "cuda" else (max(self.shape[0] // self.shrink, 1), *self.shape[1:])
        count = self.count if device.type == "cuda" else 2
        return [torch.randn(shape, device=device).to(self.dtype) for _ in range(count)]


CASES = (
    Case("momentum", 16, (8192, 4096), torch.float32),
    Case("weights", 16, (8192, 4096), torch.bfloat16),
    Case("experts", 2, (64, 2048, 1024), torch.bfloat16),
    Case("small layers", 1024, (512, 512), torch.float32, 1),
    Case("biases", 256, (4096,), torch.float32, 1),
    Case("one long vector", 1, (1 << 28,), torch.float32, 64),
    Case("fp64", 4, (4096, 4096), torch.float64),
)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one run, from the call until the device has ended it."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def check(case: Case, device: torch.device) -> None:
    """Both implementations against numpy, at an origin that is not zero.

    Raises:
        SystemExit: they differ.
    """
    shape = tuple(min(size, 3_000_000 if len(case.shape) == 1 else 1100) for size in case.shape)
    tensor = torch.randn(shape, device=device).to(case.dtype)
    origin = tuple(range(5, 5 + len(shape)))
    expected = fingerprint(bits_of(tensor.cpu()), origin)
    for share in (share_of(tensor, origin), share_by_torch(tensor, origin)):
        if unsigned(int(share)) != expected:
            raise SystemExit(f"{case.name}: fingerprint {unsigned(int(share)):016x}, expected {expected:016x}")


def row(case: Case, device: torch.device, until: float) -> str:
    """One line of the table: medians of runs in turn, after one that is not counted."""
    check(case, device)
    tensors = case.tensors(device)
    origin = (0,) * len(case.shape)
    target = torch.empty_like(tensors[0])
    works: dict[str, Callable[[], object]] = {
        "fingerprint": lambda: [share_of(tensor, origin) for tensor in tensors],
        "copy": lambda: [target.copy_(tensor) for tensor in tensors],
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            times[name].append(seconds(work, device))
        if number and time.monotonic() > until:
            break
    nbytes = sum(tensor.nbytes for tensor in tensors)
    speed, copied = (nbytes / statistics.median(all_seconds[1:]) / 1e9 for all_seconds in times.values())
    shape = " x ".join(map(str, tensors[0].shape))
    extra = "not measured"
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        works["fingerprint"]()
        extra = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"
    kind = f"{len(tensors)} of {shape}, {str(case.dtype).removeprefix('torch.')}"
    return f"| {case.name} | {kind} | {speed:.4g} | {copied:.4g} | {copied / speed:.2g} | {extra} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of timing, about")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(describe() + (f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ", no GPU") + "\n")
    print("| tensors | | fingerprint, GB/s | copy, GB/s | times a copy | extra memory |\n|---|---|---|---|---|---|")
    begin = time.monotonic()
    for number, case in enumerate(CASES, 1):
        print(row(case, device, begin + arguments.limit * number / len(CASES)), flush=True)


if __name__ == "__main__":
    main()
