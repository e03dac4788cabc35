"""Triton kernels and how they are launched: the only package that imports triton.

``kernel_products`` runs Newton-Schulz with the products of ``multiply``; ``updates`` has the element-wise parts of a
step, ``launches`` the helpers of all kernels.  Open ``kernel_products`` first.
"""
