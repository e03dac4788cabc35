"""One thread a process, so that results do not depend on the machine; the workers end with the session."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for every process that a test starts

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which torch does on some paths

from hypothesis import settings
from support import store_server, workers
from torch.distributed.checkpoint.state_dict import get_state_dict

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it, and so would their children
torch.set_num_threads(1)
gc.disable()  # until all tests are there, which need not be looked through

# The same examples in every run, however slow the machine is.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


DURATIONS = Path(__file__).with_name("durations.json")
"""How many seconds each file of tests took when that was last recorded."""

durations = Counter[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write how long files take to {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU (`make gpu` runs these)")
    config.addinivalue_line("markers", "exhaustive: a long sweep that `make check` runs and `make test` leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, where several processes share them, so that all end at about the same time."""
    if hasattr(config, "workerinput"):
        seconds = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    durations[file_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--record-durations") and not hasattr(session.config, "workerinput"):
        seconds = json.loads(DURATIONS.read_text()) | {file: round(duration, 1) for file, duration in durations.items()}
        kept = {file: seconds[file] for file in sorted(seconds) if (DURATIONS.parent / file).exists()}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test and each fixture draws the same numbers, whichever tests this process has run before."""
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _end_of_the_workers() -> Iterator[None]:
    yield
    workers.shutdown()


@pytest.fixture(autouse=True)
def _one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all tiles of all products would be compiled and timed, for minutes; `test_kernels` compares them."""
    if torch.cuda.is_available() and (tiles := sys.modules.get("muonckpt.optimizer.triton.multiply")):
        for name in ("SMALL_TILES", "LARGE_TILES"):
            monkeypatch.setattr(tiles, name, tiles.SMALL_TILES[:1])
        monkeypatch.setattr(tiles, "WIDE_TILES", ())


@pytest.fixture(scope="session")
def object_store() -> Iterator[tuple[store_server.Server, str]]:
    """An S3 server with a bucket, and its address."""
    with store_server.served() as found:
        yield found


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of this package, saved by one process: matrices, a fused one, vectors, counters.  Do not change."""
    import muonckpt

    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    muonckpt.save(tiny_state(), path, provenance={"step": 1})
    return path


def tiny_state() -> dict[str, object]:
    from muonckpt.optimizer import Muon

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Linear(40, 13))
    opt = Muon(
        [
            {"params": [net[0].weight], "pieces": (24, 8, 8)},
            {"params": [net[1].weight]},
            {"params": [net[0].bias, net[1].bias], "algorithm": "adamw", "lr": 1e-3},
        ]
    )
    net(torch.randn(3, 16)).sum().backward()
    opt.step()
    model, state = get_state_dict(net, opt)
    return {"model": model, "optimizer": state}


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, of three steps that are alike but for their numbers.  Do not change."""
    import muonckpt

    folder, state = tmp_path_factory.mktemp("tiny run"), tiny_state()
    for step in (1, 2, 3):
        muonckpt.save(state, folder / f"step-{step:08}", provenance={"step": step})
    return folder


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, for damage."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))
