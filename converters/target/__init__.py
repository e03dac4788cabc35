"""Where the tensors of a destination go: a mesh of ranks, the rules by which its axes cut tensors, and flat buffers.

``engine`` decides which files have the boxes of the ranks.  Open ``topology`` first.
"""
