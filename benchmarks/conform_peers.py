"""Other projects' optimizers on meshes, beside one process: the table of docs/guide/lab.md.

    PYTHONPATH=…dion:…muon.py's folder:… python benchmarks/conform_peers.py [OPTIMIZER]…

It tries every optimizer of the list that can be imported, by its own defaults but for the rate, and says of the others
that they cannot.  Each is given what its documentation asks for: where parameters have to be DTensors, one process has
them too.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muonckpt.lab import conform
from muonckpt.lab.conformity.conform import BITS, OTHER, REFUSED, ROUNDED, UNSURE
from muonckpt.optimizer import Muon

LR = 0.02


def ours(model: nn.Module, mesh: DeviceMesh) -> Any:
    return Muon(model.named_parameters(), lr=LR)


def torch_muon(model: nn.Module, mesh: DeviceMesh) -> Any:
    return torch.optim.Muon(model.parameters(), lr=LR)


def dion_muon(model: nn.Module, mesh: DeviceMesh) -> Any:
    return import_module("dion").Muon(model.parameters(), _sharded(mesh), lr=LR)


def dion_normuon(model: nn.Module, mesh: DeviceMesh) -> Any:
    return import_module("dion").NorMuon(model.parameters(), _sharded(mesh), lr=LR)


def keller(model: nn.Module, mesh: DeviceMesh) -> Any:
    return import_module("muon").Muon(list(model.parameters()), lr=LR)  # it wants a list


def xtuner(model: nn.Module, mesh: DeviceMesh) -> Any:
    if not isinstance(model.weight, DTensor):  # it takes nothing else
        fully_shard(model, mesh=mesh)
    return import_module("xtuner.v1.optim.muon").Muon(model.parameters(), lr=LR)


def veomni(model: nn.Module, mesh: DeviceMesh) -> Any:
    return import_module("veomni.optim.muon").DistributedMuon(model.parameters(), lr=LR, ns_implementation="std")


def emerging(model: nn.Module, mesh: DeviceMesh) -> Any:
    return import_module("emerging_optimizers.orthogonalized_optimizers").Muon(model.parameters(), lr=LR)


def _sharded(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of a mesh over which dion's matrices are sharded: it takes one."""
    names = mesh.mesh_dim_names or ()
    return mesh["shard"] if "shard" in names else mesh


PEERS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "muonckpt": (ours, "muonckpt"),
    "torch.optim.Muon": (torch_muon, "torch"),
    "dion Muon": (dion_muon, "dion"),
    "dion NorMuon": (dion_normuon, "dion"),
    "Keller Jordan's Muon": (keller, "muon"),
    "XTuner": (xtuner, "xtuner.v1.optim.muon"),
    "VeOmni": (veomni, "veomni.optim.muon"),
    "Emerging-Optimizers Muon": (emerging, "emerging_optimizers.orthogonalized_optimizers"),
}


def main() -> None:
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, gloo, 2, 3 and 4 ranks\n")
    print(
        "| optimizer | same bits | rounded otherwise | cannot tell | another update | refused | another state | where |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name in sys.argv[1:] or PEERS:
        make, module = PEERS[name]
        try:
            import_module(module)
        except ImportError as error:
            print(f"| {name} | | | | | | | cannot be imported here: {error} |", flush=True)
            continue
        report = conform(f"{__file__}:{make.__name__}")
        counts = Counter(comparison.status for comparison in report.comparisons)
        states = sum(bool(comparison.state) for comparison in report.comparisons)
        causes = Counter(f"{c.sharding}: {c.cause}" for c in report.comparisons if c.status == OTHER)
        refusals = Counter(f"{c.sharding}: {c.cause[:90]}" for c in report.comparisons if c.status == REFUSED)
        examples = [f"{cause} ({count})" for cause, count in (*causes.most_common(2), *refusals.most_common(2))]
        numbers = [counts[status] for status in (BITS, ROUNDED, UNSURE, OTHER, REFUSED)]
        print(f"| {name} | {' | '.join(map(str, (*numbers, states)))} | {'; '.join(examples)} |", flush=True)


if __name__ == "__main__":
    main()
