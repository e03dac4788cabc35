"""Files on a disk or in an object store, whatever is in them.

``location`` represents a path or a URL, ``regular`` opens files that others wrote, ``new_file`` writes, ``publish``
makes checkpoints appear and vanish.  Open ``location`` first.
"""
