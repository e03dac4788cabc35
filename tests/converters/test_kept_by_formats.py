"""What Megatron's torch_dist and DeepSpeed's universal folder keep of groups, steps and conventions, once written."""

from __future__ import annotations

import pytest
import torch
from support.golden import golden

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.names import NameRule, NameRules

DION, TORCH = golden("dion_fsdp4") / "ckpt", golden("torch_fsdp4") / "ckpt"
RATES = ("lr", "weight_decay", "momentum", "betas", "eps", "step")


def rates(path, names=RATES) -> dict[str, dict]:
    """The options of each parameter that every program has."""
    with muonckpt.open(path) as checkpoint:
        found = {}
        for group in checkpoint.groups.values():
            for param in group["params"]:
                found[param] = {name: group[name] for name in names if name in group}
        return found


def counts(path) -> set[int]:
    with muonckpt.open(path) as checkpoint:
        return {int(t.numpy()) for key, t in checkpoint.tensors.items() if key.endswith(".step")}


@pytest.mark.parametrize("source", [DION, TORCH])
def test_groups_and_steps_come_back_from_torch_dist(source, tmp_path):
    """Two of dion's groups differ in their rates, and Megatron's common state does not name their parameters."""
    kept = ("lr", "weight_decay", "momentum", "betas")
    muonckpt.convert(source, tmp_path / "direct", to_dialect="muonckpt")
    muonckpt.convert(source, tmp_path / "there", **grouped(to_dialect="torch_dist_chained", target_convention="ema"))
    muonckpt.reshard(tmp_path / "there", tmp_path / "moved", mesh={"dp": 2})
    muonckpt.convert(tmp_path / "moved", tmp_path / "back", to_dialect="muonckpt")
    assert rates(tmp_path / "back", kept) == rates(tmp_path / "direct", kept)
    assert counts(tmp_path / "back") == counts(tmp_path / "direct") == {3}


def test_members_of_groups_have_the_names_that_rules_give(tmp_path):
    muonckpt.convert(DION, tmp_path / "there", **grouped(to_dialect="torch_dist_chained", target_convention="ema"))
    rename = NameRules((NameRule(("lm_head.weight",), ("head.weight",)),))
    muonckpt.convert(tmp_path / "there", tmp_path / "renamed", **grouped(rules=rename))
    muonckpt.convert(tmp_path / "renamed", tmp_path / "back", to_dialect="muonckpt")
    found = rates(tmp_path / "back")
    assert found["head.weight"]["lr"] == 0.004999999888241291 and "lm_head.weight" not in found


def test_without_our_manifest_equal_groups_and_the_common_step_count(tmp_path):
    """As Megatron itself writes it: groups are known where an optimizer has one kind, its step in any case."""
    muonckpt.convert(DION, tmp_path / "there", **grouped(to_dialect="torch_dist_chained", target_convention="ema"))
    (tmp_path / "there" / "muonckpt.json").unlink()
    options = grouped(to_dialect="muonckpt", convention="ema", from_dialect="torch_dist")
    with pytest.warns(UserWarning, match=r"saved with a muonckpt\.json"):
        muonckpt.convert(tmp_path / "there", tmp_path / "back", **options)
    found = rates(tmp_path / "back")
    matrices = [name for name, group in found.items() if "momentum" in group]
    assert len(matrices) == 9 and {found[name]["momentum"] for name in matrices} == {0.95}
    assert counts(tmp_path / "back") == {3}


@pytest.mark.parametrize("name", ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"])
def test_a_universal_folder_keeps_options_and_convention(name, tmp_path):
    source = golden(name) / "global_step3"
    muonckpt.convert(source, tmp_path / "universal", to_dialect="deepspeed")
    report = muonckpt.convert(tmp_path / "universal", tmp_path / "ours", to_dialect="muonckpt")
    assert any(note.startswith("momentum: ema, because that is what deepspeed keeps") for note in report.notes)
    assert not any("optimizer_state.pt" in note for note in report.notes)
    muonckpt.convert(source, tmp_path / "direct", to_dialect="muonckpt")
    assert rates(tmp_path / "ours") == rates(tmp_path / "direct")


def test_groups_of_which_nothing_says_whose_they_are_are_not_read(tmp_path):
    muonckpt.convert(golden("deepspeed_zero1") / "global_step3", tmp_path / "universal", to_dialect="deepspeed")
    (tmp_path / "universal" / "mp_rank_00_model_states.pt").unlink()
    with muonckpt.open(tmp_path / "universal") as opened:
        assert not opened.groups and "zero/optimizer_state.pt" in opened.not_read


@pytest.mark.parametrize("to", ["fsdp_dtensor", "torch_dist_chained"])
def test_a_sum_for_megatron_is_told_with_the_cure(to, tmp_path):
    told = [c for c in muonckpt.convert(DION, tmp_path / "sum", to_dialect=to).checklist if "convention" in c.subject]
    (check,) = told
    assert (check.action, check.values) == ("set in code", ("sum",))
    assert "1 / (1 - μ) times" in check.reason and '`target_convention="ema"`' in check.reason
    cured = muonckpt.convert(DION, tmp_path / "ema", **grouped(to_dialect=to, target_convention="ema"))
    averages = muonckpt.convert(TORCH, tmp_path / "torch", to_dialect=to)
    for report in (cured, averages):
        assert not [check for check in report.checklist if "convention" in check.subject]
    state = {"w": {"momentum_buffer": torch.ones(4, 3)}}
    groups = [{"params": ["w"], "lr": 0.1, "momentum": 0.9}]
    muonckpt.save({"model": {"w": torch.ones(4, 3)}, "optimizer": {"state": state, "param_groups": groups}},
                  tmp_path / "unknown")  # fmt: skip
    report = muonckpt.convert(tmp_path / "unknown", tmp_path / "there", to_dialect=to)
    (check,) = [check for check in report.checklist if "convention" in check.subject]
    assert check.values == ("unknown",) and "`convention=`" in check.reason


def test_what_is_dropped_and_does_not_fit_is_not_answered_by_more_of_the_same(tmp_path):
    for slots in (["exp_avg_sq"], ["exp_avg"]):
        with pytest.raises(SourceError, match=r"without the slots that `drop=` leaves out.*fresh=") as refusal:
            muonckpt.convert(TORCH, tmp_path / "x", **grouped(to_dialect="muonckpt", drop=slots))
        assert "leaves a slot out with" not in str(refusal.value)
