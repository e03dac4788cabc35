"""Element-wise algorithms: torch's own bits, the papers' formulas, and the same bits wherever a shard ends."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support import torch_since
from support.interpreted import DEVICE, on_gpu
from torch import nn

from muonckpt.optimizer import Muon
from muonckpt.optimizer.ground import tensors as ground
from muonckpt.optimizer.ground.tensors import cut_portions
from muonckpt.optimizer.methods.scalar import SCALARS, decay

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = [(algorithm, cautious) for algorithm in SCALARS for cautious in (False, True)]


def noise(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def group_of(params: list[torch.Tensor], algorithm: str, **options) -> dict:
    return {
        "params": params,
        "algorithm": algorithm,
        "lr": 0.01,
        "weight_decay": 0.1,
        "cautious": False,
        **SCALARS[algorithm].defaults,
        **options,
    }


def stepped(starts: list[torch.Tensor], gradients: list[list[torch.Tensor | None]], algorithm: str, **options):
    """Parameters and states after one step per list of gradients, of which some may be missing."""
    params = [nn.Parameter(start.clone()) for start in starts]
    group = group_of(params, algorithm, **options)
    state = {p: SCALARS[algorithm].fresh(p) for p in params}
    for step in gradients:
        for p, gradient in zip(params, step, strict=True):
            p.grad = None if gradient is None else gradient.clone()
        with torch.no_grad():
            SCALARS[algorithm].step(group, state)
    return [p.detach() for p in params], [state[p] for p in params]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adamw_is_torchs_bit_for_bit_and_16_bits_are_its_float32_rounded_once(dtype):
    exact = torch.promote_types(dtype, torch.float32)
    """In steps of different numbers, as a parameter without a gradient sits out, and with one that has no elements."""
    starts = [noise(count, count, dtype) for count in (1, 7, 0, 41, 1000)]
    gradients = [
        [
            None if step and (step + i) % 4 == 3 else noise(p.numel(), 100 * step + i, dtype)
            for i, p in enumerate(starts)
        ]
        for step in range(4)
    ]
    found, states = stepped(starts, gradients, "adamw")
    params = [nn.Parameter(start.to(exact)) for start in starts]
    theirs = torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in gradients:
        for p, gradient in zip(params, step, strict=True):
            p.grad = None if gradient is None else gradient.to(exact)
        theirs.step()
        for p in params:
            for tensor in (p, theirs.state[p]["exp_avg"], theirs.state[p]["exp_avg_sq"]):
                tensor.data.copy_(tensor.to(dtype))
    for p, mine, state in zip(params, found, states, strict=True):
        assert torch.equal(mine, p.detach().to(dtype)) and mine.dtype == dtype
        assert state.keys() == theirs.state[p].keys()
        assert all(torch.equal(state[slot], theirs.state[p][slot].to(state[slot].dtype)) for slot in state)


@pytest.mark.parametrize(("algorithm", "cautious"), KINDS)
def test_sixteen_bits_are_rounded_once(algorithm, cautious):
    start, gradient = noise(300, 0, torch.bfloat16), noise(300, 1, torch.bfloat16)
    (narrow, slots), (wide, exact) = (
        stepped([start.to(dtype)], [[gradient.to(dtype)]], algorithm, cautious=cautious, lr=0.0371)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(narrow[0], wide[0].bfloat16()) and not torch.equal(narrow[0], start)
    for slot, value in slots[0].items():
        assert torch.equal(value, exact[0][slot].to(value.dtype)), slot


def test_lion_is_what_its_paper_says():
    """Algorithm 2 of arXiv 2302.06675, written out in float64."""
    beta1, beta2, lr, weight_decay = 0.9, 0.99, 0.01, 0.1
    start, gradients = noise(500, 0, torch.float64), [noise(500, 1 + step, torch.float64) for step in range(5)]
    p, m = start.clone(), torch.zeros_like(start)
    for gradient in gradients:
        update = torch.sign(beta1 * m + (1 - beta1) * gradient)
        m = beta2 * m + (1 - beta2) * gradient
        p = p - lr * (update + weight_decay * p)
    [found], [state] = stepped([start], [[g] for g in gradients], "lion")
    torch.testing.assert_close(found, p, rtol=0, atol=1e-14)
    assert state.keys() == {"exp_avg"}
    torch.testing.assert_close(state["exp_avg"], m, rtol=0, atol=1e-15)


def cuts(count: int) -> Iterator[list[int]]:
    """Ways to cut a vector: into equal parts that end anywhere in a SIMD register, and into five at random."""
    yield from ([part] * (count // part) + [count % part] for part in (8, 37, 64, 129) if count // part < 200)
    if count < 50:
        yield [1] * count
    for seed in range(4):
        ends = sorted(torch.randint(0, count + 1, (4,), generator=torch.Generator().manual_seed(seed)).tolist())
        yield [b - a for a, b in zip([0, *ends], [*ends, count], strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("algorithm", "cautious"), KINDS)
def test_bits_do_not_depend_on_where_a_shard_ends(algorithm, cautious, dtype):
    """Kernels treat the last elements of a tensor, and unaligned ones, by other code than the rest."""
    for count in (7, 41, 1000, 4099):
        start, gradients = noise(count, 0, dtype), [noise(count, 1 + step, dtype) for step in range(3)]
        [whole], [slots] = stepped([start], [[g] for g in gradients], algorithm, cautious=cautious)
        assert whole.isfinite().all() and not torch.equal(whole, start)
        for split in cuts(count):
            parts, states = stepped(
                start.split(split), [g.split(split) for g in gradients], algorithm, cautious=cautious
            )
            assert torch.equal(torch.cat(parts), whole), (count, split)
            for slot in slots.keys() - {"step"}:
                assert torch.equal(torch.cat([state[slot] for state in states]), slots[slot]), (slot, count, split)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("algorithm", "cautious"), KINDS)
def test_bits_do_not_depend_on_what_is_computed_together(algorithm, cautious, dtype, monkeypatch):
    """In portions of all parameters, of a few, of one each, and of parts of one, contiguous or not."""
    starts = [noise(n, n, dtype).view(shape) for n, shape in ((60, (6, 10)), (7, (7,)), (0, (0, 3)), (41, (41,)))]
    starts.append(noise(90, 90, dtype).view(9, 10).t())
    gradients = [[noise(s.numel(), 9 + s.numel() + step, dtype).view(s.shape) for s in starts] for step in range(3)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    expected, slots = stepped(starts, gradients, algorithm, cautious=cautious)
    for elements in (1, 13, 64, 101):
        monkeypatch.setattr(ground, "ELEMENTS", elements)
        found, states = stepped(starts, gradients, algorithm, cautious=cautious)
        assert all(map(torch.equal, found, expected)), elements
        for state, slot in zip(states, slots, strict=True):
            assert all(torch.equal(state[name], slot[name]) for name in slot), elements


def test_portions_are_every_tensor_once_and_no_larger_than_asked_for(monkeypatch):
    monkeypatch.setattr(ground, "ELEMENTS", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sizes = [7, 40, 41, 0, 30, 10, 1, 200, 0, 3]
    tensors = [torch.arange(size) + 1000 * number for number, size in enumerate(sizes)]
    both = list(cut_portions([tensors, tensors]))
    assert all(torch.equal(a, b) for mine, others in both for a, b in zip(mine, others, strict=True))
    seen = [mine for mine, _ in both]
    assert torch.equal(torch.cat([t for portion in seen for t in portion]), torch.cat(tensors))
    assert [sum(t.numel() for t in portion) for portion in seen] == [7, 40, 40, 1, 40, 1, *[40] * 5, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", SCALARS)
def test_cautious_decay_is_only_where_it_does_not_oppose_the_update(algorithm, dtype):
    start, gradients = noise(2000, 0, dtype), [[noise(2000, 1 + step, dtype)] for step in range(2)]
    start[:10], gradients[0][0][5:15], gradients[1][0][5:15] = 0, 0, 0
    [before], [state] = stepped([start], gradients[:1], algorithm)
    # One more step from there, without decay and with cautious decay.
    after = {}
    for rate in (0.0, 3.0):
        p = nn.Parameter(before.clone())
        p.grad = gradients[1][0]
        group = group_of([p], algorithm, weight_decay=rate, cautious=True)
        held = {p: {slot: value.clone() for slot, value in state.items()}}
        with torch.no_grad(), torch.device("meta"):  # a user's default device has no part in it
            SCALARS[algorithm].step(group, held)
        after[rate] = p.detach()
    beta1 = SCALARS[algorithm].defaults["betas"][0]
    update = state["exp_avg"].double() * beta1 + gradients[1][0].double() * (1 - beta1)
    opposed = update.sign() * before.double().sign() < 0
    assert 0.2 < opposed.double().mean() < 0.8
    assert torch.equal(after[3.0][opposed], after[0.0][opposed])
    expected = after[0.0].double() - torch.where(opposed, 0, 0.01 * 3.0 * before.double())
    torch.testing.assert_close(after[3.0].double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    unmoved = (update == 0) & (before != 0)
    assert unmoved.any() and (after[3.0][unmoved].abs() < before[unmoved].abs()).all()


def test_opposing_signs_are_seen_where_the_product_vanishes():
    tiny = torch.tensor([1e-30, 1e-30, -1e-30, -1e-30, 0.0, 1e-30])
    updates = torch.tensor([1e-30, -1e-30, 1e-30, -1e-30, 1.0, 0.0])
    found = tiny.clone()
    decay([found], [updates], {"lr": 1.0, "weight_decay": 0.5, "cautious": True})
    assert torch.equal(found, torch.tensor([5e-31, 1e-30, -1e-30, -5e-31, 0.0, 5e-31]))


@pytest.mark.parametrize("algorithm", SCALARS)
def test_state_is_in_the_parameters_layout_and_counters_are_float32_on_the_cpu(algorithm):
    p = nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16).t())
    with torch.device("meta"):
        state = SCALARS[algorithm].fresh(p)
    for slot, value in state.items():
        wanted = ((), torch.float32) if slot == "step" else (p.shape, p.dtype)
        assert (value.shape, value.dtype) == wanted and value.device.type == "cpu"
        assert value.is_contiguous() and not value.any() and not value.requires_grad


@torch_since.grad_dtype
@pytest.mark.parametrize("algorithm", SCALARS)
def test_rates_and_betas_may_be_tensors_and_a_gradient_may_be_missing_or_of_another_dtype(algorithm):
    start, gradient = noise(9, 0), noise(9, 1)
    [expected], _ = stepped([start], [[gradient]], algorithm, lr=0.25, weight_decay=0.5, betas=(0.5, 0.75))
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    params[0].grad_dtype = torch.float64
    params[0].grad = gradient.double()
    lr, betas = torch.tensor(0.25), (torch.tensor(0.5), torch.tensor(0.75))
    options = {"lr": lr, "weight_decay": torch.tensor(0.5), "betas": betas}
    state = {p: SCALARS[algorithm].fresh(p) for p in params}
    with torch.no_grad():
        SCALARS[algorithm].step(group_of(params, algorithm, **options), state)
        SCALARS[algorithm].step(group_of(params[1:], algorithm), state)
    assert torch.equal(params[0].detach(), expected) and torch.equal(params[1].detach(), start)
    assert all(not value.any() for value in state[params[1]].values())


@pytest.mark.parametrize("algorithm", SCALARS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True"),
        ({"maximize": True}, "maximize=True"),
        ({"capturable": True}, "capturable=True"),
        ({"fused": True}, "fused=True"),
        ({"betas": (0.9,)}, "two numbers"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"eps": -1.0}, "eps=-1.0"),
    ],
)
def test_what_an_algorithm_does_not_have_is_refused(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "algorithm": algorithm, **options}])


# --- inside the optimizer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", SCALARS)
def test_state_of_every_algorithm_loads_and_carries_on(algorithm):
    params = [nn.Parameter(noise(5, 0)) for _ in range(2)]
    opts = [Muon([{"params": [p], "algorithm": algorithm}]) for p in params]
    params[0].grad = noise(5, 1)
    opts[0].step()
    with torch.no_grad():
        params[1].copy_(params[0])
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))  # torch takes the very tensors over
    for p, opt in zip(params, opts, strict=True):
        p.grad = noise(5, 2)
        opt.step()
    assert torch.equal(params[0], params[1])
    lacking = opts[0].state_dict()
    lacking["state"][0].pop("exp_avg")
    slots = ", ".join(sorted(lacking["state"][0]))
    reason = f"with {slots} in the checkpoint, expected exp_avg, {slots}" if slots else "new, without state"
    with pytest.raises(ValueError, match=reason):
        opts[1].load_state_dict(lacking)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_betas_that_are_tensors_are_saved_as_numbers_and_loaded_into_tensors():
    def made(*betas: float) -> Muon:
        p = nn.Parameter(noise(5, 0))
        return Muon([{"params": [p], "algorithm": "lion", "betas": tuple(map(torch.tensor, betas))}])

    saved = made(0.5, 0.25).state_dict()
    assert saved["param_groups"][0]["betas"] == (0.5, 0.25)
    opt = made(0.75, 0.125)
    opt.load_state_dict(saved)
    assert all(torch.equal(b, torch.tensor(v)) for b, v in zip(opt.param_groups[0]["betas"], (0.5, 0.25), strict=True))


def counting(device: torch.device) -> tuple[nn.Parameter, Muon]:
    p = nn.Parameter(noise(5, 0).to(device))
    opt = Muon([{"params": [p], "algorithm": "adamw"}])
    p.grad = torch.ones_like(p)
    opt.step()
    return p, opt


@pytest.mark.gpu
@on_gpu
def test_state_of_a_cpu_goes_on_on_a_gpu_and_the_other_way_round():
    devices = [torch.device("cpu"), DEVICE]
    for here, there in (devices, devices[::-1]):
        (source, saved), (p, opt) = counting(here), counting(there)
        opt.load_state_dict(copy.deepcopy(saved.state_dict()))
        assert {slot: value.device.type for slot, value in opt.state[p].items()} == {
            "step": "cpu",
            "exp_avg": there.type,
            "exp_avg_sq": there.type,
        }
        for one in (saved, opt):
            one.step()
        assert opt.state[p]["step"] == 2
        torch.testing.assert_close(p.detach().cpu(), source.detach().cpu())
