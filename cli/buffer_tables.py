"""Tables that describe flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..wording import size
from .printing import print_section

if TYPE_CHECKING:
    from ..converters.buffer_summary import LabelledBuffer

_FEW_RANKS = 24
"""The most ranks that are listed unless all are asked for."""

_SIZES = ("buffers of", "placed by", "ranks", "buckets", "elements", "padding")
_HEADERS = (*_SIZES, "busiest by elements", "by Newton-Schulz")
_RANK_HEADERS = ("rank", "buffers of", "placed by", "elements", "Newton-Schulz", "of the mean")
_PARAMETER_HEADERS = ("parameter", "buffers of", "placed by", "bucket", "elements", "owner")


def print_summary(summary: Sequence[Mapping[str, Any]], every_rank: bool = False) -> None:
    """Print a summary: a line for each entry, and for each rank if there are few or all are asked for."""
    rank_rows = list(_rank_rows(summary))
    print_section(_HEADERS, list(_rows(summary)))
    print_section(_RANK_HEADERS, rank_rows if every_rank or len(rank_rows) <= _FEW_RANKS else ())


def print_parameters(buffers: Iterable[LabelledBuffer]) -> None:
    """Print a line for each parameter of each buffer: where it lies, and which rank owns it."""
    print_section(_PARAMETER_HEADERS, list(_parameter_rows(buffers)))


def _rows(summary: Iterable[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    for entry in summary:
        padding = f"{entry['padding']} ({entry['padding_percent']:g} %, {size(entry['padding_bytes'])})"
        busiest = (_or_dash(entry["busiest"][measure]) for measure in ("elements", "newton_schulz"))
        sizes = len(entry["ranks"]), entry["buckets"], entry["elements"]
        yield entry["of"], _placed_by(entry), *sizes, padding, *busiest


def _rank_rows(summary: Iterable[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Shares are compared with the mean Newton-Schulz work, or with the mean number of elements if no rank owns any."""
    for entry in summary:
        measure = "elements" if entry["ranks"][0]["newton_schulz"] is None else "newton_schulz"
        mean = sum(share[measure] for share in entry["ranks"]) / len(entry["ranks"])
        for share in entry["ranks"]:
            ratio = f"{share[measure] / mean:.3f}" if mean else "-"
            cost = _or_dash(share["newton_schulz"])
            yield share["rank"], entry["of"], _placed_by(entry), share["elements"], cost, ratio


def _parameter_rows(buffers: Iterable[LabelledBuffer]) -> Iterator[tuple[object, ...]]:
    for label, buffer in buffers:
        layout, owners = buffer.layout, buffer.layout.owners
        for placed in layout.parameters:
            owner = owners[placed.name]
            name, span = placed.name, f"{placed.start}:{placed.stop}"
            placed_by = f"{layout.algorithm} v{layout.version}"
            yield name, label, placed_by, placed.bucket, span, "-" if owner is None else buffer.group[owner]


def _placed_by(entry: Mapping[str, Any]) -> str:
    return f"{entry['algorithm']} v{entry['version']}"


def _or_dash(value: object) -> object:
    return "-" if value is None else value
