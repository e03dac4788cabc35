"""From the bytes of a checkpoint to elements: bounded, checked, and without running anything.

``payloads`` reads and checks the bytes of items, ``blocks`` cuts boxes into parts, ``dtypes`` has the element types,
``reader`` the values of formats.  Open ``payloads`` first.
"""
