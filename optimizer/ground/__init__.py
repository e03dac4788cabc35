"""Tools that know no optimizer.

``tensors`` does many tensors together, ``rounding`` rounds them with noise, ``cuda_graphs`` says what may be done while
a graph is captured, and ``held_boxes`` which boxes of a tensor a rank holds.  Open ``tensors`` first.
"""
