"""Tools that know no optimizer.

``tensors`` does many tensors together, and ``devices`` is about hosts and devices.  Open ``tensors`` first.
"""
