"""A complete Muon for sharded training: ``Muon`` is a ``torch.optim.Optimizer``.

``groups/`` sorts a model's parameters by rules, ``planning/`` decides who orthogonalises which matrix, ``step/`` runs
an update, ``newton_schulz/`` is the arithmetic, ``triton/`` its kernels, and ``layer_wise/`` a runtime for whole
matrices with owners.  ``options`` checks hyper-parameters, whose defaults are in ``muonckpt/vocabulary``; ``following``
moves state when a framework replaces parameters, and ``restoration`` loads it; ``megatron_fsdp`` is its adapter.  Open
``muon`` first.
"""

from .clipping import clip_grad_norm_
from .groups import sort_parameters
from .layer_wise import LayerWise
from .muon import Muon
from .newton_schulz import COEFFICIENTS, CostTable, measure, orthogonalize
from .qk_clip import Projection, qk_clip
from .restoration import FreshStart
from .scales import ADJUST_LR

__all__ = [
    "ADJUST_LR",
    "COEFFICIENTS",
    "CostTable",
    "FreshStart",
    "LayerWise",
    "Muon",
    "Projection",
    "clip_grad_norm_",
    "measure",
    "orthogonalize",
    "qk_clip",
    "sort_parameters",
]
