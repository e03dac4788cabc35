"""The table of names and structure: every element goes where the rule says, and comes back."""

from __future__ import annotations

import random
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from muonckpt import LayoutError, SourceError
from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import TensorLayout, dense
from muonckpt.converters.engine.outputs import OutputTensor
from muonckpt.converters.translate.names import NameRule, NameRules
from muonckpt.converters.translate.structure import TranslatedParameter, apply_rules
from muonckpt.record.record import StateRecord, no_chunks


def cut(shape, rng) -> list[Box]:
    """Random boxes that tile a shape."""
    boxes = [Box.of(shape)]
    for _ in range(rng.randrange(5) if shape else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        if box.shape[dim] < 2:
            boxes.append(box)
            continue
        at = rng.randrange(box.lo[dim] + 1, box.hi[dim])
        boxes.append(Box(box.lo, tuple(at if d == dim else hi for d, hi in enumerate(box.hi))))
        boxes.append(Box(tuple(at if d == dim else lo for d, lo in enumerate(box.lo)), box.hi))
    return boxes


def weight(name: str, dtype: str, layout: TensorLayout, parts: tuple) -> TranslatedParameter:
    record = StateRecord(name, (name,), layout.shape, dtype, no_chunks(len(layout.shape)))
    return TranslatedParameter(name, name, (name,), tensors={None: OutputTensor(record, layout, (parts,))})


class Stored:
    """Arrays cut into random dense chunks, and what layouts into these chunks say."""

    def __init__(self, arrays: dict[str, np.ndarray], seed: int) -> None:
        rng = random.Random(seed)
        self.parameters: dict[str, TranslatedParameter] = {}
        for name, array in arrays.items():
            fragments, parts = [], []
            for box in cut(array.shape, rng) if array.size else ():
                part = array[tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))]
                fragments.append(dense(box, len(parts)))
                parts.append(part.reshape(-1).copy())
            layout = TensorLayout.of(array.shape, tuple(fragments))
            self.parameters[name] = weight(name, str(array.dtype), layout, tuple(parts))

    def read(self, parameter: TranslatedParameter) -> np.ndarray:
        """The elements, one at a time."""
        tensor = parameter.weight
        out, parts = np.full(tensor.record.shape, -1, tensor.record.dtype), list(chain.from_iterable(tensor.sources))
        for fragment in tensor.layout.fragments:
            for index in np.ndindex(*fragment.box.shape):
                where = tuple(lo + i for lo, i in zip(fragment.box.lo, index, strict=True))
                at = fragment.place.offset + sum(i * s for i, s in zip(index, fragment.place.strides, strict=True))
                assert out[where] == -1
                out[where] = parts[fragment.place.buffer][at]
        assert (out != -1).all()
        return out


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.int64).reshape(shape)


def check(table: str, arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray], back: str | None = None) -> None:
    """The rules turn the one into the other, and their inverse turns it back, however the arrays are cut."""
    rules = NameRules.from_toml(table)
    assert NameRules.from_toml(rules.to_toml()) == rules
    assert rules.inverse().inverse() == rules
    for seed in range(20):
        stored = Stored(arrays, seed)
        made = apply_rules(rules, stored.parameters)
        assert made.keys() == expected.keys()
        for name, array in expected.items():
            assert np.array_equal(stored.read(made[name]), array), name
        inverse = NameRules.from_toml(back) if back else rules.inverse()
        again = apply_rules(inverse, made)
        assert again.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(stored.read(again[name]), array), name


def test_gate_and_up_are_split_by_halves():
    whole = numbers(12, 5)
    table = "[[rule]]\nfrom = '{p*}.fc1.weight'\nto = ['{p*}.fc1.weight_w', '{p*}.fc1.weight_v']\nkeeps_groups = true\n"
    check(
        table,
        {"a.b.fc1.weight": whole, "a.b.fc2.weight": whole},
        {"a.b.fc1.weight_w": whole[:6], "a.b.fc1.weight_v": whole[6:], "a.b.fc2.weight": whole},
    )


def test_query_key_value_of_unequal_sizes():
    whole = numbers(40, 3)
    table = "[[rule]]\nfrom = 'l.{i}.qkv'\nto = ['l.{i}.q', 'l.{i}.k', 'l.{i}.v']\nshares = [3, 1, 1]\n"
    check(table, {"l.7.qkv": whole}, {"l.7.q": whole[:24], "l.7.k": whole[24:32], "l.7.v": whole[32:]})


def test_query_groups_that_take_turns():
    """Megatron's qkv: for each group its queries, its key, its value."""
    groups = numbers(3, 4 * 2, 5)
    table = "[[rule]]\nfrom = 'qkv'\nto = ['q', 'k', 'v']\nshares = [2, 1, 1]\ninterleaved = 3\n"
    check(
        table,
        {"qkv": groups.reshape(24, 5)},
        {"q": groups[:, :4].reshape(-1, 5), "k": groups[:, 4:6].reshape(-1, 5), "v": groups[:, 6:].reshape(-1, 5)},
    )


def test_columns():
    whole = numbers(3, 8)
    table = "[[rule]]\nfrom = 'w'\nto = ['a', 'b']\ndim = 1\nshares = [1, 3]\n"
    check(table, {"w": whole}, {"a": whole[:, :2], "b": whole[:, 2:]})


def test_experts_stacked_in_one_tensor_and_each_by_itself():
    whole = numbers(11, 2, 3)
    table = "[[rule]]\nfrom = '{p*}.w13'\nto = '{p*}.{e}.w13'\neach = 'e'\nstacked = true\n"
    check(table, {"x.experts.w13": whole}, {f"x.experts.{e}.w13": whole[e] for e in range(11)})


def test_experts_fused_by_rows_become_stacked():
    """Two rules, one after the other: the 2-d fused form of one program, the 3-d form of another."""
    whole = numbers(12, 3)
    table = (
        "[[rule]]\nfrom = 'w13'\nto = 'w13.{e}'\neach = 'e'\ncount = 4\n"
        "[[rule]]\nfrom = 'w13.{e}'\nto = 'experts'\neach = 'e'\nstacked = true\n"
    )
    check(table, {"w13": whole}, {"experts": whole.reshape(4, 3, 3)})


def test_unequal_parts_are_joined_as_they_are():
    a, b = numbers(2, 4), numbers(5, 4) + 100
    rules = "[[rule]]\nfrom = ['a', 'b']\nto = 'ab'\n"
    back = "[[rule]]\nfrom = 'ab'\nto = ['a', 'b']\nshares = [2, 5]\n"
    check(rules, {"a": a, "b": b}, {"ab": np.concatenate([a, b])}, back)


def test_names_of_any_dims_are_renamed():
    table = "[[rule]]\nfrom = 'transformer.h.{i}.{rest*}'\nto = 'layers.{i}.{rest*}'\n"
    arrays = {"transformer.h.3.a.b": numbers(2, 3), "transformer.h.0.c": numbers(4), "head": numbers(1, 1, 1, 1)}
    expected = {"layers.3.a.b": arrays["transformer.h.3.a.b"], "layers.0.c": numbers(4), "head": arrays["head"]}
    check(table, arrays, expected)


def test_empty_tensors():
    table = "[[rule]]\nfrom = 'w'\nto = ['a', 'b']\n"
    check(table, {"w": numbers(4, 0)}, {"a": numbers(2, 0), "b": numbers(2, 0)})


def test_a_layout_with_holders_in_many_buffers_is_followed():
    """Boxes in one buffer with strides, as a column shard of a larger matrix lies in memory."""
    whole = numbers(6, 4)
    fragments = tuple(dense(Box((0, lo), (6, lo + 2)), lo // 2) for lo in (0, 2))
    stored = Stored({}, 0)
    parts = (whole[:, :2].reshape(-1).copy(), whole[:, 2:].reshape(-1).copy())
    made = apply_rules(
        NameRules((NameRule(("w",), ("a", "b"), shares=(1, 2)),)),
        {"w": weight("w", "int64", TensorLayout.of((6, 4), fragments), parts)},
    )
    assert np.array_equal(stored.read(made["b"]), whole[2:])


@pytest.mark.parametrize(
    "table, arrays, message",
    [
        ("from = 'w'\nto = ['a', 'b']", {"w": (5, 2)}, r"'w'.*5 elements of dim 0 do not divide into 1 x 2"),
        ("from = ['a', 'b']\nto = 'w'", {"a": (2, 2)}, r"found a without part 1"),
        ("from = 'w.{e}'\nto = 'w'\neach = 'e'", {"w.0": (2, 2), "w.2": (2, 2)}, r"without part 1"),
        ("from = ['a', 'b']\nto = 'w'", {"a": (2, 2), "b": (2, 3)}, r"a part has shape \(2, 3\)"),
        ("from = ['a', 'b']\nto = 'w'\nshares = [1, 1]", {"a": (1, 2), "b": (3, 2)}, r"expected \(2, 2\)"),
        ("from = ['a', 'b']\nto = 'w'", {"a": (2, 2), "b": (2,)}, r"ranks \[1, 2\]"),
        ("from = 'w'\nto = 'w.{e}'\neach = 'e'", {"w": (4, 2)}, r"`count` is needed"),
        ("from = 'w.{e}'\nto = 'w'\neach = 'e'\ncount = 3", {"w.0": (2,), "w.1": (2,)}, r"2 parts, expected 3"),
        ("from = 'w'\nto = ['a', 'b']\ndim = 2", {"w": (4, 2)}, r"has no dim 2"),
        ("from = 'w'\nto = ['a', 'b']", {"w": ()}, r"has no dim 0"),
        ("from = 'w'\nto = ['a', 'b']", {"w": (4,), "b": (1,)}, r"makes 'b', which exists already"),
        ("from = '{x}.w'\nto = '{x}.w'\n[[rule]]\nfrom = 'w'\nto = ['a', 'a']", {"w": (4,)}, r"makes 'a' twice"),
    ],
)
def test_what_does_not_tile_is_refused(table, arrays, message):
    stored = Stored({name: numbers(*shape) for name, shape in arrays.items()}, 1)
    with pytest.raises(LayoutError, match=message):
        apply_rules(NameRules.from_toml("[[rule]]\n" + table), stored.parameters)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[[rule]\n", "rules"),
        ("[[rule]]\nfrom = 'a'\n", "'to'"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nsize = 3\n", "unknown keys"),
        ("[[rule]]\nfrom = ['a', 'b']\nto = ['c', 'd']\n", "exactly one pattern"),
        ("[[rule]]\nfrom = '{a}'\nto = '{b}'\n", "same placeholders"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\neach = 'e'\n", "`each` must be"),
        ("[[rule]]\nfrom = 'a'\nto = ['b', 'c']\nshares = [1]\n", "one share"),
        ("[[rule]]\nfrom = 'a'\nto = ['b', 'c']\nshares = [1, 0]\n", "one share"),
        ("[[rule]]\nfrom = 'a'\nto = ['b', 'c']\nshares = [1, true]\n", "expected int"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nstacked = true\n", "`stacked` needs `each`"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\ninterleaved = 0\n", "interleaved"),
        ("[[rules]]\nfrom = 'a'\nto = 'b'\n", r"\[\[rule\]\] tables only"),
    ],
)
def test_a_table_that_is_none_is_refused(text, message):
    with pytest.raises(SourceError, match=message):
        NameRules.from_toml(text)


def test_what_no_rule_names_keeps_its_layout():
    stored = Stored({"w": numbers(3, 4)}, 3)
    assert apply_rules(NameRules(), stored.parameters) == stored.parameters


def test_groups_name_wholes_where_the_rule_says_so():
    stored = Stored({"l.w": numbers(4, 2), "l.x": numbers(4, 2)}, 3)
    keeping, naming = (
        NameRule(("{l}." + name,), ("{l}." + name + "_a", "{l}." + name + "_b"), keeps_groups=keeps)
        for name, keeps in (("w", True), ("x", False))
    )
    made = apply_rules(NameRules((keeping, naming)), stored.parameters)
    assert {name: parameter.listed for name, parameter in made.items()} == {
        "l.w_a": "l.w",
        "l.w_b": "l.w",
        "l.x_a": "l.x_a",
        "l.x_b": "l.x_b",
    }
    joined = apply_rules(NameRules((keeping.inverse(),)), {name: made[name] for name in ("l.w_a", "l.w_b")})
    assert joined["l.w"].listed == "l.w" and "l.w" in joined["l.w"].aliases


def test_the_tables_that_the_documentation_shows_are_tables():
    page = (Path(__file__).parents[2] / "docs" / "formats" / "names.md").read_text()
    tables = [NameRules.from_toml(text) for text in re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
    assert [len(table.rules) for table in tables] == [3]
