"""Checkpoints as bytes, without torch.

``io/`` opens, writes, bounds and publishes files.  ``reading/`` turns bytes of a chunk into elements.  ``formats/`` has
the formats and their registry, ``open_checkpoint`` what ``muonckpt.open`` returns, ``verify/`` what ``verify`` checks.
Open ``formats/registry`` first.
"""
