"""What a parameter's update is, given its gradient: the algorithms that groups choose.

``form`` is the form of those that need whole matrices, which ``matrix`` lists: ``muon`` has those that orthogonalise
momentum, and ``soap`` is apart.  ``scalar`` has AdamW and Lion, which step element by element.  Open ``form`` first.
"""
