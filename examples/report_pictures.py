"""The pictures of the report in docs: a small run that is unwell, shown by a headless Chromium.

``python examples/report_pictures.py`` writes ``docs/pictures/report_*.png``.  It needs selenium
(``pip install '.[browser]'``) and Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

import muonckpt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import browser, shown  # noqa: E402  (tests are no package of this one)

LAYERS = range(12)
MATRICES = {"attn.qkv": (96, 64), "attn.out": (64, 64), "mlp.experts": (8, 48, 64), "mlp.router": (8, 64)}
HEIGHT = 1150
SHOWN = {"light": ("light", "#findings"), "dark": ("dark", "#norms"), "damaged": ("light", "h1")}
"""The colour scheme of each picture, and the part of the page at its top."""
GENERATOR = torch.Generator().manual_seed(0)


def matrix(*shape: int, scale: float, decay: float) -> torch.Tensor:
    """Matrices whose singular values fall exponentially."""
    short = min(shape[-2:])
    left, right = (torch.randn(*shape[:-2], rows, short, generator=GENERATOR) for rows in shape[-2:])
    falling = torch.exp(-decay * torch.arange(short) / short)
    return scale * (torch.linalg.qr(left)[0] * falling) @ torch.linalg.qr(right)[0].mT


def save(folder: Path) -> None:
    """Steps 900 and 1000 of a run, on 2 x 4 ranks; in the later one, things have gone wrong in four layers."""
    shapes = {f"layers.{layer}.{name}.weight": shape for layer in LAYERS for name, shape in MATRICES.items()}
    weights, momentum = {}, {}
    for number, (name, shape) in enumerate(shapes.items()):
        weights[name] = matrix(*shape, scale=1 + 0.03 * number, decay=2)
        momentum[name] = {"momentum_buffer": matrix(*shape, scale=0.05, decay=4 + number / 20)}
    vectors = {f"layers.{layer}.norm.weight": torch.ones(64) for layer in LAYERS}
    vectors["embed.weight"] = torch.randn(250, 64, generator=GENERATOR)
    adam = {name: adam_state(weight.shape, 1e-3) for name, weight in vectors.items()}
    options = {"weight_decay": 0.1, "convention": "ema"}
    groups = [{"params": [*shapes], "algorithm": "muon", "lr": 0.02, "momentum": 0.95, **options},
              {"params": [*vectors], "algorithm": "adamw", "lr": 3e-4, "betas": (0.9, 0.95), **options}]  # fmt: skip
    cuts = {"*experts*": (("ep", 0), ("dp", 1)), "*router*": (("ep", 0),), "*": (("dp", 0), ("ep", 0))}
    for step in (900, 1000):
        state = {"model": weights | vectors, "optimizer": {"state": momentum | adam, "param_groups": groups}}
        muonckpt.save(state, f"whole-{step}", provenance={"step": step})
        muonckpt.reshard(f"whole-{step}", folder / f"step-{step:08}", mesh={"dp": 2, "ep": 4}, shard=cuts)
        for name, weight in weights.items():
            if not name.startswith("layers.7.mlp.router"):
                weights[name] = weight + matrix(*weight.shape, scale=0.2, decay=0.5)
        weights["layers.9.attn.out.weight"] *= 9
        momentum["layers.4.mlp.experts.weight"] = {"momentum_buffer": torch.zeros(8, 48, 64)}
        momentum["layers.8.attn.qkv.weight"] = adam_state((96, 64), 1e-4)
        momentum["layers.2.attn.out.weight"] = {"momentum_buffer": matrix(64, 64, scale=0.05, decay=300)}


def adam_state(shape: tuple[int, ...], scale: float) -> dict[str, torch.Tensor]:
    averages = {name: scale * torch.rand(shape, generator=GENERATOR) for name in ("exp_avg", "exp_avg_sq")}
    return averages | {"step": torch.tensor(1000.0)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser(1280, HEIGHT) as driver:
        os.chdir(folder)  # the page names checkpoints as they are given
        save(Path("run"))
        page, step = Path("report.html"), Path("run/step-00001000")
        for name, (scheme, top) in SHOWN.items():
            if name == "damaged":
                (step / "__5_0.distcp").unlink()
            muonckpt.report(step, "run/step-00000900").write(page)
            shown(driver, page, scheme)
            place = f"document.querySelector('{top}').getBoundingClientRect().top"
            driver.execute_script(f"scrollBy({{top: {place} - 50, behavior: 'instant'}})")
            time.sleep(0.5)  # canvases are drawn in the next frame
            with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as picture:
                target = ROOT / "docs" / "pictures" / f"report_{name}.png"
                reduced = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)  # keeps rare colours
                reduced.save(target, optimize=True)
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
