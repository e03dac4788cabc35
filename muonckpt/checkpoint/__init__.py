"""Saving and loading live state: the torch half of a checkpoint.

``save_load`` has the two calls, ``series`` those of a run that saves again and again; ``save_planner``, ``dcp_writer``
and ``dcp_reader`` are the planners and storage classes that DCP runs for them; ``matching`` decides what of a
checkpoint goes where in a template; ``annotation`` records what a state dict says and DCP's metadata does not.
``attestation`` compares live state with a checkpoint, by the fingerprints that ``device_fingerprint`` takes.
``redistribution`` fills live state from that of other ranks: ``transfers`` plans, ``carrier`` moves.  Open
``save_load`` first.
"""
