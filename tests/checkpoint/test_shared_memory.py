"""Targets whose elements share memory: refused element by element, before anything is written."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import muonckpt
from muonckpt import BoxedTensor, LayoutError, SourceError


@pytest.fixture(params=["load", "redistribute"])
def fill(request, tmp_path):
    """What fills a state dict from another one."""

    def by_load(source: dict[str, Tensor], target: dict[str, Tensor], **options: object) -> None:
        path = tmp_path / str(len([*tmp_path.iterdir()]))
        muonckpt.save(source, path)
        muonckpt.load(target, path, **options)

    return by_load if request.param == "load" else muonckpt.redistribute


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)


def sources_of(target: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other values for each tensor."""
    return {key: counted(*value.shape, dtype=value.dtype) + 100 * n for n, (key, value) in enumerate(target.items())}


base = torch.zeros
REFUSED = {
    "expanded": lambda: {"x": base(1, 3).expand(4, 3)},
    "expanded scalar": lambda: {"x": base(()).expand(5)},
    "expanded inside": lambda: {"x": base(4, 1, 2).expand(4, 3, 2)},
    "a window that slides": lambda: {"x": base(4).as_strided((2, 3), (1, 1))},
    "unfolded": lambda: {"x": base(9).unfold(0, 3, 2)},
    "steps that meet": lambda: {"x": base(40).as_strided((4, 3), (4, 6))},
    "views that overlap": lambda: (lambda b: {"a": b[:3], "b": b[2:]})(base(5)),
    "a part of another": lambda: (lambda b: {"a": b, "b": b[1:3]})(base(5, 2)),
    "a transposed one": lambda: (lambda b: {"a": b, "b": b.t()})(base(3, 3)),
    "in another shape": lambda: (lambda b: {"a": b, "b": b.view(2, 6)})(base(4, 3)),
    "in another dtype": lambda: (lambda b: {"a": b, "b": b.view(torch.int32)})(base(4, 3)),
    "a row and a column": lambda: (lambda b: {"a": b[2], "b": b[:, 1]})(base(4, 3)),
    "a diagonal": lambda: (lambda b: {"a": b.diagonal(), "b": b[2:]})(base(4, 4)),
    "real parts": lambda: (lambda b: {"a": b, "b": torch.view_as_real(b)[..., 0]})(base(4, dtype=torch.complex64)),
    "in slots": lambda: (lambda b: {"s": {"p": {"m": b[:2], "v": b[1:]}}})(base(3)),
}


def flat(node: dict) -> list[Tensor]:
    return [leaf for value in node.values() for leaf in (flat(value) if isinstance(value, dict) else [value])]


def renewed(node: dict) -> dict:
    """The cure: memory of its own for each."""
    return {k: renewed(v) if isinstance(v, dict) else v.contiguous().clone() for k, v in node.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_elements_that_share_memory_are_refused_untouched_and_the_cure_loads(name, fill):
    target = REFUSED[name]()
    source = {"s": {"p": sources_of(target["s"]["p"])}} if "s" in target else sources_of(target)
    with pytest.raises(LayoutError, match="share memory"):
        fill(source, target)
    assert not any(bool(leaf.any()) for leaf in flat(target))
    cured = renewed(target)
    fill(source, cured)
    assert all(map(torch.equal, flat(cured), flat(source)))


def test_boxes_of_one_tensor_and_zeros_count(fill):
    memory = torch.zeros(2, 3)
    with pytest.raises(LayoutError, match="'x' and 'x' share memory"):
        fill({"x": counted(4, 3)}, {"x": BoxedTensor((4, 3), {(0, 0): memory, (2, 0): memory})})
    slots = {"p": {"momentum_buffer": memory[:1]}, "q": {"momentum_buffer": memory}}
    groups = [{"params": ["p", "q"], "lr": 0.5}]
    state = {name: {"momentum_buffer": counted(*of["momentum_buffer"].shape)} for name, of in slots.items()}
    with pytest.raises(LayoutError, match=r"p\.momentum_buffer' .*share memory"):
        fill(
            {"optimizer": {"state": state, "param_groups": groups}},
            {"optimizer": {"state": slots, "param_groups": groups}},
            fresh=["p"],
        )
    assert not memory.any()


VIEWS = {
    "conjugate": lambda memory: memory.conj(),
    "negative": lambda memory: memory.conj().imag,
    "both": lambda memory: torch.view_as_complex(torch.view_as_real(memory)).conj(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_conjugate_and_negative_views_are_refused_and_the_cure_loads(name, fill):
    memory = torch.zeros(3, dtype=torch.complex64)
    target = {"x": VIEWS[name](memory)}
    source = {"x": VIEWS[name](counted(3, dtype=torch.complex64) * (1 + 2j))}
    with pytest.raises(LayoutError, match="'x' is a conjugate or negative view"):
        fill(source, target)
    assert not memory.any()
    cured = target["x"].resolve_conj().resolve_neg()
    fill(source, {"x": cured})
    target["x"].copy_(cured)
    assert torch.equal(target["x"], source["x"]) and memory.any()


def test_whole_tied_tensors_are_filled_once_and_refused_where_they_differ(fill):
    tied = torch.zeros(4, 3)
    fill({"a": counted(4, 3), "b": counted(4, 3)}, {"a": tied, "b": tied.view(4, 3)})
    assert torch.equal(tied, counted(4, 3))
    tied.zero_()
    with pytest.raises(
        (SourceError, LayoutError), match=r"tensors 'a' and 'b' differ in .*share their memory here, as tied"
    ):
        fill({"a": counted(4, 3), "b": counted(4, 3) + 1}, {"a": tied, "b": tied})
    assert not tied.any()


def test_views_without_a_common_element_are_filled(fill):
    """Their memory interleaves: columns, steps, real and imaginary parts, tiles."""
    wide, steps, pairs, grid = torch.zeros(5, 7), torch.zeros(12), torch.zeros(4, dtype=torch.complex64), base(6, 6)
    target = {"left": wide[:, :3], "right": wide[:, 3:].t(), "even": steps[::2], "odd": steps[1::2]}
    target |= {"real": pairs.real, "imag": pairs.imag, "empty": wide[:0]}
    target |= {f"tile {i} {j}": grid[3 * i : 3 * i + 3, 3 * j : 3 * j + 3] for i in range(2) for j in range(2)}
    source = sources_of(target)
    fill(source, target)
    for key, value in target.items():
        assert torch.equal(value, source[key]), key


def marked(views: list[Tensor], numel: int) -> bool:
    """Whether views of one memory have an element twice, counted one by one."""
    count = torch.zeros(numel, dtype=torch.int64)
    for view in views:
        places = torch.arange(numel).as_strided(view.shape, view.stride(), view.storage_offset()).reshape(-1)
        count.index_add_(0, places, torch.ones_like(places))
    return bool((count > 1).any())


def test_random_views_are_judged_as_their_elements_counted_one_by_one():
    dice, verdicts = random.Random(4), [0, 0]
    for _ in range(400):
        memory, views = torch.zeros(64), []
        for _ in range(dice.choice([1, 2, 2, 3])):
            shape = [dice.randint(1, 4) for _ in range(dice.randint(1, 3))]
            strides = [dice.choice([0, 1, 1, 2, 3, 4, 8]) for _ in shape]
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            views.append(memory.as_strided(shape, strides, dice.randint(0, 63 - last)))
        target = {str(number): view for number, view in enumerate(views)}
        source = sources_of(target)
        expected = marked(views, 64)
        verdicts[expected] += 1
        if expected:
            with pytest.raises(LayoutError, match=r"in the same memory|share memory"):
                muonckpt.redistribute(source, target)
            assert not memory.any()
        else:
            muonckpt.redistribute(source, target)
            assert all(torch.equal(view, source[key]) for key, view in target.items())
    assert min(verdicts) > 80


def test_the_source_of_a_redistribution_is_compared_by_elements(fill):
    if fill is not muonckpt.redistribute:
        return
    memory = counted(4, 6)
    source = {"a": memory[:, :3], "b": memory[:, 3:]}
    with pytest.raises(LayoutError, match="'a' of the target shares memory with 'b' of the source"):
        fill(source, {"a": memory[:, 3:], "b": torch.zeros(4, 3)})
    spare = torch.zeros(4, 6)
    target = {"a": memory[:, :3], "b": spare[:, 3:]}  # one stays in its place
    fill(source, target)
    assert torch.equal(memory, counted(4, 6)) and torch.equal(spare[:, 3:], memory[:, 3:])
    left = torch.zeros(4, 6)
    wide = {"a": left[:, ::2], "b": left[:, 1::2]}
    fill({"a": left[:, ::2].clone() + 1, "b": source["b"]}, wide)
    assert torch.equal(wide["a"], torch.ones(4, 3)) and torch.equal(wide["b"], source["b"])


def test_copies_in_the_background_keep_every_view(tmp_path):
    memory = counted(4, 3)
    live = {"a": memory, "rows": memory[1:], "turned": memory.t(), "wide": memory[:1].expand(4, 3)}
    expected = {key: value.clone() for key, value in live.items()}
    muonckpt.async_save(live, tmp_path / "c").result()
    target = {key: torch.zeros_like(value).contiguous() for key, value in expected.items()}
    muonckpt.load(target, tmp_path / "c", attest=True)
    assert all(torch.equal(target[key], value) for key, value in expected.items())
