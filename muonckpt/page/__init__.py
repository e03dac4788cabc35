"""A page about a checkpoint: one HTML file that needs no network and runs nothing but its own script.

``checkpoint_page`` gathers what `inspect`, `stats` and `diff` find and where every shard is, and puts it with style and
script (in ``assets/``) into one file.  Open ``checkpoint_page`` first.
"""
