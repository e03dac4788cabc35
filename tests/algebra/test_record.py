from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest

from muonckpt.box import Box
from muonckpt.errors import LayoutError, SourceError
from muonckpt.record import Blob, Chunk, Extent, Manifest, StateRecord
from muonckpt.vocabulary import Convention

SCHEMA = json.loads(files("muonckpt").joinpath("manifest.schema.json").read_text())

CHUNKS = (
    Chunk(Box((0, 0), (2, 3)), Extent("__0_0.distcp", 0, 900), Extent("__0_0.distcp", 704, 24), "0" * 32, 7),
    Chunk(Box((2, 0), (4, 3)), Extent("__1_0.distcp", 0, 900), None, None, None),
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
    (TENSOR, StateRecord("s", ("s",), (), "int64", ())),
    (Blob("lr", ("lr",), Extent("__0_0.distcp", 900, 10), "f" * 32),),
    {"step": 3, "note": "ünïcode"},
)


def test_a_manifest_survives_json_and_fits_the_schema():
    text = MANIFEST.to_json()
    jsonschema.validate(json.loads(text), SCHEMA)
    assert Manifest.from_json(text) == MANIFEST


def test_a_manifest_that_was_laid_out_anew_is_read_alike():
    """Lines are read one by one; any other JSON, such as that of an editor, as a whole."""
    data = json.loads(MANIFEST.to_json())
    del data["digest"]
    for text in (json.dumps(data), json.dumps(data, indent=1)):
        assert Manifest.from_json(text) == MANIFEST
    assert Manifest.from_json(MANIFEST.to_json()).to_json() == MANIFEST.to_json()


def test_an_empty_manifest_is_json_too():
    assert Manifest.from_json(Manifest(()).to_json()) == Manifest(())


def damaged(**changes):
    data = json.loads(MANIFEST.to_json())
    for path, value in changes.items():
        node = data
        *parents, last = path.split("__")
        for part in parents:
            node = node[int(part) if part.isdigit() else part]
        node[last] = value
    del data["digest"]
    return data


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": 2},
        {"tensors__0__shape": [4, -3]},
        {"tensors__0__shape": "43"},
        {"tensors__0__dtype": 32},
        {"tensors__0__convention": "mean"},
        {"tensors__0__fingerprint": "zz"},
        {"tensors__0__chunks__0__file": "../w"},
        {"tensors__0__chunks__0__file": ".hidden"},
        {"tensors__0__chunks__0__item": [0]},
        {"tensors__0__chunks__0__payload": [True, 24]},
        {"tensors__0__chunks__0__digest": "0"},
        {"tensors__0__chunks__0__strides": [1, 4]},
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


def test_a_reversed_box_is_refused():
    with pytest.raises(SourceError, match="lo <= hi"):
        Manifest.from_json(json.dumps(damaged(tensors__0__chunks__0__lo=[3, 0])))


def test_other_json_and_no_json_are_refused():
    for text in ("", "[]", "{}", "null", '{"format": "muonckpt", "version": 1}', "[" * 100_000):
        with pytest.raises(SourceError):
            Manifest.from_json(text)


def test_the_layout_of_a_record_proves_coverage_and_names_the_tensor():
    assert [f.place.buffer for f in TENSOR.chunk_layout().fragments] == ["0", "1"]
    with pytest.raises(LayoutError, match=r"o\.state\.w\.momentum_buffer.*no buffer holds box \[2:4, 0:3\]"):
        replace(TENSOR, chunks=CHUNKS[:1]).chunk_layout()
