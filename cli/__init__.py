"""The ``muonckpt`` command: one file a command; none imports torch.  Open ``main`` first."""
