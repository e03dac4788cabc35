"""One update: gather to the owners, orthogonalise, send back, apply.

``planner`` makes the ``Step`` of each set of ranks; ``step`` overlaps its stages; ``operators`` and ``kernels`` are the
backends of its element-wise parts; ``agreement``, ``notes`` and ``turn`` are how ranks stop together; ``exchange`` is
the only file that talks to other ranks.  Open ``step`` first.
"""
