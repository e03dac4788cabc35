"""Tools that know no optimizer.

``foreach`` does many tensors by one operator, ``cuda_graphs`` says what may be done while a graph is captured,
``places`` where matrices lie that are done together, and ``held_boxes`` which boxes of a tensor a rank holds.  Open
``foreach`` first.
"""
