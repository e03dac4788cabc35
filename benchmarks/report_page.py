"""A page about a large checkpoint: CPU seconds to make it, its size, and the time until a browser has built it.

Needs selenium (``pip install '.[browser]'``) and Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import describe
from many_chunks import write

import muonckpt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.browser import browser, shown

SIZES = ((1600, 32), (100, 512), (50_000, 1), (15_625, 64))
"""Tensors, and the ranks over which each is cut."""

LOADS = 5


def main() -> None:
    print(describe(), end="\n\n")
    print("| tensors | ranks | shards | CPU, metadata only | with norms | page | built after (median of 5) |")
    print("|---|---|---|---|---|---|---|")
    for tensors, ranks in SIZES:
        with tempfile.TemporaryDirectory() as name, browser() as driver:
            folder = Path(name)
            write(folder / "checkpoint", tensors, ranks)
            seconds = []
            for stats in ("none", "norms"):
                start = time.process_time()
                size = muonckpt.report(folder / "checkpoint", stats=stats).write(folder / "page.html")
                seconds.append(time.process_time() - start)
            built = statistics.median(built_after(driver, folder / "page.html") for _ in range(LOADS))
        page_times = " | ".join(f"{duration:.1f} s" for duration in seconds)
        print(f"| {tensors} | {ranks} | {tensors * ranks} | {page_times} | {size / 2**20:.1f} MiB | {built:.0f} ms |")


def built_after(driver, page: Path) -> float:
    """Milliseconds from the start of loading to the end of the page's script; what is in view is painted then."""
    return shown(driver, page).execute_script("return performance.getEntriesByName('ready')[0].startTime")


if __name__ == "__main__":
    main()
