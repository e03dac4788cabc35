"""The algebra: boxes, layouts, plans and fingerprints, as pure values.

Open ``layout`` first.
"""
