"""The `muonckpt` command: one file a command, torch imported by none."""
