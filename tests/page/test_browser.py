"""The page of `report` in a headless Chromium, where there is one."""

from __future__ import annotations

import io
import json

import pytest
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
        assert asked == {(folder / "page.html").as_uri()}, "the page loads nothing"


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
    point_at(driver, left, top + 24 + 10)
    waited(lambda: text(driver, "#tip") == tip)
    view.send_keys("\ue007")  # Enter
    waited(lambda: driver.execute_script("return document.getElementById('tensor').open"))
    assert text(driver, "#tensor-title") == first
