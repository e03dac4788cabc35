"""Readers of the world's ways of sharding a tensor, each turned into a layout.  Code behind them does not ask which it
was.

``mesh`` reads mesh placements, ``flat`` shards of flat buffers and whole tensors with single owners, ``buffers/`` the
flat buffers of layer-wise optimizers.  Only two files import torch: ``tensors`` reads live DTensors, ``boxed_tensor``
any live tensor.  Open ``mesh`` first.
"""
