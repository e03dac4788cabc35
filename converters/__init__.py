"""Offline conversions between checkpoints: plans executed as file I/O.

``engine/`` decides what goes into which file and moves the bytes, ``target/`` lays a destination out, ``translate/``
gives a checkpoint the names, groups and momentum convention of another program.  Open ``rewrite`` first.
"""
