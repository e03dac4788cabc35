"""Newton-Schulz by the kernels of others, as far as they are installed, or checked out in a folder that PEERS names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

Polynomials = tuple[tuple[float, float, float], ...]
"""The coefficients of each step."""

KELLER: Polynomials = ((3.4445, -4.7750, 2.0315),) * 5
"""What torch.optim.Muon uses."""

DION: Polynomials = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""What dion's kernels use, whatever they are given."""

Orthogonalize = Callable[[Tensor], Tensor]
"""Takes and returns ``[matrices, rows, columns]``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A package, how to call it, and the polynomials with which it is called, or that it has inside."""

    module: str
    made: Callable[[], Orthogonalize]
    polynomials: Polynomials = KELLER


def _gram_newton_schulz() -> Orthogonalize:
    from gram_newton_schulz import GramNewtonSchulz

    peer_function: Orthogonalize = GramNewtonSchulz(
        ns_coefficients=list(KELLER), gram_newton_schulz_reset_iterations=[2]
    )
    return peer_function


def _flash_muon() -> Orthogonalize:
    from flash_muon import fast_newtonschulz
    from torch import stack

    return lambda matrices: stack([fast_newtonschulz(matrix) for matrix in matrices])  # it takes no stacks


def _dion() -> Orthogonalize:
    from dion.newton_schulz_triton import newton_schulz_triton

    peer_function: Orthogonalize = newton_schulz_triton
    return peer_function


PEERS: Mapping[str, Peer] = {
    "gram-newton-schulz": Peer("gram_newton_schulz", _gram_newton_schulz),
    "flash-muon": Peer("flash_muon", _flash_muon),
    "dion": Peer("dion", _dion, DION),
}


def found() -> dict[str, Peer]:
    """The peers that can be imported, by name."""
    if folder := os.environ.get("PEERS"):
        sys.path += [str(checkout) for checkout in sorted(Path(folder).iterdir()) if checkout.is_dir()]
    return {name: peer for name, peer in PEERS.items() if find_spec(peer.module)}
