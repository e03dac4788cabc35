"""A page about a checkpoint, alone or beside another one: its data, and one HTML file of data, style and script.

Names in a checkpoint may be hostile.  They are in the page as JSON only, in which no ``<`` occurs, and the script shows
them as text; a policy lets browsers run and apply only our own script and style, known by their hashes, and load
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np

from ..chunks import Boxes
from ..columns import UNKNOWN
from ..converters.compare.diff import Difference, diff_of
from ..converters.compare.stats import (
    STATS_MEMORY,
    CheckpointStats,
    bytes_of_elements,
    health_json,
    measurable,
    measured,
    siblings_of,
    stats_of,
)
from ..converters.look.contents import Contents, FirstLook, Role, first_look
from ..converters.look.holders import chunk_bytes, cut_in_words, newton_schulz_by_rank
from ..converters.look.inspection import Inspection, description, inspection_of
from ..errors import DestinationError, LayoutError, SourceError
from ..record import Manifest
from ..store.damage import rank_in_name
from ..store.io.location import Remote
from ..store.io.new_file import write_synced
from ..store.opening import open
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import Progress
from ..version import VERSION

StatsChoice = Literal["spectra", "norms", "none"]

_FIGURES = ("norm", "rms", "largest", "zeros", "nan", "infinite", "stable_rank", "spectrum")
"""Figures of each measured tensor on the page."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page about a checkpoint.

    Attributes:
        known: its metadata by role.
        stats: its measured numbers, if any.
        difference: the changes since the other checkpoint (``a``), if there is one.
    """

    inspection: Inspection
    known: FirstLook
    stats: CheckpointStats | None
    difference: Difference | None

    @property
    def findings(self) -> int:
        """The number of findings in the metadata and the numbers."""
        return len(self.inspection.symptoms) + len(self.stats.health if self.stats else ())

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page, as docs/guide/report.md describes it."""
        manifest, ranks = self.inspection.manifest, self.inspection.bytes_of_ranks()
        work = newton_schulz_by_rank(self.known.contents, list(ranks)) if ranks else None
        return {
            "muonckpt": VERSION,
            "overview": list(description(self.inspection)),
            "inspection": plain(self.inspection.to_json()),
            **shard_columns(manifest, self.known.contents),
            "ranks": {"bytes": by_number(ranks), "newton_schulz": by_number(work)},
            "stats": plain(_stats_columns(self.stats, [t.key for t in manifest.tensors])) if self.stats else None,
            "difference": plain(self.difference.to_json()) if self.difference else None,
        }

    def html(self) -> str:
        return html_of(f"{Path(self.inspection.checkpoint).name} - muonckpt report", self.to_json())

    def write(self, file: str | os.PathLike[str]) -> int:
        """Write the page into a local file, which appears whole and replaces an earlier one; return its bytes.

        Raises:
            DestinationError: it cannot be written.
        """
        place, text = Path(file), self.html().encode("ascii")
        draft = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
        try:
            write_synced(draft, text)
            draft.replace(place)
        except OSError as error:
            raise DestinationError(f"the report cannot be written to {place}: {error}") from error
        finally:
            with suppress(OSError):  # it has its name, or was never made
                draft.unlink()
        return len(text)


def report(
    path: str | os.PathLike[str] | Remote,
    other: str | os.PathLike[str] | Remote | None = None,
    *,
    stats: StatsChoice = "spectra",
    select: Sequence[str] = (),
    memory: int = STATS_MEMORY,
    jobs: int = 2,
    progress: Progress = lambda count, total: None,
) -> Page:
    """Make a page about a checkpoint, as ``muonckpt report`` writes it; needs no torch.

    Args:
        path: a path or a URL, of any format.
        other: another checkpoint, such as an earlier one of the run; the page shows the changes since.
        stats: the numbers to measure; with ``"none"`` elements are read only for a comparison.
        select: shell patterns of the keys of weights and state to measure; by default all.
        memory: the most bytes of elements in memory.
        jobs: the number of threads.
        progress: called with the bytes read since the last call, and with the total.

    Raises:
        SourceError: a checkpoint cannot be read, or is damaged.
        LayoutError: a tensor has a hole or an overlap.
        TargetError: a pattern matches nothing.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(open(path))
        known = first_look(opened)
        inspection = inspection_of(opened, known)
        chosen = [] if stats == "none" else measurable(known, select)
        to_measure = bytes_of_elements(tensor for _, tensor in chosen)
        to_compare = 0

        def compared(count: int, total: int) -> None:
            nonlocal to_compare
            to_compare = total
            progress(count, total + to_measure)

        earlier = stack.enter_context(open(other)) if other is not None else None
        before = first_look(earlier) if earlier else None
        difference = None
        if earlier and before:
            sides = (earlier, before), (opened, known)
            difference = diff_of(*sides, memory=memory, jobs=jobs, progress=compared)
        found = None
        if stats != "none":

            def passed(count: int) -> None:
                progress(count, to_compare + to_measure)

            spectra = stats == "spectra"
            try:
                tensors = measured(opened, known, chosen, spectra=spectra, memory=memory, jobs=jobs, passed=passed)
            except (SourceError, LayoutError) as error:
                instead = "without measuring, by --stats none or stats='none', there is a page"
                raise type(error)(f"{error}; {instead}") from error
            weights = {tensor.key for tensor in known.contents.tensors.get(Role.WEIGHTS, ())}
            changes = {  # root mean squares, where both checkpoints have a weight in one shape
                tensor.key: tensor.statistics.rms_change if tensor.statistics else 0.0
                for tensor in (difference.tensors if difference else ())
                if tensor.key in weights and tensor.by != "shape"
            }
            found = stats_of(opened, known, tensors, earlier, before, changes)
    return Page(inspection, known, found, difference)


def _stats_columns(stats: CheckpointStats, keys: Sequence[str]) -> dict[str, Any]:
    """Return the numbers as JSON data, with five significant digits.

    Figures are columns, and ``tensor`` a position in ``keys``; rows of ``folded`` have ``members``, positions in
    columns.
    """
    positions = {key: position for position, key in enumerate(keys)}
    rows = {id(tensor): row for row, tensor in enumerate(stats.tensors)}
    figures = [tensor.to_json() for tensor in stats.tensors]
    members = [[rows[id(tensor)] for tensor in group] for group in siblings_of(stats.tensors).values()]
    return {
        "since": stats.since,
        "steps": stats.steps,
        "tensors": {
            "tensor": [positions[tensor.key] for tensor in stats.tensors],
            **{name: [_rounded(row[name]) for row in figures] for name in _FIGURES},
        },
        "folded": [
            {name: _rounded(value) for name, value in row.items()} | {"members": own}
            for row, own in zip(stats.folded(), members, strict=True)
        ],
        "updates": [update.to_json() for update in stats.updates],
        "health": [health_json(finding) for finding in stats.health],
    }


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.5g}")
        case Mapping():
            return {name: _rounded(each) for name, each in value.items()}
        case tuple():
            return [_rounded(each) for each in value]
        case _:
            return value


def shard_columns(manifest: Manifest, contents: Contents) -> dict[str, Any]:
    """Return tensors, their cuts and their shards as columns: a million shards take ten megabytes.

    ``tensors``: columns ``key``, ``role``, ``slot``, ``shape``, ``dtype``, ``bytes``, ``fingerprint`` and ``cut``, a
    position in ``cuts``.  ``cuts``: ``words``, and the boxes ``lo`` and ``hi``, one for each shard of a tensor.
    ``shards``, in the order of the tensors: columns ``file`` and ``offset``, of the elements or else of their item.
    ``files``: columns ``name``, ``rank`` (None if the name does not tell) and ``bytes`` of elements.
    """
    roles = {tensor.key: str(role) for role, tensors in contents.tensors.items() for tensor in tensors}
    cuts: dict[tuple[tuple[int, ...], Boxes], int] = {}
    words: list[str] = []
    cut_of = []
    for tensor in manifest.tensors:
        number = cuts.setdefault((tensor.shape, tensor.boxes), len(cuts))
        if number == len(words):
            words.append(cut_in_words(tensor))
        cut_of.append(number)
    columns = manifest.columns
    held = np.zeros(len(columns.names), np.int64)
    np.add.at(held, columns.file, chunk_bytes(manifest))
    return {
        "tensors": {
            "key": [tensor.key for tensor in manifest.tensors],
            "role": [roles[tensor.key] for tensor in manifest.tensors],
            "slot": [tensor.slot for tensor in manifest.tensors],
            "shape": [list(tensor.shape) for tensor in manifest.tensors],
            "dtype": [tensor.dtype for tensor in manifest.tensors],
            "bytes": [math.prod(tensor.shape) * itemsize(tensor.dtype) for tensor in manifest.tensors],
            "fingerprint": [tensor.fingerprint for tensor in manifest.tensors],
            "cut": cut_of,
        },
        "cuts": [
            {"words": text, "lo": boxes.lo.tolist(), "hi": boxes.hi.tolist()}
            for (_, boxes), text in zip(cuts, words, strict=True)
        ],
        "shards": {
            "file": columns.file.tolist(),
            "offset": np.where(columns.payload == UNKNOWN, columns.item, columns.payload).tolist(),
        },
        "files": {
            "name": list(columns.names),
            "rank": [rank_in_name(name) for name in columns.names],
            "bytes": held.tolist(),
        },
    }


def by_number(shares: Mapping[int, int] | None) -> dict[str, list[int]] | None:
    """Return shares of ranks as columns ``rank`` and ``share``; None if unknown."""
    return {"rank": list(shares), "share": list(shares.values())} if shares else None


_SCRIPTS = ("model", "table", "charts", "map", "tensor", "sections", "main")

_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def html_of(title: str, data: Mapping[str, Any]) -> str:
    """Return the page, in ASCII; ``data`` is JSON data, as `plain` gives it."""
    style = _asset("page.css")
    script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return Template(_asset("page.html")).substitute(
        title=escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'",
        style=style,
        script=script,
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPED),
    )


def plain(value: Any) -> Any:
    """Convert data to JSON's types; infinite and NaN numbers, and whatever else JSON lacks, become text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(name): plain(each) for name, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case _:
            return str(value)


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
