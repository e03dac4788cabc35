"""Writes a whole checkpoint out of a damaged one, and lists every box that did not come from it as it was."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from ..names.errors import ADVICE, DamageError, DestinationError, LostFileError, SourceError, TargetError, UnlistedError
from ..programs.signs import METADATA_FILE
from ..record.record import MANIFEST_FILE, StateRecord, by_key, entry_keys
from ..store.formats.registry import DCP, OWN, OWN_LINES, ZERO, format_of
from ..store.io.location import Location, Remote, location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.audit import audit
from ..store.verify.damage import Damage
from ..store.verify.diagnosis import diagnosis_of
from .engine.container import container_of
from .engine.job import check_destination, make_job
from .engine.workers import joined
from .look.contents import first_look
from .merge.filling import Filling
from .merge.same_save import FillingSource, WholePart, compare, one_save
from .options import IN_ONE_GO, Execution
from .report import Report
from .rewrite import advice_on_attempt, check_use, default_format, notes_on_unread, target_of
from .target.topology import ROWS


def salvage(
    source: str | os.PathLike[str] | Remote,
    destination: str | os.PathLike[str] | Remote,
    *,
    others: Sequence[str | os.PathLike[str] | Remote] = (),
    mix_steps: bool = False,
    fresh: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
    format: str | None = None,
    execution: Execution = IN_ONE_GO,
) -> Report | None:
    """Write a whole checkpoint out of a damaged one, without torch; what was whole is copied bit for bit.

    The damaged checkpoint is read whole first.  What it has lost is taken from its replicas, from its other description
    (``muonckpt.json`` and ``.metadata``), from ``others`` in their order, and from zeros.  If anything is still lost
    then, nothing is written.  ``salvaged`` of the report lists every box that was taken, as the provenance of the
    result does.

    Args:
        source: the damaged checkpoint, of any format.
        others: checkpoints that may fill what is lost, each checked in what is taken from it: of the same step, such as
            a copy or a consolidated file, or of another one.
        mix_steps: take boxes and items also from checkpoints of other steps, or of unknown ones.
        fresh: shell patterns of state that may begin anew, as zeros, where no checkpoint has it: momenta, moments and
            step counters, never weights.
        mesh: of the destination; None means as many ranks as have written the source.
        format: the format to write; None means the one that `reshard` would write.

    Returns:
        What was done, or would be.  If several processes share the work: None in all but the coordinator, rank 0.

    Raises:
        TargetError: nothing is lost, or an argument does not fit the checkpoint.
        SourceError: nothing has what is lost, which is named; or one of ``others`` is not of this model.
        DestinationError: the destination exists, lies inside a source, or cannot be written.
        Interrupted: the work can be resumed.
        LaunchError: the environment contradicts itself about the processes, or they do different work.
    """
    with joined(os.environ, execution.timeout) as workers, ExitStack() as stack:
        place = location(destination, DestinationError)
        # The damaged checkpoint by what can be read of it, and the others; one may say what the damaged one has lost.
        errors: list[SourceError] = []
        descriptions = _descriptions(location(source, SourceError), errors)
        if (damaged := next(descriptions, None)) is None:
            raise type(errors[0])(
                f"{'; '.join(map(str, errors))}. Nothing else says what was in its files, and where, so nothing can be "
                "salvaged: restore the missing description or file from a copy of this checkpoint, or go back to the "
                "step before"
            )
        stack.enter_context(damaged)
        opened = [stack.enter_context(_best(location(other, SourceError))) for other in others]
        damaged = _with_unlisted(damaged, opened)
        container = container_of(format or _format_of_files(damaged, place))
        target = target_of(mesh or {"dp": _ranks(damaged)}, {}, ROWS)
        check_use(container, target.mesh, False, ROWS)
        for checkpoint in (damaged, *opened):
            check_destination(checkpoint.path, place, container)
        # What of it is whole, by its own records.
        reported = partial(audit, progress=lambda count, size: execution.progress(count, 3 * size), jobs=execution.jobs)
        report = reported(damaged)
        if report.damage.mixed_up and (stock := next(descriptions, None)) is not None:
            errors.append(report.diagnosis.error)
            damaged = stack.enter_context(stock)
            report = reported(damaged)
        # What of that is of one save, by what the sources have.
        part = WholePart.of(damaged, first_look(damaged), report.damage, report)
        sources = [FillingSource.of(str(checkpoint.path), checkpoint) for checkpoint in opened]
        part, comparisons = one_save(part, [compare(part, source, execution.jobs) for source in sources], mix_steps)
        damage = part.damage
        diagnosis = diagnosis_of(damaged, damage, report.findings) if damage.strays else report.diagnosis
        if not errors and not damage and all(finding.kind == "nonfinite" for finding in report.findings):
            contradictions = "".join(f"; {c.contradiction}" for c in comparisons if c.differs)
            raise TargetError(
                f"{damaged.path} is whole: nothing of it is lost, so there is nothing to salvage{contradictions}"
            )
        # What fills the holes.
        itself = [*descriptions, *_replicas(damaged, damage)] if damage else []
        filling = Filling.of(part, diagnosis, [stack.enter_context(checkpoint) for checkpoint in itself], comparisons)
        filling.fill(mix_steps, fresh, execution.jobs)
        misspelt = (finding.names for finding in report.findings if finding.kind == "key")
        salvaged, outputs = filling.outputs(set[str]().union(*misspelt))
        job = make_job(salvaged, target, (), lambda _: outputs, container)
        entry, size = salvaged.provenance["salvaged"][-1], report.payload_bytes
        last = replace(execution, progress=lambda count, total: execution.progress(count, size + total))
        result = last.run(job, place, (entry["damage"], *entry["notes"], *notes_on_unread(damaged)), workers)
        advice = tuple(advice_on_attempt(damaged, place, container.name))
        return result and replace(result, salvaged=entry, advice=advice)


def _format_of_files(damaged: OpenCheckpoint, place: Location) -> str:
    """Return the format to write: DeepSpeed reads no other than that of its own stage, which only folders can have."""
    if damaged.format.name == ZERO.name and not isinstance(place, Remote):
        return str(damaged.provenance["zero"]["format"])
    return default_format(damaged, None)


def _descriptions(path: Location, errors: list[SourceError]) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint by each description of it that can be read, the fullest first; add why others cannot.

    Raises:
        SourceError: replicas differ, and nothing tells which is right.
    """
    # A folder may have both descriptions, other formats have one.
    described = ((OWN, MANIFEST_FILE), (DCP, METADATA_FILE)) if path.is_dir() else ()
    for format in [format for format, name in described if (path / name).exists()] or [format_of(path)]:
        try:
            opened = OpenCheckpoint(path, format)
        except SourceError as error:
            errors.append(error)
            if format is OWN and isinstance(error, DamageError):
                with suppress(SourceError):
                    yield OpenCheckpoint(path, OWN_LINES)
            if format_of_replicas := format.without(()):  # there may be some of what is missing
                with suppress(SourceError):
                    yield OpenCheckpoint(path, format_of_replicas)
            continue
        for fault in opened.faults if format.remains else ():
            if not isinstance(fault, LostFileError):
                raise fault
        yield opened


def _with_unlisted(damaged: OpenCheckpoint, others: Sequence[OpenCheckpoint]) -> OpenCheckpoint:
    """Return a checkpoint as one that has lost also the tensors that only others say it had.

    Raises:
        SourceError: none of them says so.
    """
    # A format without paths has keys for paths; tensors of another format get the same.
    has_only_keys = all(tensor.path == (tensor.key,) for tensor in damaged.outline.tensors)
    keys = {*entry_keys(damaged.outline.tensors)}
    for fault in (fault for fault in damaged.faults if isinstance(fault, UnlistedError) and fault.count != 0):
        for other in others:
            # It has to be of the same model, and to have exactly as many more as are missed.
            tensors = by_key(other.outline.tensors)
            lost = [t for key, t in tensors.items() if key not in keys and key in (fault.keys or (key,))]
            if keys & tensors.keys() and fault.count in (None, len(lost)):
                if has_only_keys:
                    lost = [StateRecord(t.key, (t.key,), t.shape, t.dtype, t.chunks) for t in lost]
                return damaged.with_lost_tensors(lost)
        names = ", ".join(str(other.path) for other in others)
        tried = f"; those given ({names}) do not" if others else ""
        raise SourceError(
            f"{damaged.path}: {str(fault).removeprefix(f'{damaged.path}: ')}. Nothing was written. {ADVICE}give a "
            f"checkpoint that has the same keys, such as the step before, with `others=`: it says what there was{tried}"
        )
    return damaged


def _best(path: Location) -> OpenCheckpoint:
    """Open a checkpoint, which may be damaged itself, by the fullest description of it that can be read.

    Raises:
        SourceError: there is none.
    """
    errors: list[SourceError] = []
    for opened in _descriptions(path, errors):
        return opened
    raise errors[0]


def _replicas(damaged: OpenCheckpoint, damage: Damage) -> Iterator[OpenCheckpoint]:
    """Open what a damaged checkpoint is without the files that have damage, where ranks have replicas in others."""
    files = damage.files.keys() | damaged.outline.columns.files_of(damage.chunks)
    if format_of_replicas := format_of(damaged.path).without(files):
        with suppress(SourceError):
            yield OpenCheckpoint(damaged.path, format_of_replicas)


def _ranks(checkpoint: OpenCheckpoint) -> int:
    """Return how many ranks a checkpoint is for, as far as it says so."""
    provenance = checkpoint.provenance
    match provenance.get("zero"):
        case {"ranks": int(num_ranks)}:
            return num_ranks
    match provenance.get("resharded"):
        case [*_, {"mesh": dict(mesh)}]:
            return max(math.prod(size for size in mesh.values() if isinstance(size, int)), 1)
    ranks = provenance.get("world") or provenance.get("ranks")
    return ranks if isinstance(ranks, int) and ranks > 0 else max(len(checkpoint.outline.columns.names), 1)
