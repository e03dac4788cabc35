"""Pages about a checkpoint or a run: one HTML file that needs no network and runs nothing but its own script.

``checkpoint_page`` gathers what `verify`, `inspect`, `stats` and `diff` find and where every shard is, of whole and
damaged checkpoints; ``run_page`` does so for the steps of a run; ``document`` puts data, style and script (in
``assets/``) into one file.  Open ``checkpoint_page`` first.
"""
