"""Rows in turn: their update beside the formula, the bits of one process everywhere, and a share of the bytes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.failing import raised
from support.layer_wise_training import Net, check, gradients, groups, pieces, run_each
from support.random_layouts import row_layout
from support.random_topologies import has_part
from support.topologies import TOPOLOGIES, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonckpt import LayoutError, load, save
from muonckpt.optimizer import Kept, LayerWise, MatrixMethod, Muon, Whole, orthogonalize
from muonckpt.optimizer import muon as muon_module
from muonckpt.optimizer.planning.matrices import Fused, RowsInTurn, Slot, Spec
from muonckpt.optimizer.planning.schedule import NOTE, make_schedule
from muonckpt.optimizer.step.elementwise import needing

ROWS = {"algorithm": "cyclic_rows"}


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("shape", "period"), [((8, 10), 4), ((9, 4), 3), ((6, 6), 2)])
def test_the_update_is_dion2s_of_rows_in_turn(shape, period):
    """Momentum adds up gradients, and decays where it was used (arXiv 2512.16928); all weights decay."""
    start = drawn(shape, 0)
    param = nn.Parameter(start.clone())
    opt = Muon([{"params": [param], **ROWS, "period": period, "ns_dtype": "float32"}], lr=0.1)
    weight, momentum = start.double(), torch.zeros(shape, dtype=torch.float64)
    scale = max(1, shape[0] / shape[1]) ** 0.5
    for step in range(2 * period + 1):
        param.grad = drawn(shape, 1 + step) * 10 ** (-step % 3)
        momentum += 0.05 * param.grad.double()
        weight *= 1 - 0.1 * 0.1
        weight[step % period :: period] -= (
            0.1 * scale * orthogonalize(momentum[step % period :: period], dtype=torch.float64)
        )
        kept = momentum.clone()
        momentum[step % period :: period] *= 0.95
        opt.step()
        torch.testing.assert_close(opt.state[param]["momentum_buffer"].double(), kept, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(param.detach().double(), weight, rtol=1e-4, atol=1e-5)


def test_cautious_decay_spares_only_what_the_update_moves_away():
    start = drawn((8, 6), 0)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    opt = Muon([{"params": [p], **ROWS, "cautious": c} for p, c in zip(params, (False, True), strict=True)], lr=0.1)
    for param in params:
        param.grad = drawn((8, 6), 1)
    opt.step()
    plain, cautious = (param.detach() for param in params)
    assert torch.equal(plain[1:4], cautious[1:4]) and torch.equal(plain[1:4], start[1:4] * (1 - 0.1 * 0.1))
    assert not torch.equal(plain[::4], cautious[::4])


def scaled(whole: Whole) -> torch.Tensor:
    assert whole.weight is not None
    for slot, mean in (("rows", whole.matrix.float().square().mean(1, True)), ("columns", whole.matrix.float()[:1])):
        whole.state[slot].lerp_(mean, 0.5)
    whole.state["count"].add_(1)
    return whole.matrix * whole.state["rows"] + whole.state["columns"] / whole.state["count"] + whole.weight.sign()


OWN = MatrixMethod(
    "own_rows",
    scaled,
    slots={"rows": Kept("[m, 1]"), "columns": Kept("[1, n]"), "count": Kept("[1, 1]"), "all": Kept("[m, n]")},
    takes="momentum",
    weight=True,
    period=lambda group: 3,
)
KINDS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((12, 10), {**ROWS, "period": 3}),
    ((2, 8, 6), {**ROWS, "momentum_dtype": "bfloat16"}),
    ((8, 12), {**ROWS, "period": 2, "pieces": (2, 6), "columns": (5, 7), "cautious": True}),
    ((12, 6), {"algorithm": OWN, "nesterov": False, "pieces": (3, 9)}),
    ((4, 16), {**ROWS, "momentum_dtype": "8bit", "block_size": 8}),
    ((9, 4), {}),
    ((5,), {"algorithm": "adamw"}),
]


def made(place, seed: int | None = None, **options) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(place(index, drawn(shape, index))) for index, (shape, _) in enumerate(KINDS)]
    own = [{"rounding_seed": seed} if "momentum_dtype" in group else {} for _, group in KINDS]
    made_of = zip(params, KINDS, own, strict=True)
    named = [{"params": [(f"p{n}", p)], "lr": 0.02, **seeded, **g} for n, (p, (_, g), seeded) in enumerate(made_of)]
    return params, Muon(named, stages=2, **options)


def train(params: list[nn.Parameter], opt: Muon, place, steps: range, odd: int | None = None) -> list[torch.Tensor]:
    """State after some steps, in some of which some have no gradient; before the second comes one that is not finite on
    one rank."""
    for step in steps:
        for index, (param, (shape, _)) in enumerate(zip(params, KINDS, strict=True)):
            param.grad = place(index, drawn(shape, 100 + 10 * step + index)) if (index + step) % 4 else None
        if odd is not None and step == steps[0] + 1:
            before = params[0].grad.clone()
            params[0].grad *= torch.nan if dist.get_rank() == odd else 1.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opt.step()
            params[0].grad = before
        opt.step()
    return [t for p in params for t in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]


def here(index: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def alone(seed: int | None, steps: int) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in train(*made(here, seed), here, range(steps))]


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    both = zip(found, expected, strict=True)
    return [f"{tuple(a.shape)} {a.dtype}" for a, b in both if a.dtype != b.dtype or not has_part(a, b)]


CHANGES = [("HSDP", "FSDP2, rows"), ("FSDP2, rows", "DDP"), ("DDP", "EP × FSDP2, rows")]


def resumed(
    rank: int, world: int, path: str, names: tuple[str, str], seed: int | None, harsh: bool, whole: list[torch.Tensor]
) -> list[str]:
    """Train five steps on a topology, save amid every period, and go on with another one; harshly: two skipped steps,
    state in host memory."""
    options: dict[str, Any] = {"replicas": dist.group.WORLD}
    options |= {"nonfinite": "skip", "offload": "cpu"} if harsh else {}
    odd = 1 if harsh else None
    first, second = (placer(TOPOLOGIES[name]) for name in names)
    params, opt = made(first, seed, **options)
    train(params, opt, first, range(5), odd)
    save({"model": {f"p{n}": p for n, p in enumerate(params)}, "optimizer": opt.state_dict()}, path)
    params, opt = made(second, seed, **options)
    state = {"model": {f"p{n}": p.data for n, p in enumerate(params)}, "optimizer": opt.state_dict()}
    load(state, path)
    opt.load_state_dict(state["optimizer"])
    return apart(train(params, opt, second, range(5, 8), odd), whole)


RESUMED = [(names, seed, names != CHANGES[0]) for names in CHANGES for seed in (None, 5)]


@pytest.mark.parametrize(("names", "seed", "harsh"), sweep(RESUMED, RESUMED[-1]))
def test_a_run_that_resumes_elsewhere_amid_a_period_has_the_bits_of_one_process(names, seed, harsh, tmp_path):
    """A seed is one of noise."""
    assert run(4, resumed, str(tmp_path / "saved"), names, seed, harsh, alone(seed, 8)) == [[]] * 4


def differing(rank: int, world: int, name: str, expected: list[torch.Tensor]) -> list[str]:
    place = placer(TOPOLOGIES[name])
    return apart(train(*made(place, replicas=dist.group.WORLD), place, range(5)), expected)


ANY = ["FSDP2, rows, 3 ranks", "HSDP, replicas inside", "FSDP2 × TP, crosswise"]


@pytest.mark.parametrize("name", sweep(ANY, *ANY[1:]))
def test_any_topology_has_the_bits_of_one_process(name):
    """A method from outside and state of rows among them; `support.random_topologies` has more."""
    world = world_of(TOPOLOGIES[name])
    assert run(world, differing, name, alone(None, 5)) == [[]] * world


def test_state_comes_to_the_device_though_no_row_of_this_rank_is_in_turn():
    layout = row_layout((8, 4), 8)
    update, rows = Slot("the update", layout, Fused(), torch.bfloat16, torch.bfloat16), RowsInTurn(layout, 4, 0)
    schedule = make_schedule([Spec(rows.of([update]), lambda m, n: m * n, rows=rows)], tuple(range(8)), 5)
    assert schedule.params() == [[]] and needing(schedule, 1) == [[0]]


def sent(rank: int, world: int, options: dict[str, Any]) -> list[int]:
    """Bytes of elements that this rank sends in each of four steps."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    placed = [distribute_tensor(torch.ones(64, 32), mesh, [Shard(0)], src_data_rank=None) for _ in range(world)]
    opt = Muon([{"params": [nn.Parameter(value) for value in placed], **options}], stages=1)
    for _ in range(4):
        for param in opt.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        opt.step()
        found.append(opt.report().sent - 2 * (world - 1) * NOTE)
    return found


def test_a_step_sends_its_rows_alone():
    muon, rows = run(4, sent, {}), run(4, sent, ROWS)
    assert muon == [[3 * 16 * 32 * 2 * 2] * 4] * 4
    assert rows == [[each // 4 for each in found] for found in muon]


def test_layer_wise_training_has_the_bits_of_one_process():
    expected, net = {}, Net()
    opt = Muon(in_turn(net))
    for step in range(6):
        for name, param in net.named_parameters():
            param.grad = sum(gradients(net, step, rank)[name] for rank in range(3))
        opt.step()
    for name, param in net.named_parameters():
        expected |= {name: param.detach(), **{f"{name}.{slot}": v for slot, v in opt.state[param].items()}}
    for layout, found in run_each(3, layer_wise):
        check(found, expected, layout)


def in_turn(net: Net) -> list[dict]:
    rows = {id(net.qkv): 8, id(net.proj): 4, id(net.stack): 2}
    return [
        {**group, **ROWS, "nesterov": False, "period": rows[id(group["params"][0])]}
        if id(group["params"][0]) in rows
        else group
        for group in groups(net)
    ]


def layer_wise(rank: int, world: int, layout: str) -> dict:
    net = Net()
    opt = LayerWise(net, in_turn(net), layout=layout, average=False, bucket_size=700)
    for step in range(6):
        net(gradients(net, step, rank)).backward()
        opt.step()
    assert [group["steps_taken"] for group in opt.param_groups if "period" in group] == [6] * 3
    return pieces(net, opt)


# --- refusals ---------------------------------------------------------------------------------------------------------


def method(**fields: Any) -> dict[str, Any]:
    return {"algorithm": MatrixMethod("mine", lambda whole: whole.matrix, **{"period": lambda group: 2, **fields})}


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ({**ROWS, "period": 3}, LayoutError, "up: 8 rows of a matrix do not divide into 3 .*: give it a period of 2"),
        ({**ROWS, "pieces": (3, 5)}, LayoutError, "up: 3 rows .* into 4 .*: put this parameter in a 'muon' group"),
        ({**ROWS, "interleaved": 4}, LayoutError, "up: 2 rows .* into 4 turns .*: give it a period of 2"),
        ({**ROWS, "period": 1}, ValueError, "period=1: expected a whole number of at least 2"),
        ({**ROWS, "period": 2.0}, ValueError, "period=2.0: expected a whole number of at least 2"),
        ({**ROWS, "nesterov": True}, ValueError, "nesterov=True: method 'cyclic_rows' updates rows in turn"),
        (method(), ValueError, "nesterov=True: method 'mine' updates rows in turn"),
        (method(takes="gradient"), ValueError, "method 'mine' updates rows in turn: expected one that takes momentum"),
        (method(period=lambda group: 0), ValueError, "method 'mine' has a period of 0: expected a whole number"),
        (
            {**method(slots={"left": Kept("[m, m]", at_owner=True)}), "nesterov": False},
            ValueError,
            "method 'mine' updates rows in turn, and its left rests at owners",
        ),
    ],
)  # fmt: skip
def test_what_cannot_have_turns_is_refused_by_name(group, error, message):
    with pytest.raises(error, match=message):
        Muon([{"params": [("up", nn.Parameter(torch.zeros(8, 4)))], **group}])


def test_periods_that_never_meet_are_refused():
    params = [nn.Parameter(torch.zeros(n, 4)) for n in (7, 11)]
    with pytest.raises(ValueError, match="periods of 7, 11 have the same rows in turn again after 77 steps"):
        Muon([{"params": [p], **ROWS, "period": len(p)} for p in params])


def test_rows_in_turn_are_not_captured(monkeypatch):
    param = nn.Parameter(torch.zeros(8, 4))
    opt = Muon([{"params": [param], **ROWS}])
    param.grad = torch.ones(8, 4)
    monkeypatch.setattr(muon_module, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="'cyclic_rows': every replay of a CUDA graph would update the same rows"):
        opt.step()


def counted_anew(rank: int, world: int) -> list[str]:
    """Errors where one rank alone counts other steps, and where all do; then the rows that have moved."""
    mesh = init_device_mesh("cpu", (world,))
    param = nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)], src_data_rank=None))
    opt = Muon([{"params": [("up", param)], **ROWS}])
    param.grad = torch.ones_like(param)
    found = [raised(opt.step)]
    opt.param_groups[0]["steps_taken"] = 3 if rank else 1
    found.append(raised(opt.step))
    opt.param_groups[0]["steps_taken"] = 3
    with torch.no_grad():
        param.zero_()
    found.append(raised(opt.step))
    return [*found, str((param.full_tensor()[:, 0] != 0).int().tolist())]


def test_a_rank_that_counts_other_steps_stops_all_and_all_may():
    for first, second, third, moved in run(2, counted_anew):
        assert first == third == "no error" and moved == str([0, 0, 0, 1] * 2)
        assert "made anew" in second or "steps_taken" in second


def test_a_report_says_what_rows_in_turn_move():
    param = nn.Parameter(torch.zeros(64, 4))
    [group] = Muon([{"params": [param], **ROWS}], lr=0.1).report().groups
    assert group.update_rms == pytest.approx((0.1 * math.sqrt(16) / math.sqrt(16),) * 2)
