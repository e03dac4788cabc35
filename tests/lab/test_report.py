"""The page of `report`: its data against what `inspect`, `stats` and `diff` say, and names that try to be HTML."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import re
import shutil
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from support.commands import called
from support.damages import flip_last_bit
from support.golden import golden
from support.hostile_names import HOSTILE, two_steps

import muonckpt
from muonckpt.names.wording import as_json
from muonckpt.optimizer import Muon
from muonckpt.store.verify.diagnosis import moving

FORMATS = {
    "stock DCP": "torch_fsdp4/ckpt",
    "replicas": "torch_hsdp2x2/ckpt",
    "flat keys": "titan_fsdp4/ckpt",
    "Megatron-FSDP": "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010",
    "torch_dist": "megatron/layer_wise/ws4_padded/torch_dist",
    "safetensors": "torch_fsdp4/truth.safetensors",
}


class Parts(HTMLParser):
    """The elements of a page by tag, each with its attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open = []
        self.elements.append((tag, dict(attributes), self.open))

    def handle_endtag(self, tag):
        self.open = []

    def handle_data(self, data):
        self.open.append(data)

    def named(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.elements if name == tag]


def data_of(html: str) -> dict:
    return next(json.loads(text) for attributes, text in Parts(html).named("script") if attributes.get("id") == "data")


def shards(data: dict) -> dict[str, list[tuple]]:
    """The shards of each tensor that have elements, as the page's columns have them: file, rank, offset, bounds."""
    columns, files, row, found = data["tensors"], data["files"], 0, {}
    for key, cut in zip(columns["key"], columns["cut"], strict=True):
        boxes = data["cuts"][cut]
        found[key] = []
        for lo, hi in zip(boxes["lo"], boxes["hi"], strict=True):
            file, offset = data["shards"]["file"][row], data["shards"]["offset"][row]
            if all(low < high for low, high in zip(lo, hi, strict=True)):
                found[key].append((files["name"][file], files["rank"][file], offset, tuple(lo), tuple(hi)))
            row += 1
    assert row == len(data["shards"]["file"])
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_page_has_what_inspect_says(name):
    path = golden(FORMATS[name])
    inspection = muonckpt.inspect(path)
    data = data_of(muonckpt.report(path, stats="none").html())
    assert data["inspection"] == json.loads(json.dumps(inspection, default=as_json))
    assert data["stats"] is data["difference"] is None
    records = inspection.manifest.tensors
    assert data["tensors"]["key"] == [record.key for record in records]
    assert data["tensors"]["shape"] == [list(record.shape) for record in records]
    assert sum(data["tensors"]["bytes"]) == inspection.bytes == sum(data["files"]["bytes"])
    counted = {role["role"]: role["tensors"] for role in inspection.roles}
    assert {role: data["tensors"]["role"].count(role) for role in set(data["tensors"]["role"])} == counted
    found = shards(data)
    for record in records:
        expected = [
            (s.file, s.rank, s.offset, s.box.lo, s.box.hi) for s in inspection.shards(record.key) if s.box.numel
        ]
        assert sorted(found[record.key], key=repr) == sorted(expected, key=repr)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return two_steps(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run):
    return muonckpt.report(run / "20", run / "10", memory=64_000)


def test_the_page_has_what_stats_and_diff_say(run, page):
    data = data_of(page.html())
    stats = muonckpt.stats(run / "20", run / "10")
    assert page.stats == stats, "changes of weights come from the comparison, and are the same"
    assert page.difference == muonckpt.diff(run / "10", run / "20")
    assert data["stats"]["health"] == json.loads(json.dumps(stats.to_json()["health"]))
    assert data["difference"]["counts"] == page.difference.counts
    columns = data["stats"]["tensors"]
    assert [data["tensors"]["key"][index] for index in columns["tensor"]] == [tensor.key for tensor in stats.tensors]
    assert columns["rms"] == pytest.approx([tensor.figures.rms for tensor in stats.tensors], rel=1e-4)
    assert columns["spectrum"][0] == pytest.approx(stats.tensors[0].spectrum, rel=1e-4)
    for row in data["stats"]["folded"]:
        members = [stats.tensors[member] for member in row["members"]]
        assert len(members) == row["tensors"] and {member.role for member in members} == {row["role"]}
    assert page.findings == len(page.inspection.symptoms) + len(stats.health) >= 1


def test_no_name_becomes_html(page):
    """Only the page's own script and style can run: the policy knows their hashes, and no name is outside of JSON."""
    html = page.html()
    parts = Parts(html)
    assert html.isascii()
    (data_attributes, data), (attributes, script) = parts.named("script")
    assert data_attributes == {"type": "application/json", "id": "data"} and attributes == {}
    assert {name for name, _, _ in parts.elements} & {"img", "b", "iframe", "link", "object"} <= {"b"}
    assert not set("<>&") & set(data)
    keys = json.loads(data)["tensors"]["key"]
    assert all(any(name in key for key in keys) for name in HOSTILE)
    [policy] = [a["content"] for a, _ in parts.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    [(_, style)] = parts.named("style")
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    loads = r"""(?:src|href)\s*=\s*["'](?!#)|url\(|@import|https?://|fetch\(|innerHTML|insertAdjacent|eval\("""
    assert not re.findall(loads, html[: html.index('<script type="application/json"')] + script)


def test_the_command_writes_the_page_whole_or_not_at_all(run, page, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("an earlier page")
    done = called("report", run / "20", run / "10", "-o", target)
    assert (done.returncode, done.stdout) == (0, f"{target}: 1 finding to look at in {run / '20'}\n")
    assert target.read_text() == page.html()
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    said = json.loads(called("report", run / "20", run / "10", "-o", target, "--json").stdout)
    assert (said["page"], said["bytes"], said["findings"]) == (str(target), len(page.html()), page.findings)
    missing = called("report", run / "20", "--stats", "none", "-o", tmp_path / "nowhere" / "page.html")
    assert missing.returncode == 4 and "cannot be written" in missing.stderr
    assert called("report", run / "20", "--select", "no.such*", "-o", target).returncode == 2


def lost_shards(data: dict) -> set[tuple]:
    """The key, the file and the bounds of each shard that the page paints as lost."""
    rows = [
        (key, data["cuts"][cut]["lo"][i], data["cuts"][cut]["hi"][i])
        for key, cut in zip(data["tensors"]["key"], data["tensors"]["cut"], strict=True)
        for i in range(len(data["cuts"][cut]["lo"]))
    ]
    runs = zip(data["lost"]["shards"]["start"], data["lost"]["shards"]["stop"], strict=True)
    lost = [row for start, stop in runs for row in range(start, stop)]
    files = data["files"]["name"]
    return {(rows[n][0], files[data["shards"]["file"][n]], tuple(rows[n][1]), tuple(rows[n][2])) for n in lost}


def test_a_damaged_element_where_the_page_says_is_painted_and_left_out_of_the_numbers(run, tmp_path):
    shutil.copytree(run / "20", tmp_path / "20")
    key = "model.layers.2.up.weight"
    [(file, _, offset, lo, hi)] = shards(data_of(muonckpt.report(run / "20", stats="none").html()))[key]
    with muonckpt.open(run / "20") as checkpoint:
        first = checkpoint.tensors[key][0, 0].tobytes()
    place = tmp_path / "20" / file
    raw = place.read_bytes()
    assert raw[offset : offset + 4] == first
    place.write_bytes(raw[:offset] + bytes(4) + raw[offset + 4 :])
    unread = data_of(muonckpt.report(tmp_path / "20", stats="none").html())
    assert unread["verdict"]["sentence"] == "" and not lost_shards(unread), "names and sizes tell nothing"
    page = muonckpt.report(tmp_path / "20", run / "10", stats="norms")
    data = data_of(page.html())
    assert lost_shards(data) == {(key, file, lo, hi)}
    assert "damaged bytes" in data["verdict"]["sentence"] and data["verdict"]["read"]
    keys = data["tensors"]["key"]
    measured = {keys[number] for number in data["stats"]["tensors"]["tensor"]}
    others = {tensor.key for tensor in muonckpt.stats(run / "20", spectra=False).tensors}
    assert measured == others - {key} and [keys[number] for number in data["stats"]["left_out"]] == [key]
    assert data["difference"]["left_out"] == [key]
    assert key not in {tensor["key"] for tensor in data["difference"]["tensors"]} and data["difference"]["only_a"] == []


@pytest.mark.parametrize("name", ["stock DCP", "Megatron-FSDP", "torch_dist"])
@pytest.mark.parametrize("fate", ["missing", "cut short"])
def test_the_page_of_a_checkpoint_without_a_file_paints_what_lay_in_it(name, fate, tmp_path):
    """Every shard in the file, and no other: by names and sizes alone, and when all is read."""
    shutil.copytree(golden(FORMATS[name]), tmp_path / "ckpt")
    whole = data_of(muonckpt.report(tmp_path / "ckpt", stats="none").html())
    file = max(zip(whole["files"]["bytes"], whole["files"]["name"], strict=True))[1]
    place = tmp_path / "ckpt" / file
    if fate == "missing":
        place.unlink()
    else:
        os.truncate(place, 1)
    expected = {(key, f, lo, hi) for key, own in shards(whole).items() for f, _, _, lo, hi in own if f == file}
    for stats in ("none", "norms"):
        page = muonckpt.report(tmp_path / "ckpt", stats=stats)
        data = data_of(page.html())
        assert {one for one in lost_shards(data) if one[2] != one[3] or one[2] == ()} == expected
        assert data["lost"]["files"]["name"] == [file] and fate in data["lost"]["files"]["reason"][0]
        assert file in data["verdict"]["sentence"] and fate in data["verdict"]["sentence"]
        assert data["inspection"]["tensors"] == whole["inspection"]["tensors"]
    lost = {key for key, *_ in expected}
    measured = {data["tensors"]["key"][number] for number in data["stats"]["tensors"]["tensor"]}
    assert measured == {tensor.key for tensor in muonckpt.stats(golden(FORMATS[name]), spectra=False).tensors} - lost


def test_a_lost_file_of_empty_chunks_takes_no_tensor_out_of_the_numbers(tmp_path):
    """Ranks write chunks without elements, of tensors that are too small for all of them."""
    shutil.copytree(golden(FORMATS["replicas"]), tmp_path / "ckpt")
    whole = data_of(muonckpt.report(tmp_path / "ckpt", stats="none").html())
    file = max(zip(whole["files"]["bytes"], whole["files"]["name"], strict=True))[1]
    (tmp_path / "ckpt" / file).unlink()
    page = muonckpt.report(tmp_path / "ckpt", golden(FORMATS["replicas"]), stats="norms")
    lost = {key for key, own in shards(whole).items() if any(f == file for f, *_ in own)}
    every = {tensor.key for tensor in muonckpt.stats(golden(FORMATS["replicas"]), spectra=False).tensors}
    assert {tensor.key for tensor in page.stats.tensors} == every - lost and page.unmeasured == every & lost
    assert {tensor.key for tensor in page.difference.tensors} == {*whole["tensors"]["key"]} - lost


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_the_page_of_a_checkpoint_without_a_description_is_the_verdict(damage, tmp_path):
    shutil.copytree(golden(FORMATS["stock DCP"]), tmp_path / "ckpt")
    description = tmp_path / "ckpt" / ".metadata"
    description.unlink() if damage == "missing" else os.truncate(description, 200)
    done = called("report", tmp_path / "ckpt", "-o", tmp_path / "page.html")
    data, diagnosis = data_of((tmp_path / "page.html").read_text()), muonckpt.verify(tmp_path / "ckpt").diagnosis
    assert done.returncode == 1 and diagnosis.sentence in done.stdout
    assert data["verdict"]["sentence"] == diagnosis.sentence and "it cannot be opened" in diagnosis.sentence
    assert [one["command"] for one in data["verdict"]["remedies"]] == [one.command for one in diagnosis.remedies]
    with pytest.raises(muonckpt.SourceError, match="expected a checkpoint"):
        muonckpt.report(tmp_path)


def test_a_page_has_verdict_and_cures_without_scripts(run, tmp_path):
    for step in (10, 20, 30):
        shutil.copytree(run / "10", tmp_path / "run" / f"step-000000{step}")
    (tmp_path / "run" / "step-00000030" / "__0_0.distcp").unlink()
    shown = []
    for page in (muonckpt.report_run(tmp_path / "run"), muonckpt.report(tmp_path / "run" / "step-00000030")):
        shown.append(unescape(page.html().partition("<script")[0]))
        assert f"<b>{page.diagnosis.sentence}.</b>" in shown[-1] and page.diagnosis.remedies
        for remedy in page.diagnosis.remedies:
            assert f"<code>{remedy.command}</code><p>{remedy.gives}</p>" in shown[-1]
    assert "<dt>newest whole</dt><dd>step-00000020, not verified yet" in shown[0]
    assert "<dt>faulty</dt><dd>step-00000030: rank 0's file __0_0.distcp is missing" in shown[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", shown[0])
    assert rows == [
        ("step", "state"),
        ("step-00000030", "faulty"),
        ("step-00000020", "whole"),
        ("step-00000010", "whole"),
    ]
    assert "Nothing is known to be lost." in muonckpt.report(tmp_path / "run" / "step-00000010", stats="none").html()


def test_the_page_of_a_run_has_norms_and_drift_of_every_step(run, tmp_path):
    shutil.copytree(run / "10", tmp_path / "run" / "step-00000010")
    shutil.copytree(run / "20", tmp_path / "run" / "step-00000020")
    shutil.copytree(run / "20", tmp_path / "run" / "step-00000030")
    (tmp_path / "run" / "step-00000030" / "__0_0.distcp").unlink()
    page = muonckpt.report_run(tmp_path / "run")
    data = data_of(page.html())
    assert [step["name"] for step in data["steps"]] == [f"step-000000{step}" for step in (10, 20, 30)]
    assert [step["state"] for step in data["steps"]] == ["whole", "whole", "faulty"]
    assert data["newest_whole"] == "step-00000020" and "step-00000030 (faulty)" in data["verdict"]["sentence"]
    remedies = muonckpt.verify(tmp_path / "run" / "step-00000030").diagnosis.remedies
    assert data["verdict"]["remedies"] == [{"command": one.command, "gives": one.gives} for one in remedies]
    measured = [muonckpt.stats(run / step, spectra=False).tensors for step in ("10", "20")]
    norms = [{tensor.key: tensor.figures.norm for tensor in tensors} for tensors in measured]
    changes = {t.key: t.statistics.norm_change for t in muonckpt.diff(run / "10", run / "20").tensors if t.statistics}
    layers = [f"model.layers.{layer}.up.weight" for layer in range(4)]
    (own,) = [row for row in data["series"] if row["pattern"] == "model.layers.*.up.weight"]
    expected = [math.hypot(*(step[key] for key in layers)) for step in norms]
    assert own["tensors"] == 4 and own["norm"][:2] == pytest.approx(expected, rel=1e-4)
    assert own["norm"][2] is None, "nothing is invented"
    drift = math.hypot(*(changes[key] for key in layers)) / expected[0]
    assert own["drift"] == [None, pytest.approx(drift, rel=1e-4), None]
    assert [len(found) for found in data["findings"][:2]] == [
        len(muonckpt.report(run / step, stats="norms").inspection.symptoms)
        + len(muonckpt.stats(run / step, spectra=False).health)
        for step in ("10", "20")
    ]
    assert data["left_out"][2] == len(norms[0]) and page.findings == sum(map(len, data["findings"]))
    unmeasured = data_of(muonckpt.report_run(tmp_path / "run", stats="none").html())
    assert unmeasured["series"] == [] and unmeasured["steps"] == data["steps"]
    said = called("report", tmp_path / "run", "-o", tmp_path / "page.html")
    assert said.returncode == 1 and all(line in said.stdout for line in page.lines)
    assert (tmp_path / "page.html").read_text() == page.html()
    assert called("report", tmp_path / "run", run / "10", "-o", tmp_path / "page.html").returncode == 2


def test_the_page_of_a_run_lists_its_resumes(run, tmp_path):
    """One that was not checked, one proved and one with another rate; a run that was never resumed has none."""
    layer = torch.nn.Linear(8, 4, bias=False)
    optimizer = Muon(layer.named_parameters(), lr=0.02)
    state = {"layer": layer, "optimizer": optimizer}
    series = muonckpt.Series(tmp_path / "resumed")
    series.save(4, state)
    series.restore(state)
    assert series.restore(state).check(layer, optimizer).equal
    restored = series.restore(state)
    optimizer.param_groups[0]["lr"] = 0.5
    assert not restored.check(layer, optimizer).equal
    data = data_of(muonckpt.report_run(tmp_path / "resumed", stats="none").html())
    assert [(each["attempt"], each["step"], each["ranks_saved"], each["ranks"]) for each in data["resumes"]] == [
        (1, 4, 1, 1),
        (2, 4, 1, 1),
        (3, 4, 1, 1),
    ]
    assert [each["proof"] and each["proof"]["equal"] for each in data["resumes"]] == [None, True, False]
    assert data["resumes"][2]["proof"]["differences"] == ["lr 0.02 -> 0.5 in group 0 (weight)"]
    shutil.copytree(run / "10", tmp_path / "run" / "step-00000010")
    assert data_of(muonckpt.report_run(tmp_path / "run", stats="none").html())["resumes"] == []


def test_each_step_is_compared_with_the_one_before_in_its_attempt(run, tmp_path):
    """Two attempts at step 20: the resume began with step 10, so nothing of the first attempt comes between."""
    folder = tmp_path / "run"
    names = {
        "step-00000010": ("10", 1),
        "step-00000020": ("20", 2),
        "step-00000020.2": ("20", 4),
        "step-00000030": ("10", 5),
    }
    for name, (step, time) in names.items():
        shutil.copytree(run / step, folder / name)
        for file in (folder / name).rglob("*"):
            os.utime(file, (time, time))
    resume = {"step": 10, "path": str(folder / "step-00000010"), "ranks_saved": 1, "ranks": 2}
    (folder / "resumes").mkdir()
    (folder / "resumes" / "3.000000-0123456789ab.json").write_text(json.dumps(resume))
    data = data_of(muonckpt.report_run(folder).html())
    assert [step["name"] for step in data["steps"]] == [*names] and data["attempts"] == [0, 0, 1, 1]
    assert data["since"] == [None, "step-00000010", "step-00000010", "step-00000020.2"]
    assert all(row["drift"][1] == row["drift"][2] for row in data["series"])
    # What a file was changed by, since an attempt began with it, is no save of that attempt.
    os.utime(folder / "step-00000010" / "__0_0.distcp", (6, 6))
    later = data_of(muonckpt.report_run(folder).html())
    assert (later["attempts"], later["since"]) == (data["attempts"], data["since"])


def test_what_to_do_about_a_run_is_about_the_newest_step_first(run, tmp_path):
    """An older damaged step without a repair is not needed; nothing is to be done about an unfinished one."""
    for step in (10, 20, 30):
        shutil.copytree(run / "10", tmp_path / "run" / f"step-000000{step}")
    (tmp_path / "run" / "step-00000010" / "__0_0.distcp").unlink()
    [needless] = muonckpt.report_run(tmp_path / "run", stats="none").diagnosis.remedies
    assert needless.command == moving(tmp_path / "run", ["step-00000010"])
    (tmp_path / "run" / "step-00000040").mkdir()
    (tmp_path / "run" / "step-00000040" / ".muonckpt.saving").touch()  # as in a store
    page = muonckpt.report_run(tmp_path / "run", stats="none")
    named = "step-00000040 (incomplete), step-00000010 (faulty)"
    assert page.diagnosis.sentence == f"2 of 4 steps not whole: {named}"
    assert page.diagnosis.remedies == (needless,)
    (tmp_path / "run" / "step-00000030" / "__0_0.distcp").unlink()
    shutil.copy(run / "10" / "__0_0.distcp", tmp_path / "run" / "step-00000010")
    (tmp_path / "run" / "step-00000010" / "muonckpt.json").unlink()
    page = muonckpt.report_run(tmp_path / "run", stats="none")
    repair, way = [one.command for one in page.diagnosis.remedies]
    assert repair.startswith("muonckpt reshard ") and way == "start the job again"


def test_a_run_goes_on_from_a_faulty_step_of_which_nothing_is_lost(run, tmp_path):
    for step in (10, 20, 30):
        shutil.copytree(run / "10", tmp_path / "run" / f"step-000000{step}")
    (tmp_path / "run" / "step-00000020" / ".metadata").unlink()
    (tmp_path / "run" / "step-00000030" / "__0_0.distcp").unlink()
    first, *others = muonckpt.report_run(tmp_path / "run", stats="none").diagnosis.remedies
    assert "step-00000020" in f"{first.command} {first.gives}"
    assert not any("fresh" in remedy.command for remedy in (first, *others))


def test_a_step_that_cannot_be_read_is_not_called_damaged(run, tmp_path, monkeypatch):
    """Neither the newest, nor an older one."""
    for step in (10, 20, 30):
        shutil.copytree(run / "10", tmp_path / "run" / f"step-000000{step}")
    refused = {tmp_path / "run" / f"step-000000{step}" / "muonckpt.json" for step in (10, 30)}
    opened = os.open

    def refuse(path: object, *arguments: int, **options: int) -> int:
        if path in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    diagnosis = muonckpt.report_run(tmp_path / "run", stats="none").diagnosis
    named = "step-00000030 (unread), step-00000010 (unread)"
    assert diagnosis.sentence == f"2 of 3 steps not whole, or cannot be read: {named}"
    *unlocking, remedy = diagnosis.remedies
    assert [each.command for each in unlocking] == [f"chmod -R u+rX {tmp_path / 'run' / 'step-00000030'}"]
    assert remedy.command == moving(tmp_path / "run", ["step-00000030"]) and remedy.step == "step-00000020"


def test_damage_that_only_reading_shows_is_the_verdict_of_a_run(run, tmp_path):
    """Row, verdict, newest whole step, exit code and what to do; the step before that is damaged, too, is no advice."""
    folder = tmp_path / "run"
    for step in (10, 20, 30):
        shutil.copytree(run / "10", folder / f"step-000000{step}")
    flip_last_bit(folder / "step-00000020"), flip_last_bit(folder / "step-00000030")
    page = muonckpt.report_run(folder)
    data, read = data_of(page.html()), muonckpt.verify(folder / "step-00000030").diagnosis
    assert [step["state"] for step in data["steps"]] == ["whole", "faulty", "faulty"]
    assert data["steps"][2]["fault"] == read.sentence and "damaged bytes" in read.sentence
    assert data["newest_whole"] == "step-00000010" and "step-00000010" in dict(data["overview"])["newest whole"]
    named = "step-00000030 (faulty), step-00000020 (faulty)"
    assert data["verdict"]["sentence"] == f"2 of 3 steps not whole: {named}"
    [remedy] = data["verdict"]["remedies"]
    assert remedy == {"command": "start the job again", "gives": "it resumes from step-00000010, not verified yet"}
    said = called("report", folder, "-o", tmp_path / "page.html")
    assert said.returncode == 1 and f"2 of 3 steps not whole: {named}" in said.stdout
    unread = muonckpt.report_run(folder, stats="none")
    assert unread.history.newest_whole.name == "step-00000030", "nothing was read, and nothing is recorded"


def test_the_script_of_a_run_names_no_field_that_its_data_lack(run, tmp_path):
    """Also where no browser is installed."""
    series = muonckpt.Series(tmp_path / "run")
    state = {"layer": torch.nn.Linear(2, 2)}
    series.save(1, state)
    series.restore(state)
    assert all(verdict.is_whole for verdict in muonckpt.verify_run(tmp_path / "run"))
    html = muonckpt.report_run(tmp_path / "run").html()
    data, script = data_of(html), Parts(html).named("script")[-1][1]
    step, resume = data["steps"][0], data["resumes"][0]
    objects = {"DATA": data, "step": step, "resume": resume, "verified": step["verified"]}
    for name, fields in objects.items():
        named = {*re.findall(rf"\b{name}\.(\w+)", script)}
        assert named and named <= fields.keys(), named - fields.keys()
