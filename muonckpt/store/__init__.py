"""Checkpoints as bytes, without torch.

``io/`` opens, writes, bounds and publishes files, on a disk or in an object store.  ``reading/`` turns the bytes of a
chunk into elements.  ``formats/`` has one file or package for each format, and the registry that tells them apart.
``step_folder`` is a folder of checkpoints by step.  ``audit`` is what ``muonckpt verify`` checks; ``open_checkpoint``,
with ``stored_tensor`` and ``stored_items``, is what ``muonckpt.open`` gives.  Open ``formats/registry`` first.
"""
