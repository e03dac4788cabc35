"""The flat buffers that a checkpoint records, in figures: what they pad, and how much of them each rank has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..layouts.buffers.balanced import newton_schulz
from ..layouts.buffers.buffer_layout import rank_of
from ..layouts.buffers.group_buffer import GroupBuffer, recorded, recorded_run
from ..store.reading.dtypes import itemsize

NO_STATE = "(not optimizer state)"
"""What tensors that are in no slot of state are called."""

RUN = "(the run that saved)"
"""What buffers are of, if they were those of a training run: its parameters and gradients."""


LabelledBuffer = tuple[str, GroupBuffer]
"""A buffer, and what it is of: a slot of state, `NO_STATE` or `RUN`."""


def labelled_buffers(provenance: Mapping[str, Any]) -> tuple[LabelledBuffer, ...]:
    """The buffers that a checkpoint lies in; if it lies in none, those of the run that saved it.

    Raises:
        SourceError: a record is not what ``docs/formats/manifest.md`` says.
    """
    state = tuple((buffer.slot or NO_STATE, buffer) for buffer in recorded(provenance))
    return state or tuple((RUN, buffer) for buffer in recorded_run(provenance))


def without_buffers(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance without what it records of buffers, which is long."""
    short = {name: value for name, value in provenance.items() if name != "buffers"}
    if run := short.get("layer_wise"):
        short["layer_wise"] = {name: value for name, value in run.items() if name not in ("buffers", "ranks")}
    return short


def buffer_summary(buffers: Sequence[LabelledBuffer]) -> list[dict[str, Any]]:
    """JSON data, for what they are of and who placed them: sizes and padding, and what each rank has.

    ``padding_bytes`` is of one buffer of that dtype; ``newton_schulz`` the FLOPs of an iteration on the matrices that
    a rank owns, null where no rank owns any.  ``busiest`` is the most that a rank has, over the mean.
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
