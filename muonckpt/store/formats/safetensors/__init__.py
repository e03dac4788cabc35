"""The safetensors format.

``folder`` reads and writes checkpoints, one file or many with an index; ``header`` reads a file's header without
trusting it.  Open ``folder`` first.
"""
