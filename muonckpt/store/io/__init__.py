"""Files, on a disk or in an object store, whatever is in them.

``location`` stands for a path or a URL; ``regular`` opens files that others wrote, ``new_file`` writes; ``bounds``
checks that the extents a checkpoint names lie in its files; ``checksums`` computes all digests of a chunk in one pass;
``publish`` renames a finished checkpoint into place, ``removal`` out of it, ``lock`` keeps others out.  Open
``location`` first.
"""
