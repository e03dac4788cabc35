"""Newton-Schulz: the orthogonal factor of a matrix by matrix products.

``iterations`` runs a ``recipe``; ``products`` has torch's arithmetic and the choice between it and the kernels,
``costs`` measured times.  Open ``iterations`` first.
"""

from ...names.coefficients import COEFFICIENTS, CoefficientSet
from .costs import CostTable, measure
from .iterations import orthogonalize

__all__ = ["COEFFICIENTS", "CoefficientSet", "CostTable", "measure", "orthogonalize"]
