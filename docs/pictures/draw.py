"""Draws the pictures of docs/guide/concepts.md, from the layouts and plans that the package itself makes, and that of a
run with ``examples/elastic.py``, from its log.

Run it after changing it, and commit what it writes: ``python docs/pictures/draw.py``.  A test compares.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import TensorLayout
from muonckpt.algebra.plan import make_plan
from muonckpt.layouts.buffers.buffer_layout import BufferLayout, rank_of
from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter
from muonckpt.layouts.buffers.placements import PlacementRequest, place_parameters
from muonckpt.layouts.flat import even_shards, flat_layout, owned_layout
from muonckpt.layouts.mesh import Mesh, Replicate, Shard, StridedShard, mesh_layout

COLOURS = ("#9ecae9", "#ffbf79", "#a3d39c", "#f2a6a0", "#cfb5e0", "#d8c3a5")
"""By rank, or by parameter.  Every part also has its number, so nothing depends on telling colours apart."""

CELL = 16
"""Pixels of one element of a matrix."""

LINE = 16
"""Pixels of a line of text."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A part of a picture, with its size in pixels."""

    width: int
    height: int
    shapes: tuple[str, ...]

    def at(self, x: int, y: int) -> str:
        return f'<g transform="translate({x} {y})">\n' + "\n".join(self.shapes) + "\n</g>"


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="#444" '
        'stroke-width="1"/>'
    )


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 11) -> str:
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def matrix(layout: TensorLayout, caption: str = "") -> Drawing:
    """A tensor of two dims, each box with the ranks that hold it."""
    rows, columns = layout.shape
    shapes = []
    for holders in layout.holders:
        box = holders[0].box
        ranks = sorted(int(fragment.place.buffer) for fragment in holders)
        x, y, width, height = rectangle_of(box)
        shapes.append(rectangle(x, y, width, height, COLOURS[ranks[0] % len(COLOURS)]))
        shapes.append(text(x + width / 2, y + height / 2 + 4, ", ".join(map(str, ranks))))
    height = rows * CELL
    if caption:
        shapes.append(text(columns * CELL / 2, height + LINE, caption))
        height += LINE + 6
    return Drawing(columns * CELL, height, tuple(shapes))


def rectangle_of(box: Box) -> tuple[int, int, int, int]:
    (top, left), (bottom, right) = box.lo, box.hi
    return left * CELL, top * CELL, (right - left) * CELL, (bottom - top) * CELL


def experts(layout: TensorLayout, caption: str) -> Drawing:
    """A tensor of three dims: its matrices side by side."""
    count, rows, columns = layout.shape
    shapes = []
    for fragment in layout.fragments:
        lo, hi = fragment.box.lo, fragment.box.hi
        rank = int(fragment.place.buffer)
        for expert in range(lo[0], hi[0]):
            x, y, width, height = rectangle_of(Box(lo[1:], hi[1:]))
            x += expert * (columns + 1) * CELL
            shapes.append(rectangle(x, y, width, height, COLOURS[rank % len(COLOURS)]))
            shapes.append(text(x + width / 2, y + height / 2 + 4, str(rank)))
    width = (count * (columns + 1) - 1) * CELL
    shapes.append(text(0, rows * CELL + LINE, caption, "start"))
    return Drawing(width, rows * CELL + LINE + 6, tuple(shapes))


def buffers(layouts: Sequence[BufferLayout], caption: str, unit: float) -> Drawing:
    """What each rank holds of flat buffers: parts of parameters by letter, and hatched padding.

    Args:
        unit: pixels of an element.
    """
    shapes = [text(0, 11, caption, "start")]
    ends: defaultdict[int, float] = defaultdict(lambda: 44.0)
    ranks = layouts[0].ranks
    for layout in layouts:
        for shard in layout.shards:
            rank, y = rank_of(shard), 18 + rank_of(shard) * 22
            x = ends[rank]
            shapes.append(rectangle(x, y, (shard.stop - shard.start) * unit, 18, "url(#padding)"))
            for number, placed in enumerate(sorted(layout.parameters, key=lambda placed: placed.name)):
                first, last = max(shard.start, placed.start), min(shard.stop, placed.stop)
                if first < last:
                    left, width = x + (first - shard.start) * unit, (last - first) * unit
                    shapes.append(rectangle(left, y, width, 18, COLOURS[number % len(COLOURS)]))
                    shapes.append(text(left + width / 2, y + 13, placed.name))
            ends[rank] = x + (shard.stop - shard.start) * unit
    shapes += [text(0, 18 + rank * 22 + 13, f"rank {rank}", "start") for rank in range(ranks)]
    return Drawing(int(max(ends.values())) + 1, 18 + ranks * 22, tuple(shapes))


def moved(source: TensorLayout, target: TensorLayout, captions: tuple[str, str]) -> Drawing:
    """Two layouts of a tensor, and a line for each copy of the plan that turns one into the other."""
    left, right = matrix(source, captions[0]), matrix(target, captions[1])
    gap = 130
    lines = []
    for copy in make_plan(source, target).copies:
        _, y, _, height = rectangle_of(copy.box)
        stays = copy.source.buffer == copy.target.buffer
        lines.append(
            f'<line x1="{left.width}" y1="{y + height / 2:g}" x2="{left.width + gap}" y2="{y + height / 2:g}" '
            f'stroke="{"#999" if stays else "#222"}" stroke-width="{1 if stays else 2}"'
            f'{" stroke-dasharray=" + chr(34) + "3 3" + chr(34) if stays else ""} marker-end="url(#arrow)"/>'
        )
        lines.append(text(left.width + gap / 2, y + height / 2 - 4, f"{copy.source.buffer} → {copy.target.buffer}"))
    return Drawing(
        left.width + gap + right.width,
        max(left.height, right.height),
        (left.at(0, 0), *lines, right.at(left.width + gap, 0)),
    )


def beside(*parts: Drawing, gap: int = 36) -> Drawing:
    shapes, x = [], 0
    for part in parts:
        shapes.append(part.at(x, 0))
        x += part.width + gap
    return Drawing(x - gap, max(part.height for part in parts), tuple(shapes))


def below(*parts: Drawing, gap: int = 20) -> Drawing:
    shapes, y = [], 0
    for part in parts:
        shapes.append(part.at(0, y))
        y += part.height + gap
    return Drawing(max(part.width for part in parts), y - gap, tuple(shapes))


def picture(title: str, drawing: Drawing) -> str:
    """The whole SVG.  Its ground is white, for pages that are dark."""
    margin = 16
    width, height = drawing.width + 2 * margin, drawing.height + 2 * margin
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"
role="img" font-family="sans-serif" fill="#111">
<title>{title}</title>
<defs>
<pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#fff"/><line x1="0" y1="0" x2="0" y2="6" stroke="#aaa" stroke-width="2"/>
</pattern>
<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#222"/>
</marker>
</defs>
<rect width="{width}" height="{height}" rx="6" fill="#fff"/>
{drawing.at(margin, margin)}
</svg>
"""


def meshes() -> Drawing:
    shape = (12, 12)
    four, grid = Mesh.of(4), Mesh.of(2, 2)
    first = (
        matrix(mesh_layout(shape, four, (Shard(0),)), "rows: FSDP2"),
        matrix(mesh_layout(shape, four, (Shard(1),)), "columns"),
        matrix(mesh_layout(shape, Mesh.of(5), (Shard(0),)), "5 ranks: the last has none"),
    )
    second = (
        matrix(mesh_layout(shape, grid, (Replicate(), Shard(0))), "replicas: HSDP"),
        matrix(mesh_layout(shape, grid, (Shard(0), Shard(1))), "rows x columns"),
        matrix(mesh_layout(shape, grid, (StridedShard(0, split=2), Shard(0))), "FSDP2 x TP"),
    )
    return below(beside(*first), beside(*second))


def stacks() -> Drawing:
    shape = (4, 8, 6)
    return below(
        experts(mesh_layout(shape, Mesh.of(4), (Shard(0),)), "expert parallel on 4 ranks: whole experts"),
        experts(
            mesh_layout(shape, Mesh.of(2, 2), (Shard(0), Shard(1))), "EP 2 x FSDP 2: two experts each, their rows cut"
        ),
        experts(mesh_layout(shape, Mesh.of(4), (Shard(1),)), "FSDP2 with Shard(1) on 4 ranks: a part of every expert"),
    )


def flat_and_owned() -> Drawing:
    shape = (7, 9)
    flat = flat_layout(shape, 8, even_shards(80, 4))
    return beside(
        matrix(mesh_layout(shape, Mesh.of(4), (Shard(0),)), "rows"),
        matrix(flat, "flat: cut anywhere"),
        matrix(owned_layout(shape, 2), "owned: whole"),
    )


def flat_buffers() -> Drawing:
    shapes = {"A": (48, 32), "B": (32, 16), "C": (40, 32), "D": (16, 32), "E": (24, 32)}
    model = tuple(Parameter(name, shape) for name, shape in shapes.items())
    even = PlacementRequest(model, frozenset(), GroupSizes(4))
    whole = PlacementRequest(model, frozenset(shapes), GroupSizes(4))
    padded, compact, balanced = "padded-nscost", "decoupled-total-order", "balanced"
    unit = 0.18
    return below(
        buffers(place_parameters(balanced, even), "flat: in equal parts, which cut matrices", unit),
        buffers(
            place_parameters(padded, whole),
            f"padded ({padded}): whole matrices, all ranks as long as the longest",
            unit,
        ),
        buffers(place_parameters(compact, whole), f"compact ({compact}): whole matrices, no padding", unit),
        buffers(
            place_parameters(balanced, whole), "balanced: whole matrices, equal Newton-Schulz work, no padding", unit
        ),
    )


def reshards() -> Drawing:
    shape = (12, 8)
    rows = mesh_layout(shape, Mesh.of(4), (Shard(0),))
    return beside(
        moved(rows, mesh_layout(shape, Mesh.of(3), (Shard(0),)), ("before: 4 ranks", "after: 3 ranks")),
        moved(rows, owned_layout(shape, 1), ("in a step: rows", "at the owner")),
        gap=60,
    )


def lives() -> Drawing:
    """The steps that ``examples/elastic.py`` has taken, a line for each time that the ranks were started."""
    steps = [json.loads(line) for line in Path(__file__).with_name("elastic.jsonl").read_text().splitlines()]
    starts = dict.fromkeys((each["first"], each["ranks"]) for each in steps)
    ends = ("killed while all save step 11", "SIGTERM, since a machine is back: all save step 16", "the end")
    label, cell, row, done = 236, 24, 44, set[int]()
    shapes = []
    for number, ((first, ranks), end) in enumerate(zip(starts, ends, strict=True)):
        y = number * row
        source = f"the checkpoint of step {first - 1}" if first else "nothing"
        shapes.append(text(0, y + 17, f"{ranks} ranks, from {source}", "start"))
        took = [each["step"] for each in steps if (each["first"], each["ranks"]) == (first, ranks)]
        for step in took:
            again = step in done
            x = label + step * cell
            shapes.append(rectangle(x, y, cell, cell, "url(#padding)" if again else COLOURS[number]))
            shapes.append(text(x + cell / 2, y + 16, str(step)))
        done |= {*took}
        shapes.append(text(label + (took[-1] + 1) * cell, y + cell + LINE - 3, end, "end", 10))
    return Drawing(label + len(done) * cell, len(starts) * row, tuple(shapes))


PICTURES: Mapping[str, tuple[str, Callable[[], Drawing]]] = {
    "meshes": ("One matrix of 12 x 12 on six meshes; the number in a part is the rank that holds it", meshes),
    "experts": ("A stack of four experts, cut in three ways", stacks),
    "flat": ("A matrix of 7 x 9 as rows, cut out of a flat buffer, and whole at an owner", flat_and_owned),
    "buffers": ("Five matrices in flat buffers of four ranks; hatched: padding", flat_buffers),
    "elastic": ("The steps of a run that lost a machine and took it back; hatched: taken again", lives),
    "reshard": ("The copies between two layouts; dashed: what stays where it is", reshards),
}


def drawn(name: str) -> str:
    """The SVG of a picture."""
    title, draw = PICTURES[name]
    return picture(title, draw())


if __name__ == "__main__":
    for name in PICTURES:
        Path(__file__).with_name(f"{name}.svg").write_text(drawn(name))
