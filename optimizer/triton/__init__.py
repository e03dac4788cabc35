"""Triton kernels and how they are launched: the only room that imports triton.

``products`` runs Newton-Schulz, by ``multiply`` and ``normalize`` in ``tiles``; ``elementwise`` has the other parts
of a step.  Open ``products`` first.
"""
