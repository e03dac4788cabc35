"""`muonckpt inspect`: print the contents and the layout of a checkpoint, from its metadata alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..converters.look.contents import groups_as_code, groups_as_data, plain_items
from ..converters.look.holders import Branch, cut_text, part_as_json
from ..converters.look.inspection import LOOK_AT, Inspection, inspection_of, overview
from ..converters.look.run_history import history_of
from ..names.errors import DamageError
from ..names.wording import counted, shape_text, size
from ..record.record import StateRecord
from ..store.io.location import Location
from ..store.open_checkpoint import OpenCheckpoint, StoredPart
from ..store.reading.payloads import tensor_bytes
from ..store.verify.damage import rank_in_name
from ..store.verify.diagnosis import naming_way_back, open_damaged
from ..store.verify.verification import unless_removed
from .argument_types import CHECKPOINT, KEY, MeshType, WordType, shard_option
from .printing import (
    or_dash,
    print_buffer_parameters,
    print_buffers,
    print_damage,
    print_duration,
    print_json,
    print_labelled,
    print_line,
    print_result,
    print_section,
    print_table,
    terminal_width,
)
from .runs import newest_whole, print_run

if TYPE_CHECKING:
    from ..converters.look.fits import Fit

_BAR = 24
"""Characters of the bar that shows a shard along a dim."""

_VIEWS = ("--tensor", "--rank", "--tree", "--items", "--groups", "--fits")
_SORTS: Mapping[str, Callable[[StateRecord], Any]] = {"bytes": lambda t: -tensor_bytes(t), "key": lambda t: t.key}


@click.command("inspect")
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("globs", type=KEY, nargs=-1, metavar="[GLOB]...")
@click.option("--tensor", type=KEY, metavar="KEY", help="Who holds a tensor; for KEY[3, 100:200] at which bytes.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="List the contents of a rank's files.")
@click.option("--tree", is_flag=True, help="Tensors by module; layers that are alike as one.")
@click.option("--items", is_flag=True, help="Hyper-parameters and other items, decoded.")
@click.option("--groups", is_flag=True, help="Parameter groups as code; with --json as convert --like takes them.")
@click.option("--fits", type=MeshType(), metavar="MESH", help="Can it be resumed on dp=48,tp=2?  Exit with 1 for no.")
@shard_option("With --fits: axes that cut matching tensors; repeatable.")
@click.option("--layout", metavar="LAYOUT", help="With --fits: the same as reshard's --layout.")
@click.option("--sort", type=WordType([*_SORTS]), help="Order of listed tensors.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--ranks", is_flag=True, help="List every rank, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --tensors also the manifest.")
def inspect_command(checkpoint: Location, as_json: bool, **options: Any) -> int:
    """Show the contents of CHECKPOINT, of any format, their owners, and suspicious facts; exit with 1 if it is damaged.

    With GLOB list the tensors whose keys match.  Reads metadata, hyper-parameters and counters only.  For the folder of
    a run it shows the steps, and with any other option their newest whole one.

    \b
    muonckpt inspect run
    muonckpt inspect run/step-00001000 '*experts*' --sort bytes
    muonckpt inspect run/step-00001000 --tensor 'layers.3.experts.w1[17, 100:200]'
    muonckpt inspect run/step-00001000 --fits dp=48,tp=2 --shard '*=tp:0,dp:0'
    """
    views = [name for name in _VIEWS if options[name[2:]] not in (None, False)]
    if len(views) > 1:
        raise click.UsageError(f"{views[0]} and {views[1]} are two views; choose one")
    view = views[0] if views else ""
    if view != "--fits" and (options["shard"] or options["layout"]):
        raise click.UsageError("--shard and --layout have no meaning without --fits")
    # The folder of a run is shown as one only if nothing else is asked; else its newest whole step is meant.
    with naming_way_back(checkpoint):
        history = history_of(checkpoint)
    if history is not None:
        if not any(options.values()):
            print_result(history, as_json, partial(print_run, history))
            return history.verdict.exit_code
        [checkpoint] = newest_whole(history.run)
    try:
        if view == "--fits":
            from ..converters.look.fits import fits  # imports all layouts

            layout = {} if options["layout"] is None else {"layout": options["layout"]}
            fit = fits(checkpoint, options["fits"], shard=options["shard"], **layout)
            print_result(fit, as_json, partial(_print_fit, fit))
            return 0 if fit else 1
        with naming_way_back(checkpoint), unless_removed(checkpoint), open_damaged(checkpoint) as opened:
            inspection = inspection_of(opened)
            if as_json:
                data = _view_as_data(view, opened, inspection, options)
            else:
                _print_view(view, opened, inspection, options)
    except DamageError as error:
        return print_damage(error, as_json)
    if as_json:
        print_json(data)
    else:
        print_duration()
    return int(bool(inspection.diagnosis))


def _view_as_data(view: str, opened: OpenCheckpoint, inspection: Inspection, options: Mapping[str, Any]) -> object:
    """Return what ``--json`` prints of a view."""
    match view:
        case "--tensor":
            record, index = inspection.selected(options["tensor"])
            data = {**_described(record), "shards": inspection.shards(record.key, *index)}
            if index:
                data["parts"] = [part_as_json(part) for part in opened.tensors[record.key].parts(index)]
            return data
        case "--rank":
            return {"rank": options["rank"], "tensors": inspection.on_rank(options["rank"])}
        case "--tree":
            return inspection.tree(*options["globs"])
        case "--items":
            return plain_items(opened.outline, opened.values)
        case "--groups":
            return {"param_groups": groups_as_data(opened.outline, opened.values)}
    records = _sorted_records(inspection, options["globs"], options["sort"])
    if options["globs"]:
        return [_described(record) for record in records]
    manifest = {"manifest": json.loads(inspection.manifest.to_json())} if options["tensors"] else {}
    return {**inspection.to_json(), **manifest}


def _print_view(view: str, opened: OpenCheckpoint, inspection: Inspection, options: Mapping[str, Any]) -> None:
    """Print a view as text."""
    match view:
        case "--tensor":
            _print_tensor(opened, inspection, options["tensor"])
        case "--rank":
            _print_rank(inspection, options["rank"])
        case "--tree":
            rows = list(_branch_rows(inspection.tree(*options["globs"]), 0))
            print_table(("module", "tensors", "bytes", "shape", "dtype"), rows)
        case "--items":
            _print_items(plain_items(opened.outline, opened.values))
        case "--groups":
            groups = groups_as_data(opened.outline, opened.values)
            for line in groups_as_code(groups, min(terminal_width(sys.stdout) or 120, 120)).splitlines():
                print_line(line, code=True)
        case _:
            records = _sorted_records(inspection, options["globs"], options["sort"])
            if options["globs"]:
                _print_matches(records)
                return
            _print_summary(inspection, options["ranks"])
            if options["tensors"] or options["sort"]:
                _print_records(inspection, records)


def _sorted_records(inspection: Inspection, globs: Sequence[str], sort: str | None) -> list[StateRecord]:
    """Return the tensors that the patterns match, or all tensors without a pattern; sorted if the user says how."""
    records = list(inspection.matching(*globs))
    return sorted(records, key=_SORTS[sort]) if sort else records


def _print_tensor(opened: OpenCheckpoint, inspection: Inspection, tensor: str) -> None:
    """Print who holds which indices of a tensor, with a bar of each along every dim that is cut."""
    record, index = inspection.selected(tensor)
    shards = inspection.shards(record.key, *index)  # raises before anything is printed
    parts = opened.tensors[record.key].parts(index) if index else ()
    print_line(f"{record.key}: {shape_text(record.shape)}, {record.dtype}, {cut_text(record)}")
    if index:
        _print_parts(tensor, parts)
        return
    # A column for each dim, and a bar for each that is cut.
    shards = tuple(shard for shard in shards if shard.box.numel)
    names = [f"dim {dim}" for dim in range(len(record.shape))]
    if len(names) >= 2:
        names[-2:] = "rows", "columns"
    cut_dims: list[int] = []
    for dim, length in enumerate(record.shape):
        if any(shard.box.shape[dim] != length for shard in shards):
            cut_dims.append(dim)
    rows = []
    for shard in shards:
        spans = list(zip(shard.box.lo, shard.box.hi, strict=True))
        ranges = [f"{lo}:{hi}" for lo, hi in spans]
        bars = []
        for (lo, hi), length in ((spans[dim], record.shape[dim]) for dim in cut_dims):
            start = lo * _BAR // length
            stop = max(-(-hi * _BAR // length), start + 1)
            bars.append("." * start + "#" * (stop - start) + "." * (_BAR - stop))
        rows.append((or_dash(shard.rank), shard.file, *ranges, size(shard.bytes), *bars))
    print_section(("rank", "file", *names, "bytes", *(names[dim] for dim in cut_dims)), rows)


def _print_parts(selection: str, parts: Sequence[StoredPart]) -> None:
    """Print which rank's file holds which part of a selection such as ``KEY[3, 100:200]``, and at which bytes."""
    elements, num_bytes = sum(part.box.numel for part in parts), sum(part.bytes for part in parts)
    print_line(f"{selection}: {counted(elements, 'element')}, {size(num_bytes)} in {counted(len(parts), 'chunk')}")
    rows = []
    for part in parts:
        runs = f"{part.run} B" if part.runs == 1 else f"{part.runs} x {part.run} B"
        offset = "encoded" if part.offset is None else part.offset
        rows.append((or_dash(rank_in_name(part.file)), part.file, str(part.box), offset, runs))
    print_section(("rank", "file", "box", "first byte", "bytes"), rows)


def _print_rank(inspection: Inspection, rank: int) -> None:
    """Print the parts of tensors in the files of a rank."""
    shards_by_key = inspection.on_rank(rank)
    files: set[str] = set()
    rows, num_bytes = [], 0
    for key, shards in shards_by_key.items():
        for shard in shards:
            files.add(shard.file)
            num_bytes += shard.bytes
            rows.append((key, str(shard.box), size(shard.bytes)))
    tensors = counted(len(shards_by_key), "tensor")
    print_line(f"rank {rank}: {tensors}, {size(num_bytes)} in {', '.join(sorted(files))}")
    print_section(("tensor", "box", "bytes"), rows)


def _branch_rows(branches: Sequence[Branch], depth: int) -> Iterator[tuple[object, ...]]:
    """Yield modules and tensors with their sizes, indented; equal ones share a row, with their count."""
    for branch in branches:
        count, unit = (f" ({branch.count} alike)", " each") if branch.count > 1 else ("", "")
        shape = "" if branch.shape is None else shape_text(branch.shape)
        name = f"{'  ' * depth}{branch.name}{count}"
        yield name, branch.tensors, f"{size(branch.bytes)}{unit}", shape, branch.dtype or ""
        yield from _branch_rows(branch.branches, depth + 1)


def _print_items(items: Mapping[str, Any]) -> None:
    """Print each item with its value, long ones cut."""
    rows = []
    for key, value in items.items():
        text = value if isinstance(value, str) else repr(value)
        rows.append((key, text if len(text) <= 200 else f"{text[:160]} … ({len(text)} characters)"))
    print_table(("item", "value"), rows)


def _print_matches(records: Sequence[StateRecord]) -> None:
    """Print the tensors that patterns match."""
    rows = [(t.key, shape_text(t.shape), t.dtype, t.slot or "-", size(tensor_bytes(t)), cut_text(t)) for t in records]
    print_table(("tensor", "shape", "dtype", "slot", "bytes", "cut into"), rows)


def _print_summary(inspection: Inspection, ranks: bool) -> None:
    """Print the verdict, then contents and balance, with ``ranks`` for every rank."""
    for number, line in enumerate(inspection.diagnosis.lines):
        print_line(line, fg="red" if number == 0 else None)
    for label, value in overview(inspection):
        print_labelled(label, value, fg="red" if label == LOOK_AT else None)
    roles = []
    for role in inspection.roles:
        slots, dtypes = ", ".join(role["slots"]) or "-", ", ".join(role["dtypes"])
        roles.append((role["role"], slots, role["tensors"], role["elements"], size(role["bytes"]), dtypes))
    print_section(("contents", "slots", "tensors", "elements", "bytes", "dtypes"), roles)
    print_buffers(inspection.buffers, ranks)
    balance = inspection.balance["bytes"] if ranks and not inspection.buffers else None
    if balance:
        rows = []
        for rank, num_bytes in inspection.bytes_of_ranks().items():
            rows.append((rank, size(num_bytes), f"{num_bytes / balance['mean']:.3f}" if balance["mean"] else "-"))
        print_section(("rank", "bytes", "of the mean"), rows)


def _print_records(inspection: Inspection, records: Sequence[StateRecord]) -> None:
    """Print the record of each tensor, and the places of parameters in flat buffers."""
    if inspection.buffers:
        from ..converters.look.buffer_summary import labelled_buffers  # imports all of flat buffers

        print_buffer_parameters(labelled_buffers(inspection.manifest.provenance))
    rows = []
    for t in records:
        pieces = f" ({'+'.join(map(str, t.pieces))} rows)" if t.pieces else ""
        facts = t.dtype, t.convention or "-", len(t.chunks), t.fingerprint or "-"
        rows.append((t.key, shape_text(t.shape) + pieces, *facts))
    print_section(("tensor", "shape", "dtype", "convention", "chunks", "fingerprint"), rows)


def _described(tensor: StateRecord) -> dict[str, Any]:
    return {"key": tensor.key, "shape": tensor.shape, "dtype": tensor.dtype, "name": tensor.name, "slot": tensor.slot,
            "convention": tensor.convention, "bytes": tensor_bytes(tensor), "chunks": len(tensor.chunks),
            "cut": cut_text(tensor), "fingerprint": tensor.fingerprint}  # fmt: skip


_SCREEN = 24
_WIDTH = 80
"""The answer fits into such a terminal, at the expense of the list of uneven tensors."""

_MIN_ROWS = 3


def _print_fit(fit: Fit) -> None:
    """Print whether a checkpoint can be resumed on a mesh, and what each rank would hold there."""
    lines = [f"{fit.checkpoint} on {fit.place}: {fit.sentence}."]
    for remedy in fit.diagnosis.remedies:
        lines += [f"  {remedy.command}", f"    {remedy.gives}"]
    if fit:
        lines.append(f"{fit.advice}.")
    lines += [f"note: {finding.message}" for finding in fit.findings]
    if fit and fit.diagnosis:
        lines.append(f"note: {fit.diagnosis.sentence}")
    for line in lines:
        print_line(line)
    amounts = ("bytes", "least", "mean", "most")
    # The table of uneven tensors gets the rows that the answer leaves of the screen.
    rows = []
    for share in fit.shares:
        rows.append((share["slot"], share["tensors"], *(size(round(share[name])) for name in amounts)))
    print_section(("a rank would hold", "tensors", *amounts), rows)
    uneven = []
    for entry in fit.uneven:
        elements = f"{entry.least} to {entry.most}"
        uneven.append((entry.pattern, entry.tensors, shape_text(entry.shape), entry.cuts, elements, entry.empty_ranks))
    headers = ("uneven", "tensors", "shape", "cut by", "elements", "ranks without")
    used = sum(-(-len(line) // _WIDTH) for line in lines) + 2 + len(rows)  # a section has a blank line and a header
    max_rows = max(_SCREEN - used - 5, _MIN_ROWS)  # and "and more", the duration and the prompt
    print_section(headers, uneven[:max_rows])
    if len(uneven) > max_rows:
        print_line(f"and {len(uneven) - max_rows} more (--json)")
