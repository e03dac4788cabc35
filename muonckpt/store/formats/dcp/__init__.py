"""Checkpoints of ``torch.distributed.checkpoint``, read and written without torch.

``directory`` reads a checkpoint; ``metadata_pickle`` is the ``.metadata`` file as plain data, ``metadata_writer``
writes it.  Open ``directory`` first.
"""
