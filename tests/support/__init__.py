"""What tests share: worlds of ranks, oracles, golden checkpoints, and models.  No test file imports another."""
