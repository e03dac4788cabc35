"""Raw flat buffers on disk: every byte of every file where the recorded layout says, whatever they came from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from support import sweep
from support.commands import run as command
from support.foreign_buffers import compact, fsdp_v1
from support.layer_wise_training import Net, groups
from support.manifest_json import manifest_at, put
from support.raw_buffers import (
    INDEX,
    MESHES,
    NUMBERS,
    PARAMETERS,
    binaries,
    dumped,
    filled,
    grouped,
    index_of,
    with_version,
    written,
)
from support.resharded import make_job
from support.sharded import elements_of, raw_bytes
from support.workers import run as on_ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.engine.container import container_of
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import LAYOUTS, Target
from muonckpt.layouts.buffers.algorithms import distributed_optimizer, legacy_pingpong, padded_nscost, padded_numel
from muonckpt.layouts.buffers.parameters import GroupSizes
from muonckpt.names.vocabulary import PLACEMENTS
from muonckpt.optimizer import LayerWise
from muonckpt.record.record import Manifest
from muonckpt.store.formats.registry import BUFFERS, format_of
from muonckpt.store.reading.dtypes import itemsize

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MATRICES = {"qkv": (9, 5), "experts": (4, 5, 3), "proj": (5, 9), "none": (0, 3)}
OTHERS = {"embed": (13, 4)}


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Weights in two dtypes, momentum, element-wise state, counters, items that are no tensors; ours, on one rank."""
    state: dict[str, dict[str, Any]] = {name: {"momentum_buffer": some(*shape)} for name, shape in MATRICES.items()}
    for name, shape in OTHERS.items():
        state[name] = {"exp_avg": some(*shape), "exp_avg_sq": some(*shape) ** 2, "step": torch.tensor(7.0)}
    model = {name: some(*shape, dtype=torch.bfloat16) for name, shape in (MATRICES | OTHERS).items()}
    optimizer = {"state": state, "param_groups": [{"params": [*state], "lr": 0.5, "betas": (0.9, 0.95)}]}
    path = tmp_path_factory.mktemp("source") / "dcp"
    muonckpt.save({"model": {**model, "head": some(3, 8)}, "optimizer": optimizer}, path)
    return path


@pytest.fixture(scope="module")
def stored(source, tmp_path_factory):
    """The source in a layout over dp ranks, as raw buffers, written once.  Do not change."""
    folder = tmp_path_factory.mktemp("stored")

    @cache
    def at(layout: str, dp: int) -> Path:
        written(source, folder / f"{layout}{dp}", layout, dp)
        return folder / f"{layout}{dp}"

    return at


@pytest.fixture(scope="module")
def values(source) -> dict[str, np.ndarray]:
    """Each tensor, as raw elements in its shape."""
    tensors = {t.key: t for t in muonckpt.open(source).outline.tensors}
    return {
        key: np.frombuffer(raw, f"V{itemsize(tensors[key].dtype)}").reshape(tensors[key].shape)
        for key, raw in elements_of(source).items()
    }


def prints(manifest: Manifest) -> dict[str, str | None]:
    return {tensor.key: tensor.fingerprint for tensor in manifest.tensors}


# --- every pair -------------------------------------------------------------------------------------------------------

WAYS = ("padded-nscost", "decoupled-total-order", "legacy-pingpong", "flat", "rows", "balanced")
PLACES = [*product(WAYS, MESHES)]


def others(place: tuple[str, int]) -> list[tuple[str, int]]:
    """Every layout, on one mesh each, so that in all each layout and each mesh meets each."""
    meshes, at = list(MESHES), WAYS.index(place[0]) + list(MESHES).index(place[1])
    return [(way, meshes[(at + number) % len(meshes)]) for number, way in enumerate(WAYS)]


@pytest.mark.parametrize(("way", "mesh"), sweep(PLACES, *PLACES[::2]))
def test_each_layout_goes_to_each_other_one_byte_for_byte(way, mesh, source, stored, values, tmp_path):
    """From DCP, to buffers, to buffers, to DCP."""
    place = way, mesh
    expected = binaries(stored(*place))
    assert filled(index_of(stored(*place)), values) == expected
    own = prints(muonckpt.open(source).outline)
    for other in others(place):
        done = written(stored(*other), tmp_path / "out", *place, threads=1)
        assert binaries(tmp_path / "out") == expected, other
        assert prints(done) == own
        shutil.rmtree(tmp_path / "out")
    back = run_job(make_job(stored(*place), Target({"dp": 2})), tmp_path / "back")
    assert elements_of(tmp_path / "back") == {key: value.tobytes() for key, value in values.items()}
    before, after = muonckpt.open(source).outline, muonckpt.open(tmp_path / "back").outline
    assert prints(before) == prints(after) and "buffers" not in back.provenance
    for old, new in zip(before.blobs, after.blobs, strict=True):
        assert (old.path, raw_bytes(source, old.item)) == (new.path, raw_bytes(tmp_path / "back", new.item))


def test_what_an_owner_must_have_whole_is_whole_and_the_rest_as_the_layout_says(stored):
    actual = {
        layout: {
            entry["slot"]: (entry["algorithm"], entry["whole"])
            for entry in index_of(stored(layout, 3))["provenance"]["buffers"]
        }
        for layout in LAYOUTS
    }
    cut = ("distributed-optimizer", False)
    for layout, elementwise in (
        ("padded-nscost", cut),
        ("padded-numel", cut),
        ("decoupled-total-order", cut),
        ("legacy-pingpong", ("legacy-pingpong", True)),
        ("balanced", cut),
    ):
        slots = dict.fromkeys((None, "momentum_buffer", "step"), (layout, True))
        assert actual[layout] == slots | dict.fromkeys(("exp_avg", "exp_avg_sq"), elementwise), layout


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded-nscost", "balanced", "flat"])
def test_what_lies_in_padding_is_ignored(layout, stored, values, tmp_path):
    clean, spoilt = stored(layout, 3), tmp_path / "spoilt"
    shutil.copytree(clean, spoilt)
    for name, content in filled(index_of(clean), values, padding=b"\xff").items():
        (spoilt / name).write_bytes(content)
    assert binaries(spoilt) != binaries(clean)
    assert muonckpt.verify(spoilt).findings == ()
    done = written(spoilt, tmp_path / "again", layout, 3)
    assert binaries(tmp_path / "again") == binaries(clean) and prints(done) == prints(muonckpt.open(clean).manifest)


# --- owners are recorded, never computed again ------------------------------------------------------------------------


def owners(manifest: Manifest) -> dict[str, str]:
    return {tensor.key: tensor.chunks[0].item.file for tensor in manifest.tensors}


def test_the_same_layout_on_the_same_ranks_keeps_recorded_owners_and_their_version(tmp_path):
    groups = [[p.name for p in reversed(PARAMETERS)]]  # another order of equal ones: other owners than by default
    (layout,) = legacy_pingpong(PARAMETERS, GroupSizes(3), None, groups)
    assert layout.owners != legacy_pingpong(PARAMETERS, GroupSizes(3))[0].owners
    source = dumped(tmp_path / "source", grouped([layout]), NUMBERS)
    with_version(source, 7)
    expected = {name: f"rank_{owner}.bin" for name, owner in layout.owners.items()}
    same = written(source, tmp_path / "same", "legacy-pingpong", 3)
    assert owners(same) == expected and {t.layout["version"] for t in same.tensors} == {7}
    for other, dp in ("legacy-pingpong", 1), ("decoupled-total-order", 3):
        assert {t.layout["version"] for t in written(source, tmp_path / other, other, dp).tensors} == {1}
    run_job(make_job(source, Target({"dp": 3}, (), "legacy-pingpong")), tmp_path / "dcp")
    assert owners(written(tmp_path / "dcp", tmp_path / "through dcp", "legacy-pingpong", 3)) == expected


def save_runs(rank: int, world: int, folder: str) -> None:
    """A layer-wise run of each layout, in buckets that no converter would choose."""
    for layout in PLACEMENTS:
        net = Net(("embedding", "qkv", "proj", "down", "bias"))
        opt = LayerWise(net, groups(net), layout=layout, bucket_size=700)
        state = {"optimizer": get_optimizer_state_dict(net, opt)}
        muonckpt.save(state, f"{folder}/{layout}", provenance=opt.provenance())
        opt.close()


def test_the_owners_of_the_run_that_saved_are_kept(tmp_path):
    on_ranks(2, save_runs, str(tmp_path))
    for layout in PLACEMENTS:
        source = muonckpt.open(tmp_path / layout).outline
        names = {tensor.key: tensor.name for tensor in source.tensors}
        run_of = {p["name"]: p for buffer in source.provenance["layer_wise"]["buffers"] for p in buffer["parameters"]}
        job = make_job(tmp_path / layout, Target({"dp": 2}, (), layout), container=container_of("buffers"))
        kept = [buffer for buffer in job.arranged.provenance["buffers"] if buffer["options"]["bucket_size"] == 700]
        assert {buffer["slot"] for buffer in kept} == {"momentum_buffer", "exp_avg", "exp_avg_sq"}
        for parameter in (parameter for buffer in kept for parameter in buffer["parameters"]):
            of_run = run_of[names[parameter["name"]]]
            assert all(parameter[what] == of_run[what] for what in ("start", "stop", "bucket", "owner"))


# --- buffers of others ------------------------------------------------------------------------------------------------

OTHERS_LAYOUTS = {
    "replicated": lambda: compact(PARAMETERS, GroupSizes(3), 60),
    "padded by cost": lambda: padded_nscost(PARAMETERS, GroupSizes(3), 60),
    "padded by elements": lambda: padded_numel(PARAMETERS, GroupSizes(3), 60),
    "cut anywhere": lambda: distributed_optimizer(PARAMETERS, GroupSizes(3), 60),
    "of Megatron-FSDP": lambda: fsdp_v1(PARAMETERS, GroupSizes(3)),
}


@pytest.mark.parametrize("name", OTHERS_LAYOUTS)
def test_any_recorded_layout_is_read_without_chunks_or_sums(name, tmp_path):
    source = dumped(tmp_path / "source", grouped(OTHERS_LAYOUTS[name](), (2, 0, 1)), NUMBERS)
    assert command(["verify", str(source)]) == 0
    assert command(["reshard", str(source), str(tmp_path / "out"), "--mesh", "dp=2", "--format", "dcp"]) == 0
    assert elements_of(tmp_path / "out") == {key: value.tobytes() for key, value in NUMBERS.items()}


# --- the tools --------------------------------------------------------------------------------------------------------


def test_the_commands_take_it(source, stored, tmp_path, capsys):
    out = tmp_path / "out"
    reshard = ["reshard", str(source), str(out), "--format", "buffers", "--layout", "padded-nscost", "--mesh", "dp=3"]
    assert command(reshard) == 0 and command(["verify", str(out)]) == 0
    assert binaries(out) == binaries(stored("padded-nscost", 3)) and format_of(out) is BUFFERS
    schema = json.loads(files("muonckpt.record").joinpath("manifest.schema.json").read_text())
    jsonschema.validate(index_of(out), schema)
    capsys.readouterr()
    assert command(["inspect", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["kind"], summary["files"]) == ("flat buffers", 4)


def test_what_has_no_tensors_has_no_buffers_and_is_read_back(tmp_path):
    muonckpt.save({"lr": 0.1}, tmp_path / "options")
    assert command(["convert", str(tmp_path / "options"), str(tmp_path / "raw"), "--format", "buffers"]) == 0
    assert command(["convert", str(tmp_path / "raw"), str(tmp_path / "back"), "--format", "dcp"]) == 0
    state = {"lr": None}
    muonckpt.load(state, tmp_path / "back")
    assert state == {"lr": 0.1}


# --- damage -----------------------------------------------------------------------------------------------------------


def momentum(*path: str | int, to: Any) -> Callable[[Path, dict[str, Any]], None]:
    """Puts a value into the record of the momentum's buffer."""

    def change(folder: Path, index: dict[str, Any]) -> None:
        node = next(entry for entry in index["provenance"]["buffers"] if entry["slot"] == "momentum_buffer")
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = to

    return change


def replaced_by_a_link(folder: Path, index: dict[str, Any]) -> None:
    (folder / "rank_1.bin").rename(folder / "elsewhere")
    (folder / "rank_1.bin").symlink_to("elsewhere")


DAMAGE = {
    "out of bounds": (momentum("files", 1, 1, to=1 << 20), "is cut short"),
    "overlap": (momentum("files", 1, 1, to=0), "begins before that"),
    "too long": (momentum("files", 1, 2, to=1 << 12), "expected places of"),
    "no places": (momentum("files", to=[]), "expected places of"),
    "places of another kind": (momentum("files", to=3), "TypeError"),
    "escape": (momentum("files", 0, 0, to="../rank_0.bin"), "refused file name"),
    "negative": (momentum("files", 0, 1, to=-8), "refused byte range"),
    "group": (momentum("group", 0, to=2), "ranks that share"),
    "origins": (momentum("origins", to=[]), "origins"),
    "an origin": (momentum("origins", 0, 0, to=1), "momentum_buffer.*outside"),
    "numel": (momentum("numel", to=1), "do not agree"),
    "a stranger": (momentum("parameters", 0, "name", to="x"), "lists it as None"),
    "two dtypes": (momentum("parameters", 0, "dtype", to="float16"), "one dtype"),
    "of another dtype": (lambda path, index: index["tensors"][0].update(dtype="float16"), "lists it as float16"),
    "a chunk": (lambda path, index: index["tensors"][0]["chunks"][0].update(payload=[2, 90]), "where the buffers say"),
    "a buffer": (lambda path, index: index["provenance"]["buffers"].pop(), "no file has some elements"),
    "no buffers": (lambda path, index: index["provenance"].pop("buffers"), "buffers"),
    "buffers": (lambda path, index: index["provenance"].update(buffers=3), "TypeError"),
    "version": (lambda path, index: index.update(version=3), "version"),
    "missing": (lambda path, index: (path / "rank_1.bin").unlink(), "is missing"),
    "link": (replaced_by_a_link, "symbolic link"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused(name, stored, tmp_path, capsys):
    damage, message = DAMAGE[name]
    path = tmp_path / "damaged"
    shutil.copytree(stored("padded-nscost", 3), path)
    index = manifest_at(path / INDEX)
    damage(path, index)
    for tensor in index["tensors"]:
        if name != "a chunk":  # else all would disagree with the chunks, too
            tensor["chunks"] = []
    put(path / INDEX, index)
    assert command(["reshard", str(path), str(tmp_path / "out"), "--mesh", "dp=2"]) == 3
    shown = capsys.readouterr().err
    assert re.search(message, shown), shown
    assert [entry.name for entry in tmp_path.iterdir()] == ["damaged"]


def test_an_index_that_is_a_link_or_no_json_is_refused(stored, tmp_path):
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / INDEX).symlink_to(stored("padded-nscost", 3) / INDEX)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / INDEX).write_bytes((stored("padded-nscost", 3) / INDEX).read_bytes()[:-100])
    for name in ("link", "cut"):
        with pytest.raises(SourceError, match=INDEX):
            muonckpt.open(tmp_path / name)
