"""Auditing: what is whole has no findings, and each kind of damage is found and named."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.commands import called
from support.dcp_metadata import dump_metadata
from support.golden import golden
from support.resharded import reshard
from support.sharded import GOLDENS, as_stock, edit, manifest_edited, no_checksums
from support.stored_bytes import bytes_read

import muonckpt
from muonckpt import SourceError
from muonckpt.record.record import Chunk
from muonckpt.store.formats.dcp_metadata import Metadata, parse_metadata
from muonckpt.store.verify.audit import AuditReport

KINDS = ["own", "stock", "torch"]
"""With our manifest in three files; the same without it; written by torch in one."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("audit")
    state = {
        "w": torch.arange(120.0).reshape(40, 3),
        "h": torch.arange(32).reshape(8, 4).bfloat16(),
        "z": torch.arange(14).reshape(7, 2).to(torch.complex128),
        "n": -torch.arange(9),
        "s": torch.tensor(3.5),
        "e": torch.empty(0, 4),
        "hyper": {"betas": (0.9, 0.95), "name": "muon"},
    }
    muonckpt.save(state, folder / "one")
    reshard(folder / "one", folder / "own", 3)
    as_stock(shutil.copytree(folder / "own", folder / "stock"))
    dcp.save(state, checkpoint_id=folder / "torch", no_dist=True)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture
def checkpoint(sources, tmp_path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(sources[kind], tmp_path / "c"))


def find(path: Path, key: str, part: int = -1) -> Chunk:
    return next(t for t in muonckpt.open(path).manifest.tensors if t.key == key).chunks[part]


def kinds(report: AuditReport) -> set[str]:
    return {finding.kind for finding in report.findings}


def metadata_edited(path: Path, change: Callable[[Metadata], Metadata]) -> None:
    (path / ".metadata").write_bytes(dump_metadata(change(parse_metadata((path / ".metadata").read_bytes()))))


# --- whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_has_no_findings(kind, sources):
    report = muonckpt.verify(sources[kind])
    assert (report.findings, report.notes, report.unchecked) == ((), (), 0)
    assert (report.tensors, report.blobs) == (6, 2)
    calls: list[tuple[int, int]] = []
    assert muonckpt.verify(sources[kind], progress=lambda count, total: calls.append((count, total)), jobs=1) == report
    assert {total for _, total in calls} == {sum(count for count, _ in calls)} == {report.payload_bytes}


@pytest.mark.parametrize("name", GOLDENS)
def test_checkpoints_of_other_programs_have_no_findings(name):
    report = muonckpt.verify(golden(name))
    assert (report.findings, report.notes, report.unchecked) == ((), (), 0)
    assert report.chunks and report.blobs and len(report.fingerprints) == report.tensors


def test_fingerprints_do_not_depend_on_how_it_is_stored(sources):
    prints = [muonckpt.verify(sources[kind]).fingerprints for kind in KINDS]
    recorded = {tensor.key: tensor.fingerprint for tensor in muonckpt.open(sources["own"]).outline.tensors}
    assert prints == [recorded] * 3


# --- damaged bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["w", "h", "z", "n", "s"])
def test_a_flipped_bit_is_found_and_named(kind, key, checkpoint):
    path = checkpoint(kind)
    chunk = find(path, key)
    edit(path / chunk.item.file, chunk.payload.end - 1, bit=0)
    report = muonckpt.verify(path)
    assert kinds(report) == ({"digest", "crc32", "fingerprint"} if kind == "own" else {"crc32"})
    for finding in report.findings:
        assert finding.key == key and repr(key) in finding.message and "expected" in finding.message
        if finding.kind != "fingerprint":
            assert str(chunk.box) in finding.message and chunk.item.file in finding.message


@pytest.mark.parametrize("bits_per_byte", sweep([1, 8], 1))
@pytest.mark.parametrize("stock", [False, True])
def test_every_flipped_bit_of_content_is_found(stock, bits_per_byte, tmp_path):
    muonckpt.save({"w": torch.arange(2.0), "lr": 0.5}, tmp_path / "c")
    manifest = muonckpt.open(tmp_path / "c").outline
    if stock:
        as_stock(tmp_path / "c")
    [blob], payload = manifest.blobs, manifest.tensors[0].chunks[0].payload
    pickled = range(blob.item.offset + 64, blob.item.offset + 64 + 10)  # the blob's data.pkl
    for at in (*range(payload.offset, payload.end), *pickled):
        for bit in (number % 8 for number in range(at, at + bits_per_byte)):
            edit(tmp_path / "c" / payload.file, at, bit)
            assert muonckpt.verify(tmp_path / "c").findings, (at, bit)
            edit(tmp_path / "c" / payload.file, at, bit)
    assert not muonckpt.verify(tmp_path / "c").findings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["cut", "missing", "link"])
def test_a_file_that_is_not_there_whole_is_found_and_named(kind, how, checkpoint, tmp_path):
    path = checkpoint(kind)
    chunk = find(path, "w")
    file = path / chunk.item.file
    if how == "cut":
        os.truncate(file, chunk.payload.offset + 5)
    else:
        file.rename(tmp_path / "elsewhere")
    if how == "link":
        file.symlink_to(tmp_path / "elsewhere")
    report = muonckpt.verify(path)
    findings = [f for f in report.findings if f.key == "w"]
    assert {f.kind for f in findings} == {"unreadable"}
    assert all(part in findings[-1].message for part in ("'w'", str(chunk.box), file.name))
    assert "w" not in report.fingerprints and ("s" in report.fingerprints or kind == "torch")
    assert kind == "own" or "files" in kinds(report)
    with pytest.raises(SourceError, match=file.name):
        muonckpt.open(path).tensors["w"].bits()


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_an_item_that_is_no_tensor_is_found_and_named(kind, checkpoint):
    path = checkpoint(kind)
    blob = next(blob for blob in muonckpt.open(path).outline.blobs if blob.key == "hyper.betas")
    edit(path / blob.item.file, blob.item.offset + 64)
    [finding] = muonckpt.verify(path).findings
    assert (finding.kind, finding.key) == ("item", "hyper.betas")
    assert "'hyper.betas'" in finding.message and blob.item.file in finding.message


def test_damage_is_found_where_there_are_no_tensors(tmp_path):
    muonckpt.save({"lr": 0.5}, tmp_path / "c")
    [blob] = muonckpt.open(tmp_path / "c").outline.blobs
    edit(tmp_path / "c" / blob.item.file, blob.item.offset + 64)
    assert muonckpt.verify(tmp_path / "c").damage.items == {"lr"}


@pytest.mark.parametrize("crc32", [True, False])
def test_checksums_that_were_switched_off_are_unchecked_and_not_damage(crc32, tmp_path):
    with nullcontext() if crc32 else no_checksums():
        dcp.save({"w": torch.ones(4, 3), "v": torch.ones(2), "lr": 0.5}, checkpoint_id=tmp_path / "c", no_dist=True)
    report = muonckpt.verify(tmp_path / "c")
    assert (report.findings, report.unchecked) == ((), 0 if crc32 else 2)
    # Chunks that are not there are not unchecked.
    for file in (tmp_path / "c").glob("*.distcp"):
        file.unlink()
    report = muonckpt.verify(tmp_path / "c")
    assert report.findings and report.unchecked == 0 and "unchecked" not in called("verify", tmp_path / "c").stdout


# --- what should be there ---------------------------------------------------------------------------------------------


def without_a_chunk(metadata: Metadata) -> Metadata:
    """`.metadata` without the second chunk of "w"."""
    meta = metadata.tensors["w"]
    gone = meta.chunks[1]
    tensors = {**metadata.tensors, "w": replace(meta, chunks=tuple(c for c in meta.chunks if c != gone))}
    storage = {place: item for place, item in metadata.storage.items() if place != ("w", gone[0])}
    return replace(metadata, tensors=tensors, storage=storage)


def moved(metadata: Metadata) -> Metadata:
    """`.metadata` with the second chunk of "w" one row too early."""
    meta = metadata.tensors["w"]
    at, sizes = meta.chunks[1]
    to = (at[0] - 1, 0)
    chunks = (meta.chunks[0], (to, sizes), *meta.chunks[2:])
    storage = {("w", to) if place == ("w", at) else place: item for place, item in metadata.storage.items()}
    return replace(metadata, tensors={**metadata.tensors, "w": replace(meta, chunks=chunks)}, storage=storage)


FAULTS = {
    "hole": (without_a_chunk, lambda chunks: chunks.pop(1), r"'w'.*no buffer holds box \[14:28, 0:3\]"),
    "overlap": (
        moved,
        lambda chunks: chunks[1].update(lo=[13, 0], hi=[27, 3]),
        r"'w'.*\[0:14, 0:3\].*\[13:27, 0:3\].*overlap",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_holes_and_overlaps_are_found_with_tensor_and_box(fault, kind, checkpoint):
    path = checkpoint(kind)
    in_metadata, in_manifest, message = FAULTS[fault]
    metadata_edited(path, in_metadata)
    if kind == "own":
        manifest_edited(path, lambda entries: in_manifest(entries["w"]["chunks"]))
    [finding] = (finding for finding in muonckpt.verify(path).findings if finding.kind == "coverage")
    assert finding.key == "w" and re.search(message, finding.message)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda h: h.update(fingerprint="0123456789abcdef"), {"fingerprint"}),
        (lambda h: h["chunks"][0].update(crc32=5), {"crc32", "metadata"}),
        (lambda h: h["chunks"][0].update(digest="0" * 32), {"digest"}),
    ],
)
def test_a_sum_in_the_manifest_that_is_not_the_one_of_the_bytes_is_found(change, expected, checkpoint):
    path = checkpoint("own")
    manifest_edited(path, lambda entries: change(entries["h"]))
    assert kinds(muonckpt.verify(path)) == expected and {finding.key for finding in muonckpt.verify(path).findings} == {
        "h"
    }


def test_a_metadata_that_is_not_the_one_of_the_manifest_is_found(checkpoint):
    path = checkpoint("own")
    metadata_edited(path, lambda m: replace(m, tensors={k: v for k, v in m.tensors.items() if k != "e"}))
    [finding] = muonckpt.verify(path).findings
    assert finding.kind == "description" and "its .metadata is damaged" in finding.message


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("key", ["w", "z", "s"])
def test_a_changed_byte_around_elements_is_found_and_loses_none(key, is_behind, checkpoint):
    path = checkpoint("own")
    chunk = find(path, key)
    edit(path / chunk.item.file, chunk.item.end - 1 if is_behind else chunk.item.offset)
    report = muonckpt.verify(path)
    [finding] = report.findings
    assert (finding.kind, finding.key) == ("metadata", key) and str(chunk.box) in finding.message
    assert not report.damage and not report.diagnosis.has_loss and len(report.fingerprints) == report.tensors


@pytest.mark.parametrize("file", [".metadata", "muonckpt.json"])
@pytest.mark.parametrize("content", [b"", b"\x80\x02.", b"{}", b"\0" * 40])
def test_damaged_metadata_is_a_finding_or_an_unreadable_source(file, content, checkpoint):
    path = checkpoint("own")
    (path / file).write_bytes(content)
    if file == ".metadata":
        assert kinds(muonckpt.verify(path)) == {"description"}
    else:
        assert kinds(muonckpt.verify(path)) == {"description"}
        with pytest.raises(SourceError, match=r"manifest|muonckpt\.json"):
            muonckpt.open(path)


def test_what_belongs_to_no_item_is_noted_and_no_finding(checkpoint):
    path = checkpoint("own")
    (path / "__7_0.distcp").write_bytes(b"of an older, wider save")
    (path / "dangling").symlink_to("nowhere")
    (path / "empty").touch()
    report = muonckpt.verify(path)
    assert report.findings == ()
    assert [note.split()[0] for note in report.notes] == ["__7_0.distcp", "dangling"]


# --- values -----------------------------------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128,
          torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinite_and_nan_elements_are_found_and_the_largest_finite_ones_are_not(dtype, tmp_path):
    real = dtype.to_real() if dtype.is_complex else dtype
    finite = [torch.finfo(real).max, torch.finfo(real).min, torch.finfo(real).tiny, -0.0] * 4
    good = torch.tensor(finite, dtype=torch.float64).reshape(8, 2).to(dtype)
    bad = torch.zeros(8, 2).to(dtype)
    bad[5, 1] = float("nan")
    if not str(dtype).endswith(("fn", "fnuz")):  # these have no infinity
        bad[6, 0], bad[7, 1] = float("inf"), float("-inf")
    muonckpt.save({"good": good, "bad": bad}, tmp_path / "one")
    reshard(tmp_path / "one", tmp_path / "three", 3)
    expected = [("[3:6, 0:2] in __1_0.distcp", 1), ("[6:8, 0:2] in __2_0.distcp", 2)]
    if not bad.to(torch.complex128).isinf().any():
        expected.pop()
    findings = muonckpt.verify(tmp_path / "three").findings
    for finding, (place, count) in zip(findings, expected, strict=True):
        assert (finding.kind, finding.key) == ("nonfinite", "bad")
        assert finding.message == f"tensor 'bad' box {place}: {count} element{'s' * (count > 1)} infinite or NaN"


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    ("format", "file", "code", "other"),
    [("safetensors", "", b'"F32"', b'"F33"'), ("zarr", "w/value/zarr.json", b'"float32"', b'"float33"')],
)
def test_a_dtype_that_nobody_knows_is_damage_where_we_wrote_it(ours, format, file, code, other, tmp_path):
    """Another program may know more of them than we do."""
    muonckpt.save({"w": torch.arange(64.0)}, tmp_path / "a")
    muonckpt.convert(tmp_path / "a", tmp_path / "b", format=format)
    described = tmp_path / "b" / file
    raw = described.read_bytes().replace(code, other)
    described.write_bytes(raw if ours else raw.replace(b'"muonckpt":', b'"somebody":'))
    if ours:
        (finding,) = muonckpt.verify(tmp_path / "b").findings
        assert finding.kind in ("description", "unlisted") and other.decode().strip('"') in finding.message
    else:
        with pytest.raises(SourceError, match=other.decode().strip('"')):
            muonckpt.verify(tmp_path / "b")


def test_small_items_are_read_once_and_opened_while_the_progress_goes_on(tmp_path):
    """Not all of them before it: a file that is cut at the first news is missed by the items that come later."""
    muonckpt.save({f"{number:04}": torch.ones(2) for number in range(2100)}, tmp_path / "run")
    assert muonckpt.verify(tmp_path / "run").verdict == "whole"
    before = bytes_read()
    assert muonckpt.verify(tmp_path / "run").verdict == "whole"
    assert bytes_read() - before < 1.3 * sum(file.stat().st_size for file in (tmp_path / "run").iterdir())
    [file] = as_stock(tmp_path / "run").glob("*.distcp")
    told: list[int] = []

    def progress(count: int, total: int) -> None:
        if not told:
            os.truncate(file, 0)
        told.append(count)

    report = muonckpt.verify(tmp_path / "run", jobs=1, progress=progress)
    missed = {finding.key for finding in report.findings}
    assert "2099" in missed and "0000" not in missed and sum(told) < report.payload_bytes == 2100 * 8
