"""The zarr v3 format, without the zarr library.

``hierarchy`` reads a checkpoint, ``writer`` writes one, ``array`` is what a single ``zarr.json`` says.  Open
``hierarchy`` first.
"""
