"""Processes, for optimizer and checkpoints: their groups.

Open ``new_group`` first.
"""
