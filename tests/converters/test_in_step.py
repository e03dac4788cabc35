"""Which files are written in step, and how threads share the work on them."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from support.resharded import contents, make_job, plan_job

import muonckpt
from muonckpt.converters.engine import in_step as module
from muonckpt.converters.engine.in_step import Draft, FilesInStep, files_in_step
from muonckpt.converters.engine.job import Job
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import ShardRule, Target
from muonckpt.store.reading.payloads import Windows

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint of twelve matrices and a vector."""
    path = tmp_path_factory.mktemp("layers") / "checkpoint"
    torch.manual_seed(0)
    muonckpt.save({f"w{number}": torch.randn(8 + number, 12) for number in range(12)} | {"b": torch.randn(5)}, path)
    return path


def columns(source, ranks: int) -> Job:
    return make_job(source, Target({"dp": ranks}, (ShardRule("w*", (("dp", 1),)),)))


def shared(job: Job, threads: int, in_any_order: bool = True) -> list[tuple[int, int]]:
    """The numbers of files and of threads of each group; each thread has four parts, or one alone has all."""
    groups = files_in_step(job.files, job.rows, threads, in_any_order)
    assert [file for group in groups for file in group.files] == list(job.files)
    return [(len(group.files), max(len(group.parts) // 4, 1)) for group in groups]


def test_threads_share_files_by_chunks_where_they_can_and_else_by_files(layers, tmp_path):
    assert shared(plan_job(layers, 4), 4) == [(1, 1)] * 4  # rows: one run of bytes each
    assert shared(plan_job(layers, 1), 4) == [(1, 4)]
    assert shared(columns(layers, 6), 1) == [(6, 1)]
    assert shared(columns(layers, 6), 4) == [(6, 4)]  # all of the source is read once
    assert shared(columns(layers, 12), 4) == [(12, 4)]
    assert shared(columns(layers, 6), 4, in_any_order=False) == [(2, 1)] * 3
    muonckpt.save({"w": torch.randn(64, 12)}, tmp_path / "one")
    assert shared(columns(tmp_path / "one", 6), 4) == [(2, 1)] * 3  # a chunk is one thread's


@pytest.mark.parametrize("ranks", [1, 2, 5, 12])
def test_any_number_of_threads_writes_the_same_files(layers, tmp_path, ranks):
    for threads in (1, 2, 3, 7):
        run_job(columns(layers, ranks), tmp_path / str(threads), threads=threads)
    whole = contents(tmp_path / "1")
    assert all(contents(tmp_path / str(threads)) == whole for threads in (2, 3, 7))


def write(group: FilesInStep, part, opened, written) -> list[tuple[str, object]]:
    """Write a part as a thread does."""
    drafts = group.begin_part(opened)
    if not drafts:
        return []
    written(list(zip(drafts, part, strict=True)))
    return group.end_part()


def parts_of(files, threads: int) -> Counter:
    """How often each chunk is written when threads share files."""
    group, seen, closed = FilesInStep(files, 4 * threads), Counter(), []

    @contextmanager
    def opened(file):
        yield Draft(file, None, [], None)
        closed.append(file.name)

    def written(part) -> None:
        assert not closed
        seen.update((draft.file.name, number) for draft, numbers in part for number in numbers)
        time.sleep(0.001)

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(lambda part: write(group, part, opened, written), group.parts))
    assert sorted(closed) == sorted(file.name for file in files)
    assert [[file for file, _ in found] for found in done if found] == [[file.name for file in files]]
    return seen


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_every_chunk_is_in_one_part_and_one_thread_hears_of_the_files(layers, threads):
    job = columns(layers, 6)
    every = {(file.name, number) for file in job.files for number in range(len(file.chunks))}
    assert parts_of(job.files, threads) == Counter(every)


def test_what_threads_keep_of_the_source_stays_within_the_budget(tmp_path, monkeypatch):
    """Windows into many chunks, of which a band of columns takes a little each."""
    muonckpt.save({f"w{number}": torch.randn(64, 2000) for number in range(8)}, tmp_path / "whole")
    run_job(plan_job(tmp_path / "whole", 8), tmp_path / "rows")
    kept: dict[int, int] = {}
    view = Windows.view

    def viewed(self, *where):
        found = view(self, *where)
        kept[id(self)] = max(kept.get(id(self), 0), sum(map(len, self._windows)))
        return found

    monkeypatch.setattr(Windows, "view", viewed)
    run_job(columns(tmp_path / "rows", 7), tmp_path / "columns", threads=2, memory=512 << 10)
    assert kept and sum(kept.values()) <= 256 << 10


def test_an_error_of_one_part_closes_the_files_with_it(layers):
    files, ended = columns(layers, 6).files, []
    group = FilesInStep(files, 3)

    @contextmanager
    def opened(file):
        try:
            yield Draft(file, None, [], None)
        except ValueError as error:
            ended.append((file.name, str(error)))
            raise

    def written(part) -> None:
        if part[0][1].start:
            raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"), group.opened:
        for part in group.parts:
            assert write(group, part, opened, written) == [] and not ended
    assert sorted(ended) == sorted((file.name, "damaged") for file in files)


def test_files_that_cannot_be_opened_are_not_tried_by_the_next_thread(layers):
    group, tried = FilesInStep(columns(layers, 6).files, 2), []

    @contextmanager
    def opened(file):
        tried.append(file.name)
        raise OSError("disk full")
        yield

    with pytest.raises(OSError, match="disk full"):
        write(group, group.parts[0], opened, lambda part: None)
    assert write(group, group.parts[1], opened, lambda part: None) == [] and len(tried) == 1
