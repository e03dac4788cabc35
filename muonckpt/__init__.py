"""Muon momentum that survives any change of topology, and a Muon that runs on every one of them.

    optimizer = muonckpt.Muon.for_model(model, lr=0.02, adamw_lr=3e-4)
    run = muonckpt.Series("run", model, optimizer)
    first_step = run.resume()  # and run.save(step), step after step

``algebra/`` says where elements lie, ``record/`` what a checkpoint holds, ``names/`` has words, ``programs/`` what
programs write; ``layouts/`` reads shardings, ``store/`` files; ``checkpoint/`` saves and loads live state, ``runs/``
step after step; ``integrations/`` and ``compat/`` are other people's trainers and names; ``lab/`` observes and advises.
``optimizer``, ``converters`` and ``cli`` are links to the folders beside this one.  Open ``algebra/layout`` first.

The public names are in ``__init__.pyi``, and imported when first used: programs that only look at checkpoints start
without torch.
"""

from __future__ import annotations

from .names.public import public_names
from .names.version import VERSION

__all__, __getattr__ = public_names(__name__, __file__, "; what goes with Muon is in muonckpt.optimizer")
__version__ = VERSION


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
