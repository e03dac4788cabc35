"""Our optimizer with the arguments of ``torch.optim.Muon``, so that a trainer changes one import.

Open ``torch_muon`` first.
"""
