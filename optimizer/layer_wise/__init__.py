"""Layer-wise training: every matrix whole at one owner, gradients and parameters in flat buffers.

``optimizer`` has the runtime and its state, ``buffers`` the memory and what moves it, ``members`` the parameters and
who shares them.  Open ``optimizer`` first.
"""

from .optimizer import LayerWise

__all__ = ["LayerWise"]
