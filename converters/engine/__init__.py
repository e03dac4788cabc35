"""From a plan to files: which process writes which elements where.

``outputs`` says what a destination holds; ``container`` is the protocol of formats, which decide what goes into which
file (``rank_files``, ``buffer_files``, ``whole_files``, ``universal_files``); ``output_files`` and ``job`` hold what
they decided.  ``in_step`` groups files, ``mover`` copies their bytes, ``source_rows`` checks the bytes read.
``workers`` are the processes that share a job.
Open ``run`` first.
"""
