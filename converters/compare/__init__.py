"""Compares two checkpoints, by fingerprints first, else element by element in bounded memory.  Open ``diff`` first.

``pair`` compares two tensors; ``statistics`` accumulates what differs; ``numeric`` turns raw bits into float64.
"""
