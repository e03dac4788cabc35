"""One update: gather to the owners, orthogonalise, send back, apply.

``planner`` makes the ``Step`` of each set of ranks; ``step`` overlaps its stages; ``elementwise`` and ``kernels`` are
the backends of its element-wise parts, on a rank's ``local_tensors``; ``agreement`` and ``notes`` are how ranks stop
together; ``exchange`` is the only file that talks to other ranks, and ``planning/schedule`` says how bytes lie there.
Open ``step`` first.
"""
