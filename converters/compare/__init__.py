"""Reads elements: what differs between two checkpoints, and what is odd among the tensors of one.

``diff`` compares checkpoints, ``elements`` two tensors; ``stats`` compares tensors with their siblings in other layers,
``figures`` measures one.  All of it in bounded memory.  Open ``diff`` first.
"""
