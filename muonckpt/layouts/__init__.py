"""Turns the world's ways of sharding a tensor into layouts: no other code asks which way it was.

``mesh`` reads mesh placements, ``flat`` shards of flat buffers and whole tensors with single owners, ``buffers/`` the
flat buffers of layer-wise optimizers; ``tensors`` live DTensors, ``boxed_tensor`` any tensor.  Open ``mesh`` first.
"""
