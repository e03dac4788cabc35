"""Small values: what torch.save makes of them, and nothing that could be run."""

from __future__ import annotations

import io
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from muonckpt import SourceError
from muonckpt.store.formats.torch_save.plain_item import plain_item, plain_value
from muonckpt.store.formats.torch_save.stored_zip import directory, store
from muonckpt.store.io.limits import LimitError


@pytest.mark.parametrize(
    "value", [None, True, 3, -3, 1 << 40, 0.95, "muon", "", (0.9, 0.95), [3.4, -4.7], ["a.b"], {"a": [1, {"b": ()}]}]
)
def test_plain_items_are_those_that_torch_saves(value):
    """Byte for byte, but for the serialization id, which no reader checks, and its checksum (twice)."""
    stream = io.BytesIO()
    torch.save(value, stream)
    theirs, ours = stream.getvalue(), plain_item(value)
    assert plain_value(theirs) == plain_value(ours) == value
    assert torch.load(io.BytesIO(ours), weights_only=True) == value
    assert len(theirs) == len(ours)
    assert sum(a != b for a, b in zip(theirs, ours, strict=True)) <= 40 + 2 * 4


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "int64", "int32", "bool_"])
def test_a_number_of_numpy_is_a_number(kind):
    value = {"lr": [getattr(np, kind)(0.1), getattr(np, kind)(-3)]}
    stream = io.BytesIO()
    torch.save(value, stream)
    actual = plain_value(stream.getvalue())
    assert actual == {"lr": [number.item() for number in value["lr"]]}
    assert {type(number) for number in actual["lr"]} <= {float, int, bool}


@pytest.mark.parametrize("value", [np.ones(2), np.dtype("f8"), np.float32, b"bytes", np.datetime64(3, "s")])
def test_what_else_numpy_has_is_no_plain_data(value):
    stream = io.BytesIO()
    torch.save([value], stream)
    with pytest.raises(SourceError, match="nothing was run"):
        plain_value(stream.getvalue())


def test_what_is_nested_too_deeply_is_refused():
    members, entries = store([("data.pkl", b"\x80\x02]" + b"\x85" * 3000 + b".")], 0)
    with pytest.raises(SourceError, match="too deeply"):
        plain_value(members + directory(entries, len(members)))


@pytest.mark.parametrize(("depth", "fits"), [(16, True), (40, False)])
def test_shared_parts_are_looked_at_once_and_refused_if_they_unfold_without_end(depth, fits):
    """Written out wherever they are used, these are 2 ** depth."""
    value = [1]
    for _ in range(depth):
        value = [value, value]
    item = io.BytesIO()
    torch.save(value, item)
    with nullcontext() if fits else pytest.raises(LimitError, match="MUONCKPT_LIMITS=off"):
        actual = plain_value(item.getvalue())
        assert actual[0] is actual[1]


def test_an_item_that_is_no_plain_data_is_refused_and_nothing_in_it_is_run(tmp_path):
    class Danger:
        def __reduce__(self):
            return (open, (str(tmp_path / "run"), "w"))

    torch.save({"lr": Danger()}, tmp_path / "item")
    with pytest.raises(SourceError, match="nothing was run"):
        plain_value((tmp_path / "item").read_bytes())
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match="plain data"):
        plain_item({"a": torch.zeros(2)})
