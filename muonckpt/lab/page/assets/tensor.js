// One tensor: facts, a picture of its shards, and the table of them, in a dialog.

const DIALOG = document.getElementById("tensor");
DIALOG.addEventListener("click", (event) => { if (event.target === DIALOG) DIALOG.close(); });

function openTensor(index) {
  const tensor = TENSORS[index];
  const shards = [...tensor.holes.map((hole) => ({ ...hole, holder: -1, file: "no file has it", offset: 0, lost: true })), ...shardsOf(tensor)];
  const size = itemBytes(tensor);
  const figures = FIGURES.get(tensor.key);
  const facts = [
    ["role", tensor.role + (tensor.slot ? " (" + tensor.slot + ")" : "")],
    ["shape", shapeOf(tensor.shape) + ", " + tensor.dtype + ", " + bytes(tensor.bytes)],
    ["cut into", tensor.cut.words],
    ["fingerprint", tensor.fingerprint || "not recorded"],
  ];
  if (tensor.lost) facts.unshift(["lost", el("span", { class: "bad" }, bytes(tensor.lost) + ", in " + count(shards.filter((shard) => shard.lost).length) + " of " + count(shards.length, "shard"))]);
  if (figures) {
    facts.push(["norm, RMS", short(figures.norm) + ", " + short(figures.rms)], ["largest", short(figures.largest)],
      ["zeros", percent(figures.zeros)], ["NaN, infinite", count(figures.nan) + ", " + count(figures.infinite)],
      ["stable rank", short(figures.stable_rank)]);
  }
  const table = new LongTable({
    caption: "Shards of " + shown(tensor.key),
    height: 300,
    columns: [
      { label: "box", value: (i) => i, text: (i) => boxInWords(shards[i]) },
      ...(tensor.lost ? [{ label: "state", width: 150, value: (i) => (shards[i].lost ? 0 : 1), cell: (i) => stateOf(shards[i]) }] : []),
      { label: HOLDERS.noun, width: 110, number: HOLDERS.ranked, value: (i) => HOLDERS.places[shards[i].holder] ?? null, text: (i) => HOLDERS.places[shards[i].holder] ?? "-" },
      { label: "file", width: 170, value: (i) => shards[i].file, text: (i) => shards[i].file },
      { label: "offset", width: 120, number: true, value: (i) => shards[i].offset, text: (i) => (shards[i].holder < 0 ? "-" : count(shards[i].offset)) },
      { label: "bytes", width: 100, number: true, value: (i) => shards[i].elements, text: (i) => bytes(shards[i].elements * size) },
    ],
  });
  table.setRows(shards.map((_, i) => i));
  DIALOG.replaceChildren(
    el("div", { class: "head" }, el("h2", { id: "tensor-title" }, tensor.key),
      el("form", { method: "dialog", class: "bar" }, el("button", { autofocus: true }, "Close"))),
    el("div", { class: "grid" }, el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      picture(tensor, shards)),
    shards.length ? table.node : el("p", { class: "empty" }, "No shard holds an element of this tensor."));
  DIALOG.showModal();
  table.draw();
}

function stateOf(shard) {
  if (!shard.lost) return "as recorded";
  const why = shard.holder < 0 ? "in no file" : FATES.has(shard.file) ? "file " + FATES.get(shard.file) : "damaged bytes";
  return el("span", { class: "bad", title: why }, "\u2715 " + why);
}

// The shards along the two dims that are cut first, or the last two, to scale; a colour for each rank, stripes where they are lost.
function picture(tensor, shards) {
  const dims = tensor.shape.length;
  const cut = tensor.shape.map((_, dim) => dim).filter((dim) => shards.some((s) => s.hi[dim] - s.lo[dim] !== tensor.shape[dim]));
  const last = [dims - 2, dims - 1].filter((dim) => dim >= 0);
  const [down, across] = cut.length >= 2 ? [cut[0], cut[1]] : dims < 2 ? [null, dims ? 0 : null]
    : cut.length && cut[0] < dims - 2 ? [cut[0], dims - 1] : last;
  if (across === null || !shards.length) return null;
  const [rows, columns] = [down === null ? 1 : tensor.shape[down], tensor.shape[across]];
  const label = "Where the shards lie, " + (down === null ? "" : dimName(down, dims) + " down, ") + dimName(across, dims) + " across";
  const draw = (context, width, height) => {
    const [w, h] = [width - 2, down === null ? 34 : height - 4];
    const line = colour("panel");
    const text = colour("text");
    const pattern = stripes(context);
    shards.forEach((shard) => {
      const x = 1 + (shard.lo[across] / columns) * w;
      const y = 1 + (down === null ? 0 : (shard.lo[down] / rows) * h);
      const boxWidth = ((shard.hi[across] - shard.lo[across]) / columns) * w;
      const boxHeight = down === null ? h : ((shard.hi[down] - shard.lo[down]) / rows) * h;
      if (shard.lost) { striped(context, pattern, x, y, Math.max(boxWidth, 2), Math.max(boxHeight, 2)); return; }
      context.fillStyle = `hsl(${(shard.holder * 137.5 + 210) % 360} 45% 50% / 0.45)`;
      context.fillRect(x, y, boxWidth, boxHeight);
      context.strokeStyle = line;
      if (boxWidth > 3 && boxHeight > 3) context.strokeRect(x, y, boxWidth, boxHeight);
      if (boxWidth > 24 && boxHeight > 12) {
        context.fillStyle = text;
        context.textAlign = "center";
        context.fillText(HOLDERS.ranked ? String(HOLDERS.places[shard.holder]) : fitted(context, shown(shard.file), boxWidth - 6), x + boxWidth / 2, y + boxHeight / 2);
      }
    });
    return (x, y) => {
      const [column, row] = [((x - 1) / w) * columns, ((y - 1) / h) * rows];
      const found = shards.filter((s) => s.lo[across] <= column && column < s.hi[across] && (down === null || (s.lo[down] <= row && row < s.hi[down])));
      return found.length && y <= h ? { title: found[0].holder < 0 ? "no rank" : holderName(found[0].holder), lines: found.slice(0, 6).map((s) => (s.holder < 0 ? boxInWords(s) + " \u2014 lost: no file has it" : shardInWords(s))) } : null;
    };
  };
  return chart({ title: label, label, height: down === null ? 40 : 150, draw });
}
