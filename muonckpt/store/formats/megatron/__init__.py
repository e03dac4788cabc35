"""Formats of Megatron-LM.

``torch_dist`` is DCP with Megatron's own files.  ``layer_wise`` joins the files that each rank's optimizer writes
(``rank_file``), with names from a description (``layer_wise_names``) and from the model (``model_weights``), and what
tensor parallelism has cut (``tensor_parallel``).  Open ``torch_dist`` first.
"""
