"""Can a checkpoint be resumed on a mesh?  Yes or no, why, and what each rank would hold there.

Tensors are laid out as `reshard` lays them out.  Tensors of one shape and cut share a layout, so costs are those of the
geometries, not of tensors times ranks.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.layout import TensorLayout
from ...algebra.overlap import overlaps
from ...names.collector import gc_paused
from ...names.errors import SourceError
from ...names.vocabulary import FLATTEN
from ...names.wording import Finding, command, counted, fields_of, size, unnumbered
from ...programs.model_view import Role
from ...record.record import Boxes, StateRecord, entry_keys, says_convention
from ...store.io.location import Location, Remote, location
from ...store.reading.dtypes import itemsize
from ...store.verify.diagnosis import Diagnosis, diagnosis_by_files, open_damaged
from ...store.verify.verification import unless_removed
from ..engine.rank_files import lay_out
from ..target.topology import ROWS, AxisCut, Target
from .contents import FirstLook, first_look, unknown_state
from .holders import balance_of

Counts = NDArray[np.int64]

WEIGHTS = "weights and others"
"""The label of tensors in no slot of optimizer state."""


@dataclass(frozen=True, slots=True)
class Unevenness:
    """Weights and state with one name in all layers, in different amounts on the ranks.

    Attributes:
        pattern: the name of their parameter, or their key, with ``*`` for the parts that are numbers.
        cuts: the axes and the dims that they cut.
        least, most: the elements of a rank.
        empty_ranks: how many hold none.
    """

    pattern: str
    tensors: int
    shape: tuple[int, ...]
    cuts: str
    least: int
    most: int
    empty_ranks: int


@dataclass(frozen=True)
class Fit:
    """The answer whether a checkpoint can be resumed on a mesh; true if it can.

    Attributes:
        mesh: sizes by axis, outermost first; ``layout`` and ``rules`` as `reshard` takes them.
        tensors: how many there are; ``uneven_tensors`` of them are cut into unequal shares, and of ``empty_tensors``
            some ranks would hold nothing: at most ``empty_ranks`` of one.
        optimizer: what its state needs: ``"load"``, ``"convert"``, ``"none"`` if there is none, or ``"unknown"`` if
            its form is.
        shares: for each slot ``tensors``, ``bytes``, and the ``least``, ``mean``, ``most`` that a rank would hold; the
            last entry is of all.
        uneven: what ranks would hold unequal shares of, folded by layers.
        findings: what else to know before the run is started.
        reads: ``count`` and ``bytes`` of what all ranks together would read from chunks in a `load`, and ``resharded``:
            the count from a checkpoint that was resharded for this mesh before.
        diagnosis: the checkpoint's faults; false if there are none.
    """

    checkpoint: str
    mesh: Mapping[str, int]
    layout: str
    rules: tuple[str, ...]
    tensors: int
    uneven_tensors: int
    empty_tensors: int
    empty_ranks: int
    optimizer: str
    shares: tuple[Mapping[str, Any], ...]
    uneven: tuple[Unevenness, ...]
    findings: tuple[Finding, ...]
    reads: Mapping[str, int]
    diagnosis: Diagnosis = field(repr=False)

    def __bool__(self) -> bool:
        return not self.diagnosis.has_loss

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def place(self) -> str:
        """The mesh in the form of the command line."""
        return ",".join(f"{axis}={count}" for axis, count in self.mesh.items())

    @property
    def sentence(self) -> str:
        """The answer in one sentence, yes or no first."""
        if not self:
            return f"no: {self.diagnosis.sentence}"
        shares = []
        if self.uneven_tensors:
            verb = "is" if self.uneven_tensors == 1 else "are"
            shares.append(f"{self.uneven_tensors} of {counted(self.tensors, 'tensor')} {verb} uneven")
        if self.empty_tensors:
            ranks = f"{'up to ' * (self.empty_tensors > 1)}{counted(self.empty_ranks, 'rank')}"
            verb = "holds" if self.empty_ranks == 1 else "hold"
            shares.append(f"{ranks} {verb} nothing of {self.empty_tensors}")
        if self.layout != ROWS:
            shares.append(f"a rank would hold {size(self.shares[-1]['least'])} to {size(self.shares[-1]['most'])}")
        answer = {
            "load": "yes: `load` reshards it",
            "convert": "yes for its weights, which `load` reshards; its optimizer state after `convert`",
            "unknown": "yes for its weights, which `load` reshards; its optimizer state has an unknown form",
            "none": "yes: `load` reshards its weights; it has no optimizer state, which would start fresh",
        }[self.optimizer]
        return f"{answer}; {' and '.join(shares) or 'all ranks hold equal shares'}"

    @property
    def advice(self) -> str:
        """Whether `load` suffices, or `reshard` is of use, in one sentence with the command."""
        if not self:
            return self.diagnosis.advice
        mean = self.reads["bytes"] // max(self.reads["count"], 1)
        reads = f"the ranks would read {counted(self.reads['count'], 'piece')} of {size(mean)} on average"
        if self.reads["count"] < max(_MANY_READS, 2 * self.reads["resharded"]) or mean > _SMALL_READ:
            return f"`load` suffices: {reads}"
        # The command with the same cuts.
        options = ["--mesh", self.place]
        for rule in self.rules:
            options += ["--shard", rule]
        options += ["--layout", self.layout] if self.layout != ROWS else []
        reshard = command("reshard", self.checkpoint, f"{self.checkpoint}-resharded", *options)
        fewer = counted(self.reads["resharded"], "piece")
        return f"`load` suffices, but {reads}; from a slow store it may pay to reshard once ({fewer}): {reshard}"

    def to_json(self) -> dict[str, Any]:
        answer = {"fits": bool(self), "sentence": self.sentence, "advice": self.advice, "ranks": self.ranks}
        return answer | fields_of(self)


_MANY_READS = 100_000
_SMALL_READ = 1 << 20
"""Where ranks read more pieces than this that are smaller than this, a slow store is busy with requests."""


def fits(
    path: str | os.PathLike[str] | Remote,
    mesh: Mapping[str, int],
    *,
    shard: Mapping[str, Sequence[AxisCut]] = MappingProxyType({}),
    layout: str = ROWS,
) -> Fit:
    """Say whether a checkpoint can be resumed on a mesh, as ``muonckpt inspect --fits`` prints it.

    Reads metadata and the sizes of files, no elements; needs no torch.

    Args:
        path: a checkpoint of any format and program.
        mesh, shard, layout: as for `reshard`: sizes of axes by name, the outermost first; which axes cut which dims of
            the tensors whose key matches a pattern, by default all axes cut the rows; and what each rank holds.

    Raises:
        SourceError: there is no checkpoint, or its metadata cannot be read; says what to do about damage.
        TargetError: an argument does not fit the others, or the checkpoint.
    """
    place = location(path, SourceError)
    with gc_paused(), unless_removed(place), open_damaged(place) as opened:
        # Every tensor is laid out as `reshard` would.
        target, look = Target.of(mesh, shard, layout), first_look(opened)
        tensors = [tensor for tensor in look.manifest.tensors if math.prod(tensor.shape)]
        shares = _Shares(target, lay_out(target, tensors, opened.provenance).layouts)
        names = {key: name for key, name in look.view.owners.items() if not name.isdecimal()}
        uneven = tuple(shares.uneven(tensors, names))
        return Fit(
            checkpoint=str(opened.path),
            mesh=dict(target.mesh),
            layout=target.layout,
            rules=tuple(map(str, target.rules)),
            tensors=len(tensors),
            uneven_tensors=sum(entry.tensors for entry in uneven),
            empty_tensors=sum(entry.tensors for entry in uneven if entry.empty_ranks),
            empty_ranks=max((entry.empty_ranks for entry in uneven), default=0),
            optimizer=_optimizer_answer(look, opened.not_read),
            shares=tuple(shares.by_slot(tensors)),
            uneven=uneven,
            findings=tuple(_findings(look, target, tensors, opened.path)),
            reads=shares.reads(tensors),
            diagnosis=diagnosis_by_files(opened),
        )


def _optimizer_answer(look: FirstLook, not_read: Sequence[str]) -> str:
    """Return whether the optimizer's state can be loaded, has to be converted, is of an unknown form, or is missing."""
    manifest = look.manifest
    if not any(parameter.state for parameter in look.view.parameters.values()):
        has_slots = any(tensor.slot is not None for tensor in manifest.tensors)
        return "convert" if has_slots else "unknown" if any(unknown_state(look, not_read)) else "none"
    return "load" if says_convention((*manifest.tensors, *manifest.blobs)) else "convert"


@dataclass(frozen=True)
class _Shares:
    """The shares of the ranks of a target; results for a layout are kept for all tensors with it."""

    target: Target
    layouts: Mapping[str, TensorLayout]
    _elements: dict[int, Counts] = field(default_factory=dict)
    _pairs: dict[tuple[int, Boxes], int] = field(default_factory=dict)

    def elements(self, layout: TensorLayout) -> Counts:
        """Return the elements that each rank holds."""
        if id(layout) not in self._elements:
            by_rank = np.zeros(self.target.ranks, np.int64)
            numel = (layout.stops - layout.starts).prod(axis=1)
            np.add.at(by_rank, np.array(layout.buffers, np.int64)[layout.buffer], numel[layout.box])
            if not layout.shape:  # one rank writes a scalar, and all hold it
                by_rank[:] = 1
            self._elements[id(layout)] = by_rank
        return self._elements[id(layout)]

    def by_slot(self, tensors: Sequence[StateRecord]) -> Iterator[dict[str, Any]]:
        """Yield the shares of each slot, and of all."""
        # Tensors of one geometry are counted, and their shares computed once.
        counts: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
        for tensor in tensors:
            layout = self.layouts[tensor.key]
            self.elements(layout)
            counts[tensor.slot or WEIGHTS][id(layout), itemsize(tensor.dtype)] += 1
        total = np.zeros(self.target.ranks, np.int64)
        for slot, geometries in counts.items():
            by_rank = np.zeros(self.target.ranks, np.int64)
            for (layout_id, width), count in geometries.items():
                by_rank += self._elements[layout_id] * (width * count)
            total += by_rank
            yield _share_row(slot, sum(geometries.values()), by_rank)
        if len(counts) > 1:
            yield _share_row("all", len(tensors), total)

    def uneven(self, tensors: Sequence[StateRecord], names: Mapping[str, str]) -> Iterator[Unevenness]:
        """Yield unequal shares of rows; flat buffers divide tensors unequally by design, so there are none to report.

        Args:
            names: the parameter of each weight and of its state, by key.
        """
        if self.target.layout != ROWS:
            return
        # Layers with equal cuts count as one pattern.
        patterns: Counter[tuple[str, tuple[int, ...], str, int]] = Counter()
        all_axes = tuple((axis, 0) for axis in self.target.mesh)
        for tensor in (tensor for tensor in tensors if tensor.shape):
            layout = self.layouts[tensor.key]
            by_rank = self.elements(layout)
            if by_rank.min() != by_rank.max():
                cuts = ", ".join(f"{axis}:{dim}" for axis, dim in self.target.cuts(tensor, all_axes))
                patterns[unnumbered(names.get(tensor.key, tensor.key)), tensor.shape, cuts, id(layout)] += 1
        for (pattern, shape, cuts, layout_id), count in patterns.items():
            by_rank = self._elements[layout_id]
            least, most, empty_ranks = int(by_rank.min()), int(by_rank.max()), int((by_rank == 0).sum())
            yield Unevenness(
                pattern, tensors=count, shape=shape, cuts=cuts, least=least, most=most, empty_ranks=empty_ranks
            )

    def reads(self, tensors: Sequence[StateRecord]) -> dict[str, int]:
        """Count what ranks read of the chunks that there are, and of such as they would write themselves."""
        count = bytes_read = resharded = 0
        for tensor in tensors:
            if not tensor.shape:  # each rank reads it
                count, resharded = count + self.target.ranks, resharded + self.target.ranks
                bytes_read += itemsize(tensor.dtype) * self.target.ranks
                continue
            layout = self.layouts[tensor.key]
            key = id(layout), tensor.boxes
            # A rank reads each chunk that overlaps its box, as every replica of the box does.
            if key not in self._pairs:
                replicas = np.bincount(layout.box, minlength=len(layout.starts))
                has_elements = tensor.boxes.numel > 0
                chunks = tensor.boxes.lo[has_elements], tensor.boxes.hi[has_elements]
                boxes, _ = overlaps(layout.starts, layout.stops, *chunks)
                self._pairs[key] = int(replicas[boxes].sum())
            count += self._pairs[key]
            bytes_read += layout.total_numel * itemsize(tensor.dtype)
            resharded += len(layout.box)
        return {"count": count, "bytes": bytes_read, "resharded": resharded}


def _share_row(slot: str, tensors: int, by_rank: Counts) -> dict[str, Any]:
    balance = balance_of(dict(enumerate(by_rank.tolist())))
    return {"slot": slot, "tensors": tensors, "bytes": int(by_rank.sum()), **balance}


def _findings(look: FirstLook, target: Target, tensors: Sequence[StateRecord], path: Location) -> Iterator[Finding]:
    """Yield facts about the optimizer and the cuts that the answer leaves out."""
    # Facts that the answer leaves out.
    if target.layout == ROWS and not target.rules and len(target.mesh) > 1:
        axes = " and ".join(target.mesh)
        yield Finding(
            "default_cut",
            f"without `shard=`, {axes} together cut the rows of every tensor into {target.ranks} parts; give the cuts "
            "of your program for what its ranks would hold (`load` takes any)",
        )
    # Steps that the run has to take for its optimizer.
    dialect = look.view.dialect
    if _optimizer_answer(look, ()) == "convert":
        who = dialect.name if dialect else "no known program"
        source = "" if dialect else " --from PROGRAM"
        to_ours = command("convert", path, f"{path}-for-muonckpt", "--to", "muonckpt")
        yield Finding(
            "program", f"the optimizer state has the keys of {who}: {to_ours}{source}; then `load` reshards that, too"
        )
    if dialect and dialect.numbered:
        yield Finding(
            "numbers",
            "the optimizer state knows parameters by number: only the same parameter groups in the same order take it; "
            "get_state_dict saves names, which any groups take",
        )
    if masters := look.view.tensors_of(Role.MASTERS):
        yield Finding.listing(
            "masters",
            f"{counted(len(masters), 'parameter')} with float32 masters in the state, which LayerWise takes; for an "
            "optimizer without masters make the weights of them by `muonckpt convert --weights masters`",
            entry_keys(masters),
        )
    # Consequences of the cuts for the program that runs there.
    if target.layout == ROWS:
        yield from _cut_findings(look, target, tensors)
    cut_axes: set[str] = set()
    for rule in target.rules:
        cut_axes.update(axis for axis, _ in rule.cuts if target.mesh[axis] > 1)
    if target.layout != ROWS and cut_axes:
        axes = " and ".join(sorted(cut_axes))
        yield Finding(
            "layer_wise",
            f"LayerWise takes plain tensors: what {axes} cut has to be the local tensors of a program such as "
            "Megatron, not DTensors, which Muon takes",
        )


_CUT_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "fused": "that is right where parameters are gathered before they are used (FSDP), and wrong for tensor "
        "parallelism, where each rank needs its share of every fused matrix",
        "stack": "expert parallelism usually wants equal numbers",
        "unequal": "tensor parallelism takes that, FSDP2 refuses it",
    }
)
"""Consequences of cuts for programs, by the kind of the finding; `load` and Muon take them all."""


def _cut_findings(look: FirstLook, target: Target, tensors: Sequence[StateRecord]) -> Iterator[Finding]:
    """Yield a finding for the cuts that are right for some programs only: of fused matrices, and into unequal parts.

    Unequal parts of the rows of a matrix, or of a vector, are no finding: all programs have them.
    """
    # The rows of fused matrices, by the keys of weights and of the state that records them; and flattened tensors.
    pieces, flattened = dict[str, tuple[int, ...]](), set[str]()
    for parameter in look.view.parameters.values():
        stored = [tensor for tensor in (parameter.weight, *parameter.state.values()) if tensor]
        rows = next((tensor.pieces for tensor in stored if tensor.pieces), None) or parameter.options.get("pieces")
        if isinstance(rows, list | tuple) and len(rows) > 1:
            pieces |= {tensor.key: tuple(rows) for tensor in stored if len(tensor.shape) >= 2}
        if parameter.options.get(FLATTEN):
            flattened |= {*entry_keys(stored)}
    # Many tensors are cut in the same way, which is one finding with their keys.
    keys_by_cut: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for tensor in tensors:
        axes_by_dim: defaultdict[int, list[str]] = defaultdict(list)
        for axis, dim in target.cuts(tensor, ()):
            if target.mesh[axis] > 1:
                axes_by_dim[dim].append(axis)
        for dim, axes in axes_by_dim.items():
            # All parts but the last have ceil(length / parts) indices, as in FSDP and DTensor.
            parts, length = math.prod(target.mesh[axis] for axis in axes), tensor.shape[dim]
            part_length = -(-length // parts)
            empty_parts = parts - -(-length // part_length)
            cut = f"{','.join(axes)}:{dim} cuts"
            emptiness = f", {empty_parts} of them empty" if empty_parts else ""
            parts_text = f"{parts} parts of at most {part_length}{emptiness}"
            is_kernel = len(tensor.shape) > 3 or tensor.key in flattened
            if tensor.key in pieces and dim == (0 if is_kernel else len(tensor.shape) - 2):
                heights = "+".join(map(str, pieces[tensor.key]))
                kind, message = "fused", f"{cut} rows that are fused of {heights} into {parts} parts"
            elif length % parts and len(tensor.shape) == 3 and dim == 0 and not is_kernel:
                kind, message = "stack", f"{cut} stacks of {length} matrices into {parts_text}"
            elif length % parts and dim:
                kind, message = "unequal", f"{cut} {length} indices into {parts_text}"
            else:
                continue
            keys_by_cut[kind, message].append(tensor.key)
    for (kind, message), keys in keys_by_cut.items():
        yield Finding.listing(kind, f"{message} ({_CUT_MEANINGS[kind]})", keys)
