"""State dicts, each rank's part saved with ``torch.save``: DTensors, put together by their meshes.

* verl: ``model_world_size_{W}_rank_{r}.pt``, ``optim_…`` and ``extra_state_…``, which is not read;
* accelerate with FSDP2 and without DCP: ``pytorch_model_fsdp_{i}_rank{r}.bin`` and ``optimizer_{i}_rank{r}.bin``;
* torch_checkpointing: ``{key}_{r}.pt`` for each key of what was saved.  Its ``metadata.pkl`` repeats what DTensors say.

Models are under ``model``, optimizers under ``optimizer``; those after the first under ``model_1``, ``optimizer_1``, …;
torch_checkpointing's keys are kept.

Sources: ``FSDPCheckpointManager`` and ``build_optimizer`` of verl (0.8), ``save_fsdp_model`` and
``save_fsdp_optimizer`` of accelerate (1.15), ``default_layout_info`` of torch_checkpointing (July 2026).
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from ....algebra.box import Index, row_major
from ....layouts.mesh import Mesh, fragments_on, local_shape
from ....names.errors import DamageError, LayoutError, SourceError, about
from ....names.keys import is_optimizer, key_of
from ....names.vocabulary import KeyPath
from ....names.wording import listed
from ....programs import signs
from ....record.record import Chunk, Chunks, Extent, StateRecord
from ...io.location import Location, names_in
from ...reading.dtypes import itemsize
from ...reading.payloads import Reader
from ..torch_save.plain_item import ItemsInMemory
from ..torch_save.tensor_item import is_row_major
from ..torch_save.torch_file import (
    SavedTensor,
    TorchFile,
    is_mapping,
    mapping,
    read_torch_file,
    whole_record,
)
from .state_tree import (
    AS_PARAMETER,
    NamesFile,
    RankPart,
    Undecoded,
    decoded,
    is_dtensor,
    optimizer_with_names,
    optimizers_with_names,
    rank_part,
    same_on_ranks,
    trainer_reader,
)

_VERL = re.compile(r"(model|optim)_world_size_([1-9][0-9]{0,5})_rank_(0|[1-9][0-9]{0,5})\.pt")
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(_[0-9]{1,4})?_rank(0|[1-9][0-9]{0,5})\.bin")
_TORCH_CHECKPOINTING = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,99})_(0|[1-9][0-9]{0,5})\.pt")
_ROOTS = {"model": "model", "optim": "optimizer", "pytorch_model_fsdp": "model", "optimizer": "optimizer"}


@dataclass(frozen=True, slots=True)
class _RankFile:
    """A file of one rank of a world, if its name says how large that is."""

    name: str
    root: str
    rank: int
    world: int | None


def reader(path: Location) -> Reader:
    """Read a folder of such files, but no elements.

    Where no replica has what the missing or damaged file of a rank held, tensors have holes.

    Raises:
        SourceError: ranks contradict each other, or a file holds more than tensors and plain data; nothing in it is
            run.
    """
    listed = names_in(path)
    files, torch_files = _parse_file_names(listed), dict[str, TorchFile]()
    damage: list[DamageError] = []
    for file in files:
        try:
            torch_files[file.name] = read_torch_file(path, file.name)
        except DamageError as error:
            damage.append(error)
    if not torch_files:
        if damage:
            raise damage[0]
        raise SourceError(
            f"{path}: expected files of ranks such as model_world_size_8_rank_0.pt, with at most six digits a number, "
            f"found {listed[:8]!r:.300}"
        )
    # A root is a model or an optimizer; its files are those of all ranks.
    by_root: defaultdict[str, list[_RankFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: (file.root, file.rank)):
        by_root[file.root].append(file)
    with about(path):
        world, lost = _count_ranks(by_root, torch_files.keys())
        names = NamesFile.beside(path)
        contents = _JoinedRanks(is_partial=bool(lost), faults=lost)
        order: dict[str, Index] = {}
        numbered: dict[str, None] = {}
        # Models come before optimizers, whose names may come from them.
        for root, all_files in by_root.items():
            values, root_files = [], [file for file in all_files if file.name in torch_files]
            for root_file in root_files:
                torch_file = torch_files[root_file.name]
                content, unnamed = _name_parameters(torch_file, root, names, order)
                numbered |= dict.fromkeys(unnamed)
                with about(torch_file.name):
                    values.append(dict(decoded(torch_file, content, (root,), dtensors=True)))
            contents.add(values, [file.name for file in root_files])
            if root == "model" and values and root_files[0].world is not None:
                order = _parameters(values[0])
        names.check_used(contents.tensors, contents.items)
    known_names = {file.name for file in files} | {signs.NAMES_FILE, signs.TORCH_CHECKPOINTING_FILE}
    provenance = {
        "ranks": world,
        signs.NOT_READ: [*(name for name in listed if name not in known_names), *contents.undecoded],
        signs.NUMBERED: [*numbered],
    }
    return trainer_reader(path, contents.tensors, contents.items, torch_files.values(), provenance, contents.faults)


def _parse_file_names(listed: Sequence[str]) -> list[_RankFile]:
    """Return the files of verl and accelerate, or else those of torch_checkpointing, whose names say less."""
    # torch_checkpointing's names match many others, so they count only where there are none of the other programs.
    files, keyed = [], []
    for name in listed:
        if match := _VERL.fullmatch(name):
            files.append(_RankFile(name, root=_ROOTS[match[1]], rank=int(match[3]), world=int(match[2])))
        elif match := _ACCELERATE.fullmatch(name):
            number = "" if match[2] in (None, "_0") else match[2]
            files.append(_RankFile(name, root=f"{_ROOTS[match[1]]}{number}", rank=int(match[3]), world=None))
        elif match := _TORCH_CHECKPOINTING.fullmatch(name):
            keyed.append(_RankFile(name, root=match[1], rank=int(match[2]), world=None))
    return files or keyed


def _count_ranks(
    by_root: Mapping[str, Sequence[_RankFile]], readable: Collection[str]
) -> tuple[int, list[SourceError]]:
    """Return the number of ranks, and for each root which of them have no file that can be read."""
    worlds: set[int | None] = set()
    for files in by_root.values():
        worlds.update(file.world for file in files)
    if len(worlds) > 1:
        raise SourceError(
            f"expected the files of one run, found some of {' and some of '.join(sorted(map(str, worlds)))} ranks: "
            "move those of other runs away"
        )
    world, faults = worlds.pop() or 1 + max(files[-1].rank for files in by_root.values()), list[SourceError]()
    for root, files in by_root.items():
        ranks = [file.rank for file in files if file.name in readable]
        if lost_ranks := sorted({*range(world)} - {*ranks}):
            actual = f"none of rank {listed(lost_ranks)}"
            faults.append(DamageError(f"expected a file of {root} of each of {world} ranks, found {actual}"))
        elif ranks != list(range(world)):
            actual = f"those of ranks {listed(ranks)}"
            raise DamageError(f"expected a file of {root} of each of {world} ranks, found {actual}")
    return world, faults


def _name_parameters(
    file: TorchFile, root: str, names: NamesFile, order: Mapping[str, Index]
) -> tuple[object, list[str]]:
    """Return a file's content with names for optimizers' numbers, and the keys of optimizers without names.

    Args:
        order: the shapes of the model's parameters in their order, if that may be the optimizer's.
    """
    with about(file.name):
        if not is_mapping(file.content):
            return file.content, []
        content = mapping(file.content)
        may_follow = order and names.of(root) is None and is_optimizer(content)
        if may_follow and _has_whole_model(content, order, file):
            return optimizer_with_names(content, list(order))[0], []
        return optimizers_with_names(content, (root,), names)


def _has_whole_model(content: Mapping[object, object], order: Mapping[str, Index], file: TorchFile) -> bool:
    """Return whether an optimizer has one group of all the model's parameters, in its order.

    verl makes it so, ``build_optimizer(module.parameters())``, and no other program with such file names does.
    """
    groups = content["param_groups"]
    if type(groups) is not list or len(groups) != 1 or mapping(groups[0]).get("params") != list(range(len(order))):
        return False
    # Its state has the shapes of the parameters with these numbers.
    shapes = dict(enumerate(order.values()))
    for number, slots in mapping(content["state"]).items():
        for slot, value in mapping(slots).items():
            if slot in AS_PARAMETER:
                shape = rank_part(file, value).shape if is_dtensor(value) else None
                if type(number) is not int or shape is None or shapes.get(number) != shape:
                    return False
    return True


def _parameters(values: Mapping[KeyPath, object]) -> dict[str, Index]:
    """Return the shapes of a model's parameters by name, in its order; tied ones have their first name."""
    order: dict[str, Index] = {}
    storages = set()
    for path, value in values.items():
        if isinstance(value, RankPart) and (value.local.payload not in storages or not value.local.box.numel):
            storages.add(value.local.payload)
            order[str(path[-1])] = value.shape
    return order


@dataclass(frozen=True, slots=True)
class _JoinedRanks:
    """The tensors and items of all ranks, or if it is partial of some, and the damage found."""

    is_partial: bool
    tensors: list[StateRecord] = field(default_factory=list)
    items: ItemsInMemory = field(default_factory=ItemsInMemory)
    faults: list[SourceError] = field(default_factory=list)
    undecoded: list[str] = field(default_factory=list)

    def add(self, ranks: Sequence[Mapping[KeyPath, object]], files: Sequence[str]) -> None:
        """Join the values of ranks, which are in these files."""
        kinds: defaultdict[KeyPath, set[type]] = defaultdict(set)
        for path, value in chain.from_iterable(values.items() for values in ranks):
            kinds[path].add(type(value))
        # A data loader may have what it keeps under keys of the rank; where there are shards, all ranks have all keys.
        has_shards = any(RankPart in types for types in kinds.values())
        for rank, values_of_rank in enumerate(ranks) if has_shards else ():
            if differing := values_of_rank.keys() ^ ranks[0].keys():
                key, only = key_of(min(differing, key=str)), f"only one of {files[0]} and {files[rank]}"
                raise SourceError(f"expected the same keys on all ranks, found {key!r} in {only}")
        for path, types in kinds.items():
            values = {rank: of_rank[path] for rank, of_rank in enumerate(ranks) if path in of_rank}
            holders = [files[rank] for rank in values]
            with about(f"tensor {key_of(path)!r}"):
                if types == {RankPart}:
                    parts = [value for value in values.values() if isinstance(value, RankPart)]
                    self._add_sharded(path, parts, files)
                elif types & {RankPart, SavedTensor}:
                    self.tensors.append(_join_replicas(path, [*values.values()], holders))
                elif Undecoded in types:
                    rank, value = next((rank, value) for rank, value in values.items() if isinstance(value, Undecoded))
                    self.undecoded.append(value.entry(path, files[rank]))
                else:
                    advice = f": to read the other files, move {files[0]} and its siblings away"
                    self.items.add(path, same_on_ranks("value", values, advice))

    def _add_sharded(self, path: KeyPath, parts: Sequence[RankPart], files: Sequence[str]) -> None:
        """Add a tensor that the ranks hold in parts; replicas that differ become faults."""
        first = parts[0]
        if math.prod(first.sizes) != len(parts) and not self.is_partial:
            raise SourceError(
                f"expected a part of every rank of a mesh of sizes {first.sizes}, found the files of {len(parts)} ranks"
            )
        ranks: dict[Index, int] = {}
        chunks: dict[object, tuple[Chunk, int]] = {}
        for rank, part in enumerate(parts):
            # The same cut on all ranks, and each at a coordinate of its own.
            if _cut(part) != _cut(first):
                raise SourceError(
                    f"expected one shape, mesh and cut on all ranks, found {_cut(first)} in {files[0]} and "
                    f"{_cut(part)} in {files[rank]}"
                )
            if (holder := ranks.setdefault(part.coordinate, rank)) != rank:
                raise SourceError(
                    f"the shards overlap: {files[holder]} and {files[rank]} are both of coordinate {part.coordinate}"
                )
            # The first replica is read, and the others must have its checksum.
            for chunk in _chunks_of(part):
                replica, holder = chunks.setdefault(chunk.box, (chunk, rank))
                if None not in (replica.crc32, chunk.crc32) and replica.crc32 != chunk.crc32:
                    self.faults.append(
                        DamageError(
                            f"tensor {key_of(path)!r}: the replicas of {chunk.box} in {files[holder]} and "
                            f"{files[rank]} differ"
                        )
                    )
        boxes = Chunks.of((chunk for chunk, _ in chunks.values()), len(first.shape))
        self.tensors.append(
            StateRecord(key=key_of(path), path=path, shape=first.shape, dtype=first.dtype, chunks=boxes)
        )


def _join_replicas(path: KeyPath, values: Sequence[object], files: Sequence[str]) -> StateRecord:
    """Return a tensor that all ranks have whole, such as a counter of steps."""
    # The same dtype, shape and checksum on all.
    first, facts = values[0], set[object]()
    for value in values:
        if isinstance(value, SavedTensor):
            facts.add((value.dtype, value.chunk.box, value.chunk.crc32))
        else:
            facts.add(type(value))
    if len(facts) > 1 or not isinstance(first, SavedTensor) or (first.chunk.crc32 is None and len(values) > 1):
        raise SourceError(
            f"expected DTensors, or the same tensor on all ranks, found others in {files[0]} to {files[-1]}, such as "
            "flat parameters of FSDP1, without names: load them in their program and save a full "
            "state dict; to take the weights alone, move the optimizer's files away"
        )
    return whole_record(path, first)


def _cut(part: RankPart) -> tuple[object, ...]:
    """Return a tensor's properties that must be the same on all ranks."""
    return part.dtype, part.shape, part.sizes, tuple(map(str, part.placements))


@lru_cache(maxsize=64)
def _mesh(sizes: Index) -> Mesh:
    """Return a mesh with the sizes.  Cached: the tensors of a run share a few, which may have many ranks."""
    return Mesh.of(*sizes)


def _chunks_of(part: RankPart) -> Iterator[Chunk]:
    """Yield a rank's elements as chunks of the tensor: several where a strided shard has runs."""
    mesh = _mesh(part.sizes)
    rank = sum(map(operator.mul, part.coordinate, row_major(part.sizes)))
    try:
        expected = local_shape(part.shape, mesh, part.placements, rank)
    except LayoutError as error:
        raise SourceError(str(error)) from error
    # Its part must have that shape, and each of its runs be in one piece.
    local, size = part.local, itemsize(part.dtype)
    if local.box.shape != expected or local.payload is None:
        raise SourceError(f"expected a local tensor of shape {expected} by its placements, found {local.box.shape}")
    fragments = fragments_on(part.shape, mesh, part.placements, rank)
    for fragment in fragments:
        if len(fragments) == 1:
            yield replace(local, box=fragment.box)
            continue
        if local.strides is not None or not is_row_major(fragment.box.shape, fragment.place.strides):
            raise SourceError("expected each run of a strided shard in one piece, found it between others")
        start = local.payload.offset + fragment.place.offset * size
        payload = Extent(local.payload.file, start, fragment.box.numel * size)
        yield Chunk(fragment.box, local.item, payload)
