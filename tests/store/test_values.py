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

PLAIN = (None, True, 3, -3, 1 << 40, 0.95, "muon", "", (0.9, 0.95), [3.4, -4.7], ["a.b"], {"a": [1, {"b": ()}]})
BYTES = (b"", b"\x00a\xff", {"dp_rank_0": bytes(range(256)), "dp_rank_1": b"\x80"})


@pytest.mark.parametrize("value", [*PLAIN, *BYTES], ids=repr)
def test_plain_items_are_those_that_torch_saves(value):
    """Byte for byte, but for the serialization id, which no reader checks, and its checksum (twice)."""
    stream = io.BytesIO()
    torch.save(value, stream)
    theirs, ours = stream.getvalue(), plain_item(value)
    assert plain_value(theirs) == plain_value(ours) == value
    with torch.serialization.safe_globals([bytes]):  # torch allows bytes that are not empty by itself
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


@pytest.mark.parametrize(
    "value",
    [
        np.ones(2),
        np.dtype("f8"),
        np.float32,
        np.datetime64(3, "s"),
        np.bytes_(b"a"),
        bytearray(b"a"),
        {b"a": 1},
        {1},
        1j,
    ],
    ids=repr,
)
def test_what_else_numpy_and_python_have_is_no_plain_data(value):
    stream = io.BytesIO()
    torch.save([value], stream)
    with pytest.raises(SourceError, match=r"nothing was run|as dict keys, found bytes"):
        plain_value(stream.getvalue())


def item(pickled):
    """Return an item with this pickle."""
    members, entries = store([("data.pkl", pickled)], 0)
    return members + directory(entries, len(members))


ENCODE, TEXT, LATIN = b"c_codecs\nencode\n", b"X\1\0\0\0x", b"X\6\0\0\0latin1"
LIKE_BYTES = {
    "another codec": ENCODE + TEXT + b"X\5\0\0\0utf-8\x86R",
    "another spelling": ENCODE + TEXT + b"X\7\0\0\0latin-1\x86R",
    "no codec": ENCODE + TEXT + b"\x85R",
    "a third argument": ENCODE + TEXT + LATIN + b"X\6\0\0\0ignore\x87R",
    "a list of arguments": ENCODE + b"](" + TEXT + LATIN + b"eR",
    "a number": ENCODE + b"K\1" + LATIN + b"\x86R",
    "a function as text": ENCODE + ENCODE + LATIN + b"\x86R",
    "a function as codec": ENCODE + TEXT + ENCODE + b"\x86R",
    "the function alone": ENCODE,
    "bytes as text": ENCODE + ENCODE + TEXT + LATIN + b"\x86R" + LATIN + b"\x86R",
    "a state": ENCODE + TEXT + LATIN + b"\x86R}b",
    "items": ENCODE + TEXT + LATIN + b"\x86RK\1K\2s",
    "text that latin1 lacks": ENCODE + b"X\2\0\0\0\xc4\x80" + LATIN + b"\x86R",
    "bytes of something": b"c__builtin__\nbytes\nK\1\x85R",
    "another class": b"c__builtin__\nbytearray\n)R",
    "the opposite": b"c_codecs\ndecode\n" + TEXT + LATIN + b"\x86R",
    "another module": b"ccodecs\nencode\n" + TEXT + LATIN + b"\x86R",
    "a bytearray of later protocols": b"\x96" + b"\1" + b"\0" * 7 + b"x",
}


@pytest.mark.parametrize("name", LIKE_BYTES)
def test_bytes_are_read_in_the_form_that_picklers_write_and_in_no_other(name):
    assert plain_value(item(b"\x80\2](" + ENCODE + TEXT + LATIN + b"\x86Rc__builtin__\nbytes\n)Re.")) == [b"x", b""]
    with pytest.raises(SourceError):
        plain_value(item(b"\x80\2](" + LIKE_BYTES[name] + b"e."))


def test_calls_that_share_a_text_are_not_encoded_without_end():
    text = b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    calls = b"](" + b"".join(b"h\0h\1h\2\x86R" for _ in range(4000)) + b"e"
    with pytest.raises(LimitError, match="MUONCKPT_LIMITS=off"):  # 4 GiB if each were made
        plain_value(item(b"\x80\2(" + ENCODE + b"q\0" + text + b"q\1" + LATIN + b"q\2\x86R" + calls + b"t."))


def test_what_is_nested_too_deeply_is_refused():
    with pytest.raises(SourceError, match="too deeply"):
        plain_value(item(b"\x80\x02]" + b"\x85" * 3000 + b"."))


@pytest.mark.parametrize(("depth", "fits"), [(16, True), (40, False)])
def test_shared_parts_are_looked_at_once_and_refused_if_they_unfold_without_end(depth, fits):
    """Written out wherever they are used, these are 2 ** depth."""
    value = [1]
    for _ in range(depth):
        value = [value, value]
    stream = io.BytesIO()
    torch.save(value, stream)
    with nullcontext() if fits else pytest.raises(LimitError, match="MUONCKPT_LIMITS=off"):
        actual = plain_value(stream.getvalue())
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
