"""What trainers save with ``torch.save``: a model and its optimizers in files of one process,
or a part of them from each rank.

``process_files`` reads Hugging Face's and accelerate's folders and plain files; ``rank_state`` the ranks' files of verl
and accelerate, with ``dtensor_pickle``; ``nanochat_state`` nanochat's;
``universal_state`` DeepSpeed's universal folders.  ``state_tree`` makes tensors and items of a
state dict, ``parameter_names`` names of an optimizer's numbers.  Open ``process_files`` first.
"""
