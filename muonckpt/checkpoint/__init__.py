"""Saving and loading live state: the torch half of a checkpoint.

``save_load`` has the two calls, ``series`` those of a run that saves again and again.  For a save ``save_planner``
lists what a rank holds in DCP's words, ``offer`` tells it to the coordinator, ``whole_plan`` plans all ranks together
and ``dcp_writer`` writes; for a load ``shared_opening`` opens the checkpoint once, ``matching`` decides what of it goes
where in a template, and ``dcp_reader`` plans and reads.  ``annotation`` records what a state dict says and DCP's
metadata does not.
``attestation`` compares live state with a checkpoint, by the fingerprints that ``device_fingerprint`` takes.
``redistribution`` fills live state from that of other ranks: ``transfers`` plans, ``carrier`` moves.  Open
``save_load`` first.
"""
