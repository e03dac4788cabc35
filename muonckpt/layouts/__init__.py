"""The world's ways of sharding a tensor, each turned into a layout.  Code behind this door does not ask which it was.

``mesh`` reads mesh placements, ``uneven`` and ``flat`` read shards cut out of flat buffers, ``owned`` whole tensors
with single owners, and ``buffers/`` the flat buffers of layer-wise optimizers.  ``tensors`` turns the placements of
live DTensors into those of ``mesh``, and is the only file here that imports torch.  Open ``mesh`` first.
"""
