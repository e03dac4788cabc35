"""The summary of a checkpoint in words, as labelled lines: the first screen of `inspect` and of a report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..wording import counted, size
from .inspection import Inspection

_MOST_LINES = 8
"""The most lines of one kind."""

_FIRST = ("algorithm", "lr", "weight_decay", "wd", "momentum", "mu", "betas", "beta1", "beta2", "adamw_betas", "step",
          "convention", "nesterov")  # fmt: skip
"""Options that come first, as programs call them; what they are called does not matter otherwise."""

_MOST_OPTIONS = 8
"""The most options of a group; `--items` and JSON have all."""

_SAID_ELSEWHERE = frozenset({"step", "resharded"})
"""Entries of provenance with lines of their own."""


def overview(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """The summary of a checkpoint as labelled lines, with what looks sick; the tables are not included."""
    yield from description(inspection)
    yield from _some("look at", [symptom["message"] for symptom in inspection.symptoms])


def description(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """The same without what looks sick; an empty label goes on with the one above."""
    yield "checkpoint", inspection.checkpoint
    yield "kind", inspection.kind
    for name, value in inspection.provenance.items():
        if name not in _SAID_ELSEWHERE and value not in ([], {}, None, ""):
            yield name, value if isinstance(value, str) else json.dumps(value)
    for step in inspection.provenance.get("resharded") or ():
        yield "resharded", _resharded(step)
    yield from _steps(inspection)
    yield from _optimizer(inspection)
    yield "tensors", f"{inspection.tensors} in {counted(inspection.chunks, 'chunk')}, {size(inspection.bytes)}"
    if inspection.empty_chunks:
        yield "", f"and {counted(inspection.empty_chunks, 'chunk')} without elements"
    yield "other items", str(inspection.other_items)
    yield "files", str(inspection.files)
    dialect = inspection.dialect
    yield "keys", f"{dialect['name']} ({dialect['who']})" if dialect["name"] else "unknown"
    for reason in dialect["reasons"]:
        yield "", reason
    layouts = [f"{counted(layout['tensors'], 'tensor')} {_how(layout)}" for layout in inspection.layouts]
    yield from _some("layout", layouts)
    yield "cut into", "; ".join(f"{cut['tensors']}: {cut['cut']}" for cut in inspection.cuts[:_MOST_LINES])
    yield from _balance(inspection.balance)
    yield "checksums", _checks(inspection.checks)


def _steps(inspection: Inspection) -> Iterator[tuple[str, str]]:
    steps = inspection.steps
    if inspection.step is not None:
        yield "step", str(inspection.step)
    if steps["least"] is not None and (steps["least"], steps["most"]) != (inspection.step, inspection.step):
        which = "all" if steps["read"] == steps["counters"] else f"{steps['read']}"
        span = steps["most"] if steps["least"] == steps["most"] else f"{steps['least']} to {steps['most']}"
        yield "counters", f"{span}, by {which} of {counted(steps['counters'], 'step counter')}"


def _optimizer(inspection: Inspection) -> Iterator[tuple[str, str]]:
    methods = [
        f"{method['method']}: {counted(method['parameters'], 'parameter')} ({_matrices(method['matrices'])})"
        for method in inspection.optimizer
    ]
    yield "optimizer", "; ".join(methods) if methods else "no state"
    for said in inspection.conventions:
        yield "momentum", f"{said['convention'] or 'unknown'} in {counted(said['tensors'], 'tensor')} ({said['by']})"
    yield from _some("group", [_group(group) for group in inspection.groups])
    if inspection.unread_groups:
        yield "", f"and {inspection.unread_groups} groups of one parameter, which were not read"
    if inspection.optimizer:
        for note in inspection.notes:
            yield "", note


def _matrices(count: int) -> str:
    return f"{count or 'no'} {'matrix' if count == 1 else 'matrices'}"


def _group(group: Mapping[str, Any]) -> str:
    numbers = f"{', '.join(map(str, group['groups']))}: " if group["groups"] else ""
    given = {name: value for name, value in group["options"].items() if value is not None}
    shown = sorted(given, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))[:_MOST_OPTIONS]
    options = ", ".join(f"{name} {_value(given[name])}" for name in shown) or "without options"
    more = f" and {len(given) - len(shown)} more" if len(given) > len(shown) else ""
    return f"{numbers}{counted(group['parameters'], 'parameter')}, {options}{more}"


def _value(value: object) -> str:
    match value:
        case [*parts]:
            return "/".join(map(_value, parts))
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)


def _balance(balance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    held, work = balance["bytes"], balance["newton_schulz"]
    if held:
        most = f", at most {size(held['most'])} (rank {held['busiest_rank']}): {held['most_to_mean']:.3g} of the mean"
        mean = f"{size(round(held['mean']))} a rank{most if held['ranks'] > 1 else ''}"
        yield "balance", f"{counted(held['ranks'], 'rank')}, {mean}"
    if work and work["ranks"] > 1:
        busiest = f"rank {work['busiest_rank']} has {work['most_to_mean']:.3g} of the mean"
        yield "", f"Newton-Schulz work of the matrices that ranks hold: {busiest}"


def _checks(checks: Mapping[str, int]) -> str:
    words = {"digest": "digests", "crc32": "CRC-32s", "in_the_item": "in the items, if any"}
    found = ", ".join(f"{checks[kind]} {word}" for kind, word in words.items() if checks[kind])
    return f"{found or 'none'}; when they were last compared is not recorded: `muonckpt verify` does it"


def _resharded(step: Mapping[str, Any]) -> str:
    mesh = step.get("mesh")
    on = f" on {','.join(f'{axis}={size}' for axis, size in mesh.items())}" if isinstance(mesh, dict) else ""
    said = {"program", "source", "mesh", "layout"}
    more = "".join(f", {name} {json.dumps(value)}" for name, value in step.items() if name not in said and value)
    return f"from {step.get('source')} to {step.get('layout')}{on}{more}, by {step.get('program')}"


def _some(label: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines[:_MOST_LINES]:
        yield label, line
    if len(lines) > _MOST_LINES:
        yield "", f"and {len(lines) - _MOST_LINES} more (--json)"


def _how(layout: Mapping[str, Any]) -> str:
    match layout:
        case {"algorithm": "mesh", "mesh": [*sizes], "placements": [*placements]}:
            return f"on mesh {_mesh(sizes, layout)}: {', '.join(map(str, placements))}"
        case {"algorithm": algorithm, "version": version, "mesh": [*sizes], "cuts": [*cuts]}:
            cut = "".join(f", {axis} cuts dim {dim}" for axis, dim in cuts)
            return f"by {algorithm} v{version} on mesh {_mesh(sizes, layout)}{cut}"
        case _:
            return json.dumps({name: value for name, value in layout.items() if name != "tensors"})


def _mesh(sizes: Sequence[object], layout: Mapping[str, Any]) -> str:
    axes = layout.get("axes") or [None] * len(sizes)
    named = (str(size) if axis is None else f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
    return " x ".join(named)
