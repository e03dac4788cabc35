"""A complete Muon for sharded training: ``Muon`` is a ``torch.optim.Optimizer``.

``groups`` sorts a model's parameters, with ``rules``, ``families``, ``decisions`` and ``questions``; ``methods/`` has
the algorithms, ``planning/`` decides who does which matrix, ``step/`` runs an update, ``newton_schulz/`` is the
arithmetic, ``triton/`` its kernels, ``ground/`` has tools, and ``layer_wise/`` is a runtime for whole matrices with
owners.  ``options`` checks hyper-parameters, whose defaults are in ``muonckpt/names/vocabulary``; ``state`` follows
parameters that a framework replaces, ``restoration`` loads it; ``megatron_fsdp`` is an adapter.  Open ``muon`` first.
"""

from .clipping import clip_grad_norm_
from .groups import sort_parameters
from .layer_wise import LayerWise
from .logits import MaxLogits, Projection, qk_clip
from .methods.form import MatrixMethod, MethodSlot, Option, WholeMatrix, of_each
from .methods.matrix import ADJUST_LR
from .muon import Muon, StepExecution
from .newton_schulz import COEFFICIENTS, CostTable, measure, orthogonalize
from .restoration import FreshStart

__all__ = [
    "ADJUST_LR",
    "COEFFICIENTS",
    "CostTable",
    "FreshStart",
    "LayerWise",
    "MatrixMethod",
    "MaxLogits",
    "MethodSlot",
    "Muon",
    "Option",
    "Projection",
    "StepExecution",
    "WholeMatrix",
    "clip_grad_norm_",
    "measure",
    "of_each",
    "orthogonalize",
    "qk_clip",
    "sort_parameters",
]
