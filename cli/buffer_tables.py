"""The flat buffers that a manifest records: what they pad, and how much of them each rank has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..layouts.buffers.balanced import newton_schulz
from ..layouts.buffers.group_buffer import GroupBuffer, recorded, recorded_run
from ..layouts.buffers.layout import rank_of
from ..store.reading.dtypes import itemsize
from .output import section, size

FEW = 24
"""So many rows of ranks are shown unasked."""

NO_STATE = "(not optimizer state)"
"""What tensors that are in no slot of state are called."""

RUN = "(the run that saved)"
"""What buffers are of, if they were those of a training run: its parameters and gradients."""


Labelled = tuple[str, GroupBuffer]
"""A buffer, and what it is of: a slot of state, `NO_STATE` or `RUN`."""


def labelled(provenance: Mapping[str, Any]) -> tuple[Labelled, ...]:
    """The buffers that a checkpoint lies in; if it lies in none, those of the run that saved it.

    Raises:
        SourceError: a record is not what ``docs/formats/manifest.md`` says.
    """
    state = tuple((buffer.slot or NO_STATE, buffer) for buffer in recorded(provenance))
    return state or tuple((RUN, buffer) for buffer in recorded_run(provenance))


def without(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance without what it records of buffers, which is long."""
    short = {name: value for name, value in provenance.items() if name != "buffers"}
    if run := short.get("layer_wise"):
        short["layer_wise"] = {name: value for name, value in run.items() if name not in ("buffers", "ranks")}
    return short


def summarise(buffers: Sequence[Labelled]) -> list[dict[str, Any]]:
    """JSON data, for what they are of and who placed them: sizes and padding, and what each rank has.

    ``padding_bytes`` is of one buffer of that dtype; ``newton_schulz`` the FLOPs of an iteration on the matrices that
    a rank owns, null where nobody owns any.  ``busiest`` is the most that a rank has, over the mean.
    """
    groups: defaultdict[tuple[str, str, int], list[GroupBuffer]] = defaultdict(list)
    for of, buffer in buffers:
        groups[of, buffer.layout.algorithm, buffer.layout.version].append(buffer)
    return [
        {"of": of, "algorithm": algorithm, "version": version, **_sizes(members), **_shares(members)}
        for (of, algorithm, version), members in groups.items()
    ]


def _sizes(members: Sequence[GroupBuffer]) -> dict[str, Any]:
    layouts = [buffer.layout for buffer in members]
    elements, padding = sum(sum(layout.filled) for layout in layouts), sum(layout.padding for layout in layouts)
    return {
        "buffers": len(layouts),
        "buckets": sum(len(layout.buckets) for layout in layouts),
        "elements": elements,
        "padding": padding,
        "padding_bytes": sum(layout.padding * itemsize(layout.parameters[0].parameter.dtype) for layout in layouts),
        "padding_percent": round(100 * padding / elements, 2),
    }


def _shares(members: Sequence[GroupBuffer]) -> dict[str, Any]:
    """Of ranks that share all of the buffers, as of the experts of a run only one group's are recorded; or if there are
    none, because the buffers are those of several parts, of all ranks."""
    groups = [set(buffer.group) for buffer in members]
    ranks = sorted(set.intersection(*groups) or set.union(*groups))
    held: Counter[int] = Counter()
    work: Counter[int] = Counter()
    for buffer in members:
        owners = buffer.layout.owners
        for placed in buffer.layout.parameters:
            for shard in buffer.layout.holding(placed):
                held[buffer.group[rank_of(shard)]] += min(placed.stop, shard.stop) - max(placed.start, shard.start)
            if (owner := owners[placed.name]) is not None and buffer.layout.whole:
                work[buffer.group[owner]] += newton_schulz(placed.parameter)
    owned = any(buffer.layout.whole for buffer in members)
    costs = [work[rank] if owned else None for rank in ranks]
    return {
        "busiest": {
            "elements": _busiest([held[rank] for rank in ranks]),
            "newton_schulz": _busiest([work[rank] for rank in ranks]) if owned else None,
        },
        "ranks": [
            {"rank": rank, "elements": held[rank], "newton_schulz": cost}
            for rank, cost in zip(ranks, costs, strict=True)
        ],
    }


def _busiest(shares: Sequence[int]) -> float | None:
    total = sum(shares)
    return round(max(shares) * len(shares) / total, 3) if total else None


SIZES = ("buffers of", "placed by", "ranks", "buckets", "elements", "padding")
HEADERS = (*SIZES, "busiest by elements", "by Newton-Schulz")
RANK_HEADERS = ("rank", "buffers of", "placed by", "elements", "Newton-Schulz", "of the mean")
PARAMETER_HEADERS = ("parameter", "buffers of", "placed by", "bucket", "elements", "owner")


def show(summary: Sequence[Mapping[str, Any]], every_rank: bool = False) -> None:
    """Print what `summarise` found: a line for each entry, and for each rank if these are few or all are asked for."""
    of_ranks = list(_rank_rows(summary))
    section(HEADERS, list(_rows(summary)))
    section(RANK_HEADERS, of_ranks if every_rank or len(of_ranks) <= FEW else ())


def show_parameters(buffers: Iterable[Labelled]) -> None:
    """Print a line for each parameter of each buffer: where it lies, and who owns it."""
    section(PARAMETER_HEADERS, list(_parameter_rows(buffers)))


def _rows(summary: Iterable[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    for entry in summary:
        padding = f"{entry['padding']} ({entry['padding_percent']} %, {size(entry['padding_bytes'])})"
        busiest = (_or_dash(entry["busiest"][what]) for what in ("elements", "newton_schulz"))
        sizes = len(entry["ranks"]), entry["buckets"], entry["elements"]
        yield entry["of"], _placed_by(entry), *sizes, padding, *busiest


def _rank_rows(summary: Iterable[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """The mean is of Newton-Schulz work, or of elements if nobody owns any."""
    for entry in summary:
        what = "elements" if entry["ranks"][0]["newton_schulz"] is None else "newton_schulz"
        mean = sum(share[what] for share in entry["ranks"]) / len(entry["ranks"])
        for share in entry["ranks"]:
            part = f"{share[what] / mean:.3f}" if mean else "-"
            cost = _or_dash(share["newton_schulz"])
            yield share["rank"], entry["of"], _placed_by(entry), share["elements"], cost, part


def _parameter_rows(buffers: Iterable[Labelled]) -> Iterator[tuple[object, ...]]:
    for of, buffer in buffers:
        layout, owners = buffer.layout, buffer.layout.owners
        for placed in layout.parameters:
            owner = owners[placed.name]
            name, span = placed.name, f"{placed.start}:{placed.stop}"
            placed_by = f"{layout.algorithm} v{layout.version}"
            yield name, of, placed_by, placed.bucket, span, "-" if owner is None else buffer.group[owner]


def _placed_by(entry: Mapping[str, Any]) -> str:
    return f"{entry['algorithm']} v{entry['version']}"


def _or_dash(value: object) -> object:
    return "-" if value is None else value
