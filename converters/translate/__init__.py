"""Translates checkpoints of one program to the keys, groups and momentum convention of another.

``parse`` makes a model view of a checkpoint, whatever is to be written; ``parameters`` gives it the target's names, by
the rules of ``names`` that ``structure`` applies; ``translator`` renders them in the target's words, options
by ``groups``, momenta by ``conventions``; ``report`` says what changed.  ``request`` is what a user asks for.  Open
``translator`` first.
"""
