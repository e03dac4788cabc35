"""The release.  The build takes it from here, so that no program has to look up the metadata of its package."""

VERSION = "0.1.0"

PROGRAM = f"muonckpt {VERSION}"
"""What checkpoints are said to be written by."""
