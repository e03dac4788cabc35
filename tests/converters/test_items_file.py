"""What is no tensor, where the format holds tensors only: in a JSON file beside it, or listed there with the reason."""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
import zarr
from support.commands import called
from support.resharded import nothing_but, once
from support.sharded import edit
from support.trees import tree

import muonckpt
from muonckpt import DestinationError, SourceError
from muonckpt.converters.engine.container import ItemFile
from muonckpt.converters.engine.outputs import OutputItem
from muonckpt.converters.options import grouped
from muonckpt.record.json_fields import check_seal
from muonckpt.store.io.location import location
from muonckpt.store.io.regular import open_regular

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KINDS = {"file": {"format": "safetensors"}, "folder": {"format": "safetensors", "shard_size": 100},
         "zarr": {"format": "zarr"}}  # fmt: skip

# A value, and how JSON has it.
PLAIN = {
    "number": (0.1, 0.1),
    "long": (2**70, 2**70),
    "none": (None, None),
    "flag": (True, True),
    "text": ('ä\ud800\n"', 'ä\ud800\n"'),
    "tuple": ((0.9, ("x", [])), [0.9, ["x", []]]),
    "integer keys": ({0: {"a": 1}, "one": 1}, {"0": {"a": 1}, "one": 1}),
    "infinite": ([math.inf, -math.inf, math.nan], ["Infinity", "-Infinity", "NaN"]),
}


def shared(depth: int) -> list:
    """Small as a pickle, because its parts are shared; 2**depth parts when written out."""
    value: list = ["x" * 8192]
    for _ in range(depth):
        value = [value, value]
    return value


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


NOT_PLAIN = {
    "set": ({1, 2}, "found '__builtin__ set'"),
    "object": (Path("x"), f"found '{type(Path()).__module__} PosixPath'; nothing was run"),
    "tensor": (torch.ones(2), "found 'torch._utils _rebuild_tensor_v2'"),
    "keys": ({1: "a", "1": "b"}, r"keys that differ as text"),
    "too long": (shared(13), "elements and characters in an item's data"),
    "too deep": (nested(700), "nested too deeply"),
}


def file_of(value: object) -> tuple[ItemFile, dict]:
    raw, limit = io.BytesIO(), sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # to save it, not to read it
    try:
        torch.save(value, raw)
    finally:
        sys.setrecursionlimit(limit)
    made = ItemFile.of([OutputItem("a.b", ("a", 0), data=raw.getvalue())], None, "run")
    return made, json.loads(made.data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_are_there_as_json_has_them(name):
    value, expected = PLAIN[name]
    made, data = file_of(value)
    check_seal(made.data, data)
    assert data.pop("digest")
    assert data == {
        "format": "muonckpt items",
        "version": 1,
        "source": "run",
        "items": [{"key": "a.b", "path": ["a", 0], "value": expected}],
        "undecoded": [],
    }
    assert (made.decoded, made.undecoded) == (("a.b",), ())


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_no_plain_data_is_listed_with_the_reason(name):
    value, reason = NOT_PLAIN[name]
    made, data = file_of(value)
    assert data["items"] == [] and (made.decoded, made.undecoded) == ((), ("a.b",))
    [entry] = data["undecoded"]
    assert (entry["key"], entry["path"]) == ("a.b", ["a", 0]) and reason in entry["reason"] and entry["bytes"] > 0


def test_deep_data_are_decoded_or_listed():
    kinds = {bool(file_of(nested(depth))[0].decoded) for depth in range(200, 500, 7)}
    assert kinds == {True, False}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tensor, plain data, and what is none.  Do not change."""
    path = tmp_path_factory.mktemp("source") / "run"
    muonckpt.save({"w": torch.arange(12.0), "lr": 0.5, "betas": (0.9, 0.95), "odd": {1, 2}}, path)
    return path


def items_of(destination: Path) -> dict:
    return json.loads(destination.with_name(f"{destination.name}.items.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_dropped_without_a_word(kind, source, tmp_path):
    plan = muonckpt.convert(source, tmp_path / "out", **grouped(**KINDS[kind], dry_run=True))
    assert list(tmp_path.iterdir()) == []
    report = muonckpt.convert(source, tmp_path / "out", **grouped(**KINDS[kind]))
    assert nothing_but(tmp_path, "out", "out.items.json")
    for told in (plan, report):
        assert (told.items_file, told.decoded) == (str(tmp_path / "out.items.json"), 2)
        assert (told.undecoded, told.left_out) == (("odd",), ())
    data = items_of(tmp_path / "out")
    assert {item["key"]: item["value"] for item in data["items"]} == {"lr": 0.5, "betas": [0.9, 0.95]}
    assert [item["key"] for item in data["undecoded"]] == ["odd"] and data["source"] == "run"
    exported = muonckpt.open(tmp_path / "out").provenance["exported"]
    assert (exported["items"], exported["undecoded"]) == (2, ["odd"])


def test_the_command_says_where_they_are(source, tmp_path):
    done = called("convert", source, tmp_path / "w.zarr", "--to-format", "zarr")
    assert done.returncode == 0
    assert f"{tmp_path}/w.zarr.items.json: 2 items of plain data; only listed, not plain data: odd\n" in done.stdout
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # zarr warns of what it does not know
        assert [name for name, _ in zarr.open_group(tmp_path / "w.zarr", mode="r").members()] == ["w"]


def test_what_lies_beside_a_source_is_not_passed_over_in_silence(source, tmp_path):
    muonckpt.convert(source, tmp_path / "w.safetensors", format="safetensors")
    report = muonckpt.convert(tmp_path / "w.safetensors", tmp_path / "back")
    assert report.notes == (f"the items in {tmp_path / 'w.safetensors.items.json'} are not read",)
    assert muonckpt.convert(tmp_path / "back", tmp_path / "again").notes == ()
    (tmp_path / "w.safetensors.items.json").unlink()
    (finding,) = muonckpt.verify(tmp_path / "w.safetensors").findings
    assert finding.kind == "items" and "w.safetensors.items.json is missing" in finding.message


def test_only_what_is_selected_is_written_and_nothing_if_only_tensors_are_asked_for(source, tmp_path):
    report = muonckpt.convert(source, tmp_path / "a", format="zarr", select=["w", "l*"])
    assert [item["key"] for item in items_of(tmp_path / "a")["items"]] == ["lr"] and not report.undecoded
    for number, how in enumerate(({"select": ["w"]}, {"tensors_only": True})):
        report = muonckpt.convert(source, tmp_path / str(number), **grouped(format="zarr", **how))
        assert report.items_file is None
    assert nothing_but(tmp_path, "a", "a.items.json", "0", "1") and set(report.left_out) == {"lr", "betas", "odd"}


def test_groups_that_are_translated_are_there_in_the_words_of_the_target(tmp_path):
    state = {"a": {"momentum_buffer": torch.ones(2, 2)}}
    groups = [{"params": ["a"], "lr": 0.1, "momentum": 0.5}]
    weights = {"a": torch.ones(2, 2)}
    muonckpt.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "run")
    report = muonckpt.convert(
        tmp_path / "run", tmp_path / "out", **grouped(format="safetensors", to_dialect="dion", convention="ema")
    )
    values = {item["key"]: item["value"] for item in items_of(tmp_path / "out")["items"]}
    assert values["optimizer.param_groups.0.mu"] == 0.5 and values["optimizer.param_groups.0.params"] == ["a"]
    assert len(values) == report.decoded


def test_a_damaged_item_stops_everything(source, tmp_path):
    muonckpt.reshard(source, tmp_path / "run", mesh={"dp": 1})
    [item] = (blob.item for blob in muonckpt.open(tmp_path / "run").manifest.blobs if blob.key == "odd")
    edit(tmp_path / "run" / item.file, item.offset + 70)
    with pytest.raises(SourceError, match=r"'odd'.*is damaged"):
        muonckpt.convert(tmp_path / "run", tmp_path / "out", format="zarr")
    assert nothing_but(tmp_path, "run")


# --- published together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True])
def test_a_file_of_that_name_is_never_replaced(kind, late, source, tmp_path):
    other = tmp_path / "out.items.json"

    def appears() -> None:
        other.write_text("mine")

    if not late:
        appears()
    progress = once(lambda: late and appears())
    with pytest.raises(DestinationError, match=r"out\.items\.json exists already"):
        muonckpt.convert(
            source, tmp_path / "out", **grouped(**KINDS[kind], progress=lambda count, total: progress(count))
        )
    assert nothing_but(tmp_path, "out.items.json") and other.read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_file_left_by_a_run_that_was_killed_is_taken_for_what_it_is(kind, source, tmp_path):
    (tmp_path / "first").mkdir()
    muonckpt.convert(source, tmp_path / "first" / "out", **grouped(**KINDS[kind]))
    (tmp_path / "out.items.json").write_bytes((tmp_path / "first" / "out.items.json").read_bytes())
    muonckpt.convert(source, tmp_path / "out", **grouped(**KINDS[kind]))
    assert tree(tmp_path / "out") == tree(tmp_path / "first" / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_again_where_the_destination_cannot_appear(kind, source, tmp_path):
    progress = once(lambda: (tmp_path / "out").mkdir())
    with pytest.raises(DestinationError, match="exists already"):
        muonckpt.convert(
            source, tmp_path / "out", **grouped(**KINDS[kind], progress=lambda count, total: progress(count))
        )
    assert nothing_but(tmp_path, "out")


@pytest.mark.parametrize("kind", KINDS)
def test_in_an_object_store_it_is_beside_the_destination_too(kind, source):
    place = location(f"memory://items-{kind}/out")
    report = muonckpt.convert(source, place, **grouped(**KINDS[kind]))
    assert report.items_file.endswith("/out.items.json")
    with open_regular(place.parent / "out.items.json") as file:
        assert len(json.loads(bytes(file.read(0, file.size)))["items"]) == 2
    muonckpt.convert(place, place.parent / "again", format="zarr")
    with pytest.raises(DestinationError, match="exists already"):
        muonckpt.convert(source, place, **grouped(**KINDS[kind]))
