"""Flat buffers of many parameters: buckets, padding and owners.

``placements`` names the ``algorithms`` that place ``parameters`` into a ``buffer_layout``; ``records`` are layouts in
checkpoints, with the ranks that share each buffer.  Open ``buffer_layout`` first.
"""
