"""Flat buffers of many parameters: buckets, padding and owners.

``placements`` has every way to place ``parameters`` into a ``buffer_layout``: those of ``megatron``, and ``balanced``.
``records`` writes a layout as JSON and reads what a checkpoint has recorded, with the ranks that share each buffer.
Open ``buffer_layout`` first.
"""
