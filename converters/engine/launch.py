"""How the processes of one command find each other: by the variables that their launcher sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .workers import LaunchError, SingleWorker, Worker, Workers, together

TIMEOUT = 120.0
"""The default number of seconds without an answer after which another worker counts as lost."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The variables in which torchrun, srun, Open MPI and MPICH store the rank and the number of processes; the first pair
that is set counts.  ``SLURM_NTASKS`` is not used, because a batch script has it although it runs once."""

_SET_WITHOUT_A_LAUNCHER = {"SLURM_PROCID"}
"""Slurm sets it in a batch script, too."""

_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def worker_of(environment: Mapping[str, str]) -> Worker:
    """Return which worker a process with this environment is; without a launcher it is the only one.

    Raises:
        LaunchError: the rank is not possible, or only one of a launcher's two variables is set.
    """
    for names in _LAUNCHERS:
        values = [environment[name] for name in names if name in environment]
        if not values or (len(values) == 1 and names[0] in environment.keys() & _SET_WITHOUT_A_LAUNCHER):
            continue
        try:
            rank, world = map(int, values)
        except ValueError:
            shown = ", ".join(f"{name}={environment.get(name, '')!r}" for name in names)
            raise LaunchError(f"expected a rank and a number of processes in the environment, found {shown}") from None
        return Worker(rank, world)
    return Worker()


@contextmanager
def joined(environment: Mapping[str, str], timeout: float = TIMEOUT) -> Iterator[Workers]:
    """Join the workers of this command for the duration of a block.

    An error that ends the block on one worker ends it on all, with the same error.  The coordinator does the last step
    of the work, so the other workers leave the block after it.

    Args:
        environment: of the process (``os.environ``).
        timeout: seconds without an answer after which another worker counts as lost.

    Raises:
        LaunchError: the environment is contradictory, or does not say where the workers meet.
        Interrupted: not all workers arrived, or one was lost.
    """
    me = worker_of(environment)
    if me.world == 1:
        yield SingleWorker()
        return
    if missing := [name for name in _ADDRESS if name not in environment]:
        raise LaunchError(
            f"{me} cannot find the others: {' and '.join(missing)} not set in the environment. torchrun sets them; "
            "under another launcher set MASTER_ADDR to the machine of worker 0 and MASTER_PORT to a free port of it"
        )
    from .process_group import ProcessGroup  # imports torch, which one process does not need

    workers = ProcessGroup(me, timeout)
    with together(workers):
        yield workers
    workers.leave()
