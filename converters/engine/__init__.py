"""From a plan to files: what is written where, by which process, and how an interrupted run is continued.

``outputs`` says what a destination holds; ``container`` is the protocol of formats, which decide what goes into which
file (``rank_files``, ``buffer_files``, ``whole_files``); ``output_files`` and ``job`` hold what they decided.
``mover`` copies the bytes and checks ``source_rows``; ``staging`` holds finished files until they are published, for
a later run to go on from.  ``workers`` are the processes that share a job.  Open ``run`` first.
"""
