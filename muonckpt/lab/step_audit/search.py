"""The search among hypotheses for the step of one parameter, which stops when it has spent its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .hypotheses import cuts_to_try, rules_to_try
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
            return self._result([self._try(Cut(), UpdateRule(method, nesterov=False, betas=betas))])
        cost = 30 * math.prod(shape) * min(shape[0], shape[-1])
        if 4 * cost > self.flops:
            return None
        # 1. What explained a sibling is believed if it explains this one, too.
        if self.sibling is not None:
            result = self._result([self._try(self.sibling.cut, self.sibling.rule)])
            if result.explanations:
                return result
        # 2. All cuts with common coefficients; then all rules with the nearest cuts.
        cuts, rules = cuts_to_try(self.options, shape), rules_to_try(self.options, method)
        common_rules = [rule for rule in rules if rule.name in _COMMON_SETS and rule.steps == 5 and rule.nesterov]
        budget = max(int(self.flops / cost / 8), 2)
        for cut in cuts[:budget]:
            for rule in [rules[0], *common_rules][: max(budget // len(cuts), 1)]:
                self._try(cut, rule)
        for cut in self._nearest_cuts():
            for rule in rules[:budget]:
                self._try(cut, rule)
        # 3. The coefficient of momentum; then rules and cuts once more with it.
        if self._best().rule.nesterov:
            momentum = least_of(self._residual_of_momentum(self._best()), 0.0, 0.9999, 1e-4)
            for rule in rules[:budget]:
                self._try(self._best().cut, replace(rule, momentum=momentum))
        for cut in cuts[:budget]:
            self._try(cut, self._best().rule)
        # 4. Of momenta that cannot be told apart the recorded one counts.
        result = self._result(self.explanations)
        if not (result.best.rule.nesterov and result.explanations):
            return result
        lowest, highest = self._momentum_range(result)
        best = result.best
        if lowest <= rules[0].momentum <= highest:
            best = self._try(best.cut, replace(best.rule, momentum=rules[0].momentum))
        return replace(result, best=best, momenta=(lowest, highest))

    def _try(self, cut: Cut, rule: UpdateRule) -> Explanation:
        for explanation in self.explanations:
            if explanation.rule == rule and explanation.cut.is_of(cut):
                return explanation
        explanation = explain(self.evidence, cut, rule)
        if rule.coefficients is not None:
            for matrix in cut.matrices(self.evidence.before):
                self.flops_spent += 6 * rule.steps * matrix.size * min(matrix.shape[-2:])
        self.explanations.append(explanation)
        return explanation

    def _best(self) -> Explanation:
        return min(self.explanations, key=lambda explanation: explanation.residual)

    def _nearest_cuts(self) -> list[Cut]:
        cuts: list[Cut] = []
        for explanation in sorted(self.explanations, key=lambda explanation: explanation.residual):
            if not any(explanation.cut.is_of(cut) for cut in cuts):
                cuts.append(explanation.cut)
        return cuts[:_BEST_CUTS]

    def _residual_of_momentum(self, explanation: Explanation) -> Callable[[float], float]:
        return lambda momentum: self._try(explanation.cut, replace(explanation.rule, momentum=momentum)).residual

    def _momentum_range(self, result: SearchResult) -> tuple[float, float]:
        """Return the coefficients of momentum around the best one that explain the step as well."""
        best = result.best
        ends = [best.rule.momentum, best.rule.momentum]
        for side, sign in enumerate((-1, 1)):
            for distance in _MOMENTUM_DISTANCES:
                momentum = best.rule.momentum + sign * distance
                if not 0 <= momentum < 1:
                    break
                rule = replace(best.rule, momentum=momentum)
                if not explain(self.evidence, best.cut, rule).is_within(result.tie_bound):
                    break
                ends[side] = momentum
        return ends[0], ends[1]

    def _result(self, explanations: Sequence[Explanation]) -> SearchResult:
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
        return SearchResult(ties if best.is_within(bound) else [], best, bound, tie_bound, min(rivals, default=None))
