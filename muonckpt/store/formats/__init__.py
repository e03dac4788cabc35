"""One file or package for each format.  Formats do not import each other, except for DCP, torch_save and safetensors.

``registry`` tells which format a checkpoint is in and returns its reader; ``signs`` are the file names it looks for.
``native`` is our own, a DCP directory with a manifest, and ``native_writer`` writes it.  Open ``registry`` first.
"""
