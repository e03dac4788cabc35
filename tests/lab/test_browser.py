"""The page of `report` in a headless Chromium, where there is one."""

from __future__ import annotations

import io
import json
import os

import pytest
import torch
from PIL import Image
from support.browser import browser, point_at, shown, waited
from support.hostile_names import two_steps

import muonckpt


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A browser that shows the page of the run's later step, on three ranks."""
    with browser() as driver:
        folder = tmp_path_factory.mktemp("shown")
        run = two_steps(folder)
        muonckpt.reshard(run / "20", folder / "cut", mesh={"dp": 3})
        muonckpt.report(folder / "cut", run / "10").write(folder / "page.html")
        driver.place = folder
        driver.said = []
        yield shown(driver, folder / "page.html")
        requests = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        asked = {r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"}
        assert asked == {page.as_uri() for page in folder.glob("*.html")}, "pages load nothing"


def text(driver, selector: str) -> str:
    return driver.execute_script("return document.querySelector(arguments[0]).innerText", selector)


def keys_shown(driver, section: str) -> list[str]:
    """The first cells of a table's rows, as the page has them in order."""
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr.row th')].map((cell) => cell.textContent)",
        section,
    )


def test_it_is_drawn_in_light_and_dark_without_a_complaint(driver):
    dark = {}
    for scheme in ("light", "dark"):
        shown(driver, driver.place / "page.html", scheme)
        assert driver.execute_script("return performance.getEntriesByName('ready').length") == 1
        with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as picture:
            colours = picture.convert("RGB").getcolors(1 << 24)
        assert len(colours) > 50, "not blank"
        dark[scheme] = sum(count for count, colour in colours if sum(colour) < 200) > picture.width * picture.height / 2
    assert dark == {"light": False, "dark": True}
    assert driver.title == "cut - muonckpt report", "no name has run"
    assert (
        driver.execute_script("return document.querySelectorAll('main script, main img, main b:not(.tile b)').length")
        == 0
    )
    assert driver.get_log("browser") == []


def test_the_table_searches_sorts_and_opens_a_tensor(driver):
    shown(driver, driver.place / "page.html")
    keys = list(muonckpt.inspect(driver.place / "cut").manifest.tensors)
    field = driver.find_element("css selector", "#tensors input[type=search]")
    field.send_keys("MOMENTUM layers")
    waited(lambda: text(driver, "#tensors [role=status]") == f"4 of {len(keys)} tensors")
    assert keys_shown(driver, "#tensors") == [
        record.key for record in keys if "momentum" in record.key and "layers" in record.key
    ]
    field.clear()
    field.send_keys("</script>")
    waited(lambda: text(driver, "#tensors [role=status]") == f"2 of {len(keys)} tensors")
    field.clear()
    field.send_keys("\ue007")
    waited(lambda: text(driver, "#tensors [role=status]") == f"{len(keys)} tensors")
    head = driver.find_element("css selector", "#tensors thead th:first-child button")
    for order, down in (("ascending", False), ("descending", True)):
        head.click()
        assert driver.find_element("css selector", "#tensors thead th").get_attribute("aria-sort") == order
        layers = [key for key in keys_shown(driver, "#tensors") if key.startswith("model.layers")]
        assert layers == sorted(layers, reverse=down) and len(layers) == 4
    key = "model.layers.2.up.weight"
    field.send_keys(key)
    waited(lambda: keys_shown(driver, "#tensors") == [key])
    driver.find_element("css selector", "#tensors tbody tr.row button").click()
    assert text(driver, "#tensor-title") == key
    shards = muonckpt.inspect(driver.place / "cut").shards(key)
    assert [f"rows {s.box.lo[0]}:{s.box.hi[0]}, columns 0:9" for s in shards] == keys_shown(driver, "#tensor")
    driver.switch_to.active_element.send_keys("\ue00c")  # Escape
    assert not driver.execute_script("return document.getElementById('tensor').open")


def test_the_map_says_box_file_and_offset_to_the_pointer_and_to_the_keyboard(driver):
    shown(driver, driver.place / "page.html")
    view = driver.find_element("id", "map-view")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", view)
    view.send_keys("\ue015", "\ue014")  # arrows down and right: the first row, the second rank
    first = muonckpt.inspect(driver.place / "cut").manifest.tensors[0].key
    shard = muonckpt.inspect(driver.place / "cut").shards(first)[1]
    place = f"rows {shard.box.lo[0]}:{shard.box.hi[0]}, columns 0:9 — {shard.file} at {shard.offset:,}"
    waited(lambda: place in text(driver, "#tip"))
    waited(lambda: place in driver.find_element("id", "map-live").get_attribute("textContent"))
    tip = text(driver, "#tip")
    left = driver.execute_script("return document.getElementById('tip').getBoundingClientRect().left") - 14
    point_at(driver, 2, 2)
    view.send_keys("\ue004")  # Tab: the map has no focus any more
    waited(lambda: driver.execute_script("return document.getElementById('tip').hidden"))
    place = "arguments[0].scrollIntoView({block: 'center'}); return arguments[0].getBoundingClientRect().top"
    top = driver.execute_script(place, view)

    def pointed() -> str:
        """What the page says there; scrolling, which ends a little later, hides it."""
        point_at(driver, left, top + 24 + 10)
        return text(driver, "#tip")

    waited(lambda: pointed() == tip)
    view.send_keys("\ue007")  # Enter
    waited(lambda: driver.execute_script("return document.getElementById('tensor').open"))
    assert text(driver, "#tensor-title") == first


@pytest.fixture(scope="module")
def damaged(driver):
    """A run of two steps of a model with six layers, on four ranks; rank 2's file of the later step is missing."""
    names = {f"layers.{layer}.{kind}.weight": (16, 8) for layer in range(6) for kind in ("up", "down")} | {"out": (8,)}
    generator = torch.Generator().manual_seed(0)
    run = driver.place / "damaged run"
    for step in (1, 2):
        model = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
        momentum = {
            name: {"momentum_buffer": torch.randn(16, 8, generator=generator)} for name in names if name != "out"
        }
        groups = [{"params": [*momentum], "algorithm": "muon", "lr": 0.02, "convention": "ema"}]
        whole = driver.place / f"whole {step}"
        muonckpt.save({"model": model, "optimizer": {"state": momentum, "param_groups": groups}}, whole)
        muonckpt.reshard(whole, run / f"step-{step:08}", mesh={"dp": 4})
    (run / "step-00000002" / "__2_0.distcp").unlink()
    # A second attempt from step 1, which is proved, and a third one that differs and has saved nothing.
    muonckpt.reshard(whole, run / "step-00000002.2", mesh={"dp": 4})
    for name, time in (("step-00000001", 100), ("step-00000002", 200), ("step-00000002.2", 400)):
        for file in (run / name).rglob("*"):
            os.utime(file, (time, time))
    proof = {"equal": True, "tensors": 25, "items": 1, "differences": [], "unchecked": []}
    differing = proof | {"equal": False, "differences": ["lr 0.02 -> 0.5"]}
    resume = {"step": 1, "path": str(run / "step-00000001"), "ranks_saved": 4, "ranks": 2}
    (run / "resumes").mkdir()
    for time, outcome in ((300, proof), (500, differing)):
        name = f"{time}.000000-0123456789ab"
        (run / "resumes" / f"{name}.json").write_text(json.dumps(resume))
        (run / "resumes" / f"{name}.proof-{time}.000001.json").write_text(json.dumps(outcome))
    assert [verdict.is_whole for verdict in muonckpt.verify_run(run)] == [True]
    muonckpt.report(run / "step-00000002", stats="norms").write(driver.place / "damaged.html")
    muonckpt.report_run(run).write(driver.place / "run.html")
    return run


def widths(driver, page, *sizes: int) -> list[int]:
    """How wide the page is in windows of these widths."""
    found = []
    for width in sizes:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        shown(driver, page)
        found.append(driver.execute_script("return document.documentElement.scrollWidth"))
    return found


def map_rows(driver) -> list[str]:
    """The first rows of the map, by what they say when the keyboard goes down from one to the next."""
    view = driver.find_element("id", "map-view")
    said = []
    while True:
        view.send_keys("\ue015")  # arrow down
        found = driver.find_element("id", "map-live").get_attribute("textContent")
        if said and found == said[-1]:
            return said
        said.append(found)


def test_the_first_screen_is_the_verdict_and_what_to_do(driver, damaged):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    shown(driver, driver.place / "damaged.html")
    report = muonckpt.verify(damaged / "step-00000002")
    said = text(driver, "#verdict")
    assert report.diagnosis.sentence in said and all(
        r.command in said and r.gives in said for r in report.diagnosis.remedies
    )
    assert "rank 2's file __2_0.distcp is missing" in said
    place = "return document.querySelector('#findings').getBoundingClientRect().bottom < innerHeight"
    assert driver.execute_script(place), "both are on the first screen"
    bare = driver.place / "bare"
    bare.mkdir()
    (bare / "__0_0.distcp").write_bytes(b"0")
    muonckpt.report(bare).write(driver.place / "bare.html")
    shown(driver, driver.place / "bare.html")
    assert muonckpt.verify(bare).diagnosis.sentence in text(driver, "#verdict"), "without a description, too"
    shown(driver, driver.place / "page.html")
    assert len(text(driver, "#verdict .verdict").splitlines()) == 1, "a whole one says so in one line"


def test_a_lost_file_is_a_striped_column_that_says_why(driver, damaged):
    shown(driver, driver.place / "damaged.html")
    view = driver.find_element("id", "map-view")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", view)
    middles, words = [], []
    for key in ("\ue015", "\ue014", "\ue014", "\ue014"):  # down to the first row, and right along the ranks
        view.send_keys(key)
        rank = len(words)
        waited(lambda rank=rank: f"rank {rank}: " in text(driver, "#tip"))
        words.append(text(driver, "#tip"))
        middles.append(driver.execute_script("return document.getElementById('tip').getBoundingClientRect().left - 14"))
    assert ["lost: all of it" in said and "__2_0.distcp is missing" in said for said in words] == [0, 0, 1, 0]
    top = driver.execute_script("return arguments[0].getBoundingClientRect().top", view) + 24
    with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as picture:
        cells = [picture.convert("RGB").crop((x - 20, top + 6, x + 20, top + 14)) for x in middles[:3]]
    assert [len(cell.getcolors()) > 1 for cell in cells] == [False, False, True], "stripes, not another colour only"


def test_layers_that_are_alike_are_one_row_for_the_model_and_for_the_optimizer(driver, damaged):
    shown(driver, driver.place / "damaged.html")
    rows = map_rows(driver)
    titles = [row.split(";")[0] for row in rows]
    kinds = ("up", "down")
    model = [f"model.layers.0\u20135.{kind}.weight" for kind in kinds]
    optimizer = [f"optimizer.state.layers.0\u20135.{kind}.weight.momentum_buffer" for kind in kinds]
    assert titles == [*model, "model.out", *optimizer]
    view = driver.find_element("id", "map-view")
    view.send_keys("\ue00f" * 3, "\ue013" * 9, "\ue007")  # up to the first row, which Enter opens
    opened = [row.split(";")[0] for row in map_rows(driver)]
    assert opened[-9:-2] == [*(f"model.layers.{layer}.up.weight" for layer in range(1, 6)), model[1], "model.out"]


def test_pages_fit_into_narrow_and_wide_windows(driver, damaged):
    sizes = (500, 1000, 1600)
    for page in ("page.html", "damaged.html", "run.html"):
        assert widths(driver, driver.place / page, *sizes) == [*sizes]
    used = driver.execute_script("return document.getElementById('steps').getBoundingClientRect().width")
    assert used > 1500, "the window's width is used"
    metrics = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def test_the_page_of_a_run_has_its_steps(driver, damaged):
    shown(driver, driver.place / "run.html")
    assert keys_shown(driver, "#steps") == ["step-00000002.2", "step-00000002", "step-00000001"]
    said = text(driver, "#verdict")
    assert "faulty: step-00000002: rank 2's file __2_0.distcp is missing" in said
    assert "step-00000002.2, verified" in said
    parts = ("1 of 3 steps not whole: ", "newest whole: ", "faulty: step-0", "step-00000002.2 replaces it")
    assert [*parts] == sorted(parts, key=said.index), "one box has all, in this order"
    place = "return document.querySelector('#verdict').getBoundingClientRect().bottom < innerHeight"
    assert driver.execute_script(place), "it is on the first screen"
    driver.find_elements("css selector", "#steps tbody tr.row button")[1].click()
    waited(lambda: driver.execute_script("return document.getElementById('tensor').open"))
    assert "__2_0.distcp is missing" in text(driver, "#tensor")
    assert "takes step-00000002.2, the newest whole step" in text(driver, "#tensor")
    assert "Since step-00000001" in text(driver, "#tensor") and "[object" not in text(driver, "#tensor")
    assert driver.get_log("browser") == []


def test_attempts_of_a_run_stand_beside_each_other_with_their_proofs(driver, damaged):
    shown(driver, driver.place / "run.html")
    rows = "return [...document.querySelectorAll('#attempts tbody tr')].map((row) => row.innerText)"
    start, first, second = driver.execute_script(rows)
    assert "2 steps: 1 to 2, 1 not whole" in start
    assert "resume 1" in first and "1 step: 2" in first and "\u2713 proved: 25 tensors" in first
    assert "resume 2" in second and "none" in second and "\u2715 not as it was saved: lr 0.02 -> 0.5" in second
    assert "resume 2, from step 1: not as it was saved" in text(driver, "#verdict")
