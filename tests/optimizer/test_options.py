"""Options of parameter groups: what is refused at construction, and what a change between two steps does."""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from muonckpt import LayoutError
from muonckpt.names.vocabulary import GROUP_OPTIONS
from muonckpt.optimizer import COEFFICIENTS, LayerWise, MatrixMethod, Muon, Option, orthogonalize
from muonckpt.optimizer.newton_schulz import CoefficientSet

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
ALGORITHMS = ("muon", "normuon", "adamw", "lion")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def label(value: object) -> str:
    """The name of a case, the same in every process: without addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def matrix(**options) -> Muon:
    return Muon([{"params": [nn.Parameter(normal(12, 8))], **options}])


def train(opt: Muon, steps: int = 1) -> torch.Tensor:
    """The only parameter after some more steps."""
    [p] = opt.param_groups[0]["params"]
    for step in range(steps):
        p.grad = normal(*p.shape, seed=1 + step)
        opt.step()
    return p.detach().clone()


def test_every_option_is_explained():
    """An argument of `Muon` in its docstring, and an option of a group on a page of the guide."""
    [arguments] = re.findall(r"Args:(.*)Raises:", Muon.__doc__, re.DOTALL)
    explained = re.findall(r"\w+", " ".join(re.findall(r"^ {8}(\w[\w, ]*):", arguments, re.MULTILINE)))
    assert {*inspect.signature(Muon).parameters} <= {*explained}
    pages = [page.read_text() for page in GUIDE.glob("*.md")]
    written = {word for page in pages for code in re.findall(r"`([^`\n]+)`", page) for word in re.findall(r"\w+", code)}
    assert {option for options in GROUP_OPTIONS.values() for option in options} <= written


# --- at construction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", ["use_muon", "kind", "type", "wd", "lr_mult", "foreach"])
def test_a_key_that_is_no_option_is_refused_whatever_it_is_called(algorithm, key):
    with pytest.raises(
        ValueError, match=f"{key}=True: {algorithm!r} groups have no such option; expected .*weight_decay"
    ):
        matrix(algorithm=algorithm, **{key: True})


@pytest.mark.parametrize(
    ("option", "meant"), [("momentun", "momentum"), ("piece", "pieces"), ("weigth_decay", "weight_decay")]
)
def test_what_is_nearly_an_option_is_refused_with_the_option(option, meant):
    with pytest.raises(ValueError, match=f"{option}=0.5: .*; is {meant!r} meant"):
        matrix(**{option: 0.5})


@pytest.mark.parametrize(
    ("algorithm", "option"),
    [("adamw", "momentum"), ("adamw", "pieces"), ("lion", "eps"), ("muon", "betas"), ("muon", "beta2")],
)
def test_an_option_of_another_algorithm_is_refused(algorithm, option):
    with pytest.raises(ValueError, match=f"{option}=0.5: {algorithm!r} groups have no such option"):
        matrix(algorithm=algorithm, **{option: 0.5})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_torchs_schedulers_write_and_a_name_pass(algorithm):
    """So groups can be taken from an optimizer that a scheduler has been attached to."""
    p = nn.Parameter(normal(12, 8))
    opt = Muon([{"params": [p], "algorithm": algorithm, "lr": 0.1, "name": "mlp"}])
    torch.optim.swa_utils.SWALR(opt, swa_lr=0.05)
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=10, cycle_momentum=True)
    [again] = Muon(opt.param_groups).param_groups
    assert again["name"] == "mlp" and {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum"} <= again.keys()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("algorithm", "option"),
    [
        *((algorithm, option) for algorithm in ALGORITHMS for option in ("lr", "weight_decay")),
        *((algorithm, "momentum") for algorithm in ("muon", "normuon")),
        *((algorithm, "eps") for algorithm in ("muon", "normuon", "adamw")),
        ("normuon", "beta2"),
    ],
)
def test_numbers_are_finite(algorithm, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        matrix(algorithm=algorithm, **{option: value})


def test_a_rate_that_is_a_tensor_is_finite_too():
    with pytest.raises(ValueError, match="lr="):
        matrix(lr=torch.tensor(math.inf))


def wrong_values(algorithm: str) -> Iterator[tuple[str, object]]:
    """Yield values of another type than an option has by default, as YAML and command lines give them."""
    for option, default in GROUP_OPTIONS[algorithm].items():
        if isinstance(default, str):
            wrong = [3, True, None] if option != "adjust_lr_fn" else [3, True]
        elif option in ("pieces", "columns", "gram"):
            wrong = [2, "12", "(4, 8)", (2.5, 9.5), ("4", "8"), (True,), {4: 8}]
        elif isinstance(default, tuple):
            wrong = [str(default), 0.9, (0.9,), ("0.9", "0.95"), (True, False), None]
        else:
            wrong = [str(default), None, (default,)]
            wrong += ["False", "true", 1, 0, "no"] if isinstance(default, bool) else [True, False]
        yield from ((option, value) for value in wrong)


@pytest.mark.parametrize("algorithm", GROUP_OPTIONS)
def test_every_option_has_the_type_of_its_default(algorithm):
    """At construction, and if it is changed between two steps."""
    opt = matrix(algorithm=algorithm)
    [group], start = opt.param_groups, train(opt)
    for option, value in wrong_values(algorithm):
        with pytest.raises(ValueError, match=f"^{option}=.*: expected|^ns_coefficients="):
            matrix(algorithm=algorithm, **{option: value})
        if value == (right := group[option]):  # 0 for False
            continue
        group[option] = value
        with pytest.raises(ValueError, match=f"{option}=.*: expected|^ns_coefficients="):
            train(opt)
        group[option] = right
    assert torch.equal(group["params"][0], start)


def test_an_option_of_a_method_from_outside_that_is_on_or_off_is_that():
    method = MatrixMethod("signed", lambda whole: whole.matrix, options={"signed": Option(True)})
    assert matrix(algorithm=method, signed=False).param_groups[0]["signed"] is False
    for value in ("False", 0, None):
        with pytest.raises(ValueError, match=r"signed=.*: expected True or False"):
            matrix(algorithm=method, signed=value)


BETWEEN = [
    *(("lr", value) for value in (-0.1, math.nan, math.inf, torch.tensor(math.nan), torch.tensor(-1.0), None)),
    *(("weight_decay", value) for value in (-0.1, math.nan)),
    *(("momentum", value) for value in (1.0, -0.5, math.nan)),
]


@pytest.mark.parametrize(("option", "value"), BETWEEN, ids=label)
@pytest.mark.parametrize("layer_wise", [False, True])
def test_a_rate_that_a_schedule_makes_wrong_is_refused_before_anything_moves(option, value, layer_wise):
    net = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))
    groups = [{"params": [layer.weight]} for layer in net]
    opt = LayerWise(net, groups) if layer_wise else Muon(groups)

    def step() -> None:
        net(normal(3, 8)).square().sum().backward()
        opt.step()
        opt.zero_grad()

    step()
    before = [layer.weight.detach().clone() for layer in net]
    was, opt.param_groups[1][option] = opt.param_groups[1][option], value
    with pytest.raises(ValueError, match=f"group 1: {option}=.*: expected a"):
        step()
    assert all(map(torch.equal, before, net.parameters()))
    opt.param_groups[1][option] = was
    opt.zero_grad()
    step()
    assert not any(map(torch.equal, before, net.parameters()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({name: value}, f"{name}=.*: expected True or False. Write LayerWise")
            for name in ("average", "exact", "overlap")
            for value in ("False", 0)
        ),
        ({"bucket_size": "100"}, "bucket_size='100': expected None, or a whole number"),
    ],
)
def test_arguments_of_layer_wise_have_their_types(arguments, message):
    net = nn.Linear(8, 12, bias=False)
    with pytest.raises(ValueError, match=message):
        LayerWise(net, net.parameters(), **arguments)


RATES = [
    ("original", {}, False),
    ("spectral", {}, False),
    ("none", {}, False),
    ("match_rms_adamw", {}, True),
    ("original", {"lr": 3e-4}, True),
]


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
@pytest.mark.parametrize("first", ["matrices", "rest", "added"])
@pytest.mark.parametrize(("scale", "own", "fine"), RATES, ids=label)
def test_the_rate_of_matrices_is_only_adamws_where_it_is_scaled_to_be(algorithm, first, scale, own, fine):
    weight, bias = nn.Parameter(normal(12, 8)), nn.Parameter(normal(12))
    groups = [{"params": [weight]}, {"params": [bias], "algorithm": algorithm, **own}]

    def build() -> Muon:
        if first == "added":
            opt = Muon(groups[:1], lr=0.02, adjust_lr_fn=scale)
            opt.add_param_group(groups[1])
            return opt
        return Muon(groups if first == "matrices" else groups[::-1], lr=0.02, adjust_lr_fn=scale)

    if fine:
        rates = {group["algorithm"]: group["lr"] for group in build().param_groups}
        assert rates == {"muon": 0.02, algorithm: own.get("lr", 0.02)}
    else:
        told = f"a group of {algorithm!r} says no lr.*lr=0.02.*adjust_lr_fn={scale!r}.*match_rms_adamw"
        with pytest.raises(ValueError, match=told):
            build()


def test_one_matrix_group_of_another_scale_is_enough_and_none_at_all_is_fine():
    weights, bias = [nn.Parameter(normal(12, 8)) for _ in range(2)], nn.Parameter(normal(12))
    matched, own = {"params": [weights[0]], "adjust_lr_fn": "match_rms_adamw"}, {"params": [weights[1]]}
    rest = {"params": [bias], "algorithm": "adamw"}
    with pytest.raises(ValueError, match="adjust_lr_fn='original'"):
        Muon([matched, rest, own])
    opt = Muon([matched, rest])
    with pytest.raises(ValueError, match="adjust_lr_fn='original'"):
        opt.add_param_group(own)
    assert len(opt.param_groups) == 2
    assert Muon([rest], lr=0.5).param_groups[0]["lr"] == 0.5
    copied = copy.deepcopy(opt)
    with pytest.raises(ValueError, match="adjust_lr_fn='original'"):
        copied.add_param_group(own)


def test_the_convention_is_ours():
    with pytest.raises(ValueError, match="convention='sum'"):
        matrix(convention="sum")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=label)
def test_parameters_of_8_bits_are_refused(algorithm, dtype):
    p = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    with pytest.raises(ValueError, match=rf"^layers\.3\.weight: .*{dtype}.*16 bits"):
        Muon([{"params": [("layers.3.weight", p)], "algorithm": algorithm}])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_of_parameters_on_the_meta_device_is_refused(algorithm):
    """Before anything is changed: a model that is materialised later has other parameters."""
    there, nowhere = nn.Parameter(normal(4, 4)), nn.Parameter(torch.empty(4, 4, device="meta"))
    opt = Muon([{"params": [there, nowhere], "algorithm": algorithm}])
    there.grad = normal(4, 4, seed=1)
    with pytest.raises(RuntimeError, match=r"\(4, 4\) is on the meta device.*build the optimizer after"):
        opt.step()
    assert torch.equal(there, normal(4, 4)) and not any(t.any() for t in opt.state[there].values())


# --- between two steps ------------------------------------------------------------------------------------------


def half(rows: int, columns: int) -> float:
    return 0.5


CHANGES = [
    ({}, {"pieces": (4, 8)}),
    ({"pieces": (4, 8)}, {"pieces": None}),
    ({}, {"columns": (2, 6)}),
    ({"pieces": (2, 4), "interleaved": 2}, {"interleaved": 1, "pieces": (12,)}),
    ({}, {"ns_dtype": "float32"}),
    ({}, {"ns_dtype": "float16"}),
    ({}, {"ns_steps": 2}),
    ({}, {"ns_coefficients": "keller"}),
    ({}, {"eps": 1e3}),
    ({"columns": (4, 4)}, {"gram": (2,), "columns": None, "pieces": (3,) * 4}),
    ({}, {"adjust_lr_fn": "match_rms_adamw"}),
    ({}, {"adjust_lr_fn": half}),
    ({}, {"nesterov": False}),
    ({}, {"cautious": True}),
    ({}, {"momentum": 0.5}),
    ({}, {"lr": 0.5}),
    ({}, {"weight_decay": 0.5}),
    ({"algorithm": "normuon"}, {"pieces": (4, 8)}),
    ({"algorithm": "normuon"}, {"beta2": 0.5}),
    ({"algorithm": "adamw"}, {"betas": (0.5, 0.5)}),
    ({"algorithm": "lion"}, {"cautious": True}),
]


@pytest.mark.parametrize(("before", "change"), CHANGES, ids=label)
def test_an_option_changed_after_the_first_step_is_as_if_it_had_been_so_from_then_on(before, change):
    opt = matrix(**before)
    start = train(opt)
    fresh = matrix(**{**before, **change})
    [p], [mine] = fresh.param_groups[0]["params"], opt.param_groups[0]["params"]
    with torch.no_grad():
        p.copy_(start)
    for slot, value in opt.state[mine].items():
        fresh.state[p][slot].copy_(value)
    opt.param_groups[0].update(change)
    assert torch.equal(train(opt, 2), train(fresh, 2))
    untouched = matrix(**before)
    train(untouched)
    assert not torch.equal(train(untouched, 2), train(fresh, 0)), "the change makes no difference"


@pytest.mark.parametrize(
    ("before", "change", "error", "message"),
    [
        ({}, {"pieces": (4, 4)}, LayoutError, "add up to the 12 rows"),
        ({}, {"ns_coefficients": "nope"}, ValueError, "ns_coefficients='nope'"),
        ({}, {"ns_steps": 0}, ValueError, "ns_steps=0"),
        ({}, {"ns_dtype": "float8"}, ValueError, "ns_dtype='float8'"),
        ({}, {"gram": ()}, ValueError, "gram=()"),
        ({}, {"algorithm": "normuon"}, ValueError, "algorithm='normuon'"),
        ({}, {"algorithm": "sgd"}, ValueError, "algorithm='sgd'"),
        ({}, {"algorithm": "adamw"}, ValueError, "algorithm='adamw'"),
        ({"algorithm": "adamw"}, {"algorithm": "muon"}, ValueError, "algorithm='muon'"),
        ({"algorithm": "normuon"}, {"columns": (4, 4)}, ValueError, "columns.*state"),
        ({"algorithm": "adamw"}, {"eps": -1.0}, ValueError, "eps=-1.0"),
    ],
    ids=label,
)
def test_a_change_that_cannot_be_followed_is_refused_and_nothing_is_stepped(before, change, error, message):
    opt = matrix(**before)
    start = train(opt)
    [p] = opt.param_groups[0]["params"]
    state = {slot: value.clone() for slot, value in opt.state[p].items()}
    opt.param_groups[0].update(change)
    for _ in range(2):  # not only once
        with pytest.raises(error, match=message):
            train(opt)
    assert torch.equal(p, start) and all(torch.equal(opt.state[p][slot], value) for slot, value in state.items())


def test_layer_wise_owners_follow_a_change():
    net, twin = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
    twin.load_state_dict(net.state_dict())
    opt, fresh = LayerWise(net, net.parameters()), LayerWise(twin, [{"params": [twin.weight], "pieces": (4, 8)}])
    opt.param_groups[0]["pieces"] = (4, 8)
    for model, optimizer in ((net, opt), (twin, fresh)):
        model(normal(3, 8)).square().sum().backward()
        optimizer.step()
    assert torch.equal(net.weight, twin.weight)


# --- coefficients of one's own ------------------------------------------------------------------------------------

KELLER = COEFFICIENTS["keller"].steps[0]


@pytest.mark.parametrize(
    "ns",
    [[KELLER] * 5, tuple([KELLER] * 5), [list(KELLER)] * 5, CoefficientSet("mine", (KELLER,), "a test", tail=KELLER)],
)
def test_coefficients_of_ones_own_do_what_the_set_of_the_same_numbers_does(ns):
    assert torch.equal(train(matrix(ns_coefficients=ns), 3), train(matrix(ns_coefficients="keller"), 3))
    assert not torch.equal(train(matrix(ns_coefficients=ns), 3), train(matrix(), 3))
    assert torch.equal(
        orthogonalize(normal(12, 8), coefficients=ns), orthogonalize(normal(12, 8), coefficients="keller")
    )


def test_a_state_dict_carries_the_numbers_and_load_compares_them(tmp_path):
    mine = matrix(ns_coefficients=CoefficientSet("mine", (KELLER, (2.0, -1.5, 0.5)), "a test", norm_scale=1.02))
    train(mine)
    state = mine.state_dict()
    assert dict(state["param_groups"][0]["ns_coefficients"])["steps"] == (KELLER, (2.0, -1.5, 0.5))
    torch.save(state, tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    same = matrix(
        ns_coefficients=CoefficientSet("another name", (KELLER, (2.0, -1.5, 0.5)), "elsewhere", norm_scale=1.02)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(again)
    other = matrix(ns_coefficients=[KELLER, (2.0, -1.5, 0.25)])
    with pytest.warns(UserWarning, match="keeps the code's ns_coefficients="):
        other.load_state_dict(again)


def test_the_name_of_a_published_set_stays_its_name():
    assert matrix(ns_coefficients=COEFFICIENTS["polar_express"]).param_groups[0]["ns_coefficients"] == "polar_express"


@pytest.mark.parametrize("ns", [[], [(1.0, 2.0)], [(1.0, 2.0, math.inf)], "kellerr", 3, [("a", "b", "c")]])
def test_what_is_no_set_of_coefficients_is_refused(ns):
    with pytest.raises(ValueError):
        matrix(ns_coefficients=ns)


def test_normuon_takes_the_scale_of_the_paper():
    before = normal(12, 8)
    options = {"algorithm": "normuon", "adjust_lr_fn": "none", "weight_decay": 0.0, "lr": 1.0}
    update = train(matrix(update_norm="rms", **options)) - before
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)
    other = train(matrix(**options)) - before
    assert torch.allclose(update / update.norm(), other / other.norm(), atol=2e-3)  # rounded to bfloat16 on the way
    with pytest.raises(ValueError, match="update_norm='l1': expected one of"):
        matrix(algorithm="normuon", update_norm="l1")


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"ns": "keller"}, {"adjust_lr": "spectral"}])
def test_an_option_has_one_name(option):
    weight = nn.Parameter(normal(12, 8))
    with pytest.raises(TypeError):
        Muon([weight], **option)
    with pytest.raises(ValueError, match="'muon' groups have no such option"):
        Muon([{"params": [weight], **option}])


def test_a_state_dict_of_torch_has_the_same_options():
    """It has numbers instead of the name of a set, and None for the default scale."""
    opt = Muon([nn.Parameter(normal(12, 8))], adjust_lr_fn=None, ns_coefficients="keller")
    saved = copy.deepcopy(opt.state_dict())
    [group] = saved["param_groups"]
    assert (group["adjust_lr_fn"], group["ns_coefficients"]) == ("original", "keller")
    group["adjust_lr_fn"], group["ns_coefficients"] = None, KELLER
    opt.load_state_dict(saved)
    assert opt.param_groups[0].keys() == group.keys()
    assert opt.param_groups[0]["adjust_lr_fn"] == "original"
    group["ns_coefficients"] = "cans"
    with pytest.raises(UserWarning, match="keeps the code's ns_coefficients='keller'"):
        opt.load_state_dict(saved)
