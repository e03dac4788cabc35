"""How a destination is laid out: the ranks of its mesh, and the files they have.

``topology`` applies mesh rules and layouts; ``buffer_layouts`` lays tensors out in flat buffers; ``rank_files``,
``buffer_files``, ``torch_dist_files`` and ``whole_files`` are the kinds of files.  Open ``topology`` first.
"""
