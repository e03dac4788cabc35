"""State in another dtype than the weights; that it has the same bits everywhere is in `test_topologies`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muonckpt.optimizer import Muon

BF16 = torch.bfloat16


def test_momentum_in_float32_of_weights_in_bfloat16_is_exact():
    start, gradient = (torch.randn(16, 24, generator=torch.Generator().manual_seed(s)).to(BF16) for s in (0, 1))
    kept = {}
    for weights in (BF16, torch.float32):
        param = nn.Parameter(start.to(weights))
        opt = Muon([{"params": [param], "momentum_dtype": "float32"}])
        for step in range(3):
            param.grad = (gradient * (step + 1)).to(weights)
            opt.step()
        kept[weights] = opt.state[param]["momentum_buffer"]
    assert kept[BF16].dtype == torch.float32
    assert torch.equal(*kept.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum_dtype": "float8"}, "momentum_dtype='float8': expected None, or one of"),
        ({"state_dtype": "bfloat16"}, "'muon' groups have no such option; .* momentum_dtype"),
        ({"algorithm": "adamw", "momentum_dtype": "bfloat16"}, "state_dtype"),
        ({"momentum_dtype": "8bit"}, "momentum_dtype='8bit': expected None, or one of"),
    ],
)
def test_what_cannot_be_kept_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Muon([{"params": [nn.Parameter(torch.zeros(4, 4))], **options}])


def test_a_dtype_cannot_change_under_its_state():
    param = nn.Parameter(torch.zeros(4, 4))
    opt = Muon([{"params": [param], "momentum_dtype": "bfloat16"}])
    opt.param_groups[0]["momentum_dtype"] = None
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="build a new optimizer, and load the state into it"):
        opt.step()


@pytest.mark.filterwarnings("ignore:group . keeps the code's")
def test_a_loaded_state_is_widened_and_narrowed():
    def stepped(dtype: str) -> tuple[nn.Parameter, Muon]:
        param = nn.Parameter(torch.zeros(4, 8))
        opt = Muon([{"params": [param], "momentum_dtype": dtype}])
        param.grad = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        opt.step()
        return param, opt

    (_, narrow), (_, wide) = stepped("bfloat16"), stepped("float32")
    for source in (narrow, wide):
        for dtype in ("float32", "bfloat16"):
            param, opt = stepped(dtype)
            opt.load_state_dict(source.state_dict())
            [saved], found = source.state.values(), opt.state[param]["momentum_buffer"]
            assert torch.equal(found, saved["momentum_buffer"].to(getattr(torch, dtype)))
