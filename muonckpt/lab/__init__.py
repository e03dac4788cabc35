"""Tools that observe and advise; only commands and the public door import them.

The public names are in ``__init__.pyi``, and imported when first used.  Open ``preflight`` first.
"""

from __future__ import annotations

from ..names.public import public_names

__all__, __getattr__ = public_names(__name__, __file__)
