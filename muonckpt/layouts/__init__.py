"""Readers: the world's ways of sharding a tensor, turned into layouts.

Each takes plain data (shapes, mesh sizes, offsets), so none needs a process group.  Only `tensors` knows torch.
"""
