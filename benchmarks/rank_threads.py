"""Ranks as threads of one process, with a process group each: programs run as they are, collectives too.

So one machine shows what work costs each of many ranks, as seconds of its thread on the processor: waiting for others
and their work do not count.
"""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

_lock = threading.Lock()
_thread_local = threading.local()

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "recv", "reduce", "scatter", "send")
"""How the names begin of what exchanges something; a barrier exchanges nothing."""

SIZES = ("500x8", "2000x8", "8000x8", "500x32", "2000x32", "500x64")


def asked(doc: str | None) -> tuple[list[tuple[int, int]], int]:
    """Numbers of tensors and of ranks, and the number of rounds, from the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="TENSORSxRANKS")
    parser.add_argument("--rounds", type=int, default=2, help="alternating ones, after one that warms up")
    settings = parser.parse_args()
    sizes = [size.split("x") for size in settings.sizes]
    return [(int(tensors), int(ranks)) for tensors, ranks in sizes], settings.rounds


class Traffic:
    """Bytes that the first rank gets and sends, by what its thread says it does."""

    def __init__(self) -> None:
        self.bytes: defaultdict[str, int] = defaultdict(int)
        named = {name: getattr(dist, name) for name in dir(dist) if name.startswith(COLLECTIVES)}
        self._plain = {name: function for name, function in named.items() if type(function) is FunctionType}

        def scattered(scatter_object_output_list, scatter_object_input_list=None, **_) -> int:
            return sum(len(pickle.dumps(item)) for item in scatter_object_input_list or ())

        def told(tensor, **_) -> int:
            return (dist.get_world_size() - 1) * tensor.nbytes if dist.get_rank() == 0 else 0

        sizes = {
            "gather": lambda tensor, *_, **__: tensor.nbytes,
            "scatter_object_list": scattered,
            "broadcast": told,
        }
        for name, function in self._plain.items():
            setattr(dist, name, self._counting(function, sizes.get(name)))

    def _counting(self, function: Callable, sizes: Callable[..., int] | None) -> Callable:
        def call(*args, **kwargs):
            if program := getattr(_thread_local, "counted_as", None):
                if sizes is None:
                    raise RuntimeError(f"{function.__name__} is not counted: say here what it sends")
                with _lock:
                    self.bytes[program] += sizes(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    def counted(self, program: str | None) -> None:
        """Count what this thread exchanges from now on as ``who``'s; None: do not count."""
        _thread_local.counted_as = program

    def end(self) -> None:
        for name, function in self._plain.items():
            setattr(dist, name, function)


def shards(rank: int, ranks: int, tensors: int, step: int) -> dict[str, DTensor]:
    """Tensors of which each rank has two rows of four."""
    mesh = init_device_mesh("cpu", (ranks,))
    shape, stride = torch.Size((2 * ranks, 4)), (4, 1)
    return {
        f"layers.{number}.momentum_buffer": DTensor.from_local(
            torch.full((2, 4), float(step + number + rank)), mesh, [Shard(0)], run_check=False, shape=shape,
            stride=stride,
        )
        for number in range(tensors)
    }  # fmt: skip


def in_threads(ranks: int, of_rank: Callable[[int, Path, Traffic], None]) -> Traffic:
    """Run a function on so many ranks, with a folder that is empty at first; returns what was counted."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, errors, traffic = dist.HashStore(), [], Traffic()

    def thread(rank: int, folder: Path) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            of_rank(rank, folder, traffic)
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            raise

    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as folder:
        threads = [threading.Thread(target=thread, args=(rank, Path(folder)), daemon=True) for rank in range(ranks)]
        for item in threads:
            item.start()
        while any(item.is_alive() for item in threads) and not errors:
            time.sleep(0.1)
    traffic.end()
    _uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return traffic
