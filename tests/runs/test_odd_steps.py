"""Steps with the names of others, halves of steps, and what other programs have left beside the steps of a series."""

from __future__ import annotations

import re
import subprocess
import warnings
from pathlib import Path

import pytest
from support import killed_saves
from support.killed_saves import names, restored, state

import muonckpt
from muonckpt import Series
from muonckpt.converters.look.run_history import history_of
from muonckpt.store.verify.diagnosis import moving

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_torn_and_foreign_folders_are_passed_over_and_left_alone(tmp_path):
    series = Series(tmp_path, keep_last=1)
    whole = Path(series.save(1, state(1)).path)
    for step, harm in enumerate(("both", "__0_0.distcp", "cut", "json"), 2):
        torn = whole.rename(tmp_path / f"step-{step:08}")
        muonckpt.save(state(1), whole)
        if harm == "cut":
            (torn / "__0_0.distcp").write_bytes((torn / "__0_0.distcp").read_bytes()[:-1])
        elif harm == "json":
            (torn / "muonckpt.json").write_text('{"format": "muonckpt", ')
        else:
            for name in (".metadata", "muonckpt.json") if harm == "both" else (harm,):
                (torn / name).unlink()
    foreign = [
        tmp_path / name for name in ("step-00000006", "step-00000007", ".step-00000000.tmp", ".0.0123456789ab.tmp")
    ]
    for folder in foreign:
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"of another program")
    (tmp_path / "step-00000009").write_text("a file")
    killed_saves.age(tmp_path, 10**6)
    before = names(tmp_path)
    with pytest.warns(RuntimeWarning, match="is not whole") as caught:
        assert series.latest().step == 1
    told = sorted(re.search(r"step-0000000\d is not", str(each.message))[0][12] for each in caught)
    assert told == [*"2345679"] and all(f"{whole} is the newest" in str(each.message) for each in caught)
    with pytest.warns(RuntimeWarning, match=f"restoring {whole} instead") as caught:
        assert series.restore(state(-1)).step == 1
    assert {each.filename for each in caught} == {__file__}
    # No later step is whole, so none would be restored: no warning of one.
    assert series.save(1, state(1), replace=True).path.endswith("step-00000001.2")
    series.save(9, state(9))  # a file has that name
    assert {*before} - {"step-00000001"} - {f"step-0000000{n}" for n in range(3, 6)} | {"step-00000009.2"} == {
        *names(tmp_path)
    }


def test_a_step_that_was_renamed_is_taken_by_its_name_with_a_warning(tmp_path):
    for step in (1, 2):
        path = Path(Series(tmp_path).save(step, state(step)).path)
    renamed = path.rename(tmp_path / "step-00000900")
    with pytest.warns(
        RuntimeWarning, match=f"{renamed} is taken, .* as step 2, and its name is step-00000900"
    ) as warned:
        assert Series(tmp_path).restore(state(-1)).step == 900
    [source, target] = re.findall(r"\(a\) mv (\S+) (\S+) ", str(warned[0].message))[0]
    Path(source).rename(target)
    assert Series(tmp_path).restore(state(-1)).step == 2  # warns no more


def test_a_save_over_a_step_with_another_name_says_that_it_stays(tmp_path, capsys):
    renamed = Path(Series(tmp_path).save(2, state(2)).path).rename(tmp_path / "step-00000900")
    Series(tmp_path, keep_last=1).save(900, state(900), replace=True)
    assert f"replaces {renamed.name}, which stays, as it was saved as step 2" in capsys.readouterr().out
    assert names(tmp_path) == ["step-00000900", "step-00000900.2"]


def test_a_step_with_the_name_of_an_older_one_is_warned_of_and_is_not_removed(tmp_path):
    series = Series(tmp_path, keep_last=None)
    for step in (5, 8, 11):
        newest = Path(series.save(step, state(step)).path)
    renamed = newest.rename(tmp_path / "step-00000002")
    cure = f"mv {renamed} {newest}"
    message = f"{tmp_path} lacks step 11, which is called step-00000002. To take that, stop and {cure}"
    with pytest.warns(RuntimeWarning, match=message):
        assert Series(tmp_path).restore(state(-1)).step == 8
    # Training that goes on removes the steps before, and not the only copy of the newest one.
    Series(tmp_path, keep_last=1).save(9, state(9))
    assert names(tmp_path) == ["step-00000002", "step-00000009"]
    Path(cure.split()[1]).rename(cure.split()[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Series(tmp_path).restore(state(-1)).step == 11
    Series(tmp_path, keep_last=1).save(12, state(12))
    assert names(tmp_path) == ["step-00000012"]


def test_a_half_published_step_that_is_saved_again_is_named_and_moved_away(tmp_path, capfd):
    """It is of no manifest, so that no save removes it; the printed command does."""
    for step in (1, 2):
        path = Path(Series(tmp_path).save(step, state(step)).path)
    for name in (".metadata", "muonckpt.json"):
        (path / name).unlink()
    Series(tmp_path).save(2, state(2))
    assert f"{path}.2 replaces step-00000002, which stays, as it has no muonckpt.json" in capfd.readouterr().out
    Series(tmp_path, keep_last=1).save(3, state(3))
    verdict = history_of(tmp_path).verdict
    [remedy] = verdict.diagnosis.remedies
    assert verdict.exit_code == 1 and remedy.command == moving(tmp_path, [path.name])
    subprocess.run(remedy.command, shell=True, check=True)
    verdict = history_of(tmp_path).verdict
    assert (verdict.exit_code, verdict.diagnosis.remedies) == (0, ()) and restored(Series(tmp_path)) == 3
