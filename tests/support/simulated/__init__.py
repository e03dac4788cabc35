"""A machine, its disk, its store and its ranks, simulated in one process from one seed: open ``machine`` first."""
