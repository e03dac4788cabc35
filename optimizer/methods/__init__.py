"""What a parameter's update is, given its gradient: the algorithms that groups choose.

``matrix`` has Muon and NorMuon, which need whole matrices, and ``scalar`` AdamW and Lion, which step element by
element.  Open ``matrix`` first.
"""
