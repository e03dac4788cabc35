"""The page of `report`: its data against what `inspect`, `stats` and `diff` say, and names that try to be HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from support.commands import called
from support.golden import golden
from support.hostile_names import HOSTILE, two_steps

import muonckpt

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
    assert data["inspection"] == json.loads(json.dumps(inspection.to_json(), default=str))
    assert data["stats"] is data["difference"] is None
    records = inspection.manifest.tensors
    assert data["tensors"]["key"] == [record.key for record in records]
    assert data["tensors"]["shape"] == [list(record.shape) for record in records]
    assert sum(data["tensors"]["bytes"]) == inspection.bytes == sum(data["files"]["bytes"])
    counted = {role["role"]: role["tensors"] for role in inspection.roles}
    assert {role: data["tensors"]["role"].count(role) for role in set(data["tensors"]["role"])} == counted
    found = shards(data)
    for record in records:
        expected = [(s.file, s.rank, s.offset, s.box.lo, s.box.hi) for s in inspection.shards(record.key)]
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
    assert (done.returncode, done.stdout) == (0, f"{target}: 1 finding in {run / '20'}\n")
    assert target.read_text() == page.html()
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    said = json.loads(called("report", run / "20", run / "10", "-o", target, "--json").stdout)
    assert (said["page"], said["bytes"], said["findings"]) == (str(target), len(page.html()), page.findings)
    missing = called("report", run / "20", "--stats", "none", "-o", tmp_path / "nowhere" / "page.html")
    assert missing.returncode == 4 and "cannot be written" in missing.stderr
    assert called("report", run / "20", "--select", "no.such*", "-o", target).returncode == 2


def test_a_damaged_element_where_the_page_says_is_found_and_a_page_of_the_rest_is_made(run, tmp_path):
    shutil.copytree(run / "20", tmp_path / "20")
    key = "model.layers.2.up.weight"
    [(file, _, offset, *_)] = shards(data_of(muonckpt.report(run / "20", stats="none").html()))[key]
    with muonckpt.open(run / "20") as checkpoint:
        first = checkpoint.tensors[key][0, 0].tobytes()
    place = tmp_path / "20" / file
    raw = place.read_bytes()
    assert raw[offset : offset + 4] == first
    place.write_bytes(raw[:offset] + bytes(4) + raw[offset + 4 :])
    with pytest.raises(muonckpt.SourceError, match=rf"{re.escape(key)}.*--stats none"):
        muonckpt.report(tmp_path / "20")
    assert muonckpt.report(tmp_path / "20", stats="none").stats is None
