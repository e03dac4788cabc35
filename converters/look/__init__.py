"""Answers from a checkpoint's metadata: roles, hyper-parameters, holders, symptoms.

Only counters and options are read of the elements.  ``contents`` sorts tensors by role, ``holders`` says which rank has
what, ``symptoms`` suspicious facts, ``buffer_summary`` how flat buffers are filled.  Open ``inspection`` first.
"""
