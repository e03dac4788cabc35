"""State dicts that trainers save with ``torch.save``: in files of one process, or a part from each rank.

``process_files`` reads folders of Hugging Face and accelerate, plain files and DeepSpeed's universal folders;
``rank_state`` the ranks' files of verl and accelerate, ``zero_state`` DeepSpeed's of ZeRO; ``state_tree`` makes tensors
and items of a state dict.  Open ``process_files`` first.
"""
