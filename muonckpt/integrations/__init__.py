"""Other people's trainers: one file each, imported only by their users, and what they have in common.

``huggingface`` is for transformers' Trainer.  accelerate needs no code: its page is docs/integrations/accelerate.md.
``saved`` checks the folders that these two write.  Nothing here is imported by the rest of the package.  Open
``huggingface`` first.
"""
