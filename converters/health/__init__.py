"""What the numbers of a checkpoint look like, and what usually lies behind numbers that look odd.

``tensor_figures`` reads one tensor in bounded memory, ``spectrum`` sketches singular values on the way, ``findings``
compares tensors with their siblings.  Open ``figures`` first.
"""
