"""A report is of what is written: what an argument leaves out is named as a loss, and nothing else is told of it."""

from __future__ import annotations

import pytest
from support.golden import golden

import muonckpt
from muonckpt.converters.options import grouped

DION = golden("dion_fsdp4") / "ckpt"
TORCH = golden("torch_fsdp4") / "ckpt"


def told(tmp_path, source=DION, **options) -> tuple[dict[str, list], list[str]]:
    report = muonckpt.convert(source, tmp_path / "made", **grouped(format="dcp", **options))
    by_action = {action: [] for action in ("carried", "rescaled", "left", "set in code")}
    for check in report.checklist:
        by_action[str(check.action)].append((check.subject, *check.values, check.reason))
    with muonckpt.open(tmp_path / "made") as made:
        slots = {tensor.slot or "weights and others" for tensor in made.manifest.tensors}
    moved = {subject for action in ("carried", "rescaled") for subject, *_ in by_action[action]}
    assert moved - {"items that are no tensors"} == slots
    return by_action, [*report.notes]


@pytest.mark.parametrize("to", [None, "muonckpt", "torch", "fsdp_dtensor"])
@pytest.mark.parametrize("source", [DION, TORCH])
def test_a_model_alone_is_all_that_the_report_tells_of(to, source, tmp_path):
    by_action, notes = told(tmp_path, source, to_dialect=to, model_only=True)
    assert by_action["rescaled"] == by_action["set in code"] == []
    assert by_action["carried"] == [("weights and others", "13 tensors", "")]
    lost = {subject: reason for subject, *_, reason in by_action["left"]}
    assert {"options of parameter groups"} < lost.keys() and {*lost.values()} == {"`model_only=True`"}
    assert {"momentum", "momentum_buffer"} & lost.keys()
    assert not any("momentum:" in note or "option" in note for note in notes)


@pytest.mark.parametrize("to", [None, "muonckpt"])
def test_tensors_without_options_have_none_to_set(to, tmp_path):
    by_action, notes = told(tmp_path, to_dialect=to, tensors_only=True)
    lost = {subject: reason for subject, *_, reason in by_action["left"]}
    assert lost == dict.fromkeys(["options of parameter groups", "other items that are no tensors"],
                                 "`tensors_only=True`")  # fmt: skip
    assert by_action["set in code"] == [] and not any("option" in note for note in notes)
    assert bool(by_action["rescaled"]) == (to == "muonckpt")


def test_selected_keys_are_told_and_the_others_lost(tmp_path):
    by_action, notes = told(tmp_path / "weights", to_dialect="muonckpt", select=["model.*"])
    assert by_action["rescaled"] == by_action["set in code"] == []
    lost = {subject: values for subject, *values, _ in by_action["left"]}
    assert lost["momentum_buffer"] == ["9 tensors"] and lost["exp_avg_sq"] == ["4 tensors"]
    assert not any("multiplied" in note or "momentum:" in note for note in notes)
    by_action, notes = told(tmp_path / "one", to_dialect="muonckpt", select=["*layers.0.mlp.down.weight*", "*groups*"])
    assert ("momentum_buffer", "1 tensor") in [entry[:2] for entry in by_action["rescaled"]]
    assert ("momentum_buffer", "8 tensors", "`select=`") in by_action["left"]
    assert by_action["set in code"] and any("1 momentum is multiplied" in note for note in notes)


def test_what_was_only_moved_has_losses_too(tmp_path):
    by_action, _ = told(tmp_path, TORCH, select=["model.*", "*exp_avg*"])
    assert ("momentum_buffer", "7 tensors", "`select=`") in by_action["left"]
    report = muonckpt.reshard(TORCH, tmp_path / "all", mesh={"dp": 2})
    assert report.checklist == ()
