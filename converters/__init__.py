"""Offline conversions between checkpoints: plans executed as file I/O.

``target/`` says which rank holds what, ``engine/`` decides what goes into which file and moves the bytes,
``translate/`` gives a checkpoint the names, groups and momentum convention of another program.  Open ``rewrite`` first.
"""
