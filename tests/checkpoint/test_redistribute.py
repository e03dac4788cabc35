"""muonckpt.redistribute: live tensors from any mesh to any other, each element written once and sent once, no disk."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.every_kind import assert_same_bits
from support.fsdp_model import build, steps
from support.leaves import leaves
from support.placed import numbered, placed, strided
from support.random_layouts import READERS, random_shape
from support.workers import run
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import muonckpt
from muonckpt import AttestError, BoxedTensor, LayoutError, SourceError, TargetError
from muonckpt.algebra.box import Box
from muonckpt.checkpoint.joint_state import RankBoxes, layout_on_ranks
from muonckpt.checkpoint.transfer_plan import Move, divide_in_stages, make_copies
from muonckpt.layouts.boxed_tensor import parts_of

S, R = Shard, Replicate()

VALUES = {
    "matrix": numbered((13, 6)),
    "half": numbered((9, 4)).bfloat16(),
    "cube": numbered((3, 5, 4)).double(),
    "count": torch.arange(11),
    "flags": torch.arange(10).reshape(5, 2) % 3 == 0,
    "tiny": numbered((6, 3)).to(torch.float8_e4m3fn),
    "wide": torch.complex(numbered((4, 3)).double(), -numbered((4, 3)).double()),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(3.5),
}


MESHES: dict[str, DeviceMesh] = {}
"""Of the job that is running: they make process groups."""


def on(ranks, *placements):
    """On a mesh of ranks; plain if it has no dim."""

    def made(whole, rank):
        if not whole.ndim:
            return whole.clone() if rank in np.ravel(ranks) else None
        if str(ranks) not in MESHES:
            MESHES[str(ranks)] = DeviceMesh("cpu", ranks)
        return placed(whole, MESHES[str(ranks)], tuple(_fit(p, whole.ndim) for p in placements))

    return made


def _fit(placement, ndim):
    if placement.is_replicate():
        return R
    dim = min(placement.dim, ndim - 1)
    return strided(dim, placement.split_factor) if hasattr(placement, "split_factor") else S(dim)


def plain(*ranks):
    """Whole on some ranks."""
    return lambda whole, rank: whole.clone() if rank in ranks else None


def flat(*cuts):
    """Cut anywhere, in sixteenths of the flattened tensor."""

    def made(whole, rank):
        start, stop = (whole.numel() * cut // 16 for cut in cuts[rank : rank + 2])
        return BoxedTensor.of_flat(whole.shape, start, whole.flatten()[start:stop].clone())

    return made


def engines(whole, rank):
    """Two that cut otherwise: all of it on rank 0, rows on 1 and columns on 2 of which it wants the first only."""
    if rank == 3 or not whole.ndim or not whole.numel():
        return whole.clone() if rank == 0 else None
    half = -(-whole.shape[0] // 2)
    part = {0: whole, 1: whole[:half], 2: whole[..., :1]}[rank]
    return BoxedTensor(whole.shape, {(0,) * whole.ndim: part.clone()})


HOMES = {
    "rows": on([0, 1, 2, 3], S(0)),
    "rows on three": on([3, 0, 2], S(0)),
    "columns": on([1, 0], S(9)),
    "EP 2 x 2": on([[0, 1], [2, 3]], S(0), S(1)),
    "EP 1 x 4": on([[3, 2, 1, 0]], S(1), S(0)),
    "HSDP": on([[0, 1], [2, 3]], R, S(0)),
    "interleaved": on([[0, 2], [1, 3]], strided(0, 3), strided(1, 2)),
    "trainers": on([0, 1], S(0)),
    "others": on([2, 3], S(1)),
    "DDP": plain(0, 1, 2, 3),
    "one": plain(2),
    "two": plain(1, 3),
    "flat": flat(0, 3, 3, 11, 16),
    "engines": engines,
}
SOURCES = [name for name in HOMES if name != "engines"]


def state(home: str, rank: int, fill: bool) -> dict[str, Tensor]:
    made = {name: HOMES[home](value, rank) for name, value in VALUES.items()}
    made = {name: value for name, value in made.items() if value is not None}
    if not fill:
        for value in made.values():
            for part in parts_of(value).values():
                part.view(torch.uint8 if part.ndim else part.dtype).zero_() if part.is_contiguous() else part.fill_(0)
    return made


def elements(tensor: Tensor) -> set[tuple[int, ...]]:
    boxes = [(lo, part.shape) for lo, part in parts_of(tensor).items()]
    return {index for lo, size in boxes for index in product(*(range(a, a + n) for a, n in zip(lo, size, strict=True)))}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def moved_everywhere(rank: int, world: int, pairs) -> list[tuple[int, int, int]]:
    """For each pair of homes: bytes that this rank had to receive, those that it received, and those that it sent."""
    counted = []
    MESHES.clear()
    for number, (source_home, target_home) in enumerate(pairs):
        memory = 130 if number % 4 == 0 else 1 << 20
        source, target, expected = (state(home, rank, fill) for home, fill in
                                    ((source_home, True), (target_home, False), (target_home, True)))  # fmt: skip
        before = {name: [raw(part) for part in parts_of(value).values()] for name, value in source.items()}
        done = muonckpt.redistribute({"t": source}, {"t": target}, memory=memory, attest=True)
        assert done.buffers <= memory
        for name, value in expected.items():
            found = [raw(part) for part in parts_of(target[name]).values()]
            assert found == [raw(part) for part in parts_of(value).values()], (source_home, target_home, name)
        for name, value in source.items():
            assert before[name] == [raw(part) for part in parts_of(value).values()]
        needed = sum(len(elements(value) - (elements(source[name]) if name in source else set())) * value.itemsize
                     for name, value in target.items())  # fmt: skip
        counted.append((needed, done.received, done.sent))
    return counted


def test_any_home_to_any_other_exactly_with_as_few_bytes_as_possible_in_little_memory():
    """Every home is a source and a target; small memory makes many stages."""
    pairs = [*zip(SOURCES, [*SOURCES[5:], *SOURCES[:5]], strict=True), ("EP 2 x 2", "engines")]
    pairs += [("trainers", "others"), ("EP 2 x 2", "EP 1 x 4")]
    assert {source for source, _ in pairs} == {*SOURCES} and {target for _, target in pairs} == {*HOMES}
    for of_pair in zip(*run(4, moved_everywhere, pairs), strict=True):
        assert all(needed == received for needed, received, _ in of_pair)
        assert sum(received for _, received, _ in of_pair) == sum(sent for _, _, sent in of_pair)


def held(layout, shift: int) -> tuple[RankBoxes, ...]:
    of_rank: dict[int, list[Box]] = {}
    for fragment in layout.fragments:
        of_rank.setdefault(int(fragment.place.buffer) + shift, []).append(fragment.box)
    return tuple(RankBoxes(rank, tuple(boxes)) for rank, boxes in sorted(of_rank.items()))


def within(box: Box) -> set[tuple[int, ...]]:
    return set(product(*map(range, box.lo, box.hi)))


@pytest.mark.parametrize("seed", range(12))
def test_stages_move_every_element_once_and_keep_to_the_memory(seed):
    """Random layouts on 12 ranks, some of which have the source only or the target only, in one process."""
    rng = np.random.default_rng(seed)
    ranks, memory, moves, expected, owned = tuple(range(12)), int(rng.integers(96, 400)), [], Counter(), []
    for number in range(6):
        shape, size = random_shape(rng), int(rng.choice([1, 2, 4]))
        given, asked = (held(READERS[rng.integers(len(READERS))](rng, shape), shift) for shift in (0, 4))
        if number % 2:  # two that cut it otherwise
            asked = tuple(
                RankBoxes(rank, boxes)
                for rank, boxes in {**dict(held(READERS[0](rng, shape), 0)), **dict(asked)}.items()
            )
        mine = {rank: set().union(*map(within, boxes)) for rank, boxes in given}
        for rank, boxes in asked:
            for index in set().union(*map(within, boxes)) - mine.get(rank, set()):
                expected[f"{number}", rank, index] = 1
        owned.append(mine)
        copies = make_copies(layout_on_ranks(shape, given), asked)
        moves += (Move(f"{number}", f"{number}", size, shape, table) for table in copies)
    found: Counter = Counter()
    for stage in divide_in_stages(moves, len(ranks), memory):
        load: Counter = Counter()
        assert len({moves[portion.move].itemsize for portion in stage}) == 1
        for portion in stage:
            move = moves[portion.move]
            copies = move.copies
            columns = (column.tolist() for column in (copies.lo, copies.hi, copies.source, copies.target))
            for lo, hi, giver, taker in zip(*columns, strict=True):
                assert taker in ranks
                common = Box(tuple(lo), tuple(hi)) & portion.box
                if common is None or giver == taker:
                    continue
                assert within(common) <= owned[int(move.source)][giver]
                found.update((move.target, taker, index) for index in within(common))
                for rank in (giver, taker):
                    load[rank] += common.numel * move.itemsize
        assert max(load.values()) <= memory
    assert found == expected


# --- a training run -------------------------------------------------------------------------------------------------


def run_moves_on(rank: int, world: int, folder: str) -> int:
    """Trains on three ranks and goes on, on two: once by way of memory, once by way of a checkpoint."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2], [1, 3])]

    def live(mesh):
        """A model with its optimizer, and their state; nothing where the rank is not on the mesh."""
        if mesh.get_coordinate() is None:
            return None, {}
        net, opt = build(mesh)
        return (net, opt), dict(zip(("model", "optimizer"), get_state_dict(net, opt), strict=True))

    trained, _ = live(meshes[0])
    source: dict = {}
    if trained:
        steps(*trained, 0, 2)
        source = dict(zip(("model", "optimizer"), get_state_dict(*trained), strict=True))
        source["optimizer"]["param_groups"][0]["lr"] = 0.125
        muonckpt.save(source, f"{folder}/c", process_group=meshes[0].get_group())
    dist.barrier()
    (moved, template), (loaded, other) = live(meshes[1]), live(meshes[1])
    done = muonckpt.redistribute(source, template, memory=500, attest=True)
    assert done.buffers <= 500 < 5000 < 500 * done.stages, done
    pair = dist.new_group([1, 3])
    if moved is None:
        return done.tensors
    engine = {"w": torch.zeros(3)} if rank == 3 else {}  # the others do not take part
    muonckpt.redistribute({"w": torch.arange(3.0)} if rank == 1 else {}, engine, group=pair)
    assert rank == 1 or engine["w"].tolist() == [0, 1, 2]
    muonckpt.load(other, f"{folder}/c", process_group=meshes[1].get_group())
    assert local_leaves(template) == local_leaves(other) and template["optimizer"]["param_groups"][0]["lr"] == 0.125
    for (net, opt), state_of in ((moved, template), (loaded, other)):
        set_state_dict(net, opt, model_state_dict=state_of["model"], optim_state_dict=state_of["optimizer"])
        steps(net, opt, 2, 4)
    assert_same_bits(*([p.detach().to_local() for p in net.parameters()] for net, _ in (moved, loaded)))
    return done.tensors


def local_leaves(node):
    """With what this rank has in place of its DTensors."""
    if hasattr(node, "to_local"):
        return leaves(node.to_local())
    if isinstance(node, dict):
        return {key: local_leaves(value) for key, value in node.items()}
    return [local_leaves(value) for value in node] if isinstance(node, list) else leaves(node)


def test_a_run_goes_on_elsewhere_as_from_a_checkpoint(tmp_path):
    assert len(set(run(4, run_moves_on, str(tmp_path)))) == 1


# --- refusals: the same on every rank, and nobody hangs -------------------------------------------------------------


class Broken:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        if self.fails:
            raise RuntimeError("no such luck")


def refusals(rank: int, world: int) -> list[str]:
    def rows(lo: int, hi: int, value: float = 0.0, **options) -> BoxedTensor:
        return BoxedTensor((4, 2), {(lo, 0): torch.full((hi - lo, 2), value, **options)} if hi > lo else {})

    whole = {"w": rows(2 * rank, 2 * rank + 2, 1.0 + rank)}
    twice = {"w": torch.ones(4, 2) + rank}
    cases = {
        "hole": ({"w": rows(0, 2) if rank == 0 else rows(3, 4)}, {"w": torch.zeros(4, 2)}, {}),
        "overlap": ({"w": rows(0, 3) if rank == 0 else rows(2, 4)}, {"w": torch.zeros(4, 2)}, {}),
        "dtype": (whole, {"w": torch.zeros(4, 2).to(torch.half if rank else torch.float32)}, {}),
        "kinds": ({"w": torch.zeros(4, 2 + rank)}, {}, {}),
        "missing": (whole, {"w": torch.zeros(4, 2), "x": torch.zeros(1)} if rank else {}, {}),
        "extra": ({**whole, "x": torch.zeros(1)}, {"w": torch.zeros(4, 2)}, {}),
        "shared": (whole, {"w": BoxedTensor((4, 2), {(0, 0): whole["w"].parts[2 * rank, 0]})}, {}),
        "meta": (whole, {"w": torch.zeros(4, 2, device="meta" if rank else "cpu")}, {}),
        "little": (whole, {"w": torch.zeros(4, 2)}, {"memory": 8 if rank else 3}),
        "none": (whole, {"w": torch.zeros(4, 2)}, {"memory": 0}),
        "drifted": (twice, {"w": torch.zeros(4, 2)}, {"attest": True}),
        "expanded": (whole, {"w": torch.zeros(1, 2).expand(4, 2) if rank else torch.zeros(4, 2)}, {}),
        "objects": ({**whole, "o": Broken(False)}, {"w": torch.zeros(4, 2), "o": Broken(rank == 1)}, {}),
    }
    said = []
    for name, (source, target, options) in cases.items():
        try:
            muonckpt.redistribute(source, target, **options)
        except (AttestError, LayoutError, SourceError, TargetError) as error:
            said.append(f"{name}: {type(error).__name__}: {error}")
    target = {"w": torch.zeros(4, 2)}
    muonckpt.redistribute({**whole, "x": 1}, target, allow_extra=True)
    assert target["w"].tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
    same = {"w": whole["w"]}  # it has what it is to have
    assert muonckpt.redistribute(whole, same).received == 0 and same["w"] is whole["w"]
    return said


def test_what_cannot_be_moved_is_refused_on_all_ranks_alike():
    first, second = run(2, refusals)
    assert first == second
    for message, part in zip(
        first,
        (
            "hole: LayoutError: tensor 'w' of the source: no buffer holds box [2:3, 0:2]",
            "overlap: LayoutError: tensor 'w' of the source: box [0:3, 0:2] in buffer 'rank 0' at 0 and box [2:4, 0:2]",
            "dtype: SourceError: the source does not fit the target: 'w' is float32, expected float16",
            "kinds: LayoutError: 'w' is float32 of shape (4, 2) in the source of rank 0, and float32 of shape (4, 3)",
            "missing: SourceError: the source does not fit the target: missing key 'x'",
            "extra: SourceError: the source does not fit the target: extra key 'x'",
            "shared: LayoutError: tensor 'w' of the target shares memory with 'w' of the source",
            "meta: LayoutError: tensor 'w': it is on the meta device and has no elements: materialise it (rank 1)",
            "little: TargetError: the memory has 0 places for elements",
            "none: TargetError: expected memory of at least 1 byte, found 0",
            "drifted: AttestError: the source differs from rank to rank: 'w' box [0:4, 0:2]: replicas differ",
            "expanded: LayoutError: elements of tensor 'w' share memory with each other, as those of an",
            "objects: TargetError: RuntimeError: no such luck (rank 1)",
        ),
        strict=True,
    ):
        assert message.startswith(part), message


def test_one_process_takes_options_over_by_the_names_of_parameters():
    def state_of(names: list[list[str]], value: float) -> dict:
        parameters = [name for group in names for name in group]
        slots = {
            name: {"momentum_buffer": torch.full((2, 3), value), "step": torch.tensor(value)} for name in parameters
        }
        groups = [{"lr": value + ord(group[0]), "params": group} for group in names]
        return {"optimizer": {"state": slots, "param_groups": groups}, "epoch": int(value)}

    source, target = state_of([["a", "b"], ["c"]], 3.0), state_of([["c"], ["a", "b"]], 0.0)
    done = muonckpt.redistribute(source, target, fresh=["b"])
    assert (done.report.loaded, done.report.fresh, done.stages, done.sent) == (("a", "c"), ("b",), 0, 0)
    groups = target["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [3.0 + ord("c"), 3.0 + ord("a")] and target["epoch"] == 3
    assert groups[0]["params"] == ["c"]
    steps_of = {name: slots["step"].item() for name, slots in target["optimizer"]["state"].items()}
    assert steps_of == {"a": 3.0, "b": 0.0, "c": 3.0}


def test_tensors_that_differ_are_not_moved_into_one_memory():
    """Tied weights get those of a run that had two, as stages of a pipeline have, if these are equal."""
    tied = torch.full((3,), 7.0)
    target = {"embedding": tied, "head": tied}
    with pytest.raises(LayoutError, match=r"'embedding' and 'head' differ in the source, and share their memory"):
        muonckpt.redistribute({"embedding": torch.ones(3), "head": torch.zeros(3)}, target)
    assert tied.tolist() == [7.0] * 3
    muonckpt.redistribute({"embedding": torch.ones(3), "head": torch.ones(3)}, target)
    assert tied.tolist() == [1.0] * 3
