"""The known programs, one file for each or for a family, mostly data; and what a checkpoint of any of them means.

A program is a `Dialect`: the places of its keys, its update methods with their slots and options, what tells it from
others, and how its momentum accumulates.  ``codings`` are options that need more than another name.  ``registry``
knows all programs, those of plug-ins included; ``detection`` tells whose a checkpoint is, and ``model_view`` sorts its
tensors by roles and parameters.  Open ``dialect`` first.
"""
