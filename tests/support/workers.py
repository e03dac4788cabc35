"""A pool of gloo processes, the one way in which a test of this suite runs on several ranks.

    def job(rank, world, tensor):  # at module level, so that a worker can import it
        torch.distributed.all_reduce(tensor)
        return tensor

    assert run(3, job, torch.ones(2))[0].tolist() == [3.0, 3.0]

Importing torch takes seconds, so one server does that, once, and the workers are forked from it by the first test
that needs them; every job gets a fresh process group and seed.  The function begins on a rank when all ranks have told
that they are connected: the early end of one is no failure of another.  A worker that failed or hung is replaced: its
state is unknown.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

MAX_WORLD = 8

#: How long the other ranks may take to report once one has failed, in seconds.  Gloo tells them quickly.
GRACE = 30.0

#: How long the start of a worker may take, in seconds: the first one waits for imports, on a machine that may be busy.
START = 600.0

#: What the server imports: what nearly every job needs.  Nothing that starts threads or a GPU, which forks would lack.
PRELOADED = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "muonckpt",
    "muonckpt.checkpoint",
    "muonckpt.optimizer",
    "fsspec",
    "hypothesis",
    "pytest",
]


class WorkersFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the message has the tracebacks, the first one first."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank has no result.  ``seconds`` are on the monotonic clock that all processes of a machine share."""

    seconds: float
    text: str


_workers: dict[int, _Worker] = {}
_scratch: list[Path] = []


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """``function(rank, world, *args)`` on ``world`` ranks with a gloo process group; the results by rank.

    Args:
        world: 1 to 8.
        function: at the top of an importable module.
        args: plainly picklable, as are the results.  CPU tensors travel by value.
        timeout: in seconds, for the function, once all ranks are connected.  A collective gives up after half.

    Raises:
        WorkersFailed: not every rank returned.
    """
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"a world has 1 to {MAX_WORLD} ranks, got {world}")
    # Pickled by hand: `Connection.send` would pass tensors as file descriptors of shared memory.
    job = pickle.dumps((function, args, warnings.filters))
    try:
        _start(world)
        store = str(Path(tempfile.mkdtemp(dir=_scratch[0])) / "store")
        for rank in range(world):
            message = (sys.path, rank, world, store, timeout / 2, job)
            _workers[rank].connection.send_bytes(pickle.dumps(message))
        _raise_failures(_collect(world, START))  # that they are connected
        for rank in range(world):
            _workers[rank].connection.send_bytes(b"begin")
        answers = _collect(world, timeout)
    except BaseException:
        shutdown()  # an answer that nobody took must not become that of the next job
        raise
    for rank, answer in answers.items():
        if isinstance(answer, _Failure):
            _end(_workers.pop(rank))
    _raise_failures(answers)
    return [answers[rank] for rank in range(world)]


def shutdown() -> None:
    """End every worker that this process started.  A later :func:`run` starts new ones."""
    while _workers:
        _end(_workers.popitem()[1])
    while _scratch:
        shutil.rmtree(_scratch.pop(), ignore_errors=True)


atexit.register(shutdown)


def pids() -> list[int]:
    """The process ids of the workers, by rank."""
    return [_workers[rank].process.pid or 0 for rank in sorted(_workers)]


def context() -> ForkServerContext:
    """What starts processes in which the modules of `PRELOADED` are there."""
    server = get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def _start(world: int) -> None:
    """Start the workers that are missing among the first ``world``."""
    if not _scratch:
        _scratch.append(Path(tempfile.mkdtemp(prefix="muonckpt-workers-")))
    missing = [rank for rank in range(world) if rank not in _workers or not _workers[rank].process.is_alive()]
    for rank in missing:
        if rank in _workers:
            _end(_workers[rank])
        parent_end, child_end = context().Pipe()
        process = context().Process(target=_serve, args=(child_end, str(_scratch[0])), daemon=True)
        process.start()
        child_end.close()
        _workers[rank] = _Worker(process, parent_end)
    for rank in missing:
        if not _workers[rank].connection.poll(START):
            raise WorkersFailed(f"rank {rank}: the worker did not start within {START:.0f} s")
        _workers[rank].connection.recv_bytes()


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _collect(world: int, seconds: float) -> dict[int, Any]:
    """What each rank answers within so many seconds, or why it did not."""
    deadline = time.monotonic() + seconds
    waiting = {_workers[rank].connection: rank for rank in range(world)}
    answers: dict[int, Any] = {}
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in [item for item in waiting if item in ready]:
            rank = waiting.pop(connection)
            process = _workers[rank].process
            try:
                answers[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                process.join()
                answers[rank] = _Failure(time.monotonic(), f"died, exit code {process.exitcode}")
            if isinstance(answers[rank], _Failure):
                # Its sockets close, so that ranks which wait for it in a collective fail at once.
                process.kill()
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in waiting.values():
        answers[rank] = _Failure(time.monotonic(), f"no answer in time, ended\n{_stack(_workers[rank])}")
    return answers


def _raise_failures(answers: dict[int, Any]) -> None:
    """Raise what failed, the first first."""
    failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
    if failures:
        order = sorted(failures, key=lambda rank: failures[rank].seconds)
        raise WorkersFailed("\n".join(f"rank {rank} of {len(answers)}: {failures[rank].text}" for rank in order))


def _stack(worker: _Worker) -> str:
    """Where a hung worker is: it writes that to its file when it gets the signal, and then the signal ends it."""
    os.kill(worker.process.pid or 0, signal.SIGUSR1)
    worker.process.join(GRACE)
    return (_scratch[0] / f"stack-{worker.process.pid}").read_text()


def _serve(connection: Connection, scratch: str) -> None:
    """A worker: jobs in, answers out, until the parent ends it or is gone."""
    with Path(scratch, f"stack-{os.getpid()}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, chain=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        import torch

        torch.set_num_threads(1)
        gc.freeze()  # what the server imported is never garbage, and need not be looked through
        connection.send_bytes(b"ready")
        while True:
            try:
                sys.path[:], *job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(_answer(connection, *job))


def _answer(connection: Connection, rank: int, world: int, store: str, collective_timeout: float, job: bytes) -> bytes:
    import torch
    from torch import distributed

    try:
        _forget_last_job()
        torch.manual_seed(0)
        function, args, filters = pickle.loads(job)
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(filters):  # what is an error in the test is one here
            patterns = [item if isinstance(item, str) else item.pattern if item else "" for item in (message, module)]
            warnings.filterwarnings(action, patterns[0], category, patterns[1], line)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=collective_timeout),
        )
        connection.send_bytes(pickle.dumps("connected"))
        connection.recv_bytes()
        return pickle.dumps(function(rank, world, *args))
    except BaseException:
        return pickle.dumps(_Failure(time.monotonic(), traceback.format_exc()))


def _forget_last_job() -> None:
    """End the process groups of the last job, and empty what DTensor has cached by mesh.

    Not at the end of that job: a rank that is done early would close connections that others still make.  And
    an equal mesh of this job has process groups of other names than those in the cache.
    """
    import torch
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _redistribute

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", int)()  # torch 2.9 has no such cache
