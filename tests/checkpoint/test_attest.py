"""Fingerprints of live tensors, and what is proved with them."""

from __future__ import annotations

import pytest
import torch
from support.sharded import DTYPES, some

from muonckpt.checkpoint.bits import bits_of
from muonckpt.checkpoint.device_fingerprint import share_by_numpy, share_by_torch, share_of, unsigned
from muonckpt.fingerprint import fingerprint

LARGE = [((3_000_017,), torch.uint8), ((1_500_007, 2), torch.uint8), ((3, 800_011), torch.uint16),
         ((2, 3, 400_009), torch.uint8), ((1_100_003,), torch.int64), ((7, 1, 5, 70_001), torch.bfloat16)]  # fmt: skip
"""More than a block, along every dim."""


def expected_share(tensor: torch.Tensor, origin: tuple[int, ...]) -> int:
    bits = bits_of(tensor)
    return fingerprint(bits, origin + (0,) * (bits.ndim - len(origin)))


def assert_exact(tensor: torch.Tensor, origin: tuple[int, ...]) -> None:
    expected = expected_share(tensor, origin)
    assert [unsigned(int(take(tensor, origin))) for take in (share_by_torch, share_by_numpy, share_of)] == [
        expected
    ] * 3


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint64, torch.complex32], ids=str)
def test_torch_and_numpy_take_the_same_fingerprint_of_any_dtype_shape_stride_and_origin(dtype):
    generator = torch.Generator().manual_seed(dtype.itemsize)
    for number, shape in enumerate(
        [(), (0,), (3, 0, 2), (7,), (70_001,), (5, 9), (2, 66_000), (3, 4, 5), (2, 1, 3, 2)]
    ):
        tensor = some(shape, dtype, number)
        origin = tuple(torch.randint(0, 1 << 40, (len(shape),), generator=generator).tolist())
        assert_exact(tensor, origin)
        if tensor.ndim > 1:
            assert_exact(tensor.transpose(0, -1), origin)
            assert_exact(tensor[..., ::2], origin)


@pytest.mark.parametrize(("shape", "dtype"), LARGE, ids=str)
def test_a_tensor_of_several_blocks_has_the_same_fingerprint(shape, dtype):
    assert_exact(some(shape, dtype, 3), tuple(range(11, 11 + len(shape))))


def test_pending_conjugation_counts_and_autograd_does_not():
    tensor = some((3, 4), torch.complex64, 1).requires_grad_()
    assert_exact(tensor.detach(), (0, 0))
    resolved = unsigned(int(share_of(tensor.conj(), (0, 0))))
    assert (
        resolved
        == expected_share(tensor.detach().conj().resolve_conj(), (0, 0))
        != expected_share(tensor.detach(), (0, 0))
    )
