"""What optimizer and checkpoints share about processes: their groups, and requests that travel with notes.

Open ``requests`` first.
"""
