"""The formats of checkpoints.  They do not import each other, except for DCP, torch_save and safetensors.

``registry`` has the table of formats and tells which one a checkpoint is in.  ``native`` is our own, a DCP directory
with a manifest; ``dcp`` reads stock DCP.  Open ``registry`` first.
"""
