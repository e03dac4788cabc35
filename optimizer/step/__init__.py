"""One update: gather to the owners, orthogonalise, send back, apply.

``planner`` makes the ``Step`` of each set of ranks; ``step`` overlaps its stages; ``operators`` and ``kernels`` are the
backends of its element-wise parts; ``methods`` is what Muon and NorMuon do with an orthogonalised matrix, and ``rows``
carries NorMuon's statistics; ``agreement``, ``notes`` and ``turn`` are how ranks stop together; ``exchange`` is the
only file that talks to other ranks, and ``planning/routes`` says how bytes lie there.  Open ``step`` first.
"""
