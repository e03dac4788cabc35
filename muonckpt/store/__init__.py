"""Checkpoints as bytes, without torch.

``io/`` opens, writes, bounds and publishes files, on a disk or in an object store.  ``reading/`` turns the bytes of a
chunk into elements.  ``formats/`` has the formats and their registry.  ``open_checkpoint`` is what ``muonckpt.open``
gives, ``audit`` what ``verify`` checks, ``step_folder`` a folder of checkpoints.  Open ``formats/registry`` first.
"""
