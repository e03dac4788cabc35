"""Flat buffers of many parameters: buckets, padding and owners.

A rule (``megatron_padded``, ``megatron_compact``, ``balanced``) places ``parameters`` into the
``ranges`` of a ``layout``.  ``recorded`` writes such a layout as JSON and reads it back; ``group_buffer`` says which
ranks of a run share one.  Open ``layout`` first.
"""
