"""What trainers save with ``torch.save``: a model and its optimizers in files of one process.

``process_files`` reads Hugging Face's and accelerate's folders and plain files; ``state_tree`` makes tensors and items
of a state dict, ``parameter_names`` names of an optimizer's numbers.  Open ``process_files`` first.
"""
