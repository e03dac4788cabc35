"""What a manifest says: tensors, their chunks in columns, items, and the keys that people ask for.

Open ``record`` first.
"""
