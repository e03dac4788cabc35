"""The ``muonckpt`` command, one file for each subcommand; none imports torch.  Open ``main`` first."""
