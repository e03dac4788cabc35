"""A complete Muon for sharded training: ``Muon`` is a ``torch.optim.Optimizer``."""

from .layer_wise import LayerWise
from .muon import ADJUST_LR, Muon
from .newton_schulz import COEFFICIENTS, orthogonalize, orthogonalize_batch

__all__ = ["ADJUST_LR", "COEFFICIENTS", "LayerWise", "Muon", "orthogonalize", "orthogonalize_batch"]
