"""Triton kernels and how they are launched: the only room that imports triton.

``kernel_products`` runs Newton-Schulz, by ``multiply`` (half of a symmetric product) and ``normalize``, in ``tiles``;
``updates`` has the element-wise parts of a step, ``launches`` what all kernels share.  Open ``kernel_products`` first.
"""
