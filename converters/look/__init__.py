"""What people ask of a checkpoint's metadata: roles, hyper-parameters, holders, symptoms, and a tree of modules.

Of elements, only counters and options are read.  ``contents`` sorts tensors by role; the others work on what it gives.
Open ``contents`` first.
"""
