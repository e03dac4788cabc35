"""Small pictures in the terminal: where the shards of a tensor are, and a model's modules as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from ..converters.inspection import Inspection
from ..converters.look.holders import StoredShard, cut_in_words
from ..converters.look.module_tree import Branch
from ..record import StateRecord
from ..wording import counted, size
from .printing import print_section, print_table, printable

_WIDTH = 24
"""Characters of a bar."""


def print_tensor(tensor: StateRecord, shards: Sequence[StoredShard]) -> None:
    """Print the shards of a tensor: who holds which indices, with a bar of each along every dim that is cut."""
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    click.echo(printable(f"{tensor.key}: {shape}, {tensor.dtype}, {cut_in_words(tensor)}"))
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
    """Print what the files of a rank hold."""
    held = inspection.on_rank(rank)
    total = sum(shard.bytes for shards in held.values() for shard in shards)
    files = sorted({shard.file for shards in held.values() for shard in shards})
    click.echo(f"rank {rank}: {counted(len(held), 'tensor')}, {size(total)} in {', '.join(files)}")
    rows = [(key, str(shard.box), size(shard.bytes)) for key, shards in held.items() for shard in shards]
    print_section(("tensor", "box", "bytes"), rows)


def print_tree(branches: Sequence[Branch]) -> None:
    """Print modules and tensors, each with its size; what is alike is one line, with its count."""
    rows = list(_rows(branches, 0))
    print_table(("module", "tensors", "bytes", "shape", "dtype"), rows)


def _rows(branches: Sequence[Branch], depth: int) -> Iterator[tuple[object, ...]]:
    for branch in branches:
        count = f" ({branch.alike} alike)" if branch.alike > 1 else ""
        shape = "" if branch.shape is None else " x ".join(map(str, branch.shape)) or "scalar"
        each = " each" if branch.alike > 1 else ""
        name = f"{'  ' * depth}{branch.name}{count}"
        yield name, branch.tensors, f"{size(branch.bytes)}{each}", shape, branch.dtype or ""
        yield from _rows(branch.branches, depth + 1)


def _dim(dim: int, dims: int) -> str:
    """Matrices have rows and columns, in their last two dims."""
    return ("rows", "columns")[dim - dims + 2] if dims >= 2 and dim >= dims - 2 else f"dim {dim}"


def _bar(lo: int, hi: int, length: int) -> str:
    start = lo * _WIDTH // length
    stop = max(-(-hi * _WIDTH // length), start + 1)
    return "." * start + "#" * (stop - start) + "." * (_WIDTH - stop)
