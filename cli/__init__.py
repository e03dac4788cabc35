"""The ``muonckpt`` command, one file a subcommand.  Open ``main`` first."""
