"""One update: gather to the owners, orthogonalise, send back, apply.

``step`` takes the steps of all sets of ranks (``rank_sets``), which ``planner`` makes; ``elementwise`` and ``kernels``
are the backends of their element-wise parts; ``agreement`` says what ranks compare; ``exchange`` is the only file that
talks to other ranks, and ``planning/schedule`` says how bytes lie there.  Open ``step`` first.
"""
