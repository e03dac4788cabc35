"""Groups of the stand-in for dion's Muon: what cannot be had is refused by name, and copies take groups alike."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from muonckpt import LayoutError
from muonckpt.compat.dion import Muon


def test_what_cannot_be_had_is_refused_by_name():
    matrix, conv = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 3, 2, 2))
    for message, groups, options in [
        ("newton_schulz_func", [matrix], {"newton_schulz_func": lambda matrix, epsilon: matrix}),
        ("adjust_lr='muon'", [matrix], {"adjust_lr": "muon"}),
        (r"\(4, 3, 2, 2\) are rows and columns is not clear; .* 4 x 12, .*'flatten': True", [conv], {}),
        ("algorithm='dion'", [{"params": [matrix], "algorithm": "dion"}], {}),
        ("num_heads=3: .*a group for each height", [{"params": [matrix], "num_heads": 3}], {}),
        ("num_heads=2 and split_sizes", [{"params": [matrix], "num_heads": 2, "split_sizes": (2, 2)}], {}),
        ("mu|momentum", [matrix], {"mu": 1.5}),
    ]:
        with pytest.raises(ValueError, match=message):
            Muon(groups, **options)
    with pytest.raises(LayoutError, match="add up to the 4 rows"):
        Muon([{"params": [matrix], "split_sizes": (2, 3)}])


def test_flatten_is_taken_where_it_says_something():
    matrix, conv, stack = (nn.Parameter(torch.ones(shape)) for shape in [(4, 6), (4, 3, 2, 2), (4, 3, 2)])
    assert "flatten" not in Muon([matrix], flatten=True).param_groups[0]
    assert Muon([conv, matrix], flatten=True).param_groups[0]["flatten"] is True
    optimizer = Muon([{"params": [conv], "flatten": True}, {"params": [stack]}, {"params": [matrix], "flatten": True}])
    assert [group.get("flatten") for group in optimizer.param_groups] == [True, None, None]
    assert [group.matrices for group in optimizer.report().groups] == [1, 4, 1]
    conv.grad = torch.ones_like(conv)
    optimizer.step()
    assert optimizer.param_groups[0]["flatten"] is True


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
def test_betas_written_into_a_group_are_taken_over():
    param = nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": [param], "algorithm": "adamw", "beta2": 0.99}])
    optimizer.param_groups[0]["beta1"] = 0.7
    optimizer.step()
    assert optimizer.param_groups[0]["betas"] == (0.7, 0.99)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_takes_groups_as_the_original(copied):
    twin = copied(Muon([nn.Parameter(torch.ones(4, 4))], betas=(0.5, 0.6), epsilon=1e-2, flatten=True))
    twin.add_param_group({"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"})
    assert twin.param_groups[1]["betas"] == (0.5, 0.6) and twin.param_groups[1]["eps"] == 1e-2
    twin.add_param_group({"params": [nn.Parameter(torch.ones(3, 2, 2))]})
    assert twin.param_groups[2]["flatten"] is True
