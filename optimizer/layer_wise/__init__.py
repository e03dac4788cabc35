"""Layer-wise training: every matrix whole at one owner, gradients and parameters in flat buffers.

``optimizer`` has the runtime, ``buffer_memory`` the buffers, ``gradients`` their reduction, ``members`` the model's
parameters and who shares them, ``owned_state`` the state as checkpoints hold it.  Open ``optimizer`` first.
"""

from .optimizer import LayerWise

__all__ = ["LayerWise"]
