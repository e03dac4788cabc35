"""Exports the model of a checkpoint in the form that other programs load, by all ranks together."""

from __future__ import annotations

import torch.distributed as dist

from ...converters.engine.container import container_of
from ...converters.engine.job import check_destination, make_job
from ...converters.engine.workers import joined_ranks
from ...converters.options import Execution, Translation
from ...converters.rewrite import target_of
from ...converters.target.topology import ROWS
from ...names.errors import ArgumentError, DamageError, SourceError
from ...names.wording import listed
from ...store.io.location import Location
from ...store.verify.diagnosis import open

FORMS = ("hf",)
"""The forms of an export.  "hf": safetensors with an index, whole weights under the model's own names, as Hugging
Face's libraries and inference engines load them beside a ``config.json``."""

SHARD_SIZE = 5 * 10**9
"""The most bytes of weights in a file, unless one weight is larger: the usual size of shards of weights."""


def check_form(form: str) -> None:
    """Refuse a form that there is not.

    Raises:
        ArgumentError: it is not one of `FORMS`.
    """
    if form not in FORMS:
        raise ArgumentError(f"expected a form of an export, one of {', '.join(map(repr, FORMS))}, found {form!r}")


def export_model(
    source: Location, destination: Location, process_group: dist.ProcessGroup | None, shard_size: int
) -> None:
    """Write the model of a checkpoint as a folder of safetensors files, each rank its share of them.

    Weights are compared with the checkpoint's fingerprints on the way.  The folder appears when all is written.

    Raises:
        SourceError: the checkpoint is damaged, has no model, or a dtype that the form lacks.
        DestinationError: the destination exists, or cannot be written.
        Interrupted: a rank was lost.
    """
    request = Translation(model_only=True, roots={"model": ""}).request("muonckpt")
    with joined_ranks(process_group) as workers, open(source) as opened:
        container = container_of("safetensors", shard_size)
        check_destination(opened.path, destination, container)
        try:
            job = make_job(opened, target_of({"dp": 1}, {}, ROWS), (), request.outputs, container)
        except SourceError as error:
            roots = {tensor.path[0] for tensor in opened.manifest.tensors}
            if isinstance(error, DamageError) or "model" in roots:
                raise
            where = listed(map(repr, sorted(map(str, roots))), 4) or "nothing"
            raise SourceError(
                f"{opened.path}: expected weights of a model under 'model', found keys under {where}: save the state "
                "dict as {'model': model.state_dict(), ...}"
            ) from error
        Execution(jobs=1).run(job, destination, (), workers)
