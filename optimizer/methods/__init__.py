"""The update of a parameter, given its gradient: the algorithms that groups choose.

``form`` is the form of methods that need whole matrices, which ``matrix`` lists; ours are in ``muon``.  ``scalar`` has
AdamW and Lion, which step element by element.  Open ``form`` first.
"""
