"""The hypotheses of what a step did, cuts of a parameter into matrices and recipes for their directions; and the search
among them for one parameter, which stops when it has spent its FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...algebra.box import Index
from ...names.coefficients import COEFFICIENTS, coefficient_set
from .updates import ELEMENTWISE, Cut, Evidence, Explanation, UpdateRule, explain, rounding_bounds

_BEST_CUTS = 3
"""Cuts into matrices, the nearest with common coefficients, with which all rules are tried."""

_COMMON_SETS = ("keller", "quintic", "polar_express")
"""Coefficients with which all cuts are tried."""

_PLAINLY = 2.0
"""A hypothesis that leaves so many times what the best one leaves does not do as well."""

_MOMENTUM_DISTANCES = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Distances from the best coefficient of momentum at which others are tried."""


@dataclass(frozen=True)
class SearchResult:
    """The hypotheses that explain a step.

    Attributes:
        best: of all hypotheses, also if it does not explain the step.
        bound: the residual that rounding may leave; ``tie_bound``: up to which others do as well as the best.
        rival: the residual of the nearest other hypothesis; None if none was tried.
        momenta: the least and the largest coefficient of momentum that do as well; None without Nesterov.
    """

    explanations: Sequence[Explanation]
    best: Explanation
    bound: float
    tie_bound: float
    rival: float | None
    momenta: tuple[float, float] | None = None


def least_of(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Return where a function with one valley is least between two ends, by golden section, to within a width."""
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > width:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


class Search:
    """The hypotheses that were tried for a parameter.

    Args:
        options: recorded, in common words.
        sibling: the explanation of another layer's parameter of the same kind; None for the first of them.
        flops: that may be spent.
    """

    def __init__(
        self, evidence: Evidence, options: Mapping[str, Any], sibling: Explanation | None, flops: float
    ) -> None:
        self.evidence = evidence
        self.options = options
        self.sibling = sibling
        self.flops = flops
        self.flops_spent = 0.0
        self.explanations: list[Explanation] = []

    def run(self, method: str) -> SearchResult | None:
        """Try hypotheses of a method; return None if there are not FLOPs for any."""
        shape = self.evidence.shape
        if method in ELEMENTWISE:
            betas = float(self.options.get("beta1", 0)), float(self.options.get("beta2", 0))
            return self._sort_explanations(
                [self._try_hypothesis(Cut(), UpdateRule(method, nesterov=False, betas=betas))]
            )
        cost = 30 * math.prod(shape) * min(shape[0], shape[-1])
        if 4 * cost > self.flops:
            return None
        # 1. A hypothesis that explained a sibling is taken if it explains this one, too.
        if self.sibling is not None:
            result = self._sort_explanations([self._try_hypothesis(self.sibling.cut, self.sibling.rule)])
            if result.explanations:
                return result
        # 2. All cuts with common coefficients; then all rules with the nearest cuts.
        cuts, rules = cuts_to_try(self.options, shape), rules_to_try(self.options, method)
        common_rules = [rule for rule in rules if rule.name in _COMMON_SETS and rule.steps == 5 and rule.nesterov]
        budget = max(int(self.flops / cost / 8), 2)
        for cut in cuts[:budget]:
            for rule in [rules[0], *common_rules][: max(budget // len(cuts), 1)]:
                self._try_hypothesis(cut, rule)
        for cut in self._cuts_by_residual():
            for rule in rules[:budget]:
                self._try_hypothesis(cut, rule)
        # 3. The coefficient of momentum; then rules and cuts once more with it.
        if self._best_so_far().rule.nesterov:
            best = self._best_so_far()
            residual = lambda momentum: self._try_hypothesis(best.cut, replace(best.rule, momentum=momentum)).residual  # noqa: E731
            momentum = least_of(residual, 0.0, 0.9999, 1e-4)
            for rule in rules[:budget]:
                self._try_hypothesis(self._best_so_far().cut, replace(rule, momentum=momentum))
        for cut in cuts[:budget]:
            self._try_hypothesis(cut, self._best_so_far().rule)
        # 4. Among momenta that cannot be distinguished the recorded one counts.
        result = self._sort_explanations(self.explanations)
        if not (result.best.rule.nesterov and result.explanations):
            return result
        lowest, highest = self._momentum_range(result)
        best = result.best
        if lowest <= rules[0].momentum <= highest:
            best = self._try_hypothesis(best.cut, replace(best.rule, momentum=rules[0].momentum))
        return replace(result, best=best, momenta=(lowest, highest))

    def _try_hypothesis(self, cut: Cut, rule: UpdateRule) -> Explanation:
        for explanation in self.explanations:
            if explanation.rule == rule and explanation.cut.is_of(cut):
                return explanation
        explanation, _ = explain(self.evidence, cut, rule)
        if rule.coefficients is not None:
            for matrix in cut.matrices(self.evidence.before):
                self.flops_spent += 6 * rule.steps * matrix.size * min(matrix.shape[-2:])
        self.explanations.append(explanation)
        return explanation

    def _best_so_far(self) -> Explanation:
        return min(self.explanations, key=lambda explanation: explanation.residual)

    def _cuts_by_residual(self) -> list[Cut]:
        cuts: list[Cut] = []
        for explanation in sorted(self.explanations, key=lambda explanation: explanation.residual):
            if not any(explanation.cut.is_of(cut) for cut in cuts):
                cuts.append(explanation.cut)
        return cuts[:_BEST_CUTS]

    def _momentum_range(self, result: SearchResult) -> tuple[float, float]:
        """Return the coefficients of momentum around the best one that explain the step as well."""
        best = result.best
        ends = [best.rule.momentum, best.rule.momentum]
        for side, sign in enumerate((-1, 1)):
            for distance in _MOMENTUM_DISTANCES:
                momentum = best.rule.momentum + sign * distance
                if not 0 <= momentum < 1:
                    break
                explanation, _ = explain(self.evidence, best.cut, replace(best.rule, momentum=momentum))
                if not explanation.is_within(result.tie_bound):
                    break
                ends[side] = momentum
        return ends[0], ends[1]

    def _sort_explanations(self, explanations: Sequence[Explanation]) -> SearchResult:
        """Sort hypotheses into those that explain the step and others."""
        best = min(explanations, key=lambda explanation: explanation.residual)
        fine_bound, coarse_bound = rounding_bounds(self.evidence, best)
        if self.sibling is not None:  # layers of one kind are rounded alike
            coarse_bound = min(coarse_bound, max(fine_bound, _PLAINLY * self.sibling.residual))
        # Where float32 explains the step, rounding to 16 bits is no excuse for another hypothesis; nor is it where
        # another one leaves plainly less, as rounding adds to what a wrong hypothesis leaves.
        bound = fine_bound if best.is_within(fine_bound) else coarse_bound
        tie_bound = min(bound, max(_PLAINLY * best.residual, fine_bound))
        ties = [explanation for explanation in explanations if explanation.is_within(tie_bound)]
        tied_rules = [replace(explanation.rule, momentum=0) for explanation in ties]
        rivals = []
        for explanation in explanations:
            if replace(explanation.rule, momentum=0) not in tied_rules or not explanation.cut.is_of(best.cut):
                rivals.append(explanation.residual)
        return SearchResult(
            explanations=ties if best.is_within(bound) else [],
            best=best,
            bound=bound,
            tie_bound=tie_bound,
            rival=min(rivals, default=None),
        )


# The hypotheses.

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
    return Cut(flatten, pieces, columns, interleaved=int(options.get("interleaved") or 1), causes=("as recorded",))


def cuts_to_try(options: Mapping[str, Any], shape: Index) -> list[Cut]:
    """Return the cuts to try for a parameter of this shape, the recorded one first, each once with all its causes."""
    recorded, cuts = recorded_cut(options, shape), list[Cut]()
    if sum(recorded.pieces or ()) * recorded.interleaved in (0, shape[-2]):
        cuts.append(recorded)
    cuts.append(Cut(causes=("whole",)))
    if len(shape) > 2:
        cuts.append(Cut(flatten=True, causes=("flattened",)))
    for flatten in (False, True) if len(shape) > 2 else (False,):
        rows, columns = (shape[0], -1) if flatten else shape[-2:]
        cuts += [replace(cut, flatten=flatten) for cut in (*_row_cuts(rows, columns), *_column_cuts(columns))]
    causes: dict[Cut, tuple[str, ...]] = {}
    for cut in cuts:
        key = replace(cut, causes=())
        causes[key] = (*causes.get(key, ()), *cut.causes)
    return [replace(cut, causes=tuple(dict.fromkeys(reasons))) for cut, reasons in causes.items()]


def _row_cuts(rows: int, columns: int) -> Iterator[Cut]:
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


def _column_cuts(columns: int) -> Iterator[Cut]:
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
    if "ns_coefficients" in options:
        steps = int(options.get("ns_steps") or 5)
        recorded = options["ns_coefficients"]
        name = recorded if isinstance(recorded, str) else "recorded"
        sets.append((name, coefficient_set(recorded), steps))
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
    for method in ("the sign of the momentum", "the momentum itself"):
        rules += [replace(base, method=method, nesterov=nesterov) for nesterov in flags]
    return rules
