"""From a plan to files: what is written where, by which process, and how an interrupted run is continued.

``outputs`` says what a destination holds, ``job`` and ``output_files`` which file each part goes into; ``mover`` copies
the bytes, with ``elements`` for those that do not lie in one run; ``staging`` and ``journal`` hold finished files until
they are published, for ``--resume`` to go on from.  ``launch``, ``workers``, ``process_group`` and ``assignment`` share
a job among several processes.  Open ``run`` first.
"""
