"""The release number.  The build reads it from here, so that a program need not look up its package's metadata."""

VERSION = "0.1.0"

PROGRAM = f"muonckpt {VERSION}"
"""The name of the program in the provenance of the checkpoints that it writes."""
