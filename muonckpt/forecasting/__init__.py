"""What if: a model or a checkpoint on meshes that are only imagined, by the optimizer's own planner, in one process.

At the top of the house, because it sees both halves: ``converters`` says what is in a checkpoint and lays it out,
``optimizer.planning`` plans a step.  ``model_tensors`` is what a model has, read from a checkpoint or by ``families``
from a configuration of Hugging Face's; ``topologies`` is the answer for one mesh.  Open ``prospects`` first.
"""
