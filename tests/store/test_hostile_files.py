"""Hostile files: whatever they hold, their reader says so in one sentence, after little work and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import hostile, sweep
from support.dcp_metadata import dump_metadata

import muonckpt
from muonckpt import DamageError, SourceError
from muonckpt.record.record import Extent
from muonckpt.store.formats.dcp_metadata import StoredItem, parse_metadata
from muonckpt.store.io.limits import SMALL_DESCRIPTION, SWITCH, LimitError, check_description
from muonckpt.store.reading.payloads import Payloads

CALLS, LOOKS, MEBIBYTES = 10_000_000, 1_000, 256
"""The most that three readings of a case may cost; what plug-ins are installed is a part of it."""

LOOK = """
import json, sys
import muonckpt
from muonckpt.cli.main import run
from muonckpt.names.errors import MuonckptError
from support.work import Work
said = []
for case in sys.argv[1:]:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    with Work() as work:
        code = max(run([command, case]) for command in ("inspect", "verify"))
        try:
            with muonckpt.open(case) as opened:
                print(len(str(opened.groups)), [opened.items[key] for key in opened.items], file=sys.stderr)
                for tensor in opened.tensors.values():
                    tensor.bits()
            code = 0
        except MuonckptError as error:
            print(error, file=sys.stderr)
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    said.append([code, work.calls, work.looks, peak // 1024])
print(json.dumps(said))
"""


SLOW = ("colliding keys in .metadata", "colliding keys in a rank's file", "colliding floats in an option",
        "empty dicts in an option", "marks in an option", "a very long pickle in an option", "many members of a zip",
        "nested boxes")  # fmt: skip
"""What takes a good part of a second, beside a case that is much like it."""

QUICK = tuple(case for case in hostile.CASES if case not in SLOW)


@pytest.mark.parametrize("cases", sweep([[QUICK], [SLOW]], [QUICK]), ids=["quick", "slow"])
def test_a_hostile_checkpoint_is_refused_with_little_work_and_memory(cases, tmp_path):
    """The exit code is 0 if everything could be decoded; calls, looks at files, and MiB of memory are bounded."""
    [names] = cases
    places = [tmp_path / str(number) / "case" for number in range(len(names))]  # else taken for steps of one run
    for name, place in zip(names, places, strict=True):
        muonckpt.save({"w": torch.zeros(4), "param_groups": [{"lr": 0.5}]}, place)
        hostile.CASES[name]()(place)
    search = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *places], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": search}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "this is a bug" not in done.stderr and "Traceback" not in done.stderr, done.stderr[-4000:]
    found = dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for name, (code, calls, looks, mebibytes) in found.items():
        assert code in (1, 3) and calls < CALLS and looks < LOOKS and mebibytes < MEBIBYTES, (name, found[name])


def test_a_description_is_in_proportion_to_the_other_files_or_the_limits_are_lifted(tmp_path, monkeypatch):
    (tmp_path / "muonckpt.json").write_bytes(bytes(SMALL_DESCRIPTION))
    check_description(tmp_path / "muonckpt.json", SMALL_DESCRIPTION)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__0_0.distcp").write_bytes(b"x" * (3 * SMALL_DESCRIPTION))
    (tmp_path / "part" / "again").hardlink_to(tmp_path / "part" / "__0_0.distcp")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 40)
    check_description(tmp_path / "muonckpt.json", 4 * SMALL_DESCRIPTION)
    with pytest.raises(LimitError, match=f"{SWITCH}=off"):
        check_description(tmp_path / "muonckpt.json", 4 * SMALL_DESCRIPTION + (1 << 16))
    monkeypatch.setenv(SWITCH, "off")
    check_description(tmp_path / "muonckpt.json", 1 << 40)


def test_load_refuses_an_option_that_would_cost_too_much_before_torch_reads_it(tmp_path):
    dcp.save({"x": [1]}, checkpoint_id=tmp_path / "c", no_dist=True)
    data = hostile.item(hostile.colliding(20_000))
    metadata = parse_metadata((tmp_path / "c" / ".metadata").read_bytes())
    (tmp_path / "c" / "__9_0.distcp").write_bytes(data)
    storage = {("x", None): StoredItem("__9_0.distcp", 0, len(data))}
    (tmp_path / "c" / ".metadata").write_bytes(dump_metadata(replace(metadata, storage=storage)))
    with pytest.raises(SourceError, match=r"refused 'x': expected at most 10000 dict keys"):
        muonckpt.load({"x": [1]}, tmp_path / "c")


def test_a_file_that_is_cut_while_it_is_read_gives_an_error_that_names_it(tmp_path):
    """Had it been mapped, this process would end here."""
    (tmp_path / "a").write_bytes(bytes(8 << 20))
    with Payloads(tmp_path) as payloads:
        file, memory = payloads.open_file("a", 8 << 20), memoryview(bytearray(8 << 20))
        bands = payloads.bands(Extent("a", 0, 8 << 20))
        next(bands)
        (tmp_path / "a").write_bytes(bytes(5 << 20))
        for read in (lambda: list(bands), lambda: file.fill(memory, 0), lambda: file.view(4 << 20, 2 << 20)):
            with pytest.raises(DamageError, match=f"{tmp_path / 'a'}.*it was cut"):
                read()
