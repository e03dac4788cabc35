"""A summary of the flat buffers that a checkpoint records: their padding, and what each rank holds of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ...layouts.buffers.buffer_layout import rank_of
from ...layouts.buffers.parameters import newton_schulz
from ...layouts.buffers.records import GroupBuffer, recorded_buffers, run_buffers
from ...store.reading.dtypes import itemsize
from .contents import NO_STATE

RUN = "(the run that saved)"
"""The label of the buffers of a training run, of parameters and gradients."""


LabelledBuffer = tuple[str, GroupBuffer]


def labelled_buffers(provenance: Mapping[str, Any]) -> tuple[LabelledBuffer, ...]:
    """Return the buffers that a checkpoint is laid out in, with their slots; if there are none, those of its run."""
    state = tuple((buffer.slot or NO_STATE, buffer) for buffer in recorded_buffers(provenance))
    return state or tuple((RUN, buffer) for buffer in run_buffers(provenance))


def buffer_summary(buffers: Sequence[LabelledBuffer]) -> list[dict[str, Any]]:
    """Return sizes, padding, and what each rank holds, for each label and placement as JSON data.

    ``padding_bytes`` counts one buffer of the dtype.  ``newton_schulz`` is the FLOPs of one iteration on the matrices
    that a rank owns, null if no rank owns any.  ``busiest`` is the most that a rank holds, divided by the mean.
    """
    groups: defaultdict[tuple[str, str, int], list[GroupBuffer]] = defaultdict(list)
    for label, buffer in buffers:
        groups[label, buffer.layout.algorithm, buffer.layout.version].append(buffer)
    summary = []
    for (label, algorithm, version), members in groups.items():
        placement = {"of": label, "algorithm": algorithm, "version": version}
        sizes: Counter[str] = Counter(buffers=len(members))
        for layout in (buffer.layout for buffer in members):
            sizes["buckets"] += len(layout.buckets)
            sizes["elements"] += sum(layout.filled)
            sizes["padding"] += layout.padding
            sizes["padding_bytes"] += layout.padding * itemsize(layout.parameters[0].parameter.dtype)
        percent = round(100 * sizes["padding"] / (sizes["elements"] + sizes["padding"]), 2)
        summary.append({**placement, **sizes, "padding_percent": percent, **_shares(members)})
    return summary


def _shares(members: Sequence[GroupBuffer]) -> dict[str, Any]:
    """Return the elements that each rank holds, and its work on the matrices that it owns."""
    # With experts, a run records the buffers of one process group only: its ranks are those that share all of them.
    # If no rank shares all (buffers of several parts), all ranks count.
    groups = [set(buffer.group) for buffer in members]
    ranks = sorted(set.intersection(*groups) or set.union(*groups))
    elements: Counter[int] = Counter()
    work: Counter[int] = Counter()
    for buffer in members:
        layout, owners = buffer.layout, buffer.layout.owners
        for entry in layout.parameters:
            # A parameter and a shard are ranges of the buffer, and a rank holds the elements in both.
            for shard in layout.shards_of(entry):
                elements[buffer.group[rank_of(shard)]] += min(entry.stop, shard.stop) - max(entry.start, shard.start)
            # The owner has the momentum of a matrix whole.
            owner = owners[entry.name]
            if owner is not None and layout.whole:
                work[buffer.group[owner]] += newton_schulz(entry.parameter)
    # Without owners no work is known.
    has_owners = any(buffer.layout.whole for buffer in members)
    shares: list[dict[str, Any]] = []
    for rank in ranks:
        shares.append({"rank": rank, "elements": elements[rank], "newton_schulz": work[rank] if has_owners else None})
    # The largest share over the mean; None where nothing is shared, or known.
    busiest: dict[str, float | None] = {}
    for name in ("elements", "newton_schulz"):
        known_shares = [share[name] for share in shares if share[name] is not None]
        total = sum(known_shares)
        busiest[name] = round(max(known_shares) * len(shares) / total, 3) if total else None
    return {"busiest": busiest, "ranks": shares}
