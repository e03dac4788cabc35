"""Where the tensors of a destination go: a mesh of ranks, the rules by which its axes cut tensors, and flat buffers.

Which files the boxes of the ranks lie in is the business of ``engine``.  Open ``topology`` first.
"""
