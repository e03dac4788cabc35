"""A series: the checkpoints that one run saves step after step; a whole one is always there to resume from.

One rank looks into the folder and tells the others, so that all act on the same answer.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.all_ranks import (
    JointWork,
    broadcast_from_first,
    is_coordinator,
    refuse_differing,
    refuse_mixed_calls,
)
from ...checkpoint.async_saving import (
    AsyncSave,
    OnError,
    WhenBusy,
    check_before_asking,
    free_lane,
    settle_last,
    wait_for_last,
)
from ...checkpoint.live_parts import frozen_parameters
from ...checkpoint.loading import LoadCall, load_sent, send_checkpoint
from ...checkpoint.refusal import RESTORE, RESUME
from ...checkpoint.saving import refuse_lone_process, save_together
from ...checkpoint.signals import On, Signals, Then
from ...checkpoint.training import Training
from ...converters.engine.container import container_of
from ...converters.engine.job import check_destination, make_job
from ...converters.engine.workers import joined_ranks
from ...converters.options import Execution, Translation, outputs_of
from ...converters.target.topology import Target
from ...names.errors import (
    ArgumentError,
    AttestError,
    DamageError,
    DestinationError,
    LostRankError,
    MuonckptError,
    SourceError,
    UnavailableError,
    about,
    called_like,
    going_on,
    value_in_short,
    warn_on_rank,
)
from ...names.resumption import SET_LINE, STATE_DICT, STATE_LINE, Choices
from ...names.wording import by_fault, command, listed
from ...programs.signs import METADATA_FILE
from ...store.io.location import Location, is_there, location
from ...store.verify.diagnosis import diagnosis_of_damaged, open, way_back
from ...store.verify.run import Run
from ...store.verify.step_names import StepName
from ..run_audit import record_damage
from ..step_folder import Newest, StepFolder
from .beginning import begin
from .restored import Restored

_FORMS = ("hf",)
"""The forms of an export.  "hf": safetensors with an index, whole weights under the model's own names, as Hugging
Face's libraries and inference engines load them beside a ``config.json``."""

_SHARD_BYTES = 5 * 10**9
"""The most bytes of weights in a file, unless one weight is larger: the usual size of shards of weights."""

_UNSEEN_SCHEDULER = (
    "the optimizer has a scheduler that the series does not have, so that no checkpoint has its state, and a resume "
    "begins it again. Write Series(folder, model, optimizer, scheduler=scheduler)"
)


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint of a series, and its path or URL.  It is accepted wherever a path is."""

    step: int
    path: str

    def __fspath__(self) -> str:
        return self.path


class Series:
    """The checkpoints of one run: ``step-00001000`` and so on in one folder.  One run at a time saves to it.

    Every method is collective over the process group, with the same arguments on all ranks; without one it works for
    one process.  Other processes may read the checkpoints at any time.

    Args:
        folder: a path that all ranks see, or a URL; made when something is saved.  A relative path is that of the
            working directory now, wherever the program goes later.
        model, optimizer: what `resume` sets and `save` saves; one optimizer or several.  Without them `save` and
            `restore` take state dicts.
        scheduler: one learning rate scheduler or several.
        extra: other objects with ``state_dict`` and ``load_state_dict``, such as a data loader, by name.
        keep_last: how many of the newest whole checkpoints stay, at least one; None keeps all.
        keep_every: checkpoints whose step is a multiple of this stay as well.
        on: signals to any rank that make `due` ask for a checkpoint on all: ``"SIGTERM"``, or several of
            ``signals.SIGNALS``.  A dict says what follows it: ``{"SIGUSR1": "stop"}``.  Handlers are installed at once,
            and call those before them; `close` puts these back.

    Raises:
        ArgumentError: one of the objects is something else; a number is no integer, or below 1; or a signal is not
            known, or this is not the main thread.
        DestinationError: no installed library supports the protocol of the URL.
    """

    @called_like("run = muonckpt.Series('run', model, optimizer, scheduler=scheduler)")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scheduler: Any | Sequence[Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        on: On = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, number in {"keep_last": keep_last, "keep_every": keep_every}.items():
            if number is not None and (type(number) is not int or number < 1):
                raise ArgumentError(f"{name}={number!r}: expected a number of checkpoints, 1 or more, or None")
        has_objects = any(each is not None for each in (model, optimizer, scheduler, extra))
        self._training = Training.of(model, optimizer, scheduler, extra) if has_objects else None
        self._folder = StepFolder(location(folder, DestinationError).absolute())
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._group = process_group
        self._whole: set[StepName] = set()
        self._damaged: dict[StepName, str] = {}
        """Steps that `restore` has found damaged, though their files have the right sizes; the same on all ranks."""
        self._fresh: tuple[str, ...] = ()
        """The patterns of ``fresh`` of the last restore: they are saved, so that the next start does not lose state."""
        self._half_loaded = ""
        """The checkpoint whose restore has overwritten tensors and failed, until one succeeds."""
        self._signals = Signals(on, process_group)

    def __enter__(self) -> Series:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may be elsewhere, so nothing is asked of them
            self._signals.close()
            wait_for_last(self._group)

    def close(self) -> None:
        """Put former signal handlers back, wait for the last `async_save`, and raise or warn of its error.

        Collective, as the end of ``with Series(...) as series:`` is, which on an error only waits.
        """
        self._signals.close()
        settle_last(self._group)

    @called_like("if run.due(step): run.save(step)")
    def due(self, step: int) -> Then | None:
        """Return whether a signal to any rank has requested a checkpoint that is not saved yet; the same on all ranks.

        Call it after each step.  Collective, by one small gather; after the first call only where a rank has ``on``.

        Returns:
            None; ``"go on"``, or ``"stop"``: then the next `save` or `async_save` ends the program when the checkpoint
            is there, with exit code 75.

        Raises:
            ArgumentError: ranks are not at the same step.
        """
        return self._signals.due(f"Series.due({step})")

    @called_like("run = muonckpt.Series(folder, model, optimizer), then run.save(step)")
    def save(
        self,
        step: int,
        state_dict: Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
        provenance: Mapping[str, Any] | None = None,
        also: str | None = None,
    ) -> SavedStep:
        """Save a checkpoint as `muonckpt.save` does; then remove steps by ``keep_last`` and ``keep_every``.

        First, an `async_save` that is running is waited for, and what killed runs have left in the folder is removed.
        A checkpoint of this step that is replaced is named on one line, with the reason.
        Where something cannot be removed, a warning says so, and training goes on.

        Args:
            step: 0 or more.
            state_dict: as for `muonckpt.save`; only for a series that was made without objects.
            replace: supersede a whole checkpoint of this step; a torn or damaged one is superseded in any case.  The
                new one has a name of its own, ``step-00001000.2``, and the old one is removed afterwards.
            provenance: JSON data to keep in the manifest; ``step`` is added.
            also: the form of an `export` to write when the checkpoint is there, ``"hf"``.

        Raises:
            SystemExit: the checkpoint is there, and a signal has asked to stop.
            DestinationError: there is a whole checkpoint of this step, or it or the export cannot be written; or the
                last restore has failed half-way.
            SourceError: the checkpoint is there, and has no model to export.
            LayoutError, ArgumentError, LostRankError: as in `muonckpt.save`.
        """
        # Hear of signals, and let the save before end, whose checkpoint may be of this step.
        self._signals.ask("Series.save")
        state_dict = self._to_save(state_dict, "save")
        settle_last(self._group)
        name, details = self._begin(step, replace, also, provenance)
        saved = self._saved(name)
        save_together(state_dict, saved.path, details, self._group)
        # Only now is there a newer whole checkpoint, so that older ones may go, and the program end.
        self._clean_up(name, also)
        self._signals.met(saved.path)
        return saved

    @called_like("run = muonckpt.Series(folder, model, optimizer), then run.async_save(step)")
    def async_save(
        self,
        step: int,
        state_dict: Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
        provenance: Mapping[str, Any] | None = None,
        also: str | None = None,
        on_error: OnError = "raise",
        when_busy: WhenBusy = "wait",
    ) -> AsyncSave:
        """Save while training goes on, as `muonckpt.async_save` does; then remove steps as `save` does.

        Args:
            step, state_dict, replace, provenance, also: as for `save`.
            on_error, when_busy: as for `muonckpt.async_save`.

        Raises:
            DestinationError, ArgumentError: as in `save` and `muonckpt.async_save`.
            SystemExit: as in `save`; then this has waited for the checkpoint.
        """

        state_dict = self._to_save(state_dict, "async_save")
        check_before_asking(self._group, on_error, when_busy)
        self._signals.ask("Series.async_save")
        lane = free_lane(self._group, f"step {step}", when_busy)
        name, details = self._begin(step, replace, also, provenance)
        clean_up = partial(self._clean_up, name, also)
        saving = lane.submit(state_dict, self._saved(name).path, details, on_error, clean_up)
        # A program that ends afterwards has to wait.
        if self._signals.then == "stop":
            saving.result()
        self._signals.met(saving.path)
        return saving

    def _to_save(self, state_dict: Mapping[str, Any] | None, call: str) -> Mapping[str, Any]:
        """Return the state dict to save."""
        if self._half_loaded:
            raise DestinationError(
                f"nothing is saved: a restore of {self._half_loaded} has failed or was interrupted, and tensors may "
                "be overwritten and of no checkpoint. Restore or resume first, or start the program again"
            )
        if self._training is None:
            if state_dict is None:
                raise ArgumentError(f"expected a state dict. Write Series(folder, model, optimizer).{call}(step)")
            return state_dict
        if state_dict is not None:
            raise ArgumentError(f"the series has the model and saves all its objects. Write run.{call}(step)")
        return self._training.state_dict()

    @called_like("first = run.resume()")
    def resume(
        self,
        *,
        strict: bool = False,
        required: bool = False,
        allow_extra: bool | Iterable[str] = False,
        fresh: Iterable[str] = (),
        grow: Iterable[str] = (),
        ungrouped: Iterable[str] = (),
        begin_from: str | os.PathLike[str] | None = None,
        begin_step: int | None = None,
    ) -> int:
        """Restore the newest whole checkpoint into the objects, and prove that they are as they were saved.

        Call it once, before the first step.  One line on the first rank says what was resumed, and that it is proved;
        a difference from the saved state is a warning.  Rates are those of the checkpoint, not of the code: set others
        in ``optimizer.param_groups`` afterwards.

        Args:
            strict: a difference from the saved state is an error, and so is a scheduler that the series does not have.
                The code's own rates are none, as those of the checkpoint take their place.
            required: an empty folder is an error.
            allow_extra, fresh, grow, ungrouped: as for `muonckpt.load`.  A checkpoint that the run has saved since then
                has the state that began fresh, so the same lines start the run again.
            begin_from: where the run has no step of its own, the checkpoint of another run, of any program that
                `convert` reads: weights go on, and the state of parameters whose method stays.  Other state begins at
                zero.  Options are the code's, and schedulers go on at the step of that run.
            begin_step: the step to go on with then; None means the one after that of the checkpoint.

        Returns:
            The step to go on with; 0 if no checkpoint has been saved yet.

        Raises:
            AttestError: ``strict``, and something is not as it was saved, or cannot be compared.
            ArgumentError: the series was made without objects; or ``begin_step`` is no step, or without ``begin_from``.
            DamageError, SourceError, LayoutError, LostRankError, DestinationError: as in `restore`.
        """
        if self._training is None:
            raise ArgumentError("the series has no objects to resume. Write Series(folder, model, optimizer)")
        if begin_step is not None and (begin_from is None or type(begin_step) is not int or begin_step < 0):
            raise ArgumentError(
                f"begin_step={value_in_short(begin_step)}: expected an integer, 0 or more, beside begin_from. Write "
                "run.resume(begin_from='other-run/step-40', begin_step=41)"
            )
        if strict and self._training.lacks_scheduler:
            raise AttestError(_UNSEEN_SCHEDULER)
        unstepped = self._training.unstepped
        state_dict = self._training.state_dict()
        choices = Choices.of(allow_extra, fresh, grow, ungrouped)
        restored = self._restored(RESUME, state_dict, choices, required)
        if is_coordinator(self._group) and self._training.lacks_scheduler:
            warn_on_rank(_UNSEEN_SCHEDULER)
        if restored is None:
            if begin_from is None:
                for optimizer in unstepped:
                    optimizer.state.clear()  # the state dict made it
                if is_coordinator(self._group):
                    place = self._folder.place
                    advice = "to make this an error: resume(required=True)"
                    print(f"no checkpoint in {place}: starting at step 0 ({advice})", flush=True)
                return 0
            source, place = os.fspath(begin_from), self._folder.place
            with self._noting_half_loaded(source):
                beginning = begin(self._training, source, place, choices, begin_step, self._group)
            if is_coordinator(self._group):
                print(beginning, flush=True)
            return beginning.step
        self._half_loaded = restored.path  # until all objects have their state
        overridden = self._training.overridden_values(state_dict)
        if overridden and is_coordinator(self._group):
            warn_on_rank(
                "the run goes on with the values of its checkpoint, and not with those that the code gives now: "
                f"{listed(overridden, 4)}. To train with the code's, set them in optimizer.param_groups after resume; "
                f"for a schedule begin a run in another folder: run.resume(begin_from={restored.path!r})"
            )
        self._training.load_state_dict(state_dict)
        self._half_loaded = ""
        proof = restored.check_training(self._training)
        if not proof.equal and strict:
            raise AttestError(str(proof))
        if is_coordinator(self._group):
            proof.show()
        return restored.step + 1

    @called_like("run.export(step, 'hf')")
    def export(
        self,
        step: int,
        form: str = "hf",
        destination: str | os.PathLike[str] | None = None,
        *,
        shard_size: int = _SHARD_BYTES,
    ) -> str:
        """Write the model of a saved step as other programs load it, all ranks together; return where it is.

        An export is never removed by the series, nor resumed from.

        Args:
            step: of a whole checkpoint of this series.
            form: ``"hf"``: safetensors with an index, whole weights under the model's own names.
            destination: a folder that does not exist; by default ``step-00001000-hf`` beside the checkpoint.
            shard_size: the most bytes of weights in a file.

        Raises:
            SourceError: there is no whole checkpoint of this step, it is damaged, or it has no model.
            DestinationError: the destination exists, or cannot be written.
            ArgumentError: an unknown form, or arguments that differ between ranks.
            Interrupted: a rank was lost.
        """
        refuse_mixed_calls(self._group, "Series.export")
        settle_last(self._group)
        place = None if destination is None else os.fspath(destination)
        # All export the attempt at the step that the first rank finds whole.
        name: StepName | None = None
        with JointWork(self._group, SourceError) as work:
            _check_form(form)
            if type(step) is not int or type(shard_size) is not int or shard_size < 1:
                raise ArgumentError(
                    "expected a step and a shard_size that are integers, the latter in bytes and above 0, found "
                    f"{step!r} and {shard_size!r}"
                )
            arguments = {"step": step, "form": form, "destination": place, "shard_size": shard_size}
            ranks = work.gather(arguments)
            if ranks is not None:
                refuse_differing(self._group, "export", ranks)
                name = self._folder.whole(step)
                if name is None:
                    raise SourceError(f"expected a whole checkpoint of step {step} in {self._folder.place}, found none")
            name = work.broadcast(name)
        return self._export(name, form, place, shard_size)

    def _export(self, name: StepName, form: str, destination: str | None = None, shard_size: int = _SHARD_BYTES) -> str:
        place = self._folder.place / f"{name}-{form}"
        if destination is not None:
            place = location(destination, DestinationError)
        _export_model(self._folder.path(name), place, self._group, shard_size)
        return str(place)

    def _clean_up(self, name: StepName, also: str | None) -> None:
        """Remove older steps, now that a checkpoint was published, and export it if that was requested."""
        self._whole.add(name)
        self._damaged.pop(name, None)
        if is_coordinator(self._group):
            with going_on(f"cannot remove what {self._folder.place} need not keep"):
                self._prune(name)
        if also is not None:
            with about(f"{self._folder.path(name)} is saved, but not exported"):
                self._export(name, also)

    def latest(self) -> SavedStep | None:
        """Return the newest whole checkpoint, or None, and warn of newer ones that are torn.  Reads no data.

        Raises:
            SourceError: a checkpoint is of a newer version of this package.
            UnavailableError: the folder, or a checkpoint in it, cannot be looked at now.
        """
        refuse_mixed_calls(self._group, "Series.latest")
        newest = broadcast_from_first(self._group, lambda: self._folder.newest(self._damaged)[0])
        if newest.name is None:
            self._warn_of(newest, "no whole one is left")
            return None
        saved = self._saved(newest.name)
        self._warn_of(newest, f"{saved.path} is the newest whole one")
        return saved

    @called_like(f"{STATE_LINE}, then series.restore({STATE_DICT}), then {SET_LINE}")
    def restore(
        self,
        state_dict: dict[str, Any],
        *,
        required: bool = False,
        allow_extra: bool | Iterable[str] = False,
        fresh: Iterable[str] = (),
        grow: Iterable[str] = (),
        ungrouped: Iterable[str] = (),
        attest: bool = False,
    ) -> Restored | None:
        """Load the newest whole checkpoint; if it turns out to be damaged, the one before, with a warning on all ranks.

        Tensors may have been overwritten when damage is found; loading the one before writes all of them again.  If
        that fails as well, the series refuses to save until a restore succeeds.  A wrong checksum is recorded as by
        `verify_run`, if the first rank, too, reads those bytes so.  A checkpoint that does not fit, or
        cannot be reached for now, is an error and no reason to take an older one.

        Args:
            state_dict: the template, as for `muonckpt.load`.
            required: an empty series is an error.
            allow_extra, fresh, grow, ungrouped, attest: as for `muonckpt.load`; ``fresh`` as in `resume`.

        Returns:
            The loaded state; None if no checkpoint has been saved yet.

        Raises:
            DamageError: there are checkpoints, and none is whole.
            SourceError, LayoutError, ArgumentError, LostRankError: as in `muonckpt.load`; or the series is empty, and
                must not be.
            UnavailableError: the file system or the store cannot answer or be read now; on all ranks.
            DestinationError: torchrun started several processes, and this one has no process group.
        """
        choices = Choices.of(allow_extra, fresh, grow, ungrouped)
        return self._restored(RESTORE, state_dict, choices, required, attest)

    def _restored(
        self, call: str, state_dict: dict[str, Any], choices: Choices, required: bool = False, attest: bool = False
    ) -> Restored | None:
        """Load the newest whole checkpoint, as `restore` says, for a call of the user."""
        refuse_lone_process(str(self._folder.place))
        refuse_mixed_calls(self._group, call)
        self._fresh = choices.fresh.patterns
        known: Mapping[StepName, str] = {}
        lost = set[StepName]()

        while True:
            # The newest checkpoint, and all that are newer and not whole.
            find = partial(self._folder.newest_to_restore, self._damaged, lost if choices.fresh.patterns else None)
            (newest, followed), sent = send_checkpoint(self._group, find)
            if newest.name is None:
                self._refuse_empty(newest.faults, required)
                self._warn_of(newest, "")
                return None
            saved = self._saved(newest.name)
            self._warn_of(newest, f"restoring {saved.path} instead", known)
            known = {name: fault for name, fault in newest.faults.items() if name >= newest.name}
            try:
                with self._noting_half_loaded(saved.path):
                    arguments = choices.without_fresh(followed).as_arguments()
                    load = LoadCall(state_dict, saved.path, arguments, call, attest, group=self._group)
                    loaded = load_sent(load, sent)
            except UnavailableError as error:
                unread = self._folder.path(newest.name)
                advice = broadcast_from_first(self._group, partial(way_back, unread, error.fault))
                raise error.with_text(error.fault, ". ".join(filter(None, (error.advice, advice)))) from error
            except SourceError as error:
                if not broadcast_from_first(self._group, partial(self._record_damage, newest.name, error.keys)):
                    continue  # it was removed while we read
                if not isinstance(error, DamageError):
                    raise
                # Damage that only reading shows: the one before is next.
                self._damaged[newest.name] = error.fault
                lost.add(newest.name)
            else:
                saved_as = saved.step if newest.saved_as is None else newest.saved_as
                return Restored.recorded(saved.step, saved_as, saved.path, loaded, self._folder.place, self._group)

    def _record_damage(self, name: StepName, keys: Collection[str]) -> bool:
        """Record what ranks have found damaged of a checkpoint; return False if it was removed."""
        if not self._folder.has(name):
            return False
        record_damage(self._folder.path(name), keys)
        return True

    @contextmanager
    def _noting_half_loaded(self, path: str) -> Iterator[None]:
        """Note a checkpoint whose load fails and may have overwritten tensors, until a load succeeds."""
        try:
            yield
        except BaseException as error:  # an interrupt says nothing of tensors
            if not isinstance(error, MuonckptError) or error.has_overwritten or isinstance(error, LostRankError):
                self._half_loaded = path
            raise
        self._half_loaded = ""

    def _refuse_empty(self, faults: Mapping[StepName, str], required: bool) -> None:
        """Raise unless a run may begin: no checkpoint was found damaged, none is required, and the folder is a run's.

        Raises:
            DamageError: no checkpoint is whole.
            SourceError: there must be one, or the folder is a checkpoint.
        """
        place = self._folder.place
        if faults:
            lines = "\n- ".join(f"{names}: {fault}" for names, fault in by_fault(faults.items()))
            newest, run = self._folder.path(max(faults)), Run(place, ())
            raise DamageError(
                f"expected a whole checkpoint in {place}, found none among {len(faults)}:\n- {lines}",
                broadcast_from_first(self._group, lambda: diagnosis_of_damaged(newest, run).advice),
            )
        if required:
            raise SourceError(f"expected a checkpoint in {place}, found none: is it the folder of this run?")
        if broadcast_from_first(self._group, partial(is_there, place / METADATA_FILE)):
            raise SourceError(
                f"expected the folder of a run, found a checkpoint: {place}. Write "
                f"Series({str(place.parent)!r}), or muonckpt.load(state_dict, {str(place)!r})"
            )

    def _saved(self, name: StepName) -> SavedStep:
        return SavedStep(name.step, str(self._folder.path(name)))

    def _begin(
        self, step: int, replace: bool, also: str | None, provenance: Mapping[str, Any] | None
    ) -> tuple[StepName, dict[str, Any]]:
        """Return the name to save under, once all ranks have given the same step, and what the manifest says."""
        decision: tuple[StepName, list[str]] | None = None
        with JointWork(self._group, DestinationError) as work:
            if type(step) is not int or step < 0:
                order = "; it comes before the state dict: series.save(step, state_dict)"
                hint = order if isinstance(step, Mapping) else ""
                raise ArgumentError(f"a step is an integer, 0 or more; found {value_in_short(step)}{hint}")
            if also is not None:
                _check_form(also)
            # Each stage of a pipeline has a model, and frozen parameters, of its own.
            frozen_here = frozen_parameters(self._training.model) if self._training else []
            ranks = work.gather(({"step": step, "replace": replace, "also": also}, frozen_here))
            if ranks is not None:
                refuse_differing(self._group, "save", [arguments for arguments, _ in ranks])
                with going_on(f"cannot remove what killed runs have left in {self._folder.place}"):
                    self._folder.clean()
                name, replaced = self._folder.new_name(step, replace, self._damaged)
                place = self._folder.path(name)
                for old, consequence in replaced.items():
                    print(f"{place} replaces {old}, {consequence}", flush=True)
                decision = name, sorted({*chain.from_iterable(frozen for _, frozen in ranks)})
            name, frozen = work.broadcast(decision)
        details = {**(provenance or {}), "step": step, **({"fresh": self._fresh} if self._fresh else {})}
        return name, {**details, "frozen": frozen} if self._training else details

    def _prune(self, saved: StepName) -> None:
        def is_whole(name: StepName) -> bool:  # looks at each checkpoint once, as time is short
            if name not in self._whole | self._damaged.keys() and self._folder.fault(name) is None:
                self._whole.add(name)
            return name in self._whole - self._damaged.keys()

        def would_be_asked(name: StepName) -> bool:
            try:
                return is_whole(name)
            except (SourceError, UnavailableError):  # nothing is known of it, so a restore stops there
                return True

        # Later steps stay: this run may have gone back.
        newer = self._folder.prune(saved, self._keep_last, self._keep_every, is_whole)
        if later := [self._saved(name) for name in newer if would_be_asked(name)]:
            warn_on_rank(
                f"{self._folder.path(saved)} was saved, but {later[-1].path} is of a later step, so that is what would "
                "be restored; if this run went back, move the later ones out of the folder",
                RuntimeWarning,
            )

    def _warn_of(self, newest: Newest, consequence: str, known: Mapping[StepName, str] | None = None) -> None:
        # All ranks know the same, and one says it, once; again where reading has found more.
        if not is_coordinator(self._group):
            return
        for name, fault in newest.faults.items():
            # A run that goes on from a damaged step passes over no older one.
            if (known or {}).get(name) == fault or (newest.name is not None and name < newest.name):
                continue
            path = self._folder.path(name)
            effect = "restoring it but for fresh state, if the rest is whole" if name == newest.name else consequence
            message = (
                f"{path} is not whole: {fault}; {effect}. A later save may remove it. "
                f"Whether it can be recovered: {command('verify', path)}"
            )
            warn_on_rank(message, RuntimeWarning)
        if newest.name is not None and newest.doubt:
            message = f"{self._folder.path(newest.name)} is taken, as nothing of it is lost, but: {newest.doubt}"
            warn_on_rank(message, RuntimeWarning)
        for text in newest.missing:
            warn_on_rank(f"{self._folder.place} lacks {text}", RuntimeWarning)


def _check_form(form: str) -> None:
    if form not in _FORMS:
        raise ArgumentError(f"expected a form of an export, one of {', '.join(map(repr, _FORMS))}, found {form!r}")


def _export_model(
    source: Location, destination: Location, process_group: dist.ProcessGroup | None, shard_size: int
) -> None:
    """Write the model of a checkpoint as a folder of safetensors files, each rank its share of them.

    Weights are compared with the checkpoint's fingerprints on the way.  The folder appears when all is written.

    Raises:
        SourceError: the checkpoint is damaged, has no model, or a dtype that the form lacks.
        DestinationError: the destination exists, or cannot be written.
        Interrupted: a rank was lost.
    """
    # Only the model, without the root of its keys; one process reads it as the ranks of a reshard do.
    request = Translation(model_only=True, roots={"model": ""}).request("muonckpt")
    with joined_ranks(process_group) as workers, ExitStack() as stack:
        workers.refuse_unseen(source)
        opened = stack.enter_context(open(source))
        container = container_of("safetensors", shard_size)
        check_destination(opened.path, destination)
        try:
            job = make_job(opened, Target({"dp": 1}), (), outputs_of(request), container)
        except SourceError as error:
            roots = {tensor.path[0] for tensor in opened.manifest.tensors}
            if isinstance(error, DamageError) or "model" in roots:
                raise
            names = listed(map(repr, sorted(map(str, roots))), 4) or "nothing"
            raise SourceError(
                f"{opened.path}: expected weights of a model under 'model', found keys under {names}: save the state "
                "dict as {'model': model.state_dict(), ...}"
            ) from error
        Execution(jobs=1).run(job, destination, (), workers)
