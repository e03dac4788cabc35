"""Tools that know no optimizer.

``tensors`` does many tensors together, ``codecs`` stores averages, ``host_memory`` is where state may rest,
``cuda_graphs`` says what may be done while a graph is captured, and ``dcp_hooks`` tells DCP the boxes of a tensor.
Open ``tensors`` first.
"""
