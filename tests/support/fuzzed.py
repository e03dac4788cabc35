"""What every parser of the package is fed with: what its writer makes, changed at random; and what may come of it."""

from __future__ import annotations

import io
import json
import os
import pickle
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

import muonckpt
from muonckpt import MuonckptError, store
from muonckpt.cli.argument_types import ByteCountType, MeshType, ShardRuleType
from muonckpt.cli.rewriting import RootType
from muonckpt.converters.target.topology import ShardRule, Target
from muonckpt.converters.translate.names import READY_MADE, NameRules
from muonckpt.store.formats.layer_wise_names import read_description
from muonckpt.store.formats.torch_save.inert_pickle import Anything, unpickle
from muonckpt.store.formats.torch_save.plain_item import plain_item, plain_value
from support.work import Work

DATA = Path(__file__).parent.parent / "data" / "fuzz"
"""Inputs that have found something, by parser: they are tried first, always."""

CALLS, MEBIBYTES = 2_000_000, 256
"""The most calls of functions for one input, and growth of memory over all of a parser."""

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Fuzzed:
    """A parser, and inputs that it accepts."""

    parse: Parse
    seeds: tuple[bytes, ...]

    def inputs(self, name: str) -> tuple[bytes, ...]:
        folder = DATA / name
        saved_files = sorted(folder.iterdir()) if folder.is_dir() else []
        return (*self.seeds, *(file.read_bytes() for file in saved_files))


# --- what may come of it ----------------------------------------------------------------------------------------------

_ACTIONS = ("exec", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename", "os.mkdir",
            "subprocess.Popen", "pickle.find_class", "shutil.rmtree", "socket.connect", "ctypes.dlopen")  # fmt: skip
_watching: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is not None and event in _ACTIONS and not _imports(event, arguments):
        _watching.append(f"{event} {arguments!r:.200}")


def _imports(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a module of Python's own is imported, as one for UTF-16 is when JSON is in it."""
    return event == "exec" and getattr(arguments[0], "co_filename", "").startswith(str(Path(os.__file__).parent))


sys.addaudithook(_note)


@contextmanager
def watched() -> Iterator[list[str]]:
    """What Python is told to do meanwhile that no parser has to do."""
    global _watching
    _watching = actions = []
    try:
        yield actions
    finally:
        _watching = None


def check(fuzzed: Fuzzed, data: bytes) -> None:
    """A parser gives a value or an error of ours, with little work, and does nothing else."""
    with watched() as actions, Work() as work:
        try:
            fuzzed.parse(data)
        except (MuonckptError, click.UsageError) as error:
            str(error)
    assert not actions, actions
    assert work.calls < CALLS


# --- changed inputs ---------------------------------------------------------------------------------------------------

_NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"9223372036854775807", b"1e400", b"NaN", b"9" * 400)
_TOKENS = (*_NUMBERS, b"null", b"true", b'""', b"[]", b"{}", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"../", b"%00",
           pickle.MARK, pickle.STOP, pickle.REDUCE, pickle.BUILD, pickle.GLOBAL, pickle.MEMOIZE, pickle.LONG4,
           pickle.FRAME, pickle.EMPTY_DICT, pickle.SETITEMS, pickle.STACK_GLOBAL, pickle.BINPERSID)  # fmt: skip
_VALUES = (None, True, -1, 0, 1, 1.5, 1 << 62, 10**400, float("inf"), float("nan"), "", "x", "\ud800", "a/../b", [],
           {}, [[]], [1, "x"], {"": None}, [-1, 2], "float32", "F32", [1 << 60] * 70)  # fmt: skip


@st.composite
def changed(draw: Any, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with a few bytes, numbers or values changed, or a part of another seed in it."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        data = draw(st.sampled_from(_CHANGES))(draw, data, seeds)
    return data


def _place(draw: Any, data: bytes) -> tuple[int, int]:
    start = draw(st.integers(0, max(len(data) - 1, 0)))
    return start, min(start + draw(st.sampled_from((0, 1, 2, 4, 8, 64, 1 << 16))), len(data))


def _flip(draw: Any, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    start, _ = _place(draw, data)
    return data[:start] + bytes([draw(st.integers(0, 255))]) + data[start + 1 :]


def _insert(draw: Any, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    start, stop = _place(draw, data)
    return data[:start] + draw(st.sampled_from(_TOKENS)) + data[stop:]


def _repeat(draw: Any, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    start, stop = _place(draw, data)
    return data[:stop] + data[start:stop] * draw(st.sampled_from((1, 2, 9))) + data[stop:]


def _splice(draw: Any, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    other_seed = draw(st.sampled_from(seeds))
    (start, _), (first, last) = _place(draw, data), _place(draw, other_seed)
    return data[:start] + other_seed[first:last] + data[start:]


def _json(draw: Any, data: bytes, seeds: tuple[bytes, ...]) -> bytes:
    """Another value somewhere in JSON, or a field that is gone or has another name."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return _flip(draw, data, seeds)
    at, key, part = None, None, whole
    while isinstance(part, dict | list) and part and (at is None or draw(st.integers(0, 5))):
        at, key = part, draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
        part = at[key]
    if at is None:
        return json.dumps(draw(st.sampled_from(_VALUES))).encode()
    mutation = draw(st.integers(0, 4))
    if mutation == 0:
        del at[key]
    elif mutation == 1 and isinstance(at, dict):
        at[draw(st.sampled_from(("", "x", *at)))] = at.pop(key)
    else:
        at[key] = draw(st.sampled_from(_VALUES))
    return json.dumps(whole).encode()


_CHANGES = (_flip, _insert, _repeat, _splice, _json, _json, _json)


# --- the parsers ------------------------------------------------------------------------------------------------------


def parsers(folder: Path) -> dict[str, Fuzzed]:
    """Every parser, by name; checkpoints lie in the folder."""
    for module in pkgutil.walk_packages(store.__path__, store.__name__ + "."):
        import_module(module.name)  # now, and not while somebody watches for code that is run
    values = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(0), "lr": 0.5, "groups": [{"betas": (0.9, 1.0)}]}
    muonckpt.save(values, folder / "own")
    dcp.save({"w": values["w"], "lr": 0.5}, checkpoint_id=folder / "stock", no_dist=True)
    muonckpt.convert(folder / "own", folder / "zarr", format="zarr")
    muonckpt.convert(folder / "own", folder / "weights.safetensors", format="safetensors")
    shutil.copytree(folder / "stock", folder / "items")
    root = json.loads((folder / "zarr" / "zarr.json").read_text())
    root["attributes"] = {}
    (folder / "zarr" / "zarr.json").write_text(json.dumps(root))
    momentum = {"optimizer": {"state": {"w": {"momentum_buffer": values["w"]}}}}
    muonckpt.save(momentum, folder / "momentum")
    muonckpt.convert(folder / "momentum", folder / "buffers", format="buffers", mesh={"dp": 2}, layout="padded-nscost")
    torch.save({"w": values["w"], "options": {"lr": 0.5}}, stream := io.BytesIO())
    layer_wise = json.loads(_LAYER_WISE)
    manifest = json.loads((folder / "own" / "muonckpt.json").read_text())
    manifest.pop("digest")
    index = json.loads((folder / "buffers" / "flat_buffers.json").read_text())
    index.pop("digest", None)
    array = json.loads((folder / "zarr" / "w" / "value" / "zarr.json").read_text())
    foreign = {**array, "attributes": {}}
    array["attributes"]["muonckpt"].pop("digest")
    weights = (folder / "weights.safetensors").read_bytes()
    pickled = [pickle.dumps({"a": [1, 2.5, "x", (None, True)], 3: "y"}, protocol) for protocol in (2, 4)]

    def file(name: str, description: str) -> Parse:
        return lambda data: _looked_at(folder / name, folder / name / description if description else None, data)

    return {
        "manifest": Fuzzed(file("own", "muonckpt.json"), (json.dumps(manifest).encode(),)),
        "metadata": Fuzzed(file("stock", ".metadata"), ((folder / "stock" / ".metadata").read_bytes(),)),
        "items": Fuzzed(file("items", "__0_0.distcp"), ((folder / "stock" / "__0_0.distcp").read_bytes(),)),
        "pickle": Fuzzed(lambda data: unpickle(data, Anything()), tuple(pickled)),
        "zip": Fuzzed(
            lambda data: plain_value(data, Anything()),
            (plain_item({"lr": [0.5, (1,)], "x": b"\xff"}), stream.getvalue()),
        ),
        "torch_save": Fuzzed(file("a.pt", ""), (stream.getvalue(),)),
        "safetensors": Fuzzed(file("weights.safetensors", ""), (weights,)),
        "safetensors_header": Fuzzed(
            lambda text: _looked_at(
                folder / "h.safetensors", None, len(text).to_bytes(8, "little") + text + weights[-48:]
            ),
            (weights[8 : 8 + int.from_bytes(weights[:8], "little")], _HEADER),
        ),
        "zarr": Fuzzed(file("zarr", "w/value/zarr.json"), (json.dumps(array).encode(), json.dumps(foreign).encode())),
        "flat_buffers": Fuzzed(file("buffers", "flat_buffers.json"), (json.dumps(index).encode(),)),
        "layer_wise": Fuzzed(_described(folder / "layer_wise", "layer_wise.json"), (json.dumps(layer_wise).encode(),)),
        "layer_wise_toml": Fuzzed(_described(folder / "toml", "layer_wise.toml"), (_LAYER_WISE_TOML,)),
        "name_rules": Fuzzed(_name_rules, tuple(table.to_toml().encode() for table in READY_MADE.values())),
        "mesh_rules": Fuzzed(_mesh_rules, (b"ep=8,dp=2\n*experts*=ep:0,dp:1\n*=", b"dp=1\nw*=dp:0")),
    }


_HEADER = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'

_LAYER_WISE = json.dumps(
    {
        "algorithm": "padded-nscost",
        "files": ["layer_wise_optimizer_0.pt"],
        "parameter": [{"name": "w", "shape": [3, 4], "dtype": "float32"}],
    }
)

_LAYER_WISE_TOML = b"""algorithm = "padded-nscost"
files = ["layer_wise_optimizer_0.pt"]
[[parameter]]
name = "w"
shape = [3, 4]
dtype = "float32"
"""


def _looked_at(path: Path, description: Path | None, data: bytes) -> None:
    """Open a checkpoint and read all of it."""
    (description or path).write_bytes(data)
    with muonckpt.open(path) as opened:
        str(opened.groups)
        for key in opened.items:
            opened.items[key]
        for tensor in opened.tensors.values():
            tensor.bits()
    muonckpt.verify(path)


def _described(folder: Path, name: str) -> Parse:
    folder.mkdir()

    def parse(data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read_description(folder)

    return parse


def _name_rules(data: bytes) -> None:
    rules = NameRules.from_toml(data.decode(errors="replace"))
    NameRules.from_toml(rules.to_toml())
    rules.inverse()


def _mesh_rules(data: bytes) -> None:
    """The first line is a mesh, the others are rules for shards; each is tried as every kind of argument."""
    lines = data.decode(errors="replace").splitlines()
    for line in lines:
        for kind in (MeshType(), ShardRuleType(), ByteCountType(), RootType()):
            try:
                kind.convert(line, None, None)
            except click.UsageError as error:
                str(error)
    if lines:
        mesh = MeshType().convert(lines[0], None, None)
        Target(mesh, tuple(ShardRule(*ShardRuleType().convert(line, None, None)) for line in lines[1:]))
