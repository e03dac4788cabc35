"""Layer-wise training: every matrix whole at one owner, gradients and parameters in flat buffers.

``optimizer`` has the runtime and its state, ``buffers`` the parameters and their memory.  Open ``optimizer`` first.
"""

from .optimizer import LayerWise

__all__ = ["LayerWise"]
