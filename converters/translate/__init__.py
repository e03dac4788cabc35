"""One program's checkpoint in the words of another.

``dialects`` has how each program names what it saves, ``detection`` finds out which one wrote a checkpoint, ``names``
and ``structure`` rename, split and join tensors, ``conventions`` converts momentum, ``regroup`` rewrites parameter
groups. Open ``translator`` first.
"""
