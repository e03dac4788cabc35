"""Translates checkpoints of one program to the keys, groups and conventions of another.

``dialects`` lists how each program names what it saves, ``detection`` tells which program wrote a checkpoint, ``names``
and ``structure`` rename, split and join tensors, ``conventions`` converts momentum, ``regroup`` rewrites parameter
groups.  Open ``translator`` first.
"""
