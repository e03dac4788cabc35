"""From the bytes of a checkpoint to elements: bounded, checked, and without running anything.

``payloads`` reads the bytes of items and checks them, ``strided`` and ``bands`` cut boxes into runs of bounded size,
``windows`` keep what was read between the pieces of a box for the next one,
``dtypes`` is the one table of element types, and ``reader`` the protocol of formats.  Open ``payloads`` first.
"""
