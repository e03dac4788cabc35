"""One update: gather to the owners, orthogonalise, send back, apply.

``step`` takes the steps that ``planner`` makes, of all ``rank_sets``; ``elementwise`` and ``kernels`` are backends of
their element-wise parts; ``exchange`` talks to other ranks, which compare ``agreement``.  Open ``step`` first.
"""
