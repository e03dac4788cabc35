"""How a destination is laid out: the ranks of its mesh, and its files.

``topology`` has meshes and rules, ``layouts`` and ``buffer_layouts`` apply them.  ``container`` is the protocol of
formats: ``rank_files`` and ``buffer_files`` have files of ranks; ``safetensors_files`` and ``zarr_files`` hold whole
tensors, with the other items in an ``item_file``.  Open ``topology`` first.
"""
