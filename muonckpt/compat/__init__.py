"""Our optimizer under the names and arguments of other packages, so that a trainer changes one import.

``dion`` has microsoft/dion's ``Muon``.
"""
