"""One reshard done by several workers, in the processes of `support.workers`."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muonckpt import MuonckptError
from muonckpt.converters.engine.job import Job
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.engine.workers import joined
from muonckpt.store.io.location import location
from support import workers

STRUCK = [sys.executable, str(Path(__file__).with_name("struck.py"))]


def environment(rank: int, world: int, port: int = 1) -> dict[str, str]:
    """What torchrun would put into the environment of a worker."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def together(world: int, plan: Callable[..., Job], *arguments: Any, **options: Any) -> list[str]:
    """What each worker did: "published", "done", or the name and text of its error.

    ``plan`` makes the job, with the rank as its first argument; ``how`` are arguments of `run_job`, whose destination
    may be a URL, and ``environment`` is added to that of the workers.
    """
    return workers.run(world, work, plan, arguments, options)


def work(rank: int, world: int, plan: Callable[..., Job], arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    options = dict(options)
    os.environ |= options.pop("environment", {})
    destination = location(str(options.pop("destination")))
    try:
        with joined(environment(rank, world), timeout=60) as group:
            manifest = run_job(plan(rank, *arguments), destination, workers=group, **options)
    except MuonckptError as error:
        return f"{type(error).__name__}: {error}"
    return "done" if manifest is None else "published"


def free_port() -> int:
    """Return a port that nothing listens on, below those that the kernel deals out to connections meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first - 10_000, first), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
