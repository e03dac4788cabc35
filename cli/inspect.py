"""`muonckpt inspect`: what is in a checkpoint and how it is laid out, from its metadata alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from ..converters.look.contents import groups_as_code, groups_as_data, plain_items
from ..converters.look.holders import Branch, StoredShard, cut_in_words
from ..converters.look.inspection import Inspection, inspection_of, overview
from ..errors import TargetError
from ..record import StateRecord
from ..store.io.location import Location
from ..store.open_checkpoint import OpenCheckpoint, open
from ..store.reading.dtypes import itemsize
from ..wording import counted, size
from .argument_types import CHECKPOINT, WordType
from .printing import (
    print_buffer_parameters,
    print_buffers,
    print_duration,
    print_json,
    print_labelled,
    print_line,
    print_section,
    print_table,
)

_VIEWS = ("--tensor", "--rank", "--tree", "--items", "--groups")
_SORTS: Mapping[str, Callable[[StateRecord], Any]] = {
    "bytes": lambda tensor: -_bytes(tensor),
    "key": lambda tensor: tensor.key,
}


@click.command("inspect")
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@click.option("--tensor", metavar="KEY", help="Where a tensor's shards are; KEY[17] for one index of dim 0.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="What the files of a rank hold.")
@click.option("--tree", is_flag=True, help="Tensors by module; layers that are alike as one.")
@click.option("--items", is_flag=True, help="Hyper-parameters and other items, decoded.")
@click.option("--groups", is_flag=True, help="Parameter groups as code; with --json as convert --like takes them.")
@click.option("--sort", type=WordType([*_SORTS]), help="Order of listed tensors.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--ranks", is_flag=True, help="List every rank, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --tensors also the manifest.")
def command(checkpoint: Location, as_json: bool, **options: Any) -> None:
    """Say what is in CHECKPOINT, of any format, who holds it, and what looks sick.

    With GLOB list the tensors whose keys match.  Reads metadata, hyper-parameters and counters only.

    \b
    muonckpt inspect run/step-00001000 '*experts*' --sort bytes
    muonckpt inspect run/step-00001000 --tensor 'model.layers.3.experts.w1[17]'
    """
    view, *others = [*(name for name in _VIEWS if options[name[2:]] not in (None, False)), ""]
    if [name for name in others if name]:
        raise click.UsageError(f"{view} and {others[0]} are two views; choose one")
    with open(checkpoint) as opened:
        try:
            shown = _SHOW[view](opened, inspection_of(opened), as_json=as_json, **options)
        except TargetError as error:
            raise click.UsageError(str(error)) from error
    if as_json:
        print_json(shown)
    else:
        print_duration()


def _show_tensor(opened: OpenCheckpoint, inspection: Inspection, tensor: str, as_json: bool, **rest: Any) -> object:
    keys = {record.key: record for record in inspection.manifest.tensors}
    match = re.fullmatch(r"(.+)\[([0-9, ]+)\]", tensor) if tensor not in keys else None
    key, index = (match[1], tuple(map(int, match[2].split(",")))) if match else (tensor, ())
    shards = inspection.shards(key, *index)
    if not as_json:
        print_tensor(keys[key], shards)
    return {**_described(keys[key]), "shards": [shard.to_json() for shard in shards]}


def _show_rank(opened: OpenCheckpoint, inspection: Inspection, rank: int, as_json: bool, **rest: Any) -> object:
    if not as_json:
        print_rank(inspection, rank)
        return None
    held = inspection.on_rank(rank).items()
    return {"rank": rank, "tensors": {key: [shard.to_json() for shard in shards] for key, shards in held}}


def _show_tree(
    opened: OpenCheckpoint, inspection: Inspection, globs: Sequence[str], as_json: bool, **rest: Any
) -> object:
    branches = inspection.tree(*globs)
    if not as_json:
        print_tree(branches)
    return [branch.to_json() for branch in branches]


def _show_items(opened: OpenCheckpoint, inspection: Inspection, as_json: bool, **rest: Any) -> object:
    items = plain_items(opened.outline, opened.values)
    if not as_json:
        print_table(("item", "value"), [(key, _short(value)) for key, value in items.items()])
    return items


def _show_groups(opened: OpenCheckpoint, inspection: Inspection, as_json: bool, **rest: Any) -> object:
    groups = groups_as_data(opened.outline, opened.values)
    if not as_json:
        for line in groups_as_code(groups).splitlines():
            print_line(line)
    return {"param_groups": groups}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:160]} … ({len(text)} characters)"


def _show_summary(
    opened: OpenCheckpoint,
    inspection: Inspection,
    globs: Sequence[str],
    sort: str | None,
    tensors: bool,
    ranks: bool,
    as_json: bool,
    **rest: Any,
) -> object:
    listed = list(inspection.matching(*globs))
    listed = sorted(listed, key=_SORTS[sort]) if sort else listed
    if as_json and globs:
        return [_described(tensor) for tensor in listed]
    if as_json:
        manifest = {"manifest": json.loads(inspection.manifest.to_json())} if tensors else {}
        return {**inspection.to_json(), **manifest}
    if globs:
        print_table(("tensor", "shape", "dtype", "slot", "bytes", "cut into"), list(map(_line, listed)))
        return None
    print_labelled(overview(inspection))
    roles = ("contents", "slots", "tensors", "elements", "bytes", "dtypes")
    print_section(roles, list(map(_role_row, inspection.roles)))
    print_buffers(inspection.buffers, ranks)
    if ranks and not inspection.buffers:
        held = inspection.balance["bytes"]
        shares = inspection.bytes_of_ranks() if held else {}
        print_section(("rank", "bytes", "of the mean"), [_share(rank, n, held) for rank, n in shares.items()])
    if tensors or sort:
        if inspection.buffers:
            from ..converters.look.buffer_summary import labelled_buffers  # imports all of flat buffers

            print_buffer_parameters(labelled_buffers(inspection.manifest.provenance))
        headers = ("tensor", "shape", "dtype", "convention", "chunks", "fingerprint")
        print_section(headers, list(map(_row, listed)))
    return None


_SHOW: Mapping[str, Callable[..., object]] = {
    "": _show_summary,
    "--tensor": _show_tensor,
    "--rank": _show_rank,
    "--tree": _show_tree,
    "--items": _show_items,
    "--groups": _show_groups,
}


def _share(rank: int, held: int, balance: Mapping[str, Any]) -> tuple[object, ...]:
    return rank, size(held), f"{held / balance['mean']:.3f}" if balance["mean"] else "-"


def _role_row(role: Mapping[str, Any]) -> tuple[object, ...]:
    slots = ", ".join(role["slots"]) or "-"
    return role["role"], slots, role["tensors"], role["elements"], size(role["bytes"]), ", ".join(role["dtypes"])


def _bytes(tensor: StateRecord) -> int:
    return math.prod(tensor.shape) * itemsize(tensor.dtype)


def _shape(tensor: StateRecord) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


def _described(tensor: StateRecord) -> dict[str, Any]:
    return {"key": tensor.key, "shape": tensor.shape, "dtype": tensor.dtype, "name": tensor.name, "slot": tensor.slot,
            "convention": tensor.convention, "bytes": _bytes(tensor), "chunks": len(tensor.chunks),
            "cut": cut_in_words(tensor), "fingerprint": tensor.fingerprint}  # fmt: skip


def _line(tensor: StateRecord) -> tuple[object, ...]:
    return (
        tensor.key,
        _shape(tensor),
        tensor.dtype,
        tensor.slot or "-",
        size(_bytes(tensor)),
        cut_in_words(tensor),
    )


def _row(tensor: StateRecord) -> tuple[object, ...]:
    pieces = f" ({'+'.join(map(str, tensor.pieces))} rows)" if tensor.pieces else ""
    return (
        tensor.key,
        _shape(tensor) + pieces,
        tensor.dtype,
        tensor.convention or "-",
        len(tensor.chunks),
        tensor.fingerprint or "-",
    )


_WIDTH = 24


def print_tensor(tensor: StateRecord, shards: Sequence[StoredShard]) -> None:
    """Print who holds which indices of a tensor, with a bar of each along every dim that is cut."""
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    print_line(f"{tensor.key}: {shape}, {tensor.dtype}, {cut_in_words(tensor)}")
    shards = [shard for shard in shards if shard.box.numel]
    dims = range(len(tensor.shape))
    cut = [dim for dim in dims if any(shard.box.shape[dim] != tensor.shape[dim] for shard in shards)]
    headers = ("rank", "file", *(_dim(dim, len(dims)) for dim in dims), "bytes", *(_dim(d, len(dims)) for d in cut))
    rows = [
        (
            "-" if shard.rank is None else shard.rank,
            shard.file,
            *(f"{lo}:{hi}" for lo, hi in zip(shard.box.lo, shard.box.hi, strict=True)),
            size(shard.bytes),
            *(_bar(shard.box.lo[dim], shard.box.hi[dim], tensor.shape[dim]) for dim in cut),
        )
        for shard in shards
    ]
    print_section(headers, rows)


def print_rank(inspection: Inspection, rank: int) -> None:
    held = inspection.on_rank(rank)
    total = sum(shard.bytes for shards in held.values() for shard in shards)
    files = sorted({shard.file for shards in held.values() for shard in shards})
    print_line(f"rank {rank}: {counted(len(held), 'tensor')}, {size(total)} in {', '.join(files)}")
    rows = [(key, str(shard.box), size(shard.bytes)) for key, shards in held.items() for shard in shards]
    print_section(("tensor", "box", "bytes"), rows)


def print_tree(branches: Sequence[Branch]) -> None:
    """Print modules and tensors with their sizes; what is alike is one line, with its count."""
    rows = list(_branch_rows(branches, 0))
    print_table(("module", "tensors", "bytes", "shape", "dtype"), rows)


def _branch_rows(branches: Sequence[Branch], depth: int) -> Iterator[tuple[object, ...]]:
    for branch in branches:
        count = f" ({branch.alike} alike)" if branch.alike > 1 else ""
        shape = "" if branch.shape is None else " x ".join(map(str, branch.shape)) or "scalar"
        each = " each" if branch.alike > 1 else ""
        name = f"{'  ' * depth}{branch.name}{count}"
        yield name, branch.tensors, f"{size(branch.bytes)}{each}", shape, branch.dtype or ""
        yield from _branch_rows(branch.branches, depth + 1)


def _dim(dim: int, dims: int) -> str:
    return ("rows", "columns")[dim - dims + 2] if dims >= 2 and dim >= dims - 2 else f"dim {dim}"


def _bar(lo: int, hi: int, length: int) -> str:
    start = lo * _WIDTH // length
    stop = max(-(-hi * _WIDTH // length), start + 1)
    return "." * start + "#" * (stop - start) + "." * (_WIDTH - stop)
