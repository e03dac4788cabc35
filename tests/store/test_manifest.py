"""The manifest's schema and its page, held against manifests of every layout, saved in training and written offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.commands import run as command
from support.layer_wise_training import LAYOUTS as RUNS, Net, groups
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt
from muonckpt.converters.target.topology import LAYOUTS
from muonckpt.layouts.buffers.records import LAYOUT, PARAMETER
from muonckpt.optimizer import LayerWise, Muon

SCHEMA = json.loads(files("muonckpt.record").joinpath("manifest.schema.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "formats" / "manifest.md").read_text()


def saved(rank: int, world: int, folder: str) -> None:
    """A run of every layer-wise layout, and one on rows of a named mesh."""
    for layout in RUNS:
        net = Net()
        opt = LayerWise(net, groups(net), layout=layout, bucket_size=700)
        model, state = get_state_dict(net, opt)
        muonckpt.save({"model": model, "optimizer": state}, f"{folder}/{layout}", provenance=opt.provenance())
        opt.close()
    net, mesh = Net(("qkv", "stack")), init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for name, p in list(net.named_parameters()):
        net.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    model, state = get_state_dict(net, Muon(groups(net)))
    muonckpt.save({"model": model, "optimizer": state}, f"{folder}/mesh", provenance={"step": 3})


@pytest.fixture(scope="module")
def manifests(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("manifests")
    run(2, saved, str(folder))
    for layout in LAYOUTS:
        given = [
            str(folder / "padded-nscost"),
            str(folder / f"offline-{layout}"),
            "--layout",
            layout,
            "--mesh",
            "dp=2,tp=2",
        ]
        assert command(["reshard", *given, "--shard", "*qkv*=tp:0", "--select", "*w*", "--select", "*qkv*"]) == 0
    given = [
        str(folder / "padded-nscost"),
        str(folder / "raw"),
        "--layout",
        "padded-nscost",
        "--mesh",
        "dp=3",
        "--format",
        "buffers",
    ]
    assert command(["reshard", *given]) == 0
    return {path.name: json.loads(next(path.glob("*.json")).read_text()) for path in sorted(folder.iterdir())}


def test_manifests_of_every_layout_fit_the_schema(manifests):
    assert len(manifests) == len(RUNS) + 1 + len(LAYOUTS) + 1
    for manifest in manifests.values():
        jsonschema.validate(manifest, SCHEMA)


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """The schemas of objects whose fields are listed."""
    if isinstance(node, dict):
        if "properties" in node:
            yield node
        for value in node.values():
            yield from objects(value)


def test_what_is_written_is_in_the_schema_and_on_the_page(manifests):
    """Nothing is written that the schema does not name, but in provenance, and all that it names is explained."""
    fields = {name for node in objects(SCHEMA) for name in node["properties"]}
    assert not [name for name in sorted(fields) if f"`{name}`" not in PAGE]
    own = {
        name: set(SCHEMA["$defs"][name]["properties"])
        for name in SCHEMA["$defs"]
        if "properties" in SCHEMA["$defs"][name]
    }
    assert (own["buffer"], own["parameter"]) == (set(LAYOUT), set(PARAMETER))
    for manifest in manifests.values():
        written = {
            "layout": manifest["layouts"],
            "resharded": manifest["provenance"].get("resharded", []),
            "group_buffer": [
                {k: v for k, v in b.items() if k not in LAYOUT} for b in manifest["provenance"].get("buffers", [])
            ],
        }
        for name, entries in written.items():
            assert all(entry.keys() <= own[name] for entry in entries), name


def changed(node: Any, path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("offline-padded-nscost", ("provenance", "buffers"), 3),
        ("offline-padded-nscost", ("provenance", "buffers", 0, "group"), None),
        ("offline-padded-nscost", ("provenance", "buffers", 0, "shards", 0), [0, 1]),
        ("offline-padded-nscost", ("provenance", "buffers", 0, "padding"), -1),
        ("offline-padded-nscost", ("provenance", "buffers", 0, "parameters", 0, "owner"), "0"),
        ("offline-padded-nscost", ("provenance", "buffers", 0, "parameters", 0, "size"), 4),
        ("offline-padded-nscost", ("provenance", "resharded", 0, "mesh"), [2, 2]),
        ("offline-padded-nscost", ("layouts", 0, "cuts"), [["tp"]]),
        ("offline-rows", ("layouts", 0, "mesh"), [0]),
        ("raw", ("provenance", "buffers", 0, "files", 0), ["../x", 0, 4]),
        ("decoupled-total-order", ("provenance", "layer_wise", "ranks"), [3]),
        ("decoupled-total-order", ("provenance", "layer_wise", "buffers", 0, "version"), "1"),
    ],
    ids=str,
)
def test_what_the_page_does_not_say_does_not_fit(name, path, value, manifests):
    damaged = json.loads(json.dumps(manifests[name]))
    changed(damaged, path, value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(damaged, SCHEMA)
