"""The world's ways of sharding a tensor, each turned into a layout.  Code behind this door does not ask which it was.

``mesh`` reads mesh placements, ``uneven`` and ``flat`` read shards cut out of flat buffers, ``owned`` whole tensors
with single owners, and ``buffers/`` the flat buffers of layer-wise optimizers.  Only two files
here import torch: ``tensors`` turns the placements of live DTensors into those of ``mesh``, and ``boxed_tensor`` any
live tensor into the boxes that this rank holds.  Open ``mesh`` first.
"""
