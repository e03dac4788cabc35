"""The hypotheses of what a step did: cuts of a parameter into matrices, and recipes for their directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...algebra.box import Index
from ...names.coefficients import COEFFICIENTS, coefficient_set
from .updates import Cut, UpdateRule

_MAX_PARTS = 64
"""The most equal parts of rows or columns that are tried: heads, experts or ranks."""

_MIN_ROWS = 2
"""The fewest rows of a part: the direction of a single row is that of the row."""

_QUERY_HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Query heads for each key head that are tried."""

_STEPS = {"deepseek_v4": (10,), "aol": (4, 5)}
"""The steps that a published set is used with, where these are not 5 and 6."""


def recorded_cut(options: Mapping[str, Any], shape: Index) -> Cut:
    """Return the cut that the options of a parameter's group say, in common words."""
    pieces, columns = (tuple(options[word]) if options.get(word) else None for word in ("pieces", "columns"))
    flatten = bool(options.get("flatten")) and len(shape) > 2
    return Cut(flatten, pieces, columns, int(options.get("interleaved") or 1), ("as recorded",))


def cuts_to_try(options: Mapping[str, Any], shape: Index) -> list[Cut]:
    """Return the cuts to try for a parameter of this shape, the recorded one first, each once with all its causes."""
    causes: dict[Cut, tuple[str, ...]] = {}
    for cut in _cuts(options, shape):
        key = replace(cut, causes=())
        causes[key] = (*causes.get(key, ()), *cut.causes)
    return [replace(cut, causes=tuple(dict.fromkeys(reasons))) for cut, reasons in causes.items()]


def _cuts(options: Mapping[str, Any], shape: Index) -> Iterator[Cut]:
    recorded = recorded_cut(options, shape)
    if sum(recorded.pieces or ()) * recorded.interleaved in (0, shape[-2]):
        yield recorded
    yield Cut(causes=("whole",))
    if len(shape) > 2:
        yield Cut(flatten=True, causes=("flattened",))
    for flatten in (False, True) if len(shape) > 2 else (False,):
        rows, columns = (shape[0], -1) if flatten else shape[-2:]
        yield from (replace(cut, flatten=flatten) for cut in _rows(rows, columns))
        yield from (replace(cut, flatten=flatten) for cut in _columns(columns))


def _rows(rows: int, columns: int) -> Iterator[Cut]:
    """Yield cuts of rows: equal parts, those of ranks, and fused query, key and value."""
    for count in range(2, min(_MAX_PARTS, rows // _MIN_ROWS) + 1):
        if rows % count == 0:
            special = {2: ("gate and up",), 3: ("query, key and value",)}.get(count, ())
            causes = (*special, "heads", "experts", f"the rows of {count} ranks")
            yield Cut(pieces=(rows // count,) * count, causes=causes)
        elif count <= 8:
            # As `torch.chunk` cuts: full parts, then a smaller one.
            full = -(-rows // count)
            parts = (full,) * (rows // full) + ((rows % full,) if rows % full else ())
            yield Cut(pieces=parts, causes=(f"the rows of {count} ranks",))
    if 0 < columns < rows and (rows - columns) % 2 == 0:
        half = (rows - columns) // 2
        yield Cut(pieces=(columns, half, half), causes=("query, key and value",))
    for queries in _QUERY_HEADS:
        unit, remainder = divmod(rows, queries + 2)
        if remainder or unit < 1:
            continue
        cause = f"query, key and value with {queries} query heads for each key head"
        yield Cut(pieces=(queries * unit, unit, unit), causes=(cause,))
        for groups in range(2, min(_MAX_PARTS, unit // _MIN_ROWS) + 1):
            if unit % groups == 0:
                head = unit // groups
                pieces = (queries * head, head, head)
                yield Cut(pieces=pieces, interleaved=groups, causes=(f"{cause}, in {groups} query groups",))


def _columns(columns: int) -> Iterator[Cut]:
    for count in range(2, min(_MAX_PARTS, columns // _MIN_ROWS) + 1):
        if columns % count == 0:
            causes = (f"the columns of {count} ranks", "heads")
            yield Cut(columns=(columns // count,) * count, causes=causes)


def rules_to_try(options: Mapping[str, Any], method: str) -> list[UpdateRule]:
    """Return the recipes to try, the recorded one first; the momentum's coefficient is refined later."""
    momentum = options.get("momentum")
    mu = float(momentum) if isinstance(momentum, int | float) else 0.95
    base = UpdateRule(method if method in ("muon", "normuon") else "muon", mu)
    flags = (bool(options["nesterov"]), not options["nesterov"]) if "nesterov" in options else (True, False)
    sets = []
    if "ns" in options:
        steps = int(options.get("ns_steps") or 5)
        name = options["ns"] if isinstance(options["ns"], str) else "recorded"
        sets.append((name, coefficient_set(options["ns"]), steps))
    for name, published in COEFFICIENTS.items():
        sets += [(name, published, steps) for steps in _STEPS.get(name, (5, 6))]
    # A recorded set of numbers may be a published one.
    schedules: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for name, polynomials, steps in sets:
        schedules.setdefault((polynomials.schedule(steps), polynomials.norm_scale), (name, polynomials, steps))
    rules: list[UpdateRule] = []
    for nesterov in flags:
        for name, polynomials, steps in schedules.values():
            rules.append(replace(base, nesterov=nesterov, name=name, coefficients=polynomials, steps=steps))
    # Updates without Newton-Schulz come last.
    for method in ("the sign of the momentum", "the momentum as it is"):
        rules += [replace(base, method=method, nesterov=nesterov) for nesterov in flags]
    return rules
