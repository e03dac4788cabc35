"""Tools that know no optimizer.

``tensors`` does many tensors together, ``codecs`` stores averages, and ``cuda_graphs`` says what may be done while a
graph is captured.  Open ``tensors`` first.
"""
