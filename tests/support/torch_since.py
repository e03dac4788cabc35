"""What older versions of torch that we support do not have, as marks of the tests that need it."""

import pytest
import torch

grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.9: a gradient has its parameter's dtype"
)
