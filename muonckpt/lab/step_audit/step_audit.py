"""The public question: from two consecutive checkpoints of any program, what did the step between them really do?

The weights and the momentum before and after give back the update and what it was made of.  Each hypothesis makes an
update of that, and explains the step if nothing is left but rounding, in every row and column.  A verdict is sure only
if hypotheses that explain the step agree; else it says between which it cannot tell, or that none does.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from ...algebra.box import Box, Index
from ...converters.compare.elements import StoredSide, as_float64, has_numbers
from ...converters.engine.outputs import OutputTensor
from ...converters.look.contents import FirstLook, first_look
from ...converters.translate.groups import common_options
from ...names.errors import TargetError
from ...names.wording import Finding, listed
from ...programs.codings import FACTORS
from ...programs.model_view import StoredParameter
from ...record.record import StateRecord, match_keys
from ...store.io.location import Remote
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.payloads import Progress
from ...store.verify.diagnosis import open_whole
from .search import Search, SearchResult, least_of, recorded_cut, rules_to_try
from .updates import (
    ELEMENTWISE,
    METHODS,
    ROW_SLOTS,
    Cut,
    Evidence,
    Explanation,
    Matrix,
    UpdateRule,
    explain,
)

MAX_FLOPS = 4e12
"""The FLOPs that hypotheses may take in all by default: about a minute on a few cores."""

_WEIGHT = ""
"""The key of the weight among arrays by slot."""

_BYTES_OF_ELEMENT = 4
"""Bytes of an element in what progress counts."""

_WEAK = 0.15
"""A bound above which rounding is no evidence: other coefficients come as near."""

EXPLAINED, AMBIGUOUS, UNEXPLAINED, UNCHANGED, UNKNOWN = (
    "explained", "cannot tell", "unexplained", "not updated", "not asked"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParameterVerdict:
    """The effect of the step on a parameter.

    Attributes:
        status: `EXPLAINED` by one hypothesis, `AMBIGUOUS`: several explain it, or rounding hides it; `UNEXPLAINED`,
            `UNCHANGED` to the bit, `UNKNOWN`: not asked.
        reason: why it is not explained, or between what the files cannot tell.
        cuts: into matrices, that explain the step; ``rules`` of its directions likewise.
        momenta: the least and the largest coefficient of momentum that explain it; None without Nesterov.
        rates: the learning rate times the scale, by the shape of matrices.
        scales: the rules of scale that fit the recorded learning rate.
        decay: the learning rate times the weight decay; None if rounding hides it.
        residual: of the best hypothesis, as a part of the update; ``bound``: what rounding may leave; ``rival``: of the
            nearest hypothesis that does not explain it, None if none was tried.
        contradictions: of recorded options, each a sentence.
    """

    name: str
    shape: Index
    status: str
    reason: str = ""
    cuts: tuple[Cut, ...] = ()
    rules: tuple[UpdateRule, ...] = ()
    momenta: tuple[float, float] | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    scales: tuple[str, ...] = ()
    decay: float | None = None
    residual: float | None = None
    bound: float | None = None
    rival: float | None = None
    contradictions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepAudit:
    """The effect of a step, by parameter.

    Attributes:
        steps: before and after; None where unknown.
        program: that wrote both.
        findings: what contradicts the recorded options, the other layers, or any method that is known.
    """

    before: str
    after: str
    steps: tuple[int | float | None, int | float | None]
    program: str
    verdicts: tuple[ParameterVerdict, ...]
    findings: tuple[Finding, ...]


def audit_step(
    before: str | os.PathLike[str] | Remote,
    after: str | os.PathLike[str] | Remote,
    *,
    select: Sequence[str] = (),
    flops: float = MAX_FLOPS,
    progress: Progress = lambda count, total: None,
) -> StepAudit:
    """Say what the step between two consecutive checkpoints did to each parameter, and what contradicts that.

    Args:
        before, after: checkpoints of one run and of any program, one step apart.
        select: shell patterns of parameters' names or keys; others are not asked about.
        flops: that hypotheses may take; one parameter of each kind comes first, and those left over are listed.
        progress: called with the bytes of parameters done since the last call, in float32, and with the total.

    Raises:
        SourceError: a checkpoint cannot be read, or is damaged.
        TargetError: they are not one step apart, have no parameter in common, or a pattern matches nothing.
    """
    with ExitStack() as stack:
        sides = [stack.enter_context(open_whole(path)) for path in (before, after)]
        looks = [first_look(side) for side in sides]
        before_step, after_step = (look.step for look in looks)
        if before_step is not None and after_step is not None and after_step != before_step + 1:
            raise TargetError(
                f"{sides[0].path} is of step {before_step} and {sides[1].path} of step {after_step}: expected two "
                "consecutive steps, the earlier first, for the audit needs the update of one step. Save two in a row, "
                "and audit these"
            )
        first, second = (look.view.parameters for look in looks)
        names = [name for name in second if name in first and first[name].shape == second[name].shape]
        keys = {name: (name, parameter.weight.key) for name, parameter in second.items() if parameter.weight}
        if not names:
            raise TargetError(f"{before} and {after} have no parameter of one name and shape in common")
        chosen = match_keys(select, names, keys, "parameter")
        audit = _Audit(sides, looks, flops)
        verdicts = audit.verdicts([name for name in names if name in chosen], progress)
        program = looks[1].view.dialect.name if looks[1].view.dialect else "unknown"
        findings = tuple(_find_findings(verdicts, looks[1]))
        return StepAudit(
            before=str(before),
            after=str(after),
            steps=(looks[0].step, looks[1].step),
            program=program,
            verdicts=tuple(verdicts),
            findings=findings,
        )


class _Audit:
    """Asks hypotheses about the parameters of both checkpoints, while there are FLOPs."""

    def __init__(self, sides: Sequence[OpenCheckpoint], looks: Sequence[FirstLook], flops: float) -> None:
        self.sides = sides
        self.looks = looks
        self.flops = flops
        self.explanations: dict[tuple[Any, ...], Explanation] = {}

    def verdicts(self, names: Sequence[str], progress: Progress) -> list[ParameterVerdict]:
        """Return the verdict on each parameter."""
        parameters = self.looks[1].view.parameters
        kinds: defaultdict[Any, list[str]] = defaultdict(list)
        for name in names:
            kinds[_kind(parameters[name])].append(name)
        # One parameter of each kind is searched, the smallest kinds first; then its siblings begin with what it did.
        members = sorted(kinds.values(), key=lambda siblings: math.prod(parameters[siblings[0]].shape))
        order = [(siblings[0], self.flops / len(members)) for siblings in members]
        for siblings in members:
            order += [(name, self.flops) for name in siblings[1:]]
        total = sum(math.prod(parameters[name].shape) for name in names) * _BYTES_OF_ELEMENT
        verdicts = {}
        for name, flops in order:
            verdicts[name] = self._judge(parameters[name], min(flops, self.flops))
            progress(math.prod(parameters[name].shape) * _BYTES_OF_ELEMENT, total)
        return [verdicts[name] for name in names]

    def _judge(self, parameter: StoredParameter, flops: float) -> ParameterVerdict:
        """Read a parameter of both checkpoints, search what explains its step, and return the verdict."""
        evidence = self._read_evidence(parameter.name)
        if isinstance(evidence, str):
            return ParameterVerdict(parameter.name, parameter.shape, status=UNKNOWN, reason=evidence)
        if not evidence.change.any():
            is_same = np.array_equal(evidence.momentum_before, evidence.source(UpdateRule(nesterov=False)))
            reason = "neither the weight nor its momentum" if is_same else "its momentum changed, and the weight not"
            return ParameterVerdict(parameter.name, parameter.shape, status=UNCHANGED, reason=reason)
        options, sibling = self._options(parameter), self.explanations.get(_kind(parameter))
        search = Search(evidence, options, sibling, flops)
        result = search.run(parameter.method.name if parameter.method else "")
        self.flops -= search.flops_spent
        if result is None:
            reason = f"its hypotheses would take more than the {flops:.1e} FLOPs that flops= has for it"
            return ParameterVerdict(parameter.name, parameter.shape, status=UNKNOWN, reason=reason)
        if result.explanations:
            self.explanations.setdefault(_kind(parameter), result.best)
        return _judge_result(evidence, options, result, sibling)

    def _options(self, parameter: StoredParameter) -> Mapping[str, Any]:
        """Return the recorded options in common words, those before the step where both have them."""
        dialect, method = self.looks[1].view.dialect, parameter.method
        if dialect is None or method is None:
            return {}
        options_before = self.looks[0].view.parameters[parameter.name].options
        return common_options({**parameter.options, **options_before}, dialect, method, parameter.shape).common

    def _read_evidence(self, name: str) -> Evidence | str:
        """Read a parameter of both sides, or say why it cannot be asked about."""
        arrays: list[dict[str, Matrix]] = []
        dtypes: list[tuple[str, str]] = []
        for side, look in zip(self.sides, self.looks, strict=True):
            # Stored float32 masters are used as the weight.
            parameter = look.view.parameters[name]
            method = parameter.method.name if parameter.method else "no method that is known"
            slots = parameter.method.slots if parameter.method else {}
            records = {common: parameter.state[slot] for common, slot in slots.items() if slot in parameter.state}
            weight = records.pop("master", parameter.weight)
            if method not in METHODS or (method == "normuon" and not records.keys() & ROW_SLOTS):
                return f"{method}: its update cannot be made again of its state"
            if weight is None:
                return "its weight is not in the checkpoints"
            momentum = records["momentum" if "momentum" in records else "first"]
            if codes := [record.key for record in (weight, *records.values()) if not has_numbers(record.dtype)]:
                return f"{codes[0]} is stored in codes, and not as numbers"
            if momentum.shape != weight.shape:
                return f"its momentum has the shape {momentum.shape}, and not that of the weight"
            arrays.append(
                {slot: _read_as_float64(side, record) for slot, record in {**records, _WEIGHT: weight}.items()}
            )
            dtypes.append((weight.dtype, momentum.dtype))
        if not all(np.isfinite(array).all() for array in chain.from_iterable(side.values() for side in arrays)):
            return "an element is infinite or NaN"
        # A step updates the momentum first, so the update follows from the state after it.
        before, after = arrays
        slot = "momentum" if "momentum" in before else "first"
        weight_after = after.pop(_WEIGHT)
        return Evidence(
            name,
            before=before[_WEIGHT],
            after=weight_after,
            momentum_before=before[slot],
            state=after,
            dtypes=dtypes[1],
        )


def _kind(parameter: StoredParameter) -> tuple[Any, ...]:
    """Return what parameters that a step treats alike have in common: name and shape without layers, and method."""
    return *parameter.layer_pattern, parameter.method.name if parameter.method else None


def _read_as_float64(side: OpenCheckpoint, record: StateRecord) -> Matrix:
    [located] = side.locate([record])
    stored = StoredSide(OutputTensor.copy_of(located), side.payloads)
    stored.check()
    return as_float64(stored.words(Box.of(located.shape)), located.dtype).reshape(located.shape)


def _judge_result(
    evidence: Evidence, options: Mapping[str, Any], result: SearchResult, sibling: Explanation | None
) -> ParameterVerdict:
    """Return the verdict on a parameter, from the hypotheses that explain its step."""
    # Hypotheses that differ in causes or in the coefficient of momentum are one; the recorded one comes first.
    recorded = recorded_cut(options, evidence.shape)
    cuts: list[Cut] = []
    rules: list[UpdateRule] = []
    for explanation in result.explanations:
        if not any(explanation.cut.is_of(cut) for cut in cuts):
            cuts.append(explanation.cut)
        if not any(explanation.rule.is_of(rule) for rule in rules):
            rules.append(explanation.rule)
    cuts.sort(key=lambda cut: not cut.is_of(recorded))
    rules.sort(key=lambda rule: not rule.is_of(rules_to_try(options, rule.method)[0]))
    best = result.best
    verdict = ParameterVerdict(
        evidence.name,
        evidence.shape,
        EXPLAINED,
        cuts=tuple(cuts),
        rules=tuple(rules),
        momenta=result.momenta,
        rates={"x".join(map(str, shape)): rate for shape, rate in best.rates.items()},
        scales=_find_scales(evidence, best, options, result.bound),
        decay=best.decay if abs(best.decay) > best.decay_error else None,
        residual=best.residual,
        bound=result.bound,
        rival=result.rival,
    )
    if not rules:
        return replace(verdict, status=UNEXPLAINED, reason=_describe_unexplained(evidence, result, sibling))
    if result.bound > _WEAK:
        reason = f"rounding alone may leave {result.bound:.2f} of the update, as the checkpoints store it"
        return replace(verdict, status=AMBIGUOUS, reason=reason)
    if len(cuts) > 1 or len(rules) > 1:
        words = [cut_words(cut) for cut in cuts] if len(cuts) > 1 else [rule_words(rule) for rule in rules]
        if cuts[0].is_of(recorded) and rules[0].is_of(rules_to_try(options, rules[0].method)[0]):
            verdict = replace(verdict, reason=f"so would: {listed(words[1:], 4, '; ')}")
        else:
            reason = f"these give the same update: {listed(words, 4, '; ')}"
            verdict = replace(verdict, status=AMBIGUOUS, reason=reason)
    return replace(verdict, contradictions=tuple(_contradictions(evidence, options, verdict, best)))


def _describe_unexplained(evidence: Evidence, result: SearchResult, sibling: Explanation | None) -> str:
    """Say where the step departs from what its siblings did, or from the nearest hypothesis."""
    best, bound = result.best, result.bound
    nearest = f"nearest is {rule_words(best.rule)} of {cut_words(best.cut)}, which leaves {best.residual:.2g}"
    if sibling is None:
        return f"no hypothesis explains it; {nearest} of the update, and rounding {bound:.1g}"
    # One element of the weight that is off is all that is left; one of the momentum is where most is left.
    likely, remainder = explain(evidence, sibling.cut, sibling.rule)
    squares = remainder**2
    place = np.unravel_index(int(squares.argmax()), evidence.shape)
    if squares[place] > 0.9 * squares.sum():
        element = _index_text(place)
        return f"all but element {element} of the weight is what its siblings' method makes: a flipped bit there?"
    largest = np.unravel_index(int(np.abs(evidence.source(sibling.rule)).argmax()), evidence.shape)
    for suspect in (largest, place):
        if _residual_without(evidence, suspect, sibling) < max(likely.residual / 4, bound):
            return (
                f"with another value for element {_index_text(suspect)} of the momentum, before or after the step, its "
                "siblings' method explains it: a flipped bit there?"
            )
    return f"its siblings' method leaves {likely.residual:.2g} of its update; {nearest} (rounding {bound:.1g})"


def _residual_without(evidence: Evidence, place: tuple[Any, ...], sibling: Explanation) -> float:
    """Return the residual with the best value for one element of the momentum, by golden section."""
    momentum = evidence.state["momentum"].copy()
    momentum[place] = 0
    bound = 6 * float(np.sqrt((momentum**2).mean()))

    def residual(value: float) -> float:
        momentum[place] = value
        before = evidence.momentum_before.copy()
        before[place] = 0
        state = {**evidence.state, "momentum": momentum}
        changed = replace(evidence, momentum_before=before, state=state)
        return explain(changed, sibling.cut, sibling.rule)[0].residual

    return residual(least_of(residual, -bound, bound, 1e-5 * bound))


def _index_text(place: Iterable[Any]) -> str:
    return f"[{', '.join(str(int(index)) for index in place)}]"


def _find_scales(evidence: Evidence, best: Explanation, options: Mapping[str, Any], bound: float) -> tuple[str, ...]:
    """Return the rules by which the rates of all matrices follow from the recorded learning rate."""
    lr = options.get("lr")
    if not isinstance(lr, int | float) or not lr or len(evidence.shape) < 2:
        return ()
    if best.rule.method in ELEMENTWISE:
        return ()
    rules: list[str] = []
    tolerance = max(0.01, min(bound, 0.05))
    whole = (evidence.shape[0], math.prod(evidence.shape[1:])) if best.cut.flatten else evidence.shape[-2:]
    for rule, factor in FACTORS.items():
        for label, transposed in (("", False), (" of the transposed shape", True)):
            for of_whole in (False, True) if set(best.rates) != {tuple(whole)} else (False,):
                words = f"{rule}{label}{' of the whole parameter' if of_whole else ''}"
                if transposed and words.replace(label, "") in rules:
                    continue
                for shape, rate in best.rates.items():
                    rows, columns = whole if of_whole else shape
                    scale = factor(columns, rows) if transposed else factor(rows, columns)
                    if abs(rate / lr - scale) > tolerance * rate / lr:
                        break
                else:  # all shapes have the rule's factor
                    rules.append(words)
    return tuple(rules)


def _contradictions(
    evidence: Evidence, options: Mapping[str, Any], verdict: ParameterVerdict, best: Explanation
) -> Iterator[str]:
    """Yield what recorded options say and the step did not do."""
    if verdict.cuts and len(evidence.shape) >= 2 and best.rule.method in ("muon", "normuon"):
        recorded = recorded_cut(options, evidence.shape)
        if not any(cut.is_of(recorded) for cut in verdict.cuts):
            said = f"recorded: {cut_words(recorded)}" if "pieces" in options else "no option says so"
            yield f"the step orthogonalised {cut_words(verdict.cuts[0])} ({said})"
    methods = {way.method for way in verdict.rules}
    if not methods & {"muon", "normuon", *ELEMENTWISE} and len(evidence.shape) >= 2 and "momentum" in evidence.state:
        yield f"nothing was orthogonalised: the update is {' or '.join(sorted(methods))}"
        return
    if "nesterov" in options and options["nesterov"] not in {way.nesterov for way in verdict.rules}:
        yield f"the step was {'without' if options['nesterov'] else 'with'} Nesterov; recorded: {options['nesterov']}"
    mu = options.get("momentum")
    if isinstance(mu, int | float) and verdict.momenta and not verdict.momenta[0] <= mu <= verdict.momenta[1]:
        ends = dict.fromkeys(f"{end:.4g}" for end in verdict.momenta)
        yield f"momentum was {' to '.join(ends)}; recorded: {mu:g}"
    recorded_scale, lr = options.get("adjust_lr_fn"), options.get("lr")
    if recorded_scale in FACTORS and not any(rule.split(" of ")[0] == recorded_scale for rule in verdict.scales):
        factors = ", ".join(f"{rate / lr:.4g} for {shape}" for shape, rate in verdict.rates.items()) if lr else ""
        said = f"as {listed(verdict.scales)}" if verdict.scales else "as no known rule"
        yield f"the rate was scaled by {factors}, {said}; recorded: {recorded_scale}"
    decay = options.get("weight_decay")
    if isinstance(decay, int | float) and lr and abs(best.decay - lr * decay) > best.decay_error + 0.02 * lr * decay:
        yield f"weight decay was {best.decay / lr:.3g}; recorded: {decay:g}"
    # A recorded set may do the same as the one that fits, so bits of coefficients are not compared.
    recorded_rule = rules_to_try(options, best.rule.method)[0]
    if "ns_coefficients" in options and not any(
        (rule.coefficients, rule.steps) == (recorded_rule.coefficients, recorded_rule.steps) for rule in verdict.rules
    ):
        said = f"{recorded_rule.steps} steps of {recorded_rule.name}"
        yield f"Newton-Schulz took {verdict.rules[0].steps} steps of {verdict.rules[0].name}; recorded: {said}"


def cut_words(cut: Cut) -> str:
    """Say how a parameter was cut into matrices."""
    causes = tuple(cause for cause in cut.causes if cause not in ("as recorded", "whole", "flattened"))
    whole = "the whole flattened" if cut.flatten else "the whole matrix"
    if not cut.pieces and not cut.columns:
        return whole
    parts = []
    for sizes, noun in ((cut.pieces, "rows"), (cut.columns, "columns")):
        if sizes:
            equal = len(set(sizes)) == 1
            parts.append(f"{len(sizes)} parts of {sizes[0]} {noun}" if equal else f"parts of {listed(sizes, 4)} {noun}")
    text = " by ".join(parts) + (f" in each of {cut.interleaved} blocks" if cut.interleaved > 1 else "")
    return f"{text} each by itself" + (f" ({', or '.join(causes)})" if causes else "")


def rule_words(rule: UpdateRule) -> str:
    """Say how a direction was made of the momentum."""
    nesterov = f"Nesterov with momentum {rule.momentum:.4g}" if rule.nesterov else "no Nesterov"
    if rule.coefficients is None:
        return rule.method if rule.method in ELEMENTWISE else f"{rule.method}, {nesterov}"
    return f"{rule.method}, {rule.steps} steps of {rule.name}, {nesterov}"


def _find_findings(verdicts: Sequence[ParameterVerdict], look: FirstLook) -> Iterator[Finding]:
    """Yield what contradicts options, siblings, or every hypothesis; layers of one kind are one finding."""
    parameters = look.view.parameters
    groups: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    updated = {parameters[v.name].layer_pattern for v in verdicts if v.status not in (UNCHANGED, UNKNOWN)}
    for verdict in verdicts:
        pattern = parameters[verdict.name].layer_pattern
        for sentence in verdict.contradictions:
            groups["contradiction", pattern[0], sentence].append(verdict.name)
        if verdict.status == UNEXPLAINED:
            groups["unexplained", verdict.name, verdict.reason].append(verdict.name)
        if verdict.status == UNCHANGED and pattern in updated:
            groups["left out", pattern[0], f"the step left it out, and not its siblings: {verdict.reason}"].append(
                verdict.name
            )
    for (kind, _, sentence), names in groups.items():
        yield Finding(kind, f"{listed(names, 2)}: {sentence}", tuple(names))


def verdict_row(verdict: ParameterVerdict) -> tuple[str, str, str, str, str]:
    """Return a verdict as cells of a table: the cut, the rule, the scale, the remainder, and the status."""
    cuts = " or ".join(dict.fromkeys(cut_words(cut).partition(" each")[0] for cut in verdict.cuts))
    rules = " or ".join(dict.fromkeys(f"{rule.method} {rule.name}".strip() for rule in verdict.rules))
    # A tenth of a decade, so that layers which do the same are one row.
    residual = "-" if verdict.residual is None else f"<{10 ** math.ceil(math.log10(verdict.residual or 1e-12)):.0e}"
    reason = f": {verdict.reason}" if verdict.status in (UNCHANGED, UNKNOWN) else ""
    scales = [scale for scale in verdict.scales if " of " not in scale] or verdict.scales
    return cuts or "-", rules or "-", " or ".join(scales) or "-", residual, f"{verdict.status}{reason}"
