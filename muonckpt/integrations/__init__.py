"""Other people's trainers: one file each, imported only by their users.

``huggingface`` is for transformers' Trainer, ``lightning`` for Lightning's, ``torchtitan`` for torchtitan's,
``megatron`` for Megatron-LM; ``saved`` checks the folders that transformers and accelerate write.  accelerate needs no
more: docs/integrations/accelerate.md.  Open ``huggingface`` first.
"""
