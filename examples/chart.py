"""The picture of the demo: the losses of a run and of its continuations, and how far these are from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PALE, DARK, RED, GREY = "#9db8d9", "#12355b", "#d1495b", "#555555"


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of consecutive steps, the first of which is step `start`."""

    label: str
    losses: Sequence[float]
    start: int = 0

    @property
    def steps(self) -> range:
        return range(self.start, self.start + len(self.losses))


def draw(path: Path, reference: Curve, resumed: Curve, control: Curve | None = None, *, title: str) -> None:
    """Write a PNG to `path`: the losses above, the distances of the continuations from `reference` below.

    Every step of `resumed` and `control` must be a step of `reference`.
    """
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (losses, distances) = plt.subplots(
            2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        reference_losses = dict(zip(reference.steps, reference.losses, strict=True))
        losses.plot(reference.steps, reference.losses, color=PALE, linewidth=5, label=reference.label)
        for curve, colour, zorder in ((resumed, DARK, 4), (control, RED, 3)):
            if curve is None:
                continue
            line = {"color": colour, "linewidth": 1.5, "zorder": zorder}
            losses.plot(curve.steps, curve.losses, label=curve.label, **line)
            distance = [
                abs(loss - reference_losses[step]) for step, loss in zip(curve.steps, curve.losses, strict=True)
            ]
            distances.plot(curve.steps, distance, marker="o", markersize=3, **line)

        for axes in (losses, distances):
            axes.axvline(resumed.start, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
            axes.grid(axis="y", color="#e6e6e6")
            axes.set_axisbelow(True)
        losses.set_title(title, loc="left", fontweight="bold")
        losses.set_ylabel("loss (nats per byte)")
        losses.legend(loc="upper right", frameon=True, framealpha=1, edgecolor="none", borderpad=0.2)
        distances.annotate(
            f"saved, resharded\nand resumed\nat step {resumed.start}",
            (resumed.start, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=GREY,
        )
        distances.set_yscale("symlog", linthresh=1e-8, linscale=0.5)  # a distance may be exactly zero
        distances.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2, 1])
        distances.set_ylim(0, 3)
        distances.set(xlabel="training step", ylabel="|loss − reference|")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)
