"""The pool of gloo processes: what it promises to the distributed tests, failures included."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support import workers
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh


def who(rank: int, world: int) -> tuple[int, int, int, int]:
    assert (rank, world) == (distributed.get_rank(), distributed.get_world_size())
    return rank, world, os.getpid(), torch.get_num_threads()


def summed(rank: int, world: int, tensor: Tensor) -> Tensor:
    tensor *= rank + 1
    distributed.all_reduce(tensor)
    return tensor


def drawn(rank: int, world: int) -> Tensor:
    return torch.rand(3)


def gathered(rank: int, world: int, groups_before: int) -> list[str]:
    """Gather through one axis of a mesh, whose process group is named by how many were made before."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    for _ in range(groups_before):
        distributed.new_group(list(range(world)))
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("one", "all"))
    whole = torch.arange(12.0).reshape(4, 3)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    product = sharded @ sharded.T
    assert isinstance(product, DTensor) and torch.equal(product.full_tensor(), whole @ whole.T)
    return [mesh.get_group(axis).group_name for axis in ("one", "all")]


def raises_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("on purpose")
    distributed.barrier()


def exits_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


def sleeps(rank: int, world: int, begun: Path) -> None:
    begun.touch()
    time.sleep(600)


def returns_a_function(rank: int, world: int) -> Callable[[], int]:
    return lambda: rank


def failure(world: int, job: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(workers.WorkersFailed) as caught:
        workers.run(world, job, *arguments)
    return str(caught.value)


def test_results_come_in_rank_order_from_the_same_processes() -> None:
    workers.run(4, who)
    pids = workers.pids()[:4]
    assert len({*pids, os.getpid()}) == 5
    for world in (1, 2, 3, 4, 2):
        assert workers.run(world, who) == [(rank, world, pids[rank], 1) for rank in range(world)]


def test_tensors_travel_by_value() -> None:
    given = torch.ones(1000, dtype=torch.bfloat16)
    for world, total in ((3, 6.0), (2, 3.0)):
        results = workers.run(world, summed, given)
        assert all(torch.equal(result, torch.full_like(given, total)) for result in results)
    assert torch.equal(given, torch.ones_like(given))


def test_every_job_has_the_same_seed() -> None:
    (first,), (second,) = workers.run(1, drawn), workers.run(1, drawn)
    assert torch.equal(first, second)


def test_an_equal_mesh_of_another_job_finds_its_own_process_groups() -> None:
    """DTensor caches by mesh, and equal meshes of two jobs have differently named groups."""
    first, second, third = (workers.run(2, gathered, groups)[0] for groups in (0, 3, 0))
    assert first == third != second


def test_an_exception_is_reported_and_the_others_do_not_hang() -> None:
    workers.run(2, who)
    message = failure(2, raises_on_rank_1)
    assert "no answer in time" not in message
    assert message.startswith("rank 1 of 2: Traceback") and "KeyError: 'on purpose'" in message
    assert "rank 0 of 2" in message
    assert [rank for rank, *_ in workers.run(2, who)] == [0, 1]


def test_a_death_is_reported_and_is_none_of_the_others() -> None:
    assert failure(2, exits_on_rank_1) == "rank 1 of 2: died, exit code 3"


def test_a_hang_is_cut_and_shown_and_only_its_process_is_replaced(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.run(2, who)
    before, begun, wait = workers.pids(), tmp_path / "begun", workers.wait

    def until_it_sleeps(connections: list[Connection], seconds: float) -> list[Any]:
        """Wait as ever; once the job sleeps the time is out."""
        while not (ready := wait(connections, 0.01)) and not begun.exists():
            pass
        return ready

    monkeypatch.setattr(workers, "wait", until_it_sleeps)
    message = failure(1, sleeps, begun)
    monkeypatch.undo()
    assert message.startswith("rank 0 of 1: no answer in time") and "in sleeps" in message
    workers.run(2, who)
    after = workers.pids()
    assert after[0] != before[0] and after[1] == before[1]


def test_a_result_that_cannot_be_sent_is_reported() -> None:
    assert "pickle" in failure(1, returns_a_function)


@pytest.mark.parametrize("world", [0, 9])
def test_a_world_that_is_too_small_or_too_large(world: int) -> None:
    with pytest.raises(ValueError, match=f"got {world}"):
        workers.run(world, who)
