"""Processes, for optimizer and checkpoints: their groups, and requests that travel with the notes of a step.

Open ``requests`` first.
"""
