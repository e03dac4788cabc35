"""The world's ways of sharding a tensor, each turned into a layout.  Code behind this door does not ask which it was.

``mesh`` reads mesh placements, ``flat`` shards that are cut out of flat buffers and whole tensors with single owners,
``buffers/`` the flat buffers of layer-wise optimizers.  Only two files here import torch: ``tensors`` turns the
placements of live DTensors into those of ``mesh``, ``boxed_tensor`` any live tensor into the boxes that a rank holds.
Open ``mesh`` first.
"""
