"""All that only a GPU can show, in one command: each part in a process of its own, with a limit; failures come last.

    python benchmarks/gpu.py [--out out/gpu] [PART ...]

Needs torch, Triton, NumPy and pytest, and installs nothing: the package is found through a folder of links.  A part
that fails or takes too long does not stop the others; its log and the figures it had are in ``--out``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNEL_TESTS = ("kernels", "elementwise", "step_kernels", "products", "stacks", "scalar")


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        arguments: of Python; ``{out}`` is the folder for figures.
        limit: seconds after which it is ended.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float


PARTS = (
    Part(
        "tests",
        ("-m", "pytest", "-p", "no:cacheprovider", *(f"tests/optimizer/test_{name}.py" for name in KERNEL_TESTS)),
        150,
    ),
    Part("products", ("benchmarks/products.py", "--limit", "30", "--out", "{out}/products.json"), 60),
    Part("step", ("benchmarks/step_gpu.py", "--limit", "30", "--out", "{out}/step.json"), 80),
    Part("attest", ("benchmarks/attest.py", "--limit", "12"), 30),
    Part("newton_schulz", ("benchmarks/newton_schulz.py", "--limit", "90", "--out", "{out}/newton_schulz.json"), 170),
)
"""490 seconds at most, in the order in which they are missed."""


def linked(root: Path, folder: Path) -> Path:
    """A folder in which ``muonckpt`` is one tree, as an installation maps it (`pyproject.toml`)."""
    package = folder / "muonckpt"
    package.mkdir(parents=True, exist_ok=True)
    inside = [*(root / "muonckpt").iterdir(), *(root / name for name in ("optimizer", "converters", "cli"))]
    for source in inside:
        link = package / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return folder


def driver() -> str:
    """The GPU's name, driver and clocks in MHz, as its tool says."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU"
    query_fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    query_command = ["nvidia-smi", f"--query-gpu={query_fields}", "--format=csv,noheader"]
    completed = subprocess.run(query_command, capture_output=True, text=True, check=False)
    return f"{query_fields}: {completed.stdout.strip() or completed.stderr.strip()}"


def run(part: Part, out: Path, path: Sequence[Path]) -> str | None:
    """Run a part, printing as it goes; what went wrong, or None."""
    arguments = [argument.format(out=out) for argument in part.arguments]
    # The working directory would be searched first, and its `muonckpt` is not the whole package.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    print(f"\n== {part.name}: python {' '.join(arguments)}", flush=True)
    begin = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        timer = threading.Timer(part.limit, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
        code = process.wait()
        timer.cancel()
    took = time.monotonic() - begin
    print(f"== {part.name}: {took:.0f} s", flush=True)
    if code == 0:
        return None
    return f"longer than {part.limit:g} s" if took >= part.limit else f"exit code {code}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(names)}; all if none is named")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for logs and figures")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(names):
        parser.error(f"no parts called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    print(driver(), flush=True)
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = (linked(ROOT, out / "linked"), ROOT / "tests", ROOT / "benchmarks")
    selected_parts = [part for part in PARTS if not arguments.parts or part.name in arguments.parts]
    failures = {part.name: failure for part in selected_parts if (failure := run(part, out, path))}
    print(f"\n{len(selected_parts) - len(failures)} of {len(selected_parts)} parts ended well")
    for name, failure in failures.items():
        print(f"  {name}: {failure}; see {out / name}.log")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
