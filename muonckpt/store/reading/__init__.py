"""From the bytes of a checkpoint to elements: bounded, checked, and without running anything.

``payloads`` reads and checks the bytes of items, ``blocks`` cuts boxes into parts, ``dtypes`` has the element types.
Open ``payloads`` first.
"""
