"""Checkpoints as bytes, without torch.

``io/`` opens, writes, bounds and publishes files.  ``reading/`` turns bytes of a chunk into elements.  ``formats/`` has
the formats and their registry.  ``open_checkpoint`` has what ``muonckpt.open`` returns, ``audit`` what ``verify``
checks, ``step_folder`` folders of checkpoints.  Open ``formats/registry`` first.
"""
