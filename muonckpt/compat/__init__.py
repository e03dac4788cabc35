"""Our optimizer under the names and arguments of other packages, so that a trainer changes one import.

``torch_muon`` has ``torch.optim.Muon``, ``dion`` microsoft/dion's ``Muon``.  Open ``torch_muon`` first.
"""
