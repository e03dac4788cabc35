"""Saving and loading a training run: DCP's formats and keys, with every element accounted for.

``save`` writes a directory that stock ``torch.distributed.checkpoint.load`` reads, plus the manifest
``muonckpt.json``.  ``load`` reads that, or any checkpoint that `muonckpt.open` opens, into live tensors on any mesh.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..resumption import LoadReport
from .dcp_reader import WhenChecked
from .dcp_writer import SaveProgress
from .joint_load import JointLoad, LoadArguments
from .joint_save import AgreedPlans, JointSave
from .taken_options import dropped_by_torch


def save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a state dict as a new checkpoint, in a directory that all ranks see or in an object store.  Collective.

    A directory appears whole, by one rename, after everything in it has been synced and checked; in a store the
    descriptions of the checkpoint are written last (docs/guide/object_stores.md).  If anything fails on any rank,
    nothing appears.

    Args:
        state_dict: nested, as for ``dcp.save``; for example
            ``{"model": get_model_state_dict(m), "optimizer": get_optimizer_state_dict(m, opt)}``.
        path: a path or a URL, where nothing may exist yet.
        provenance: JSON data to keep in the manifest, such as ``{"step": 100}``; the first rank's is kept.

    Raises:
        DestinationError: the path exists, or cannot be written.
        LayoutError: a tensor has a hole or an overlap, or replicas differ.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
        ArgumentError: the provenance is not JSON, or the path is not the same on all ranks.
    """
    JointSave(path, provenance or {}, process_group, _plans_of(process_group), SaveProgress()).run(lambda: state_dict)


_plans: WeakKeyDictionary[dist.ProcessGroup, AgreedPlans] = WeakKeyDictionary()
_alone = AgreedPlans()
"""Of a process without a process group."""


def _plans_of(process_group: dist.ProcessGroup | None) -> AgreedPlans:
    """Kept as long as the process group."""
    group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    return _alone if group is None else _plans.setdefault(group, AgreedPlans())


def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
    attest: bool = False,
    check: WhenChecked | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint in place into the tensors of ``state_dict``, whatever mesh they are on.  Collective.

    Everything that is checked without reading data (keys, coverage, shapes, dtypes, momentum convention, the items of
    a stock checkpoint) is checked on all ranks before any tensor is touched, and so are digests and checksums unless
    ``check`` says otherwise.  The first rank reads what describes the checkpoint, for all; each opens only the items
    that it loads.  Of a chunk of which it needs one run of
    elements, as of rows, it reads only that, and all ranks check the chunk together.

    Args:
        state_dict: the template, nested as it was saved; other objects with ``load_state_dict`` are called.
        path: a path or a URL of a checkpoint of this package, of stock DCP, or of any other format that this package
            reads, if its keys are those of the template.
        allow_extra: True: load only what the template asks for.  Globs of keys, such as ``["lr_scheduler.*"]``, where
            ``*`` stands for any characters: leave only these.  Other keys that only the checkpoint has are an error, as
            keys that only the template has always are; but options of groups that a converted checkpoint does not say
            stay as the running optimizer has them, which the report and a warning say.
        fresh: globs of parameters' names as the optimizer's state has them, such as ``["lm_head.*"]``; ``*`` stands for
            any characters.  The state of these parameters is not loaded but becomes zeros, so the number of their steps
            too; their options are those of their group.  What only the checkpoint has of them is dropped.  A weight of
            such a name, which is the last part of its path, is loaded where both sides have it, keeps its values where
            the checkpoint has none, and is dropped where only the checkpoint has it.  The same on every rank.
        attest: at the end take the fingerprints of the loaded tensors, from memory, and compare them with those of the
            checkpoint (docs/guide/attest.md).
        check: ``"before"``: every rank compares what it is to load with digests and checksums, and none touches a
            tensor unless all of it is whole.  ``"while"``: each chunk when it is read, so damage may be found when
            other tensors have been overwritten; the error then says that the state dict is unusable.  None:
            ``"before"``, but for an object store, from which the bytes would be read twice, ``"while"``.

    Returns:
        What was done with which parameters, the same on every rank; print it.

    Raises:
        SourceError: the checkpoint is missing, damaged or does not fit, or a glob matches nothing; lists what differs.
        LayoutError: it has a hole or an overlap.
        AttestError: what is in memory is not what the checkpoint has.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
        ArgumentError: ``fresh`` or ``allow_extra`` is no list of strings, ``check`` is unknown, or an argument is not
            the same on all ranks.
    """
    joint = JointLoad(LoadArguments(path, allow_extra, fresh, attest, check), process_group)
    report = joint.run(state_dict)
    if joint.planner.matching.own_options:
        own = "; ".join(joint.planner.matching.own_options)
        warnings.warn(f"{path} does not say options, which stay as the running optimizer's: {own}", stacklevel=2)
    if dropped := dropped_by_torch(joint.planner.matching.added):
        warnings.warn(
            f"{path} has {', '.join(dropped)}, which torch's set_state_dict drops from a flattened state dict, because "
            "the running optimizer's groups have no such option; a scheduler would then begin at the loaded lr: give "
            "the groups that option, of any value, before get_state_dict (a scheduler that is made then does), or load "
            "a nested state dict",
            stacklevel=2,
        )
    return report
