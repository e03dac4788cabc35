"""A complete Muon for sharded training: ``Muon`` is a ``torch.optim.Optimizer``."""

from .muon import ADJUST_LR, Muon
from .newton_schulz import COEFFICIENTS, orthogonalize

__all__ = ["ADJUST_LR", "COEFFICIENTS", "Muon", "orthogonalize"]
