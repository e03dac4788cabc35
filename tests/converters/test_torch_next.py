"""Options that a later torch.optim.Muon may have (PyTorch #187132): known, and ours where that is the same."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.optim._muon

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.look.contents import groups_as_data
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.groups import common_options
from muonckpt.names.coefficients import coefficient_set
from muonckpt.optimizer import Muon
from muonckpt.programs.registry import DIALECTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KELLER = (3.4445, -4.775, 2.0315)
YOU = [[4.0848, -6.8946, 2.9270], [3.9505, -6.3029, 2.6377], [3.7418, -5.5913, 2.3037],
       [2.8769, -3.1427, 1.2046], [2.8366, -3.0525, 1.2012]]  # fmt: skip


class NewtonSchulzAlgorithm(str, Enum):  # noqa: UP042
    """As the source of the pull request has it, and pickles it."""

    STANDARD = "standard"
    GRAM = "gram"


@pytest.fixture
def enumeration(monkeypatch):
    """The enumeration where torch would have it."""
    monkeypatch.setattr(NewtonSchulzAlgorithm, "__module__", "torch.optim._muon")
    monkeypatch.setattr(torch.optim._muon, "NewtonSchulzAlgorithm", NewtonSchulzAlgorithm, raising=False)
    return NewtonSchulzAlgorithm


def saved(path, **options):
    """Save a wide and a square matrix with the groups of the later Muon."""
    optimizer = torch.optim.Muon([torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 16), (8, 8))], lr=0.02)
    group = {**optimizer.param_groups[0], "params": ["wide", "square"], "foreach": None, "use_cuda_graph": False}
    group |= {"ns_algorithm": "standard", "gram_ns_coefficients": [[*KELLER]] * 5, "gram_ns_reset_iterations": []}
    weights = {"wide": torch.rand(4, 16), "square": torch.rand(8, 8)}
    state = {name: {"momentum_buffer": torch.rand_like(weight)} for name, weight in weights.items()}
    optimizer = {"state": state, "param_groups": [{**group, **options}]}
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)
    return path


def converted(path, out):
    """Return the checklist, and ours of the options of each parameter."""
    report = muonckpt.convert(path, out, **grouped(to_dialect="muonckpt"))
    with muonckpt.open(out) as opened:
        groups = groups_as_data(opened.outline, opened.values)
    options = {name: group for group in groups for name in group["params"]}
    return [str(check) for check in report.checklist], options


def test_the_standard_algorithm_is_what_it_was(enumeration, tmp_path):
    path = saved(tmp_path / "run", ns_algorithm=enumeration.STANDARD)
    assert muonckpt.inspect(path).dialect["name"] == "torch"
    checklist, options = converted(path, tmp_path / "ours")
    assert options["wide"] is options["square"]
    assert (options["wide"]["ns_coefficients"], options["wide"]["gram"]) == ("keller", None)
    assert not [line for line in checklist if "ns_algorithm" in line or "gram_" in line or "cuda" in line]


def test_the_gram_form_with_restarts_is_ours_for_wide_matrices_and_none_for_square_ones(enumeration, tmp_path):
    chosen = {"gram_ns_coefficients": YOU, "gram_ns_reset_iterations": [2]}
    path = saved(tmp_path / "run", ns_algorithm=enumeration.GRAM, **chosen)
    checklist, found = converted(path, tmp_path / "ours")
    wide = {"ns_coefficients": "quintic", "ns_steps": 5, "gram": (2,), "ns_dtype": "float16"}
    square = {"ns_coefficients": "keller", "ns_steps": 5, "gram": None, "ns_dtype": "bfloat16"}
    assert {option: found["wide"][option] for option in wide} == wide
    assert {option: found["square"][option] for option in square} == square
    assert not [line for line in checklist if "Gram matrix" in line]
    # The argument of the constructor, of which groups have the two parts, means the same.
    live = {"ns_algorithm": enumeration.GRAM, "gram_newton_schulz_config": chosen}
    (muon, _), shape = DIALECTS["torch"].methods, (4, 16)
    as_argument = common_options(live, DIALECTS["torch"], muon, shape).common
    assert as_argument == common_options({**live, **chosen}, DIALECTS["torch"], muon, shape).common
    form = {"ns_coefficients": "quintic", "gram": (2,), "ns_dtype": "float16"}
    assert form.items() <= as_argument.items()
    # It runs with these options, and steps by torch's triples.
    parameter = torch.nn.Parameter(torch.zeros(4, 16))
    Muon([{"params": [parameter], **{option: found["wide"][option] for option in wide}}], lr=0.02)
    assert coefficient_set(wide["ns_coefficients"]).schedule(5) == tuple(map(tuple, YOU))


def test_a_form_without_restarts_is_said_to_be_rounded_otherwise(enumeration, tmp_path):
    """Five steps in float16 on one Gram matrix, torch's default, are refused here: the plain form is written."""
    path = saved(tmp_path / "run", ns_algorithm=enumeration.GRAM)
    checklist, found = converted(path, tmp_path / "ours")
    assert (found["wide"]["gram"], found["wide"]["ns_dtype"]) == (None, "float16")
    (line,) = [line for line in checklist if "Gram matrix" in line]
    assert line.startswith("set in code: steps on one Gram matrix of wide: 5 (muonckpt has no option for it")
    # On the way back nothing says that it is torch's form.
    report = muonckpt.convert(tmp_path / "ours", tmp_path / "back", **grouped(to_dialect="torch"))
    assert "left: ns_dtype of wide: 'float16'" in "\n".join(map(str, report.checklist))


@pytest.mark.parametrize(
    "value", [{"ns_algorithm": "newest"}, {"ns_algorithm": 3}, {"gram_ns_reset_iterations": "2"}], ids=str
)
def test_values_that_the_source_does_not_have_are_not_taken_for_torchs(value, tmp_path):
    path = saved(tmp_path / "run", **value)
    with pytest.raises(SourceError, match="that of the source is unknown"):
        converted(path, tmp_path / "ours")
    report = muonckpt.convert(path, tmp_path / "told", **grouped(to_dialect="muonckpt", convention="ema"))
    (line,) = [str(check) for check in report.checklist if next(iter(value)) in check.subject]
    assert "left: " in line and "so what it means is unknown" in line
