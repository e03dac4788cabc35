"""What older versions of torch that we support do not have: marks of the tests that need it."""

import pytest
import torch
from packaging.version import Version

grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.9: a gradient has its parameter's dtype"
)
uneven_strided = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.10"),
    reason="torch 2.9: distribute_tensor cuts uneven dims otherwise than it says by `_StridedShard`",
)
