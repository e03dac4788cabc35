"""Translates checkpoints of one program to the keys, groups and conventions of another.

``dialects`` has the keys of what each program saves (torchtitan, XTuner, Megatron, …), ``tables`` ready-made rules,
``detection`` tells which program wrote a checkpoint, ``names`` and ``structure`` rename, split and join tensors,
``conventions`` converts momentum, ``regroup`` rewrites parameter groups.  Open ``translator`` first.
"""
