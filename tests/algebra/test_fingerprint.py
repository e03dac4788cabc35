"""Fingerprints are those of the definition, the same of every layout, and others after any change."""

from __future__ import annotations

import numpy as np
import pytest
from support.random_layouts import READERS, random_shape

from muonckpt.algebra.fingerprint import as_hex, box_shares, combine, fingerprint

WORDS = [np.uint8, np.uint16, np.uint32, np.uint64]
GOLDEN = 0x9E3779B97F4A7C15


def weight(dim: int, index: int) -> int:
    """Return the weight of an index along a dim as the definition says it, in Python integers."""
    mask = 2**64 - 1
    x = (index + dim * 2**56 + 1) * GOLDEN & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31 | 1


def defined_fingerprint(values: np.ndarray) -> int:
    total = 0
    for index, value in np.ndenumerate(values):
        # Elements of eight bytes are two words, along one more dim.
        words = [int(value)] if values.itemsize < 8 else [int(value) & 0xFFFFFFFF, int(value) >> 32]
        for k, word in enumerate(words):
            product = word
            for dim, i in enumerate(index if values.itemsize < 8 else (*index, k)):
                product *= weight(dim, i)
            total += product
    return total % 2**64


def random_values(rng, shape, dtype):
    return rng.integers(0, np.iinfo(dtype).max, size=shape, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_it_is_what_the_definition_says(dtype, shape):
    values = random_values(np.random.default_rng(0), shape, dtype)
    assert fingerprint(values, (0,) * len(shape)) == defined_fingerprint(values)


@pytest.mark.parametrize("seed", range(4))
def test_every_layout_of_a_tensor_has_the_same_fingerprint(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        shape = random_shape(rng)
        values = random_values(rng, shape, WORDS[rng.integers(4)])
        # Replicas count once: the fingerprint is that of the set of boxes.
        layout = READERS[rng.integers(len(READERS))](rng, shape)
        boxes = {fragment.box for fragment in layout.fragments}
        shares = [fingerprint(values[tuple(map(slice, box.lo, box.hi))], box.lo) for box in boxes]
        assert combine(*shares) == fingerprint(values, (0,) * len(shape))


@pytest.mark.parametrize(
    ("dtype", "shape"), [("<u1", (3, 5)), ("<u2", ()), ("<u4", (7,)), ("<u8", (2, 3)), ("<u8", (4, 2))]
)
def test_many_boxes_of_one_shape_have_the_shares_that_each_has(dtype, shape):
    values = np.random.default_rng(3).integers(0, 200, (6, *shape), dtype=dtype)
    origin = tuple(range(9, 9 + len(shape)))
    assert box_shares(values, origin) == [fingerprint(box, origin) for box in values]


def test_any_single_changed_bit_changes_it():
    values = random_values(np.random.default_rng(1), (6, 9), np.uint32)
    before = fingerprint(values, (0, 0))
    for index in np.ndindex(values.shape):
        for bit in range(32):
            changed = values.copy()
            changed[index] ^= np.uint32(1 << bit)
            assert fingerprint(changed, (0, 0)) != before


def test_negating_a_tensor_or_swapping_rows_changes_it():
    values = np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32)
    prints = {
        fingerprint(v.view(np.uint32), (0, 0))
        for v in (values, -values, values[::-1].copy(), values[:, ::-1].copy(), values.T.copy())
    }
    assert len(prints) == 5


def test_long_and_narrow_tensors_take_the_same_blocks_wherever_they_are_cut():
    rng = np.random.default_rng(3)
    columns = 1 << 16  # beyond this many, rows are cut
    for shape in [(3 * columns + 5,), (4, columns + 3), (columns // 2, 3)]:
        values = random_values(rng, shape, np.uint16)
        cut = shape[-1] // 3 + 1
        head, tail = values[..., :cut], values[..., cut:]
        shares = fingerprint(head, (0,) * len(shape)), fingerprint(tail, (*(0,) * (len(shape) - 1), cut))
        assert combine(*shares) == fingerprint(values, (0,) * len(shape))


def test_scalars_and_empty_tensors():
    assert fingerprint(np.array(3, np.uint32), ()) == 3 * weight(0, 0) % 2**64
    wide = np.array((7 << 32) + 5, np.uint64)
    assert fingerprint(wide, ()) == weight(0, 0) * (5 * weight(1, 0) + 7 * weight(1, 1)) % 2**64
    assert fingerprint(np.empty((0, 4), np.uint32), (0, 0)) == 0
    assert as_hex(255) == "00000000000000ff"
