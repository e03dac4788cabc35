"""Offline resharding puts every element where it belongs, bit for bit, or names an error and publishes nothing."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from io import BytesIO
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from support import sharded, sweep
from support.golden import golden
from support.resharded import KINDS, contents, make_job, nothing_but, once, plain, plan_job, reshard, rewrite, saved
from support.sharded import edit, elements_of, manifest_edited, raw_bytes
from support.stored_bytes import bytes_read
from support.trees import tree

import muonckpt
from muonckpt import DestinationError, LayoutError, SourceError
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.options import grouped
from muonckpt.converters.target.topology import ShardRule, Target
from muonckpt.programs.detection import with_slots
from muonckpt.record.record import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def described(manifest: Manifest) -> list[tuple]:
    return [(t.key, t.path, t.shape, t.dtype, t.name, t.slot, t.convention) for t in manifest.tensors]


def check_reshard(source: Path, destination: Path, ranks: int, expected: dict[str, bytes], oracle: bool = True) -> None:
    """Compare a checkpoint that is cut by rows with its source: elements, records, chunks, checksums and items."""
    before, after = muonckpt.open(source).manifest, muonckpt.open(destination).outline
    # Torch reads the same elements, and so does the oracle.
    assert sharded.stock_load(destination, before) == expected
    if oracle:
        assert elements_of(destination) == expected
    assert described(with_slots(before)) == described(after)
    # Each tensor is cut by rows, each rank has its part in its own file, and checksums are those of the payload.
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.fingerprint in (None, new.fingerprint) and new.fingerprint
        parts = [(chunk.item.file, *chunk.box.lo[:1], *chunk.box.hi[:1]) for chunk in new.chunks]
        if old.shape:
            rows = enumerate(torch.arange(old.shape[0]).chunk(ranks) if math.prod(old.shape) else ())
            assert parts == [(f"__{rank}_0.distcp", int(row[0]), int(row[-1]) + 1) for rank, row in rows], old.key
        else:
            assert parts == [("__0_0.distcp",)], old.key
        for chunk in new.chunks:
            assert (chunk.box.lo[1:], chunk.box.hi[1:]) == ((0,) * len(old.shape[1:]), old.shape[1:])
            payload = raw_bytes(destination, chunk.payload)
            assert (zlib.crc32(payload), xxhash.xxh3_128_hexdigest(payload)) == (chunk.crc32, chunk.digest)
            assert chunk.payload.offset % 64 == 0
            assert zipfile.ZipFile(BytesIO(raw_bytes(destination, chunk.item))).testzip() is None
    # Items that are no tensors are copied byte for byte.
    for old, new in zip(before.blobs, after.blobs, strict=True):
        assert (old.key, old.path) == (new.key, new.path)
        assert raw_bytes(source, old.item) == raw_bytes(destination, new.item)
    report = muonckpt.verify(destination)
    assert {finding.kind for finding in report.findings} <= {"nonfinite"} and report.notes == ()


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", sweep(["1 3 8", "2 4"], "1 3 8"))
@pytest.mark.parametrize("name", sweep(sharded.SOURCES, "stock rows4", "stock turned2x2", *sharded.SOURCES[-4::2]))
def test_every_element_arrives_bit_for_bit_on_any_number_of_ranks(name, numbers, tmp_path):
    source = saved(name)
    expected = {f"t.{key}": sharded.bits(value) for key, value in sharded.small().items()}
    for ranks in map(int, numbers.split()):
        reshard(source, tmp_path / str(ranks), ranks)
        check_reshard(source, tmp_path / str(ranks), ranks, expected)
        state = {"hyper": {"lr": 0.0, "betas": None}, "step": 0}
        dcp.load(state, checkpoint_id=tmp_path / str(ranks), no_dist=True)
        assert state == {"hyper": {"lr": 0.5, "betas": (0.9, 0.95)}, "step": 3}


def test_fingerprints_do_not_depend_on_the_source_mesh_and_survive_there_and_back(tmp_path):
    def prints_of(manifest: Manifest) -> frozenset[tuple[str, str | None]]:
        return frozenset((tensor.key, tensor.fingerprint) for tensor in manifest.tensors)

    prints = {prints_of(reshard(saved(name), tmp_path / name, 3)) for name in sharded.SOURCES}
    prints |= {prints_of(muonckpt.open(saved(name)).outline) for name in sharded.SOURCES if name.startswith("own")}
    assert len(prints) == 1
    back = reshard(tmp_path / "own rows4", tmp_path / "made" / "too" / "back", 4)
    assert prints_of(back) in prints and elements_of(tmp_path / "made" / "too" / "back") == elements_of(
        saved("own rows4")
    )
    assert [step["mesh"] for step in back.provenance["resharded"]] == [{"dp": 3}, {"dp": 4}]


@pytest.mark.parametrize("name", sweep(sharded.GOLDENS, *sharded.GOLDENS[::2]))
def test_checkpoints_of_other_programs_keep_every_element_and_item(name, tmp_path):
    source = golden(name)
    expected = sharded.stock_load(source, muonckpt.open(source).outline)
    truth = sharded.truth_of(source)
    # The file beside the checkpoint lists its tensors by the ends of their keys, all but step counters.
    true_elements = {}
    for key, (end, value) in product(expected, truth.items()):
        if f".{key}".endswith(f".{end}"):
            true_elements[key] = value
    assert all(key.endswith((".step", ".step_dev")) for key in expected.keys() - true_elements.keys())
    for ranks in (1, 3, 8):
        reshard(source, tmp_path / str(ranks), ranks)
        check_reshard(source, tmp_path / str(ranks), ranks, expected, oracle=ranks == 3)
    elements = elements_of(tmp_path / "3")
    assert {key: elements[key] for key in true_elements} == true_elements


@pytest.mark.parametrize("name", ["own rows1", "own columns3", "stock rows3"])
def test_rows_larger_than_a_band_are_exact_and_the_budget_changes_no_byte(name, tmp_path):
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
import muonckpt
from muonckpt.converters.engine.job import make_job
from muonckpt.converters.engine.outputs import unchanged
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.engine.container import container_of
from muonckpt.converters.target.topology import ShardRule, Target
def watch(count):
    seen.append(int(re.search(r"RssAnon:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1]))
source, out, form, *dim = sys.argv[1:]
rules = [ShardRule(names, (("dp", int(dim[0])),)) for names in ("[mt]a*", "row") if dim]
target = Target({"dp": 3}, tuple(rules)) if dim else Target({"dp": 1})
job, seen = make_job(muonckpt.open(source), target, (), unchanged, container_of(form)), []
watch(0)
run_job(job, Path(out), memory=16 << 20, progress=watch)
print(max(seen) - seen[0])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    shapes = {"matrix": (4096, 6400), "long": (12_000_000,), "tall": (6_000_000, 2), "row": (1, 2_000_000)}
    path = tmp_path_factory.mktemp("large") / "a"
    muonckpt.save({n: torch.arange(math.prod(shape)).float().reshape(shape) for n, shape in shapes.items()}, path)
    assert sum(file.stat().st_size for file in path.iterdir()) > 200e6
    return path


@pytest.mark.parametrize("form", sweep(["dcp 0", "dcp 1", "safetensors", "zarr"], "dcp 1"))
def test_memory_stays_within_the_budget_whatever_the_shapes(form, large, tmp_path):
    """Tensors are cut by rows, cut by columns, and uncut."""
    script = [sys.executable, "-c", MEASURED, large, tmp_path / "b", *form.split()]
    growth = int(subprocess.run(script, capture_output=True, check=True).stdout)
    shutil.rmtree(tmp_path / "b") if (tmp_path / "b").is_dir() else (tmp_path / "b").unlink()
    assert growth < (16 << 10) + (24 << 10)  # KiB: the budget; and code, stacks and the weights of the fingerprint


@pytest.mark.parametrize(("dim", "threads", "limit"), [(0, 2, 1.7), (1, 1, 1.7), (1, 2, 3.7)])
def test_many_ranks_are_written_from_few_reads_of_the_source(dim, threads, limit, tmp_path):
    """Without that, each of eight ranks would read all of it.

    Of rows, the source is read once to be checked and copied.  Of columns, of which each rank has a small piece of
    every row, it is read once by each thread, and in part once more where both come to the same rows at a time.  The
    limits leave room for other reads of this process.
    """
    values = {name: torch.randn(1500, 1024) for name in "ab"}
    muonckpt.save(values, tmp_path / "a")
    size = sum(value.nbytes for value in values.values())
    job = make_job(tmp_path / "a", Target({"dp": 8}, (ShardRule("*", (("dp", dim),)),)))
    before = bytes_read()
    run_job(job, tmp_path / "b", threads=threads)
    assert bytes_read() - before < limit * size
    loaded = {name: torch.zeros(1500, 1024) for name in "ab"}
    muonckpt.load(loaded, tmp_path / "b")
    assert all(torch.equal(loaded[name], values[name]) for name in "ab")


# --- nothing damaged passes -------------------------------------------------------------------------------------------


def copy_of(source: Path, to: Path) -> Path:
    shutil.copytree(source, to)
    return to


WAYS = ("dcp", *KINDS)


def source_for(way: str, writer: str, to: Path) -> Path:
    """Copy, to be damaged, what this writer saved on three ranks, or a checkpoint of types that every format has."""
    return copy_of(saved(f"{writer} rows3") if way == "dcp" else plain(), to)


@pytest.mark.parametrize(
    ("writer", "way", "key"),
    [
        *product(("own", "stock"), ("dcp",), ("t.bfloat16", "t.scalar", "t.complex128", "hyper.betas")),
        *product(("own",), KINDS, ("t.bfloat16", "t.scalar")),
    ],
)
def test_a_flipped_bit_in_the_source_stops_everything(writer, way, key, tmp_path):
    # Flip a bit of a tensor's last chunk, or of an item.
    source = source_for(way, writer, tmp_path / "source")
    manifest = muonckpt.open(source).manifest
    chunks = [tensor.chunks[-1] for tensor in manifest.tensors if tensor.key == key]
    blobs = [blob for blob in manifest.blobs if blob.key == key]
    file = (chunks or blobs)[0].item.file
    edit(source / file, chunks[0].payload.end - 1 if chunks else blobs[0].item.offset + 70)
    with pytest.raises(SourceError) as caught:
        rewrite(source, tmp_path / "out", way)
    assert all(part in str(caught.value) for part in (key, file, "is damaged", *(str(c.box) for c in chunks)))
    assert nothing_but(tmp_path, "source")


@pytest.mark.parametrize("name", ["own rows3", "stock rows3"])
@pytest.mark.parametrize("fault", ["missing", "cut", "link"])
def test_a_file_that_is_not_there_whole_is_a_fault_of_the_source(name, fault, tmp_path):
    source = copy_of(saved(name), tmp_path / "source")
    file = source / "__1_0.distcp"
    if fault == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.rename(tmp_path / "elsewhere")
    if fault == "link":
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"__1_0\.distcp"):
        reshard(source, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("way", ["dcp", "file"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda cube: cube["chunks"].pop(1), LayoutError, r"'t\.cube'.*no buffer holds box \[1:2, 0:4, 0:5\]"),
        (lambda cube: cube.update(fingerprint="0" * 16), SourceError, r"'t\.cube'.*fingerprint [0-9a-f]{16}, .* 0{16}"),
    ],
)
def test_a_manifest_that_is_not_true_is_found(change, error, message, way, tmp_path):
    source = source_for(way, "own", tmp_path / "source")
    manifest_edited(source, lambda entries: change(entries["t.cube"]))
    with pytest.raises(error, match=message):
        rewrite(source, tmp_path / "out", way)
    assert nothing_but(tmp_path, "source")


CHANGES = {
    "touched": lambda file: os.utime(file, ns=(0, 0)),
    "longer": lambda file: file.open("ab").write(b"\0"),
    "replaced": lambda file: (shutil.copy2(file, file.with_name("new")), file.with_name("new").rename(file)),
    "removed": lambda file: file.unlink(),
}


@pytest.mark.parametrize(("change", "way"), [*((change, "dcp") for change in CHANGES), ("touched", "zarr")])
def test_a_source_that_changes_meanwhile_is_not_published(change, way, tmp_path):
    source = source_for(way, "stock", tmp_path / "source")
    message = "changed while it was read" if change == "touched" else r"changed|__1_0\.distcp"
    with pytest.raises(SourceError, match=message):
        rewrite(source, tmp_path / "out", way, progress=once(lambda: CHANGES[change](source / "__1_0.distcp")))
    assert nothing_but(tmp_path, "source")


def test_a_source_that_is_cut_meanwhile_is_an_error_and_not_a_crash(tmp_path):
    source = copy_of(saved("stock rows3", "wide"), tmp_path / "source")
    job, progress = plan_job(source, 2), 0

    def cut_when_all_is_checked(count: int) -> None:
        nonlocal progress
        progress += count
        if progress > job.bytes_to_check:
            os.truncate(source / "__1_0.distcp", 4096)

    with pytest.raises(SourceError, match=r"__1_0\.distcp has 4096 bytes.*it was cut"):
        run_job(job, tmp_path / "out", memory=1, threads=1, progress=cut_when_all_is_checked)
    assert nothing_but(tmp_path, "source")


# --- the destination --------------------------------------------------------------------------------------------------


def in_place(change):
    return lambda folder, source: change(folder / "out") or folder / "out"


DESTINATIONS = {
    "folder": in_place(Path.mkdir),
    "file": in_place(Path.touch),
    "dangling link": in_place(lambda out: out.symlink_to("nowhere")),
    "link to a folder": in_place(lambda out: out.symlink_to(out.parent)),
    "source itself": lambda folder, source: source,
    "inside the source": lambda folder, source: source / "out",
    "inside by a link": lambda folder, source: (folder / "link").symlink_to(source) or folder / "link" / "deep" / "out",
    "below a file": lambda folder, source: (folder / "plain").touch() or folder / "plain" / "out",
}


OCCUPIED = ("folder", "file", "dangling link")


@pytest.mark.parametrize(
    ("kind", "way"),
    [*product(DESTINATIONS, ("dcp",)), *product((*OCCUPIED, "inside the source"), KINDS)],
)
def test_a_destination_that_is_taken_or_inside_the_source_is_refused_and_nothing_is_touched(kind, way, tmp_path):
    source = source_for(way, "own", tmp_path / "source")
    destination = DESTINATIONS[kind](tmp_path, source)
    before = (sorted(tmp_path.rglob("*")), contents(source))
    with pytest.raises(DestinationError, match="inside the source" if kind.startswith("inside the") else None):
        rewrite(source, destination, way)
    assert (sorted(tmp_path.rglob("*")), contents(source)) == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OCCUPIED)
def test_what_appears_meanwhile_is_never_replaced(kind, way, tmp_path):
    source = saved("own rows3") if way == "dcp" else plain()
    with pytest.raises(DestinationError):
        rewrite(source, tmp_path / "out", way, progress=once(lambda: DESTINATIONS[kind](tmp_path, source)))
    assert nothing_but(tmp_path, "out")
    assert (tmp_path / "out").is_symlink() or tree(tmp_path / "out") in ({}, {".": b""})


SMALL = "mount -t tmpfs -o size=1m x {0} && {1} -c '{2}' reshard {3} {0}/out --mesh dp=2; echo code $?; ls -A {0}"


def test_a_full_disk_fails_cleanly(tmp_path):
    script = SMALL.format(
        tmp_path, sys.executable, "from muonckpt.cli.main import main; main()", saved("own rows1", "wide")
    )
    process = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    if "code" not in process.stdout or "mount:" in process.stderr:
        pytest.skip(f"no small file system can be mounted here: {process.stderr}")
    assert (
        process.stdout.split() == ["code", "4"]
        and "No space left" in process.stderr
        and "Traceback" not in process.stderr
    )


def test_a_tensor_that_torch_saved_in_another_order_is_the_same_tensor(tmp_path: Path):
    tensors = {
        "transposed": torch.arange(35.0).reshape(7, 5).T,
        "images": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "wide": torch.arange(24.0, dtype=torch.float64).view(torch.complex128).reshape(4, 3).T,
    }
    dcp.save(tensors, checkpoint_id=tmp_path / "source", no_dist=True)
    elements = {key: sharded.bits(tensor) for key, tensor in tensors.items()}
    report = muonckpt.verify(tmp_path / "source")
    assert not report.findings
    # Reshard to both layouts.
    for layout in ("rows", "flat"):
        out = tmp_path / layout
        run_job(make_job(tmp_path / "source", Target({"dp": 3}, layout=layout)), out)
        assert elements_of(out) == elements and muonckpt.verify(out).fingerprints == report.fingerprints
    # Load it.
    loaded = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items()}
    muonckpt.load(loaded, tmp_path / "source")
    assert {key: sharded.bits(tensor) for key, tensor in loaded.items()} == elements
    # Damage it.
    payload = muonckpt.open(tmp_path / "source").manifest.tensors[0].chunks[0].payload
    edit(tmp_path / "source" / payload.file, payload.offset + 7)
    assert {finding.kind for finding in muonckpt.verify(tmp_path / "source").findings} == {"crc32"}


def test_many_small_chunks_between_large_ones_and_a_bit_in_any_of_them(tmp_path):
    """Chunks of few bytes, of several shapes and dtypes, cut by rows and by columns, are moved many at a time."""
    shapes = [((5, 4), torch.float32), ((5, 4), torch.bfloat16), ((), torch.int64), ((7,), torch.complex128)]
    state = {}
    for i in range(80):
        shape, dtype = shapes[i % 4]
        state[f"t{i}"] = torch.arange(i, i + math.prod(shape)).reshape(shape).to(dtype)
    state |= {"large": torch.arange(3 << 15).reshape(3, -1), "u": torch.ones(2, 3)}
    muonckpt.save(state, tmp_path / "a")
    numpy = {key: tensor.numpy() for key, tensor in muonckpt.open(tmp_path / "a").tensors.items()}
    # Reshard from folder to folder: a to b, b to c, c to d.
    for ranks, out, shard in ((2, "b", {}), (3, "c", {"t[02468][048]": [("dp", 1)], "t4": [("dp", 1)]}), (1, "d", {})):
        source = tmp_path / chr(ord(out) - 1)
        muonckpt.reshard(source, tmp_path / out, **grouped(mesh={"dp": ranks}, shard=shard, memory=1 << 20))
        assert muonckpt.verify(tmp_path / out).verdict == "whole"
        copies = {key: tensor.numpy() for key, tensor in muonckpt.open(tmp_path / out).tensors.items()}
        assert all((copies[key] == values).all() and copies[key].dtype == values.dtype for key, values in numpy.items())
    # Flip a bit of one chunk, and flip it back.
    for key in ("t41", "t62", "large"):
        chunk = muonckpt.open(tmp_path / "c").tensors[key].record.chunks[0]
        file, offset = tmp_path / "c" / chunk.payload.file, chunk.payload.offset
        edit(file, offset)
        with pytest.raises(SourceError, match=f"tensor '{key}' box .* is damaged: digest"):
            muonckpt.reshard(tmp_path / "c", tmp_path / "e", mesh={"dp": 2})
        edit(file, offset)


def test_a_bit_in_an_item_that_is_no_tensor_is_found_by_its_copy(tmp_path):
    muonckpt.save({"w": torch.ones(3, 2), "lr": 0.1}, tmp_path / "a")
    [blob] = muonckpt.open(tmp_path / "a").manifest.blobs
    edit(tmp_path / "a" / blob.item.file, blob.item.offset + blob.item.length // 2)
    with pytest.raises(SourceError, match=r"item 'lr' in .* is damaged: digest"):
        muonckpt.reshard(tmp_path / "a", tmp_path / "b", mesh={"dp": 2})
    assert nothing_but(tmp_path, "a")
