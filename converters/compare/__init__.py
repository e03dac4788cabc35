"""Reads elements: differences between two checkpoints, and odd figures among the tensors of one.

``diff`` compares checkpoints, ``elements`` two tensors; ``stats`` compares tensors with their siblings in other layers,
``figures`` measures one.  All of it in bounded memory.  Open ``diff`` first.
"""
