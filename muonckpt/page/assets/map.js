// The map of shards: a row for each tensor or module, a column for each rank or file.  Only what is in view is drawn.

const LINE = 20;
const HEAD = 24;
const FEW = 150;

// A tree of modules over some tensors; chains of single modules are one node.
function moduleTree(tensors) {
  const root = { name: "", path: "", children: new Map(), tensors, tensor: null };
  for (const tensor of tensors) {
    let node = root;
    const parts = tensor.key.split(".");
    parts.forEach((part, depth) => {
      const name = depth === parts.length - 1 ? part + "\u0000" : part; // a tensor and a module may have one name
      let child = node.children.get(name);
      if (!child) {
        child = { name: part, path: node.path ? node.path + "." + part : part, children: new Map(), tensors: [], tensor: null };
        node.children.set(name, child);
      }
      child.tensors.push(tensor);
      node = child;
    });
    node.tensor = tensor;
  }
  return root;
}

function childrenOf(node) {
  return [...node.children.values()].map((child) => {
    while (!child.tensor && child.children.size === 1) [child] = child.children.values();
    return child;
  });
}

// Modules and tensors below a node, as deep as few rows allow.
function rowsBelow(node) {
  let rows = childrenOf(node);
  for (;;) {
    const deeper = rows.flatMap((row) => (row.tensor ? [row] : childrenOf(row)));
    if (deeper.length === rows.length || deeper.length > FEW) return rows;
    rows = deeper;
  }
}

class ShardMap {
  constructor(open) {
    this.open = open;
    this.hiddenRoles = new Set();
    this.every = false;
    this.path = [];
    this.cursor = null;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.extent = el("div", { class: "extent" });
    this.node = el("div", { class: "map", id: "map-view", tabindex: "0", role: "application", "aria-roledescription": "map of shards",
      "aria-label": "Map of shards", "aria-describedby": "map-help" }, this.canvas, this.extent);
    this.crumbs = el("ol", { class: "crumbs", "aria-label": "Module" });
    this.modules = el("select", { "aria-label": "Zoom into a module", onchange: () => this.zoom([...this.path, this.modules.value]) });
    this.live = el("div", { class: "visually-hidden", role: "status", id: "map-live" });
    this.node.addEventListener("scroll", () => this.soon());
    this.node.addEventListener("pointermove", (event) => this.point(event));
    this.node.addEventListener("pointerleave", () => { hideTip(); this.at(null); });
    this.node.addEventListener("click", (event) => { this.at(this.cellAt(event)); this.enter(); });
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.node.addEventListener("blur", hideTip);
    new ResizeObserver(() => this.soon()).observe(this.node);
    REDRAWN.set(this.node, () => this.soon());
    this.rebuild();
  }

  // What the rows are follows from the roles that are shown, the module that is zoomed to, and whether every tensor is
  // a row.
  rebuild() {
    const tensors = TENSORS.filter((tensor) => !this.hiddenRoles.has(colourName(tensor.role)));
    let [node, names] = [moduleTree(tensors), []];
    for (const path of this.path) {
      const next = findBelow(node, path);
      if (!next) break;
      node = next;
      names.push(path);
    }
    this.path = names;
    this.rows = this.every
      ? node.tensors.map((tensor) => ({ name: below(node, tensor.key), tensor, tensors: [tensor] }))
      : rowsBelow(node).map((row) => ({ name: below(node, row.path), tensor: row.tensor, tensors: row.tensors, path: row.path }));
    const inside = childrenOf(node).filter((child) => !child.tensor);
    this.modules.replaceChildren(el("option", { value: "" }, inside.length ? "zoom into\u2026" : "no modules inside"),
      ...inside.map((child) => el("option", { value: child.path }, below(node, child.path))));
    this.modules.disabled = !inside.length;
    const context = this.canvas.getContext("2d");
    context.font = "11px " + getComputedStyle(document.body).fontFamily;
    this.longest = 60 + this.rows.slice(0, 400).reduce((most, row) => Math.max(most, context.measureText(row.name).width), 60);
    this.cursor = null;
    this.node.scrollTop = 0;
    this.showCrumbs();
    this.soon();
  }

  showCrumbs() {
    const places = ["", ...this.path];
    this.crumbs.replaceChildren(...places.map((path, i) => {
      const name = i ? path.slice(places[i - 1] ? places[i - 1].length + 1 : 0) : "all";
      const last = i === places.length - 1;
      return el("li", {}, el("button", { type: "button", class: "link mono", "aria-current": last ? "location" : null,
        onclick: () => this.zoom(places.slice(1, i + 1)) }, name));
    }));
  }

  zoom(path) {
    this.path = path;
    this.rebuild();
    this.live.textContent = (path.length ? shown(path[path.length - 1]) : "All modules") + ": " + count(this.rows.length, "row");
  }

  // Bytes of a row by holder, and its shards if it is a tensor; kept, because rows are drawn again and again.
  measured(row) {
    if (!row.held) {
      row.held = new Float64Array(HOLDERS.places.length);
      row.shards = 0;
      for (const tensor of row.tensors) {
        const size = itemBytes(tensor);
        for (const shard of shardsOf(tensor)) { row.held[shard.holder] += shard.elements * size; row.shards += 1; }
      }
      row.most = row.held.reduce((a, b) => Math.max(a, b), 0);
      row.total = row.held.reduce((a, b) => a + b, 0);
      const roles = new Set(row.tensors.map((tensor) => colourName(tensor.role)));
      row.role = roles.size === 1 ? [...roles][0] : "several";
    }
    return row;
  }

  measures() {
    const width = this.node.clientWidth || 800;
    const widest = HOLDERS.ranked ? 64 : 180;
    const most = Math.max(Math.min(330, width * 0.32), width - 8 - widest * HOLDERS.places.length);
    this.label = Math.round(Math.min(most, this.longest));
    this.cell = Math.max(9, Math.min(widest, (width - this.label - 8) / Math.max(1, HOLDERS.places.length)));
    this.fullWidth = Math.ceil(this.label + this.cell * HOLDERS.places.length + 8);
    this.fullHeight = HEAD + this.rows.length * LINE + 4;
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    this.measures();
    const tall = Math.min(this.fullHeight, 520);
    const width = Math.min(this.node.clientWidth, this.fullWidth);
    if (!width) return;
    const context = context2d(this.canvas, width, tall);
    this.extent.style.width = this.fullWidth + "px";
    this.extent.style.height = this.fullHeight + "px";
    const [x0, y0] = [this.node.scrollLeft, this.node.scrollTop];
    const colours = Object.fromEntries([...ROLES, "other", "several", "accent", "text", "muted", "line", "panel", "raised"].map((name) => [name, colour(name)]));
    const firstRow = Math.max(0, Math.floor((y0) / LINE));
    const lastRow = Math.min(this.rows.length, Math.ceil((y0 + tall - HEAD) / LINE));
    const firstHolder = Math.max(0, Math.floor(x0 / this.cell));
    const lastHolder = Math.min(HOLDERS.places.length, Math.ceil((x0 + width - this.label) / this.cell));
    for (let r = firstRow; r < lastRow; r++) {
      const row = this.measured(this.rows[r]);
      const y = HEAD + r * LINE - y0;
      if (this.cursor && this.cursor.row === r) {
        context.fillStyle = colours.raised;
        context.fillRect(0, y, width, LINE);
      }
      context.fillStyle = colours[row.role];
      for (let h = firstHolder; h < lastHolder; h++) {
        if (!row.held[h]) continue;
        context.globalAlpha = 0.22 + 0.78 * (row.held[h] / row.most);
        context.fillRect(this.label + h * this.cell - x0, y + 2, this.cell - (this.cell > 12 ? 2 : 1), LINE - 4);
      }
      context.globalAlpha = 1;
    }
    // The labels and the heads lie over what is scrolled below them.
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, this.label - 4, tall);
    context.fillRect(0, 0, width, HEAD);
    for (let r = firstRow; r < lastRow; r++) {
      const y = HEAD + r * LINE - y0;
      if (y < HEAD - LINE / 2) continue;
      context.fillStyle = colours[this.rows[r].role];
      context.fillRect(10, y + 6, 8, 8);
      context.fillStyle = this.rows[r].tensor ? colours.text : colours.accent;
      context.textAlign = "left";
      context.fillText(fitted(context, shown(this.rows[r].name) + (this.rows[r].tensor ? "" : " \u203a"), this.label - 36), 25, y + LINE / 2 + 0.5);
    }
    context.fillStyle = colours.line;
    context.fillRect(0, HEAD - 1, width, 1);
    context.fillStyle = colours.muted;
    context.fillText(HOLDERS.noun + "s \u2192", 10, HEAD / 2);
    context.textAlign = "center";
    const every = Math.ceil((HOLDERS.ranked ? 26 : 60) / this.cell);
    for (let h = Math.ceil(firstHolder / every) * every; h < lastHolder; h += every) {
      const x = this.label + (h + 0.5) * this.cell - x0;
      if (x < this.label) continue;
      context.fillText(HOLDERS.ranked ? String(HOLDERS.places[h]) : fitted(context, shown(HOLDERS.places[h]), Math.max(this.cell * every - 6, 20)), x, HEAD / 2);
    }
    if (this.cursor) {
      const [x, y] = [this.label + this.cursor.holder * this.cell - x0, HEAD + this.cursor.row * LINE - y0];
      if (x >= this.label - 1 && y >= HEAD - 1) {
        context.strokeStyle = colours.text;
        context.lineWidth = 1.5;
        context.strokeRect(x - 0.5, y + 1, this.cell, LINE - 2);
      }
    }
    if (!this.rows.length) {
      context.fillStyle = colours.muted;
      context.textAlign = "left";
      context.fillText("No tensors of these roles.", 10, HEAD + 10);
    }
  }

  cellAt(event) {
    const box = this.node.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left - 1, event.clientY - box.top - 1];
    const row = top < HEAD ? -1 : Math.floor((top + this.node.scrollTop - HEAD) / LINE);
    const holder = left < this.label ? -1 : Math.floor((left + this.node.scrollLeft - this.label) / this.cell);
    return row < 0 || row >= this.rows.length || holder >= HOLDERS.places.length ? null : { row, holder };
  }

  at(cell) {
    this.cursor = cell;
    this.node.style.cursor = cell ? "pointer" : "";
    this.soon();
  }

  point(event) {
    const cell = this.cellAt(event);
    this.at(cell);
    if (!cell) { hideTip(); return; }
    const { title, lines } = this.words(cell);
    showTip(event.clientX, event.clientY, title, lines);
  }

  // What a cell holds, in words: boxes, files and offsets of a tensor, sums of a module.
  words({ row, holder }) {
    const own = this.measured(this.rows[row]);
    const title = own.tensor ? own.tensor.key : own.path;
    if (holder < 0) {
      const what = own.tensor ? [shapeOf(own.tensor.shape) + ", " + own.tensor.dtype, own.tensor.cut.words] : [count(own.tensors.length, "tensor")];
      return { title, lines: [...what, count(own.shards, "shard") + ", " + bytes(own.total)] };
    }
    const share = bytes(own.held[holder]) + " of " + bytes(own.total) + (own.total ? " (" + percent(own.held[holder] / own.total) + ")" : "");
    if (!own.tensor) return { title, lines: [holderName(holder) + ": " + share, "of " + count(own.tensors.length, "tensor")] };
    const held = shardsOf(own.tensor).filter((shard) => shard.holder === holder);
    if (!held.length) return { title, lines: [holderName(holder) + ": nothing"] };
    const most = 6;
    const lines = held.slice(0, most).map((shard) => boxInWords(shard) + " \u2014 " + shard.file + " at " + count(shard.offset));
    if (held.length > most) lines.push("and " + count(held.length - most, "more shard"));
    return { title, lines: [holderName(holder) + ": " + share, ...lines] };
  }

  enter() {
    if (!this.cursor) return;
    const row = this.rows[this.cursor.row];
    hideTip();
    if (row.tensor) this.open(row.tensor.index); else this.zoom([...this.path, row.path]);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-20, 0], PageDown: [20, 0],
      Home: [0, -Infinity], End: [0, Infinity] };
    if (event.key === "Enter") this.enter();
    else if (event.key === "Backspace" || event.key === "Escape") { if (this.path.length) this.zoom(this.path.slice(0, -1)); else return; }
    else if (moves[event.key] && this.rows.length) {
      const [down, right] = moves[event.key];
      const from = this.cursor || { row: down > 0 ? -1 : 0, holder: 0 };
      const within = (value, length) => Math.max(0, Math.min(length - 1, value));
      this.cursor = { row: within(from.row + down, this.rows.length), holder: within(from.holder + right, HOLDERS.places.length) };
      this.reveal();
    } else return;
    event.preventDefault();
  }

  // Scrolls to the cursor, shows what is there, and says it.
  reveal() {
    this.measures();
    const { row, holder } = this.cursor;
    const tall = Math.min(this.fullHeight, 520);
    const [x, y] = [holder * this.cell, row * LINE];
    const wide = this.node.clientWidth - this.label;
    this.node.scrollTop = Math.min(y, Math.max(this.node.scrollTop, y + LINE - (tall - HEAD)));
    this.node.scrollLeft = Math.min(x, Math.max(this.node.scrollLeft, x + this.cell - wide));
    const { title, lines } = this.words(this.cursor);
    requestAnimationFrame(() => { // after the scrolling, which hides what was shown before
      const box = this.node.getBoundingClientRect();
      showTip(box.left + this.label + x - this.node.scrollLeft + this.cell / 2, box.top + HEAD + y - this.node.scrollTop, title, lines);
    });
    this.live.textContent = [shown(title), ...lines.map(shown)].join("; ");
    this.soon();
  }
}

// A path without that of the node in which it is.
function below(node, path) {
  return node.path ? path.slice(node.path.length + 1) || path : path;
}

function findBelow(node, path) {
  if (node.path === path && !node.tensor) return node;
  for (const child of node.children.values()) {
    if (child.path === path || path.startsWith(child.path + ".")) {
      const found = child.tensor ? null : findBelow(child, path);
      if (found) return found;
    }
  }
  return null;
}

// The end of a name that fits: what tells keys apart is there.
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText("\u2026" + text.slice(middle)).width <= width) high = middle; else low = middle + 1;
  }
  return "\u2026" + text.slice(low);
}
