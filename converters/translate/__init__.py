"""Translates checkpoints of one program to the keys, groups and momentum convention of another.

``parse`` makes a model view of a checkpoint, whatever is to be written; ``parameters`` gives it the target's names, by
the rules of ``names`` that ``structure`` applies; ``matrices`` says which matrices are in them.  In the target's words
``state_writer`` writes state, momenta by ``conventions``; ``group_writer`` groups, options by ``groups``.  The user's
choices are a ``request``, which makes outputs.  Open ``translator`` first, which says what changed.
"""
