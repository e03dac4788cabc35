"""The flat buffers that a manifest records: what they pad, and how much of them each rank has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LayoutError, SourceError
from ..layouts.buffers.balanced import newton_schulz
from ..layouts.buffers.layout import BufferLayout, rank_of
from ..layouts.buffers.recorded import BUFFER, from_json
from ..store.reading.dtypes import itemsize
from .output import section, size

FEW = 24
"""So many rows of ranks are shown unasked."""

NO_STATE = "(not optimizer state)"
"""What tensors that are in no slot of state are called."""

RUN = "(the run that saved)"
"""What buffers are of, if they were those of a training run: its parameters and gradients."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One buffer: what it is of (a slot of state, `NO_STATE` or `RUN`), and the global ranks that share it, in order.

    Raises:
        LayoutError: the layout is of another number of ranks, or holds nothing.
    """

    of: str
    ranks: tuple[int, ...]
    layout: BufferLayout

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.ranks or not self.layout.parameters:
            parameters = len(self.layout.parameters)
            raise LayoutError(
                f"a buffer of {parameters} parameters on {self.layout.ranks} ranks, shared by {self.ranks}"
            )


def recorded(provenance: Mapping[str, Any]) -> tuple[Recorded, ...]:
    """The buffers that a checkpoint lies in; if it lies in none, those of the run that saved it.

    Raises:
        SourceError: a record is not what ``docs/formats/manifest.md`` says.
    """
    try:
        if "buffers" in provenance:
            return tuple(_recorded(each["slot"] or NO_STATE, each["group"], each) for each in provenance["buffers"])
        run = provenance.get("layer_wise", {"buffers": [], "ranks": []})
        return tuple(_recorded(RUN, *each) for each in zip(run["ranks"], run["buffers"], strict=True))
    except (KeyError, TypeError, ValueError, AttributeError, LayoutError) as error:
        raise SourceError(f"damaged record of flat buffers: {type(error).__name__}: {error}") from error


def _recorded(of: str, ranks: Iterable[int], data: Mapping[str, Any]) -> Recorded:
    return Recorded(of, tuple(ranks), from_json({key: data[key] for key in BUFFER}))


def without(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance without what it records of buffers, which is long."""
    short = {name: value for name, value in provenance.items() if name != "buffers"}
    if run := short.get("layer_wise"):
        short["layer_wise"] = {name: value for name, value in run.items() if name not in ("buffers", "ranks")}
    return short


def summarise(buffers: Sequence[Recorded]) -> list[dict[str, Any]]:
    """JSON data, for what they are of and who placed them: sizes and padding, and what each rank has.

    ``padding_bytes`` is of one buffer of that dtype; ``newton_schulz`` the FLOPs of an iteration on the matrices that
    a rank owns, null where nobody owns any.  ``busiest`` is the most that a rank has, over the mean.
    """
    groups: defaultdict[tuple[str, str, int], list[Recorded]] = defaultdict(list)
    for each in buffers:
        groups[each.of, each.layout.algorithm, each.layout.version].append(each)
    return [
        {"of": of, "algorithm": algorithm, "version": version, **_sizes(members), **_shares(members)}
        for (of, algorithm, version), members in groups.items()
    ]


def _sizes(members: Sequence[Recorded]) -> dict[str, Any]:
    layouts = [each.layout for each in members]
    elements, padding = sum(sum(layout.filled) for layout in layouts), sum(layout.padding for layout in layouts)
    return {
        "buffers": len(layouts),
        "buckets": sum(len(layout.buckets) for layout in layouts),
        "elements": elements,
        "padding": padding,
        "padding_bytes": sum(layout.padding * itemsize(layout.parameters[0].parameter.dtype) for layout in layouts),
        "padding_percent": round(100 * padding / elements, 2),
    }


def _shares(members: Sequence[Recorded]) -> dict[str, Any]:
    """Of ranks that share all of the buffers, as of the experts of a run only one group's are recorded; or if there are
    none, because the buffers are those of several parts, of all ranks."""
    groups = [set(each.ranks) for each in members]
    ranks = sorted(set.intersection(*groups) or set.union(*groups))
    held: Counter[int] = Counter()
    work: Counter[int] = Counter()
    for each in members:
        owners = each.layout.owners
        for placed in each.layout.parameters:
            for shard in each.layout.holding(placed):
                held[each.ranks[rank_of(shard)]] += min(placed.stop, shard.stop) - max(placed.start, shard.start)
            if (owner := owners[placed.name]) is not None and each.layout.whole:
                work[each.ranks[owner]] += newton_schulz(placed.parameter)
    owned = any(each.layout.whole for each in members)
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


def show_parameters(buffers: Iterable[Recorded]) -> None:
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


def _parameter_rows(buffers: Iterable[Recorded]) -> Iterator[tuple[object, ...]]:
    for each in buffers:
        layout, owners = each.layout, each.layout.owners
        for placed in layout.parameters:
            owner = owners[placed.name]
            name, span = placed.name, f"{placed.start}:{placed.stop}"
            placed_by = f"{layout.algorithm} v{layout.version}"
            yield name, each.of, placed_by, placed.bucket, span, "-" if owner is None else each.ranks[owner]


def _placed_by(entry: Mapping[str, Any]) -> str:
    return f"{entry['algorithm']} v{entry['version']}"


def _or_dash(value: object) -> object:
    return "-" if value is None else value
