"""Muon momentum that survives any change of topology, and a Muon that runs on every one of them.

``algebra/`` says where elements lie, ``record/`` what a checkpoint holds, ``names/`` has words, ``programs/`` what
programs write; ``layouts/`` reads shardings, ``store/`` files; ``checkpoint/`` saves and loads live state, ``runs/``
step after step; ``integrations/`` and ``compat/`` are other people's trainers and names; ``lab/`` observes and advises.
``optimizer``, ``converters`` and ``cli`` are links to the folders beside this one.  Open ``algebra/layout`` first.

The public names are in ``__init__.pyi``, and imported when first used: programs that only look at checkpoints start
without torch.
"""

from __future__ import annotations

from .names.public import public_names

__all__, __getattr__ = public_names(__name__, __file__, "; what goes with Muon is in muonckpt.optimizer")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
