"""Saving and loading live state: the torch half of a checkpoint.

``live_state`` is the one description of what a rank holds. For a save, ``whole_plan`` plans all ranks together and
``rank_file`` writes; for a load, ``matching`` decides what goes where in a template, and ``chunk_reader`` reads what
`muonckpt.plan` says. ``series`` has the calls of a run that saves again and again. ``attestation`` compares live
state with a checkpoint. ``redistribution`` fills live state from that of other ranks: ``transfers`` plans
and moves. ``all_ranks`` has the ways in which ranks agree and fail together. Open ``saving`` first.
"""
