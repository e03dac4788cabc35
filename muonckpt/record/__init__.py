"""The contents of a manifest: tensors, their chunks in columns, items, and the keys that users name.

Open ``record`` first.
"""
