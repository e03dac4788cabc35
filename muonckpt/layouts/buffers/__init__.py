"""Flat buffers of many parameters: buckets, padding and owners.

``placements`` has every way to place ``parameters`` into the ``ranges`` of a ``buffer_layout`` (``megatron_padded``,
``megatron_compact``, ``balanced``).  ``layout_json`` writes a layout as JSON and reads it back; ``group_buffer`` says
which ranks of a run share one, and reads what a checkpoint has recorded.  Open ``buffer_layout`` first.
"""
