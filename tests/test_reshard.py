"""Offline resharding: every element where it belongs, bit for bit; or an error that names it, and nothing at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path

import pytest
import sharded
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from golden import golden
from sharded import edit, elements_of, manifest_edited, raw_bytes

import muonckpt
from muonckpt.converters.reshard import plan_job, run
from muonckpt.errors import DestinationError, Interrupted, LayoutError, SourceError
from muonckpt.record import Manifest
from muonckpt.store import audit, directory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS = (1, 2, 3, 4, 8)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Checkpoints by name, saved when first asked for.  Do not change."""

    @cache
    def get(name: str, values: str = "small") -> Path:
        path = tmp_path_factory.mktemp("source") / "checkpoint"
        sharded.save_all(name, values, path)
        return path

    return get


def reshard(source: Path, destination: Path, ranks: int, **how) -> Manifest:
    return run(plan_job(source, ranks), destination, **how)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def described(manifest: Manifest) -> list[tuple]:
    return [(t.key, t.path, t.shape, t.dtype, t.name, t.slot, t.convention) for t in manifest.tensors]


def check_reshard(source: Path, destination: Path, ranks: int, expected: dict[str, bytes], oracle: bool = True) -> None:
    before, after = directory.read(source, payloads=True), directory.read(destination)
    assert sharded.stock_load(destination, before) == expected
    if oracle:
        assert elements_of(destination) == expected
    assert described(before) == described(after)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.fingerprint in (None, new.fingerprint) and new.fingerprint
        found = [(chunk.item.file, *chunk.box.lo[:1], *chunk.box.hi[:1]) for chunk in new.chunks]
        if old.shape:
            rows = enumerate(torch.arange(old.shape[0]).chunk(ranks) if math.prod(old.shape) else ())
            assert found == [(f"__{rank}_0.distcp", int(part[0]), int(part[-1]) + 1) for rank, part in rows], old.key
        else:
            assert found == [("__0_0.distcp",)], old.key
        for chunk in new.chunks:
            assert (chunk.box.lo[1:], chunk.box.hi[1:]) == ((0,) * len(old.shape[1:]), old.shape[1:])
            payload = raw_bytes(destination, chunk.payload)
            assert (zlib.crc32(payload), xxhash.xxh3_128_hexdigest(payload)) == (chunk.crc32, chunk.digest)
            assert chunk.payload.offset % 64 == 0
            assert zipfile.ZipFile(BytesIO(raw_bytes(destination, chunk.item))).testzip() is None
    for old, new in zip(before.blobs, after.blobs, strict=True):
        assert (old.key, old.path) == (new.key, new.path)
        assert raw_bytes(source, old.item) == raw_bytes(destination, new.item)
    report = audit.audit(destination)
    assert {finding.kind for finding in report.findings} <= {"nonfinite"} and report.notes == ()


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sharded.SOURCES)
def test_every_element_arrives_bit_for_bit_on_any_number_of_ranks(name, saved, tmp_path):
    source = saved(name)
    expected = {f"t.{key}": sharded.bits(value) for key, value in sharded.small().items()}
    for ranks in RANKS:
        reshard(source, tmp_path / str(ranks), ranks)
        check_reshard(source, tmp_path / str(ranks), ranks, expected)
        state = {"hyper": {"lr": 0.0, "betas": None}, "step": 0}
        dcp.load(state, checkpoint_id=tmp_path / str(ranks), no_dist=True)
        assert state == {"hyper": {"lr": 0.5, "betas": (0.9, 0.95)}, "step": 3}


def test_fingerprints_do_not_depend_on_the_source_mesh_and_survive_there_and_back(saved, tmp_path):
    def prints_of(manifest: Manifest) -> frozenset[tuple[str, str | None]]:
        return frozenset((tensor.key, tensor.fingerprint) for tensor in manifest.tensors)

    prints = {prints_of(reshard(saved(name), tmp_path / name, 3)) for name in sharded.SOURCES}
    prints |= {prints_of(directory.read(saved(name))) for name in sharded.SOURCES if name.startswith("own")}
    assert len(prints) == 1
    back = reshard(tmp_path / "own rows4", tmp_path / "made" / "too" / "back", 4)
    assert prints_of(back) in prints and elements_of(tmp_path / "made" / "too" / "back") == elements_of(
        saved("own rows4")
    )
    assert [step["mesh"] for step in back.provenance["resharded"]] == [{"dp": 3}, {"dp": 4}]


@pytest.mark.parametrize("name", sharded.GOLDENS)
def test_checkpoints_of_other_programs_keep_every_element_and_item(name, tmp_path):
    source = golden(name)
    expected = sharded.stock_load(source, directory.read(source))
    truth = sharded.truth_of(source)
    known = {key: value for key in expected for end, value in truth.items() if f".{key}".endswith(f".{end}")}
    assert all(key.endswith((".step", ".step_dev")) for key in expected.keys() - known.keys())
    for ranks in (1, 3, 8):
        reshard(source, tmp_path / str(ranks), ranks)
        check_reshard(source, tmp_path / str(ranks), ranks, expected, oracle=ranks == 3)
    found = elements_of(tmp_path / "3")
    assert {key: found[key] for key in known} == known


@pytest.mark.parametrize("name", ["own rows1", "own columns3", "stock rows3"])
def test_rows_larger_than_a_band_are_exact_and_the_budget_changes_no_byte(name, saved, tmp_path):
    source = saved(name, "wide")
    expected = {f"t.{key}": sharded.bits(value) for key, value in sharded.wide().items()}
    for ranks in (1, 3):
        reshard(source, tmp_path / f"tiny{ranks}", ranks, memory=1)
        reshard(source, tmp_path / f"large{ranks}", ranks, threads=1)
        check_reshard(source, tmp_path / f"tiny{ranks}", ranks, expected, oracle=False)
        assert contents(tmp_path / f"tiny{ranks}") == contents(tmp_path / f"large{ranks}")


MEASURED = """
import re, sys
from pathlib import Path
from muonckpt.converters.reshard import plan_job, run
def watch(count):
    seen.append(int(re.search(r"RssAnon:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1]))
job, seen = plan_job(Path(sys.argv[1]), 3), []
watch(0)
run(job, Path(sys.argv[2]), memory=16 << 20, progress=watch)
print(max(seen) - seen[0])
"""


def test_memory_stays_within_the_budget_whatever_the_shapes(tmp_path):
    shapes = {"matrix": (4096, 6400), "long": (12_000_000,), "tall": (6_000_000, 2), "row": (1, 2_000_000)}
    muonckpt.save(
        {n: torch.arange(math.prod(shape)).float().reshape(shape) for n, shape in shapes.items()}, tmp_path / "a"
    )
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) > 200e6
    script = [sys.executable, "-c", MEASURED, tmp_path / "a", tmp_path / "b"]
    grown = int(subprocess.run(script, capture_output=True, check=True).stdout)
    assert grown < (16 << 10) + (24 << 10)  # KiB: the budget; and code, stacks and the weights of the fingerprint


# --- nothing damaged passes -------------------------------------------------------------------------------------------


def copy_of(source: Path, to: Path) -> Path:
    shutil.copytree(source, to)
    return to


def nothing_but(folder: Path, *names: str) -> bool:
    return sorted(file.name for file in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("name", ["own rows3", "stock rows3"])
@pytest.mark.parametrize("key", ["t.bfloat16", "t.scalar", "t.complex128", "hyper.betas"])
def test_a_flipped_bit_in_the_source_stops_everything(name, key, saved, tmp_path):
    source = copy_of(saved(name), tmp_path / "source")
    manifest = directory.read(source, payloads=True)
    chunks = [tensor.chunks[-1] for tensor in manifest.tensors if tensor.key == key]
    blobs = [blob for blob in manifest.blobs if blob.key == key]
    file = (chunks or blobs)[0].item.file
    edit(source / file, chunks[0].payload.end - 1 if chunks else blobs[0].item.offset + 70)
    with pytest.raises(SourceError) as caught:
        reshard(source, tmp_path / "out", 2)
    assert all(part in str(caught.value) for part in (key, file, "is damaged", *(str(c.box) for c in chunks)))
    assert nothing_but(tmp_path, "source")


@pytest.mark.parametrize("name", ["own rows3", "stock rows3"])
@pytest.mark.parametrize("how", ["missing", "cut", "link"])
def test_a_file_that_is_not_there_whole_is_a_fault_of_the_source(name, how, saved, tmp_path):
    source = copy_of(saved(name), tmp_path / "source")
    file = source / "__1_0.distcp"
    if how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.rename(tmp_path / "elsewhere")
    if how == "link":
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"__1_0\.distcp"):
        reshard(source, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda cube: cube["chunks"].pop(1), LayoutError, r"'t\.cube'.*nobody holds box \[1:2, 0:4, 0:5\]"),
        (lambda cube: cube.update(fingerprint="0" * 16), SourceError, r"'t\.cube'.*fingerprint [0-9a-f]{16}, .* 0{16}"),
    ],
)
def test_a_manifest_that_is_not_true_is_found(change, error, message, saved, tmp_path):
    source = copy_of(saved("own rows3"), tmp_path / "source")
    manifest_edited(source, lambda entries: change(entries["t.cube"]))
    with pytest.raises(error, match=message):
        reshard(source, tmp_path / "out", 2)
    assert nothing_but(tmp_path, "source")


def once(action):
    """A progress callback that acts on the first call only."""
    actions = [action]
    return lambda count: actions.pop()() if actions else None


CHANGES = {
    "touched": lambda file: os.utime(file, ns=(0, 0)),
    "longer": lambda file: file.open("ab").write(b"\0"),
    "replaced": lambda file: (shutil.copy2(file, file.with_name("new")), file.with_name("new").rename(file)),
    "removed": lambda file: file.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_meanwhile_is_not_published(change, saved, tmp_path):
    source = copy_of(saved("stock rows3"), tmp_path / "source")
    with pytest.raises(SourceError, match=r"changed|__1_0\.distcp"):
        reshard(source, tmp_path / "out", 2, progress=once(lambda: CHANGES[change](source / "__1_0.distcp")))
    assert nothing_but(tmp_path, "source")


def test_a_source_that_is_cut_meanwhile_is_an_error_and_not_a_crash(saved, tmp_path):
    source = copy_of(saved("stock rows3", "wide"), tmp_path / "source")
    job, told = plan_job(source, 2), [0]

    def cut_when_all_is_checked(count: int) -> None:
        told[0] += count
        if told[0] > job.bytes_to_check:
            os.truncate(source / "__1_0.distcp", 4096)

    with pytest.raises(SourceError, match=r"__1_0\.distcp has 4096 bytes.*it was cut"):
        run(job, tmp_path / "out", memory=1, threads=1, progress=cut_when_all_is_checked)
    assert nothing_but(tmp_path, "source")


# --- the destination --------------------------------------------------------------------------------------------------


def in_place(change):
    return lambda folder, source: change(folder / "out") or folder / "out"


TAKEN = {
    "folder": in_place(Path.mkdir),
    "file": in_place(Path.touch),
    "dangling link": in_place(lambda out: out.symlink_to("nowhere")),
    "link to a folder": in_place(lambda out: out.symlink_to(out.parent)),
    "source itself": lambda folder, source: source,
    "inside the source": lambda folder, source: source / "out",
    "inside by a link": lambda folder, source: (folder / "link").symlink_to(source) or folder / "link" / "deep" / "out",
    "below a file": lambda folder, source: (folder / "plain").touch() or folder / "plain" / "out",
}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_destination_that_is_taken_or_inside_the_source_is_refused_and_nothing_is_touched(kind, saved, tmp_path):
    source = copy_of(saved("own rows3"), tmp_path / "source")
    destination = TAKEN[kind](tmp_path, source)
    before = (sorted(tmp_path.rglob("*")), contents(source))
    with pytest.raises(DestinationError):
        reshard(source, destination, 2)
    assert (sorted(tmp_path.rglob("*")), contents(source)) == before


SMALL = "mount -t tmpfs -o size=1m x {0} && {1} -c '{2}' reshard {3} {0}/out --mesh dp=2; echo code $?; ls -A {0}"


def test_a_full_disk_fails_cleanly(saved, tmp_path):
    script = SMALL.format(
        tmp_path, sys.executable, "from muonckpt.cli.main import main; main()", saved("own rows1", "wide")
    )
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    if "code" not in done.stdout or "mount:" in done.stderr:
        pytest.skip(f"no small file system can be mounted here: {done.stderr}")
    assert done.stdout.split() == ["code", "4"] and "No space left" in done.stderr and "Traceback" not in done.stderr


# --- stopped at any point, and gone on with ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "interrupt", "error"])
def test_stopped_at_any_step_nothing_half_done_is_seen_and_resume_gives_the_same_bytes(how, tmp_path):
    muonckpt.save({"w": torch.arange(15.0).reshape(5, 3), "n": torch.tensor(7), "lr": 0.1}, tmp_path / "source")
    (tmp_path / "here").mkdir()
    script = [sys.executable, Path(__file__).with_name("stopped.py"), how, tmp_path / "source", tmp_path / "here"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen) > 30
    for step in enumerate(seen):
        status, nothing_or_all, staged, again, same, left = step[1]
        assert nothing_or_all and same and again in (None, 0), step
        assert set(left) - {"out", "whole"} <= ({".out.reshard.journal"} if again is None else set()), step
        assert status == {"kill": -9, "interrupt": 5, "error": 4}[how] or (status, again) == (0, None), step
        assert not (how == "error" and staged), step  # the disk may be full: it is given back
    assert how == "error" or sum(staged for _, _, staged, *_ in seen) > len(seen) / 2


class Stop:
    """A progress callback that interrupts after so many bytes."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture
def unfinished(saved, tmp_path):
    """A source, a destination that was interrupted with two of three files done, and the bytes it should get."""
    source = saved("own rows4")
    reshard(source, tmp_path / "whole", 3)
    job = plan_job(source, 3)
    two_files = sum(file.payload for file in job.files[:2])
    with pytest.raises(Interrupted, match=r"2 of 3 files.*--resume"):
        run(job, tmp_path / "out", threads=1, progress=Stop(job.bytes_to_check + two_files + 1))
    return source, tmp_path / "out", tmp_path / ".out.reshard.tmp", contents(tmp_path / "whole")


def rewrite(file: Path, change) -> None:
    """Replace the content of a file by what ``change`` makes of it, without following a link."""
    data = change(file.read_bytes() if file.exists() else b"")
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


JOURNAL = "../.out.reshard.journal"
LEFT_BEHIND = {
    "nothing": (JOURNAL, lambda data: data),
    "payload": ("__0_0.distcp", lambda data: data[:-3000] + b"?" + data[-2999:]),
    "head of an item": ("__0_0.distcp", lambda data: b"?" + data[1:]),
    "tail of an item": ("__1_0.distcp", lambda data: data[:-80] + b"?" + data[-79:]),
    "padding": ("__1_0.distcp", lambda data: data[:-1] + b"?"),
    "short": ("__0_0.distcp", lambda data: data[:100]),
    "long": ("__0_0.distcp", lambda data: data + b"?"),
    "gone": ("__1_0.distcp", lambda data: None),
    "manifest": ("muonckpt.json", lambda data: b"?"),
    "metadata": (".metadata", lambda data: b"?"),
    "journal cut in a line": (JOURNAL, lambda data: data[:-20]),
    "journal cut before a line ends": (JOURNAL, lambda data: data[:-1]),
    "journal cut to nothing": (JOURNAL, lambda data: b""),
    "journal with zeros": (JOURNAL, lambda data: data + bytes(40) + b"\n"),
    "journal of something": (JOURNAL, lambda data: data + b'{"file": "x"}\n'),
    "journal of too little": (JOURNAL, lambda data: data + b'{"file": "__1_0.distcp", "blobs": [], "items": []}\n'),
    "journal gone": (JOURNAL, lambda data: None),
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("left", LEFT_BEHIND)
def test_resume_trusts_nothing_that_it_does_not_check(left, twice, unfinished, tmp_path):
    source, destination, staged, whole = unfinished
    name, change = LEFT_BEHIND[left]
    rewrite(staged / name, change)
    if left == "journal gone":
        (staged / "__7_0.distcp").touch()  # of whatever job it was
    if twice:  # interrupted again, in the last file
        job = plan_job(source, 3)
        late = Stop(job.bytes_to_check + job.payload_to_write - 1)
        with pytest.raises(Interrupted):
            run(job, destination, resume=True, threads=1, progress=late)
    reshard(source, destination, 3, resume=True)
    assert contents(destination) == whole
    assert nothing_but(tmp_path, "out", "whole")


def test_resume_does_not_write_again_what_is_finished(unfinished):
    def written(folder: Path) -> list[tuple[int, int]]:
        states = [(folder / name).stat() for name in ("__0_0.distcp", "__1_0.distcp")]
        return [(state.st_ino, state.st_mtime_ns) for state in states]

    source, destination, staged, _ = unfinished
    before = written(staged)
    told: list[int] = []
    job = plan_job(source, 3)
    run(job, destination, resume=True, progress=told.append)
    assert written(destination) == before
    assert sum(told) == job.bytes_to_check + job.payload_to_write


def test_unfinished_work_is_neither_overwritten_nor_mixed_with_that_of_another_job(unfinished, saved):
    source, destination, staged, _ = unfinished
    before = contents(staged)
    with pytest.raises(DestinationError, match="--resume"):
        reshard(source, destination, 3)
    for other, ranks in ((source, 2), (saved("own rows3"), 3)):
        with pytest.raises(DestinationError, match="another job"):
            reshard(other, destination, ranks, resume=True)
    assert contents(staged) == before and not destination.exists()


def test_a_source_without_checksums_that_changed_in_between_is_another_job(tmp_path):
    """Nothing else could tell: half of the destination would be of the old one."""
    with sharded.no_checksums():
        dcp.save({"w": torch.arange(12.0).reshape(4, 3)}, checkpoint_id=tmp_path / "source", no_dist=True)
    job = plan_job(tmp_path / "source", 2)
    with pytest.raises(Interrupted):
        run(job, tmp_path / "out", threads=1, progress=Stop(job.bytes_to_check + 25))
    payload = job.manifest.tensors[0].chunks[0].payload
    edit(tmp_path / "source" / payload.file, payload.offset)
    with pytest.raises(DestinationError, match="another job"):
        reshard(tmp_path / "source", tmp_path / "out", 2, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_do_not_write_into_one_place(resume, saved, tmp_path):
    def second():
        with pytest.raises(DestinationError, match="another process is writing"):
            reshard(saved("own rows4"), tmp_path / "out", 3, resume=resume)
        refused.append(True)

    refused: list[bool] = []
    reshard(saved("own rows4"), tmp_path / "out", 3, progress=once(second))
    assert refused and elements_of(tmp_path / "out") == elements_of(saved("own rows4"))
    assert nothing_but(tmp_path, "out")


def test_the_place_is_held_until_the_checkpoint_is_published(saved, tmp_path, monkeypatch):
    def publish_while_another_tries(staged, destination):
        with pytest.raises(DestinationError, match="another process is writing"):
            reshard(saved("own rows4"), tmp_path / "out", 3, resume=True)
        publish(staged, destination)

    publish = directory.publish
    monkeypatch.setattr(directory, "publish", publish_while_another_tries)
    reshard(saved("own rows4"), tmp_path / "out", 3)
    assert elements_of(tmp_path / "out") == elements_of(saved("own rows4"))
