"""The options that `reshard` and `convert` share, as values: the translation, and how the work is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..names.errors import ArgumentError, TargetError, constructed_like
from ..names.vocabulary import STATE_DTYPES, Convention
from ..store.io.location import Location
from ..store.reading.payloads import Progress
from .engine.job import Job
from .engine.run import MEMORY, THREADS, run_job
from .engine.workers import TIMEOUT, Workers
from .report import Report, report_of
from .translate.names import NameRules, load_rules

if TYPE_CHECKING:
    from ..store.open_checkpoint import OpenCheckpoint
    from .engine.outputs import Outputs
    from .translate.request import Request

Choice = TypeVar("Choice", bound=str)


def outputs_of(request: Request) -> Callable[[OpenCheckpoint], Outputs]:
    """Return a function that makes the outputs of a request from a checkpoint."""
    from .translate.translator import requested_outputs  # most reshards start sooner without it

    return partial(requested_outputs, request=request)


@constructed_like("muonckpt.Translation(rules='hf-qkv', convention='ema')")
@dataclass(frozen=True, slots=True)
class Translation:
    """Options of a translation: what it has to know beside the program to write for, and no checkpoint says.

    Attributes:
        from_dialect: the program whose keys the source has; None means that the keys tell.
        keys: the form of the optimizer's keys, ``"nested"`` or ``"flat"``; None means the target's program decides.
        roots: where the target has its model and its optimizer in the state dict, if not where its program has them:
            ``{"optimizer": "app.optimizer", "model": "app.model"}``; an empty path is the top.  ``"parameters"`` is
            what Megatron-FSDP's wrappers put before names in the optimizer, such as ``"module.module"``.
        rules: tables of names and structure, applied in order: names of ready-made ones, TOML files, or `NameRules`;
            ``inverse:`` before a name means the opposite direction.
        convention: the convention of the source's momentum, if it is not recorded: ``"ema"`` or ``"sum"``.
        target_convention: the convention to write, if the target's program has none of its own.
        mu: the momentum coefficient, if the source's groups have none.
        step: the number of steps taken, whatever the source says; needed if only the target stores it.
        drop: slots of optimizer state to leave out.
        tensors_only: leave out items that are not tensors.
        model_only: leave out all but the model's weights and buffers.
        fill_missing: write zeros as the state of parameters in groups that have none, as they never had a gradient.
        weights: where the source has float32 masters as well, what weights are made of, ``"masters"`` or ``"model"``;
            the other is left out.  None writes both, which only programs with masters can load.
        state_dtype: the dtype of momentum and moments, ``"float32"`` or ``"bfloat16"``, each element rounded once;
            None keeps the source's.
        like: the groups of the run that the result is for, as ``Muon.describe()`` returns them, or a JSON file of them.
            The result has these groups, in this order, and takes from them what the source does not say.
    """

    from_dialect: str | None = None
    keys: str | None = None
    roots: Mapping[str, str] = field(default_factory=dict)
    rules: str | NameRules | Iterable[str | NameRules] = ()
    convention: str | None = None
    target_convention: str | None = None
    mu: float | None = None
    step: int | None = None
    drop: Collection[str] = ()
    tensors_only: bool = False
    model_only: bool = False
    fill_missing: bool = False
    weights: str | None = None
    state_dtype: str | None = None
    like: str | os.PathLike[str] | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 0:
            raise ArgumentError(f"step={self.step!r}: expected the number of steps taken, 0 or more")

    def request(self, to_dialect: str | None) -> Request:
        """Return the request for this program; None means the source's.

        Raises:
            TargetError: an option does not fit the others, or has no such value.
            LayoutError: a table of rules cannot be read.
        """
        # Most reshards translate nothing, and start sooner without these.
        from ..programs.detection import with_target_keys
        from ..programs.registry import program
        from .translate.conventions import WeightsFrom
        from .translate.groups import GroupTemplate
        from .translate.request import Request

        # Names become values here, so that nothing below has to check them again.
        tables = [self.rules] if isinstance(self.rules, str | NameRules) else self.rules
        target = program(to_dialect, "`to_dialect=`")
        if self.keys is not None or self.roots:
            if target is None:
                raise TargetError(
                    "`keys=` and `roots=` have no meaning without `to_dialect=`; leave them out, and keys stay as they "
                    "are"
                )
            target = with_target_keys(target, self.keys, self.roots)
        rules = NameRules()
        for table in tables:
            rules += load_rules(table) if isinstance(table, str) else table
        return Request(
            program(self.from_dialect, "`from_dialect=`"),
            target=target,
            rules=rules,
            convention=_choice("momentum convention", list(Convention), self.convention),
            target_convention=_choice("momentum convention", list(Convention), self.target_convention),
            mu=self.mu,
            step=self.step,
            fill_missing=self.fill_missing,
            weights=_choice("source of weights", list(WeightsFrom), self.weights),
            state_dtype=_choice("dtype of state", STATE_DTYPES, self.state_dtype),
            drop=frozenset(self.drop),
            like=None if self.like is None else GroupTemplate.read(self.like),
            tensors_only=self.tensors_only,
            model_only=self.model_only,
        )


@constructed_like("muonckpt.Execution(memory=1 << 30, jobs=8)")
@dataclass(frozen=True, slots=True)
class Execution:
    """Options of how the work is done.

    Attributes:
        memory: bytes of all buffers together.
        jobs: the number of threads that check and write files.
        dry_run: plan only; nothing is written.
        timeout: where several processes share the work (under torchrun), seconds to wait at the beginning until all of
            them are there.
        progress: receives the bytes done since its last call and the total.
    """

    memory: int = MEMORY
    jobs: int = THREADS
    dry_run: bool = False
    timeout: float = TIMEOUT
    progress: Progress = lambda count, total: None

    def __post_init__(self) -> None:
        for name in ("memory", "jobs", "timeout"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: expected a number above 0")

    def run(self, job: Job, place: Location, notes: tuple[str, ...], workers: Workers) -> Report | None:
        """Do a worker's share of a job, and return what was done, or would be; None in all but the coordinator.

        Args:
            notes: come before those of the job.
        """
        # The report is of the plan; what was written is added when it is.
        report = report_of(job, place, notes)
        if self.dry_run:
            return report if workers.me.coordinates else None
        total = (job.bytes_to_check + job.payload_to_write) // workers.me.world
        manifest = run_job(
            job,
            place,
            memory=self.memory,
            threads=self.jobs,
            progress=lambda count: self.progress(count, total),
            workers=workers,
        )
        return None if manifest is None else report.finished(manifest)


AS_THE_SOURCE_SAYS = Translation()

IN_ONE_GO = Execution()


def grouped(**options: Any) -> dict[str, Any]:
    """Return the arguments of `reshard` or `convert` for options in one list, as a command has them."""
    # An option is the member of one of the two values, or an argument itself.
    arguments = dict(options)
    for name, kind in (("translation", Translation), ("execution", Execution)):
        members = {field.name for field in fields(kind)} & options.keys()
        if members:
            arguments[name] = kind(**{option: arguments.pop(option) for option in members})
    return arguments


def _choice(noun: str, choices: Sequence[Choice], name: str | None) -> Choice | None:
    """Return the choice that is equal to a name; None for None."""
    if name is None:
        return None
    if name not in choices:
        raise TargetError(f"unknown {noun} {name!r}; expected one of {', '.join(choices)}")
    return choices[list(choices).index(name)]  # type: ignore[arg-type]  # equal, if not of the same type
