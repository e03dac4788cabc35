"""Forecasts of a model on meshes that are only imagined, by the optimizer's own planner, in one process.

At the top of the package, because it needs both halves: ``converters`` reads a checkpoint and lays it out,
``optimizer.planning`` plans a step.  ``models`` reads what a model has, from a checkpoint or from a configuration of
Hugging Face's; ``topologies`` answers for one mesh.  Open ``prospects`` first.
"""
