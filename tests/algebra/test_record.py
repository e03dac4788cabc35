"""Manifests survive JSON, and damage in one is refused by the reader and by the schema."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest
from support.manifest_json import gathered, spread

from muonckpt import LayoutError, SourceError
from muonckpt.algebra.box import MAX_ELEMENTS, Box
from muonckpt.names.vocabulary import Convention
from muonckpt.record.chunks import no_chunks
from muonckpt.record.record import Blob, Chunk, Chunks, Extent, Manifest, StateRecord

SCHEMA = json.loads(files("muonckpt.record").joinpath("manifest.schema.json").read_text())

CHUNKS = Chunks.of(
    [
        Chunk(Box((0, 0), (2, 3)), Extent("__0_0.distcp", 0, 900), Extent("__0_0.distcp", 704, 24), "0" * 32, 7),
        Chunk(Box((2, 0), (4, 3)), Extent("__1_0.distcp", 0, 900), None, None, None),
    ],
    2,
)
TENSOR = StateRecord(
    key="o.state.w.momentum_buffer",
    path=("o", "state", "w", "momentum_buffer", 0),
    shape=(4, 3),
    dtype="float32",
    chunks=CHUNKS,
    name="w",
    slot="momentum_buffer",
    convention=Convention.EMA,
    pieces=(1, 3),
    layout={"algorithm": "mesh", "version": 1},
    fingerprint="00112233445566ff",
)
MANIFEST = Manifest(
    (TENSOR, StateRecord("s", ("s",), (), "int64", no_chunks(0))),
    (Blob("lr", ("lr",), Extent("__0_0.distcp", 900, 10), "f" * 32),),
    {"step": 3, "note": "ünïcode"},
)

DOCUMENT = json.loads(MANIFEST.to_json())


def test_a_manifest_survives_json_and_fits_the_schema():
    text = MANIFEST.to_json()
    jsonschema.validate(json.loads(text), SCHEMA)
    assert Manifest.from_json(text) == MANIFEST


def test_a_manifest_that_was_laid_out_anew_is_read_alike():
    """Lines are read many at a time; any other JSON, such as that of an editor, as a whole."""
    data = json.loads(MANIFEST.to_json())
    del data["digest"]
    for text in (json.dumps(data), json.dumps(data, indent=1)):
        assert Manifest.from_json(text) == MANIFEST
    assert Manifest.from_json(MANIFEST.to_json()).to_json() == MANIFEST.to_json()


def test_long_manifests_are_no_more_lenient_than_json():
    """Lines are read many at a time, and nothing may hide between those of one time and those of the next."""
    tensors = [replace(TENSOR, key=f"{number}{'k' * 70_000}") for number in range(3)]
    manifest = Manifest((*tensors, TENSOR))
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    text = f"{text[: text.rindex(',')]}}}"  # without its own digest
    assert Manifest.from_json(text) == manifest
    # A comma too many between two tensors, or after the last, is damage, also with blanks that fill a read.
    for mark in (',\n  {"key": "1', '\n ],\n "blobs"'):
        for noise in (",\n  ", ",\n  " + " " * 70_000):
            assert text.count(mark) == 1
            with pytest.raises(SourceError, match="damaged manifest"):
                Manifest.from_json(text.replace(mark, noise + mark))


def test_a_letter_that_changes_in_a_manifest_is_seen():
    with pytest.raises(SourceError, match="not the one that was written"):
        Manifest.from_json(MANIFEST.to_json().replace('"ema"', '"sum"'))
    assert Manifest.from_json(json.dumps(gathered(spread(DOCUMENT)))) == MANIFEST  # without a digest, nobody knows


def test_tensors_that_are_cut_alike_share_boxes_and_layouts():
    """Read back, they share them still, and chunks of several manifests become the columns of one."""
    manifest = Manifest((TENSOR, replace(TENSOR, key="x"), replace(TENSOR, key="y", chunks=CHUNKS[:1])))
    # Equal boxes and layouts are written once, and read once.
    document = json.loads(manifest.to_json())
    assert [tensor["chunks"]["boxes"] for tensor in document["tensors"]] == [0, 0, 1]
    assert [tensor["layout"] for tensor in document["tensors"]] == [0, 0, 0] and len(document["layouts"]) == 1
    copy = Manifest.from_json(manifest.to_json())
    assert copy == manifest and copy.tensors[0].boxes is copy.tensors[1].boxes
    # Tensors of two manifests and of none, in one.
    tensors = Manifest.from_json(MANIFEST.to_json()).tensors
    mixed = Manifest((*copy.tensors[1:], tensors[0], TENSOR, tensors[1], copy.tensors[0]))
    assert Manifest.from_json(mixed.to_json()) == mixed and len(mixed.columns) == 9


def test_an_empty_manifest_is_json_too():
    assert Manifest.from_json(Manifest(()).to_json()) == Manifest(())


def damaged(**changes):
    """Return the document of the manifest with values changed at paths such as ``boxes__0__lo``, and no digest."""
    data = json.loads(MANIFEST.to_json())
    for path, value in changes.items():
        node = data
        *parents, field = path.split("__")
        for part in parents:
            node = node[int(part) if part.isdigit() else part]
        node[int(field) if field.isdigit() else field] = value
    del data["digest"]
    return data


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": 1},
        {"version": 3},
        {"tensors__0__shape": [4, -3]},
        {"tensors__0__shape": "43"},
        {"tensors__0__dtype": 32},
        {"tensors__0__convention": "mean"},
        {"tensors__0__fingerprint": "zz"},
        {"tensors__0__layout": -1},
        {"tensors__0__chunks__boxes": None},
        {"tensors__0__chunks__file": [0, 1.5]},
        {"tensors__0__chunks__item": [0, -2]},
        {"tensors__0__chunks__item_length": [900, None]},
        {"tensors__0__chunks__payload": [True, None]},
        {"tensors__0__chunks__crc32": [1 << 32, None]},
        {"tensors__0__chunks__digest": ["0" * 31 + "F", None]},
        {"tensors__0__chunks__strides": [[1, 4], None]},
        {"data_files__0": "../w"},
        {"data_files__0": ".hidden"},
        {"data_files__0": "__1_0.distcp"},
        {"layouts__0": 3},
        {"layouts__0__mesh": "x"},
        {"layouts__0__cuts": [1]},
        {"provenance__resharded": ["x"]},
        {"provenance__layer_wise": "x"},
        {"provenance__not_read": {"x": 1}},
        {"boxes__0__lo": [0, 2]},
        {"blobs__0__key": None},
    ],
    ids=str,
)
def test_damage_is_refused_by_the_reader_and_by_the_schema(changes):
    data = damaged(**changes)
    with pytest.raises(SourceError):
        Manifest.from_json(json.dumps(data))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes__0__lo": [[3, 0], [2, 0]]}, "lo <= hi"),
        ({"boxes__0__lo": [[0, 0]]}, "as many corners"),
        ({"tensors__0__chunks__boxes": 2}, "of 2 lists of boxes"),
        ({"tensors__0__chunks__boxes": 1}, "each of 0 boxes"),
        ({"tensors__0__chunks__file": [0, 2]}, "numbers of 2 files"),
        ({"tensors__0__chunks__item": [0]}, "each of 2 boxes"),
        ({"tensors__0__chunks__item": [0, 1 << 70]}, "up to"),
        ({"tensors__0__chunks__item": [0, MAX_ELEMENTS]}, "refused byte range"),
        ({"tensors__0__chunks__payload": [704, 0]}, "one of them"),
        ({"tensors__0__layout": 1}, r"o\.state\.w\.momentum_buffer': layout: expected the number of one of 1 layouts"),
        (
            {"layouts__0": {"algorithm": "mesh", "version": 1, "mesh": [2], "axes": ["a", "b"]}},
            "an axis for each of the sizes",
        ),
        ({"layouts__0__cuts": [["dp"]]}, "cuts: "),
        ({"tensors__1__shape": [True]}, "tensor 's': shape: expected an integer >= 0, got True"),
        ({"tensors__1__name": 3}, "tensor 's': name: expected a string, got 3"),
    ],
    ids=str,
)
def test_what_a_schema_cannot_say_is_refused_too(changes, message):
    with pytest.raises(SourceError, match=message):
        Manifest.from_json(json.dumps(damaged(**changes)))


def test_provenance_without_a_meaning_is_carried_whatever_it_is():
    provenance = {"not_ours": [None, {"\ud800": "a\0\x1b"}], "world": "\udcff é", "step": [], "x": 10**30}
    text = Manifest((TENSOR,), provenance=provenance).to_json()
    # No file holds a lone surrogate otherwise than escaped.
    assert Manifest.from_json(text.encode()).provenance == provenance


def test_other_json_and_no_json_are_refused():
    for text in ("", "[]", "{}", "null", '{"format": "muonckpt", "version": 1}', "[" * 100_000):
        with pytest.raises(SourceError):
            Manifest.from_json(text)


def test_the_layout_of_a_record_proves_coverage_and_names_the_tensor():
    assert [f.place.buffer for f in TENSOR.chunk_layout().fragments] == [0, 1]
    with pytest.raises(LayoutError, match=r"o\.state\.w\.momentum_buffer.*no buffer holds box \[2:4, 0:3\]"):
        replace(TENSOR, chunks=CHUNKS[:1]).chunk_layout()
