"""The suite's core under other versions, one environment after the other: `make matrix`, whose table is in docs.

``python -m support.matrix 3.12:2.10 …`` tries these pairs of Python and torch only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import cycle
from pathlib import Path

from support.environments import ROOT, installed, pythons, requirements

TORCHES = tuple(f"2.{minor}" for minor in range(9, 16))
"""From the lowest that pyproject.toml allows to the newest that was tried."""

CORE = (
    "tests/algebra",
    "tests/layouts/test_tensors.py",
    "tests/optimizer/test_muon.py",
    "tests/optimizer/test_topologies.py",
    "tests/optimizer/test_products.py",
    "tests/optimizer/test_scalar.py",
    "tests/optimizer/test_torch_state.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/checkpoint/test_async_saving.py",
    "tests/checkpoint/test_redistribute.py",
    "tests/converters/test_reshard.py",
    "tests/converters/test_several_workers.py",
    "tests/store/test_dcp_store.py",
    "tests/store/test_safetensors.py",
    "tests/store/test_torch_zip.py",
    "tests/store/test_trainer_files.py",
    "tests/store/test_zarr.py",
)
"""That a step has the same bits on every mesh, that what is saved is loaded, resharded and read in every format."""

TOOLS = ("hypothesis", "jsonschema", "pytest", "safetensors")

HEAD = ("Python", "torch", "NumPy", "zarr", "passed", "skipped", "failed")


def combinations() -> list[tuple[str, str, bool]]:
    """Pythons by turns, every torch once, the newest also under the newest Python; whether the rest is the oldest."""
    available_pythons = [f"{major}.{minor}" for major, minor in pythons()]
    pairs = dict.fromkeys([*zip(cycle(available_pythons), TORCHES, strict=False), (available_pythons[-1], TORCHES[-1])])
    requested_pairs = [tuple(pair.split(":")) for pair in sys.argv[1:]] or pairs
    return [(python, torch, torch == TORCHES[0]) for python, torch in requested_pairs]


def row(python: str, torch: str, oldest: bool, folder: Path) -> tuple[tuple[str, ...], str]:
    """One line of the table, and what failed."""
    pins = (ROOT / "constraints.txt").read_text().split()
    tools = [pin for pin in pins if pin.partition("==")[0] in TOOLS]
    oldest_pins = requirements(oldest) | {"torch": f"torch=={torch}.*"}
    try:
        command = installed(pythons()[tuple(map(int, python.split(".")))], folder, [*oldest_pins.values(), *tools])
    except subprocess.CalledProcessError as error:
        return (python, torch, *["not to be had"] * 2, *[""] * 3), error.stderr
    requested_pairs = "import importlib.metadata as m; print(*(m.version(n) for n in ('torch', 'numpy', 'zarr')))"
    versions = subprocess.run(
        [*command, "-c", requested_pairs], capture_output=True, text=True, check=True
    ).stdout.split()
    tests = [*command, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *CORE]
    ran = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    last = ran.stdout.rstrip().rpartition("\n")[2]
    counts = {outcome: number for number, outcome in re.findall(r"(\d+) (passed|skipped|failed|error)", last)}
    bad = int(counts.get("failed", 0)) + int(counts.get("error", 0))
    cells = (counts.get("passed", "0"), counts.get("skipped", "0"), str(bad))
    return (python, *versions, *cells), ran.stdout[-6000:] + ran.stderr[-2000:] if ran.returncode else ""


def main() -> int:
    """Print the table; what failed goes to the error stream."""
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = False
    print("| " + " | ".join(HEAD) + " |", "|---|---|---|---|---:|---:|---:|", sep="\n", flush=True)
    for combination in combinations():
        folder = Path(tempfile.mkdtemp(prefix="muonckpt-matrix-"))
        try:
            cells, wrong = row(*combination, folder)
        finally:
            shutil.rmtree(folder)
        failed |= bool(wrong)
        print("| " + " | ".join(cells) + " |", flush=True)
        print(wrong, end="", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
