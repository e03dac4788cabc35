"""Translates checkpoints of one program to the keys, groups and momentum convention of another.

``parse`` makes one neutral optimizer of a checkpoint, ``translator`` renders it in a program's words; ``names`` are
rules that rename, split and join tensors, which ``structure`` applies; ``detection`` tells which program wrote a
checkpoint.  What programs save is in `converters.programs`.  Open ``translator`` first.
"""
