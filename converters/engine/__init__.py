"""From a job to files: what is written where, who writes it, and what is left to do after an interruption.

``outputs`` says what a destination holds, ``job`` which file each part goes into, ``mover`` copies the bytes,
``journal`` records finished files.  Open ``run`` first.
"""
