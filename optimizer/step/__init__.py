"""One update: gather to the owners, orthogonalise, send back, apply.

``pipeline`` overlaps the stages of a schedule, ``round`` does one of them by torch's operators and ``fused`` by
kernels, ``exchange`` is the only file that talks to other ranks.  Open ``pipeline`` first.
"""
