"""Saving and loading live state: the torch half of a checkpoint.

``live_state`` is the one description of what a rank holds.  For a save, ``whole_plan`` plans all ranks together; for a
load, ``matching`` decides what goes where in a template, and ``chunk_reader`` reads what `algebra.plan` says.
``attestation`` compares live state with a checkpoint, ``resume_check`` proves a resume, ``redistribution`` fills live
state from that of other ranks.  ``all_ranks`` has the ways in which ranks agree and fail together.  Open ``saving``
first.
"""
