"""The ``muonckpt`` command, one file a subcommand; only ``plan`` needs torch, when it runs.  Open ``main`` first."""
