"""The checkpoints that a run saves one after the other; a whole one is always there to resume from.

It is above saving and loading (`checkpoint/`) and above rewriting (`converters/`), because a series exports steps,
too.  Open ``series`` first.
"""
