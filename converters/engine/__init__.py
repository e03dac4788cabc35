"""From a plan to files: what is written where, by which process, and how an interrupted run is continued.

``outputs`` says what a destination holds, ``output_files`` and ``job`` which file each part goes into; ``mover`` copies
the bytes and checks ``source_rows``; ``staging`` holds finished files until they are published, for ``--resume`` to go
on from.  ``launch``, ``workers``, ``process_group`` and ``assignment`` share a job among
processes.  Open ``run`` first.
"""
