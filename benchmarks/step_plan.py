"""What a step of Muon costs by plan, at up to 4096 ranks: ours over the lower bounds, beside other projects' formulas.

Parameters are planned as in training, on a fake process group (`plans`); other projects' costs are formulas (`peers`).
Every plan is made in a fresh process, so no cache is warm.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from machine import describe
from models import LARGE, MODELS, Model
from peers import PEERS, Cost, busiest_bound, lower_bound, undivided_bound
from plans import Case, Numbers, fake_world, parameters, plan_of, planning_of

Groups = dict[int, tuple[int, ...]]
"""Sizes of the world, each with the numbers of expert-parallel groups in it."""

ALL: Groups = {8: (1, 8), 64: (8,), 128: (), 512: (8, 64), 4096: (8, 64)}
EXPERTS: Groups = {512: (1, 8, 64), 4096: (8, 64)}
QUICK: Groups = {8: (8,), 512: (64,), 4096: (64,)}


def cases(model: Model, groups: Groups, expert_groups: Groups) -> Iterator[Case]:
    """All weights; of a model with experts, also these alone where ranks are more than experts, and the rest alone."""
    if model.experts.numel:
        yield from (Case(model, ranks, ep) for ranks, sizes in groups.items() for ep in sizes)
        lines_of_experts = {ranks: sizes for ranks, sizes in expert_groups.items() if ranks > model.expert_count}
        yield from (Case(model.experts, ranks, ep) for ranks, sizes in lines_of_experts.items() for ep in sizes)
        model = model.dense
    yield from (Case(model, ranks, 1) for ranks in groups)


@dataclass(frozen=True, slots=True)
class Line:
    """A plan and its bounds."""

    case: Case
    found: Numbers
    bound: Cost
    busiest: float
    undivided: int

    @classmethod
    def of(cls, case: Case, found: Numbers) -> Line:
        setting = case.model.matrices, case.ranks, case.ep
        undivided = undivided_bound(case.model.matrices, case.ranks)
        return cls(case, found, lower_bound(*setting), busiest_bound(*setting), undivided)

    @property
    def sent(self) -> float:
        """Mean bytes over the bound."""
        return over(sum(self.found.sent) / self.case.ranks, self.bound.sent)

    @property
    def work(self) -> float:
        """Newton-Schulz of the busiest rank over the bound."""
        return over(max(self.found.flops), self.bound.flops)

    @property
    def where(self) -> tuple[str, ...]:
        return self.case.model.name, str(self.case.ranks), str(self.case.ep)

    def ours(self) -> tuple[str, ...]:
        """The cells of `OURS`."""
        found = self.found
        ratios = (
            self.sent,
            over(max(found.sent), self.busiest),
            self.work,
            over(max(found.flops), self.undivided),
            over(found.serial, self.bound.flops),
        )
        return (
            *(*self.where, str(found.units), *map(digits, ratios), str(found.stages), str(2 * found.stages)),
            *(f"{found.peak / 1e6:.1f}", digits(found.share), f"{found.planning:.2f}"),
        )

    def beside_others(self) -> tuple[str, ...]:
        """The cells of `OTHERS`."""
        case, our_numbers = (
            self.case,
            Cost(max(self.found.flops), sum(self.found.sent) / self.case.ranks, 2 * self.found.stages),
        )
        costs = (our_numbers, *(peer(case.model.matrices, case.ranks, case.ep) for peer in PEERS.values()))
        ratios = ((over(cost.flops, self.bound.flops), over(cost.sent, self.bound.sent), cost.calls) for cost in costs)
        return (*self.where, *(f"{digits(work)}, {digits(sent)}, {calls}" for work, sent, calls in ratios))


SETTING = ("weights", "W", "EP")
OURS = (*SETTING, "units", "bytes", "bytes, busiest", "NS", "NS, undivided", "NS by stages", "stages", "collectives",
        "peak MB", "peak / 2 stages", "plan s")  # fmt: skip
OTHERS = (*SETTING, "muonckpt", *PEERS)

EXPLAINED = """
Two tables a model: our plans, and these beside other projects' formulas as "NS, bytes, collectives".  All of it is per
rank and step, and over the lower bound where no unit is given.
bytes: sent to others; the mean and the busiest rank, each over its bound.  NS: Newton-Schulz of the busiest rank;
"undivided": over the bound if ranks share no matrix; "by stages": if all waited for the slowest rank of every stage.
peak: wires in memory at once, and over two even stages of what is sent to and received from others.  plan s: CPU
seconds for one rank's part, from parameters to wires.  Megatron's bytes are what it sends beyond what training sends
anyway.
"""


def over(value: float, bound: float) -> float:
    """A multiple of a bound; where nothing is needed, 1 for nothing and infinity for anything."""
    return value / bound if bound else (math.inf if value else 1.0)


def digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def aims(lines: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    """What we set out to reach, and the plan that is farthest from it."""

    def aim(
        subject: str, limit: float, value: Callable[[Line], float], among: Sequence[Line] = lines
    ) -> tuple[str, ...]:
        worst = max(among, key=value)
        verdict = "reached" if value(worst) <= limit else "missed"
        missed = sum(value(line) > limit for line in among)
        return subject, f"{value(worst):.3f}", verdict, f"{missed} of {len(among)}", ", ".join(worst.where)

    yield aim("bytes 1.00", 1.005, lambda line: line.sent)
    yield aim("NS <= 1.35", 1.35, lambda line: line.work)
    lines_of_many_units = [line for line in lines if line.found.units >= 4 * line.case.ranks]
    yield aim("NS <= 1.05 where units >= 4 W", 1.05, lambda line: line.work, lines_of_many_units)
    lines_of_experts = [line for line in lines if not line.case.model.dense.numel]
    yield aim("NS <= 1.05 for experts alone, W > E", 1.05, lambda line: line.work, lines_of_experts)
    yield aim("wires of at most 2 stages", 1.0, lambda line: line.found.share)
    yield aim("planned in 2 s", 2.0, lambda line: line.found.planning)


def planned(found: Sequence[Case]) -> Iterator[Line]:
    """A line for each case, in order; each planned in a process of its own, as many at a time as there are cores."""
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        yield from map(Line.of, found, pool.imap(plan_of, found))


def show(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def head(columns: Sequence[str]) -> None:
    print()
    show(*columns)
    print("|" + "---|" * len(columns))


def show_planning() -> None:
    """Print what planning one rank's part takes, each in a process of its own, one after the other."""
    whole = [make() for make in LARGE]
    models = [*whole, *(model.apart for model in whole if model.experts.numel)]
    head(("weights", "ranks", "matrices", "s", "MB"))
    for case in (Case(model, ranks, 1) for model in models for ranks in (64, 16384)):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            units, seconds, peak = pool.apply(planning_of, (case,))
        show(case.model.name, str(case.ranks), str(units), f"{seconds:.2f}", f"{peak / 1e6:.0f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="three sizes of the world, one number of groups each")
    arguments.add_argument("--planning", action="store_true", help="only what planning takes on 64 and 16384 ranks")
    options = arguments.parse_args()
    groups, expert_groups = (QUICK, QUICK) if options.quick else (ALL, EXPERTS)
    with fake_world(8, 0):
        parameters(Case(MODELS[0](), 8, 1))  # what torch does once, before any time is taken
    if options.planning:
        print(describe())
        show_planning()
        return
    print(f"{describe()}\n{EXPLAINED}")
    lines: list[Line] = []
    for make in MODELS:
        head(OURS)
        of_model = []
        for line in planned(list(cases(make(), groups, expert_groups))):
            show(*line.ours())
            of_model.append(line)
        head(OTHERS)
        for line in of_model:
            show(*line.beside_others())
        lines += of_model
    head(("aim", "farthest", "", "missed", "where farthest"))
    for cells in aims(lines):
        show(*cells)
    print(f"\nBuilding the parameters took at most {max(line.found.building for line in lines):.2f} CPU seconds.")


if __name__ == "__main__":
    main()
