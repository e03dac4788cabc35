"""Ranks plan a save together once: later saves of the same structure exchange a name, and write the same files."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.failing import full_disk
from support.workers import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt import DestinationError, LayoutError
from muonckpt.algebra.box import Box
from muonckpt.checkpoint import all_ranks
from muonckpt.checkpoint.live_state import Annotation, LiveState, RankForm, RankState, ShardSpec
from muonckpt.checkpoint.saving import AgreedPlans, SaveProgress, run_save
from muonckpt.checkpoint.whole_plan import WholePlan, receipt_row
from muonckpt.store.io.location import location


class Ranks:
    """What a rank keeps, and what it sends to the coordinator or gets dealt, in bytes."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.plans = AgreedPlans()
        self.exchanged: list[int] = []
        self._gather, self._scatter = all_ranks.gather_on_first, dist.scatter_object_list
        all_ranks.gather_on_first, dist.scatter_object_list = self._gathered, self._scattered

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        all_ranks.gather_on_first, dist.scatter_object_list = self._gather, self._scatter

    def _gathered(self, process_group, answer):
        self.exchanged.append(len(pickle.dumps(answer)))
        return self._gather(process_group, answer)

    def _scattered(self, *args, **kwargs):
        self.exchanged.append(-1)
        return self._scatter(*args, **kwargs)

    def state(self, step: int) -> dict:
        """Shards (of the last rank an empty one), replicas, objects whose length differs from step to step."""
        values = torch.arange(12.0).reshape(4, 3) + 100 * step

        def placed(value: torch.Tensor, placement) -> DTensor:
            return distribute_tensor(value.clone(), self.mesh, [placement], src_data_rank=None)

        momenta = {f"m{number}": {"momentum_buffer": placed(values + number, Shard(0))} for number in range(4)}
        group = {"params": list(momenta), "lr": 1 / (step + 1), "convention": "ema", "pieces": None}
        return {
            "w": placed(values, Replicate()),
            "none": placed(torch.empty(0, 3), Shard(0)),
            f"of rank {dist.get_rank()}": torch.full((2,), float(step)),
            "optimizer": {"state": momenta, "param_groups": [group]},
            "log": "x" * 10 ** min(step, 3),
            "position": step // 100 * dist.get_rank(),
        }

    def save(self, name: str, state: dict, plans: AgreedPlans) -> list[int]:
        """Save, and say what was exchanged."""
        self.exchanged.clear()
        place = location(self.folder / name, DestinationError)
        run_save(lambda: LiveState.of(state, "to save"), place, {"step": 1}, None, plans, SaveProgress())
        return list(self.exchanged)

    def same_as_first(self, name: str, state: dict, plans: AgreedPlans | None = None) -> bool:
        """Whether a save needed no plan, after checking that its files are those of ranks that never saved before."""
        new, sent = (
            self.save(f"{name}-new", state, AgreedPlans()),
            self.save(name, state, self.plans if plans is None else plans),
        )
        assert len(new) == 4 and new[2] == -1, new
        one, two = self.folder / name, self.folder / f"{name}-new"
        files = sorted(path.name for path in one.iterdir())
        assert files == sorted(path.name for path in two.iterdir()) and ".metadata" in files
        assert all((one / file).read_bytes() == (two / file).read_bytes() for file in files)
        assert len(sent) in (2, 4) and sent[0] < 200
        return len(sent) == 2


def saves(rank: int, world: int, folder: str) -> list[str]:
    said = []
    with Ranks(folder) as ranks:
        assert not ranks.same_as_first("first", ranks.state(1))
        assert ranks.same_as_first("second", ranks.state(3))
        more = {"more": torch.ones(5)} if rank == 1 else {}
        assert not ranks.same_as_first("a rank has more", {**ranks.state(2), **more})
        assert ranks.same_as_first("again", {**ranks.state(4), **more})
        assert ranks.same_as_first("as before", ranks.state(5)), "the plan before the last is kept"

        other = ranks.state(6)
        if rank == 1:
            other[f"of rank {rank}"] = other[f"of rank {rank}"].half()
        assert not ranks.same_as_first("a dtype", other)
        other["optimizer"]["param_groups"][0]["convention"] = "sum"
        assert not ranks.same_as_first("annotations", other)
        forgotten = AgreedPlans()
        assert not ranks.same_as_first("restarted", other, forgotten if rank == 1 else None)
        if rank == 1:
            ranks.plans = forgotten
        assert ranks.same_as_first("all go on", other)

        assert not ranks.same_as_first("items differ by rank", ranks.state(100))
        assert ranks.same_as_first("and go on so", ranks.state(205)), "they are compared no more"
        drifted = ranks.state(107)
        assert ranks.same_as_first("whole", drifted)
        if rank == 1:
            drifted["w"].to_local()[0, 0] += 1
        try:
            ranks.save("drifted", drifted, ranks.plans)
        except LayoutError as error:
            said.append(str(error))
        with full_disk(100) if rank == 1 else nullcontext():
            try:
                ranks.save("unwritable", ranks.state(108), ranks.plans)
            except DestinationError as error:
                said.append(str(error))
        assert ranks.same_as_first("after", ranks.state(109))
    return said


def test_later_saves_plan_nothing_and_write_what_a_first_save_writes(tmp_path):
    first, second, third = run(3, saves, str(tmp_path))
    assert first == second == third
    drifted, unwritable = first
    assert "'w' at (0, 0): ranks" in drifted and "different data" in drifted
    assert "__1_0.distcp: " in unwritable and "File too large" in unwritable and "(rank 1)" in unwritable
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") or "drifted" in path.name]
    assert not muonckpt.verify(tmp_path / "all go on").findings


Part = tuple[ShardSpec | None, tuple[Box, ...]]


def part(shape: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...], dtype: str = "float32") -> Part:
    return ShardSpec(dtype, shape, Annotation()), (Box(lo, hi),)


OBJECT: Part = None, ()
"""What is not a tensor."""


def held(**parts: Part) -> RankState:
    kinds, boxes = zip(*parts.values(), strict=True)
    paths, names = tuple((key,) for key in parts), (None,) * len(parts)
    return RankState.of(RankForm(tuple(parts), tuple(range(len(parts))), kinds, paths, names), boxes)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([part((4,), (0,), (2,)), part((4,), (3,), (4,))], "tensor 'w': no buffer holds box [2:3]"),
        ([part((4,), (0,), (3,)), part((4,), (2,), (4,))], "overlap in part"),
        ([part((4,), (0,), (2,)), part((4,), (2,), (4,), "bfloat16")], "rank 7 bfloat16 of shape (4,)"),
        ([part((4,), (0,), (2,)), part((8,), (2,), (4,))], "rank 5 says float32 of shape (4,), and rank 7 float32 of"),
        ([part((4,), (0,), (4,)), part((4,), (0,), (4,), "int32")], "ranks 5 and 7 hold different data"),
        ([part((4,), (0,), (4,)), OBJECT], "'w' is a tensor on some ranks and another object on others"),
        ([OBJECT, part((4,), (0,), (4,))], "'w' is a tensor on some ranks and another object on others"),
    ],
)
def test_ranks_that_do_not_hold_one_tensor_are_told_which_and_where(ranks, message):
    like = [part((4,), (0,), (2,)), part((4,), (2,), (4,))]  # is fine, and comes first
    with pytest.raises(LayoutError) as refused:
        WholePlan.of([held(v=own, w=kind) for own, kind in zip(like, ranks, strict=True)], [{}, {}], [5, 7])
    assert message in str(refused.value)


def test_replicas_that_differ_are_told_by_the_global_ranks_of_a_group():
    whole = held(w=part((4,), (0,), (4,)))
    plan = WholePlan.of([whole, whole], [{}, {}], [5, 7])
    with pytest.raises(LayoutError, match=r"'w' at \(0,\): ranks 5 and 7 hold different data"):
        plan.manifest([receipt_row("0" * 32, length=64), receipt_row("1" * 32)], {})


def test_ranks_that_hold_the_same_keys_send_one_form_and_boxes_of_their_own():
    sent = [held(w=part((4, 2), (rank, 0), (rank + 1, 2)), v=part((), (), ()), log=OBJECT) for rank in range(4)]
    arrived = [pickle.loads(pickle.dumps(state)) for state in sent]
    assert arrived == sent and len({id(state.form) for state in arrived}) == 1
    assert [state.boxes_by_key["w"] for state in arrived] == [(Box((rank, 0), (rank + 1, 2)),) for rank in range(4)]
    plan = WholePlan.of(arrived, [{2: b""}] * 4, range(4))
    assert plan.shares == (([0, 1], []), ([2, 0], [1]), ([0], [1]), ([0], [1]))
    assert [tensor.boxes.lo.tolist() for tensor in plan.tensors] == [[[rank, 0] for rank in range(4)], [[]]]


def test_replicas_are_written_by_the_rank_that_has_least_to_write():
    whole = {f"w{number}": part((4,), (0,), (4,)) for number in range(4)}
    mine = {"big": part((100,), (0,), (100,))}
    plan = WholePlan.of([held(**mine, **whole), held(**whole, log=OBJECT), held(**whole)], [{}, {4: b""}, {}], range(3))
    assert plan.shares == (([0], [1, 2, 3, 4]), ([4, 0, 2], [1, 3]), ([1, 3], [0, 2])), "objects come first"
    assert sorted(plan.rank.tolist()) == [0, 1, 1, 2, 2] and plan.witnesses.shape == (2, 8)
