"""The ``muonckpt`` command, one file for each subcommand; only `plan` imports torch, when it runs.  Open ``main`` first."""
