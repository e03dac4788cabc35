"""Whether an optimizer does on a mesh what it does on one process: ours does, and what faulty ones do is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from muonckpt import TargetError
from muonckpt.cli.main import run as muonckpt_command
from muonckpt.lab import Conformity, conform

SOURCE = str(Path(__file__).with_name("conform_optimizers.py"))


@pytest.fixture(scope="module")
def faulty() -> dict[tuple[str, str], Conformity]:
    """The comparisons of an optimizer that has another fault for each shape, by sharding and shape."""
    report = conform(f"{SOURCE}:several", ranks=[2])
    assert not report
    return {(c.sharding, c.shape): c for c in report.comparisons}


def test_slices_that_were_orthogonalised_are_named(faulty):
    assert faulty["replicas", "fused"].status == "same bits"
    rows, columns = faulty["FSDP2", "uneven"], faulty["columns (TP)", "fused"]
    assert rows.status == columns.status == "another update"
    assert rows.cause.startswith("each rank's slice was orthogonalised by itself: parts of 19, 18 rows")
    assert columns.cause.startswith("each rank's slice was orthogonalised by itself: 2 parts of 8 columns")
    assert rows.difference > 0.1
    assert faulty["FSDP2", "stack"].status == "same bits", "each rank holds whole matrices"


def test_replicas_that_drift_are_named(faulty):
    assert "replicas of the weight differ" in faulty["replicas", "square"].cause


def test_state_that_torch_would_save_of_one_rank_is_named(faulty):
    assert faulty["FSDP2", "wide"].status == "same bits"
    assert "torch saves one rank's for all" in faulty["FSDP2", "wide"].state
    assert not faulty["replicas", "wide"].state


@pytest.mark.exhaustive
def test_an_optimizer_that_steps_nothing_is_told():
    with pytest.raises(TargetError, match="steps nothing on one process: ValueError: no such optimizer"):
        conform(f"{SOURCE}:never", ranks=[2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ours_has_the_same_bits_on_every_mesh(ranks):
    report = conform(f"{SOURCE}:ours", ranks=[ranks])
    assert report
    assert {c.status for c in report.comparisons} == {"same bits"}


@pytest.mark.exhaustive
def test_the_command_exits_with_1_where_updates_differ(capsys):
    assert muonckpt_command(["lab", "conform", f"{SOURCE}:slices", "--ranks", "2"]) == 1
    assert "another update" in capsys.readouterr().out
