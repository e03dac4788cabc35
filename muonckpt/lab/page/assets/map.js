// The map of shards: a row for tensors that are alike or a module, a column for each rank or file.  Only what is in
// view is drawn.  In a narrow window a row's name is above its cells.

const HEAD = 24;
const TALLEST = 520;
const NARROW = 640;

class ShardMap {
  constructor(open) {
    this.open = open;
    this.hiddenRoles = new Set();
    this.every = false;
    this.damagedOnly = false;
    this.path = [];
    this.opened = new Set();
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
    this.node.addEventListener("pointerleave", hideTip);
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
    const tensors = TENSORS.filter((tensor) => !this.hiddenRoles.has(colourName(tensor.role)) && !(this.damagedOnly && !tensor.lost));
    let [node, names] = [moduleTree(tensors), []];
    for (const path of this.path) {
      const next = findBelow(node, path);
      if (!next) break;
      node = next;
      names.push(path);
    }
    this.path = names;
    this.top = this.every ? node.tensors.map((tensor) => rowOfTensor(tensor, false)) : nodesBelow(node).map((own) => rowOf(own, node));
    const inside = childrenOf(node).filter((child) => !child.leaf);
    this.modules.replaceChildren(el("option", { value: "" }, inside.length ? "zoom into\u2026" : "no modules inside"),
      ...inside.map((child) => el("option", { value: child.path }, rowOf(child, node).name)));
    this.modules.disabled = !inside.length;
    this.opened.clear();
    this.cursor = null;
    this.node.scrollTop = 0;
    this.spread();
    this.showCrumbs();
  }

  // The rows that are shown: rows of tensors that are alike, and, if they are opened, these tensors.
  spread() {
    this.rows = this.top.flatMap((row) => (this.opened.has(row) ? [row, ...(row.members ??= row.tensors.map((tensor) => rowOfTensor(tensor, true)))] : [row]));
    const context = this.canvas.getContext("2d");
    context.font = "11px " + getComputedStyle(document.body).fontFamily;
    this.longest = 64 + this.rows.slice(0, 400).reduce((most, row) => Math.max(most, context.measureText(this.label(row)).width), 60);
    this.soon();
  }

  label(row) {
    const sign = row.alike ? (this.opened.has(row) ? "\u25be " : "\u25b8 ") : row.inside ? "\u2003" : "";
    return sign + shown(row.name) + (row.alike ? " \u00d7 " + row.tensors.length : row.tensor ? "" : " \u203a");
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

  // Bytes of a row by holder, those that are lost, and its shards; kept, because rows are drawn again and again.
  measured(row) {
    if (!row.held) {
      row.held = new Float64Array(HOLDERS.places.length);
      row.gone = new Float64Array(HOLDERS.places.length);
      row.shards = 0;
      row.holes = 0;
      for (const tensor of row.tensors) {
        const size = itemBytes(tensor);
        for (let i = tensor.start; i < tensor.stop; i++) {
          const elements = tensor.cut.elements[i - tensor.start];
          if (!elements) continue;
          const holder = HOLDERS.ofFile[DATA.shards.file[i]];
          row.held[holder] += elements * size;
          row.shards += 1;
          if (LOST[i]) row.gone[holder] += elements * size;
        }
        row.holes += tensor.holes.length;
      }
      row.most = row.held.reduce((a, b) => Math.max(a, b), 0);
      row.total = row.held.reduce((a, b) => a + b, 0);
      row.lost = row.tensors.reduce((sum, tensor) => sum + tensor.lost, 0);
      const roles = new Set(row.tensors.map((tensor) => colourName(tensor.role)));
      row.role = roles.size === 1 ? [...roles][0] : "several";
    }
    return row;
  }

  measures() {
    const width = this.node.clientWidth || 800;
    const holders = Math.max(1, HOLDERS.places.length);
    this.narrow = width < NARROW;
    this.line = this.narrow ? 36 : 20;
    this.bar = this.narrow ? 17 : 0; // where the cells begin in their row
    this.side = this.narrow ? 6 : Math.round(Math.min(Math.max(200, width * 0.34, Math.min(width * 0.5, width - 26 * holders)), this.longest));
    this.cell = Math.max(this.narrow ? 5 : 3, (width - this.side - 8) / holders);
    this.fullWidth = Math.ceil(this.side + this.cell * HOLDERS.places.length + 8);
    this.fullHeight = HEAD + this.rows.length * this.line + 4;
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    this.measures();
    const tall = Math.min(this.fullHeight, TALLEST);
    const width = Math.min(this.node.clientWidth, this.fullWidth);
    if (!width) return;
    const context = context2d(this.canvas, width, tall);
    this.extent.style.width = this.fullWidth + "px";
    this.extent.style.height = this.fullHeight + "px";
    const [x0, y0] = [this.node.scrollLeft, this.node.scrollTop];
    const colours = Object.fromEntries([...ROLES, "other", "several", "accent", "text", "muted", "line", "panel", "raised", "bad"].map((name) => [name, colour(name)]));
    const pattern = ANY_LOST ? stripes(context) : null;
    const firstRow = Math.max(0, Math.floor(y0 / this.line));
    const lastRow = Math.min(this.rows.length, Math.ceil((y0 + tall - HEAD) / this.line));
    const firstHolder = Math.max(0, Math.floor(x0 / this.cell));
    const lastHolder = Math.min(HOLDERS.places.length, Math.ceil((x0 + width - this.side) / this.cell));
    for (let r = firstRow; r < lastRow; r++) {
      const row = this.measured(this.rows[r]);
      const y = HEAD + r * this.line - y0;
      if (this.cursor && this.cursor.row === r) {
        context.fillStyle = colours.raised;
        context.fillRect(0, y, width, this.line);
      }
      for (let h = firstHolder; h < lastHolder; h++) {
        if (!row.held[h]) continue;
        const [x, wide] = [this.side + h * this.cell - x0, this.cell - (this.cell > 12 ? 2 : this.cell > 5 ? 1 : 0)];
        context.fillStyle = colours[row.role];
        context.globalAlpha = 0.22 + 0.78 * (row.held[h] / row.most);
        context.fillRect(x, y + this.bar + 2, wide, this.line - this.bar - 4);
        context.globalAlpha = 1;
        if (row.gone[h]) this.drawLost(context, pattern, row, h, x, y + this.bar + 1, wide);
      }
    }
    // The names and the heads lie over what is scrolled below them.
    context.fillStyle = colours.panel;
    if (!this.narrow) context.fillRect(0, 0, this.side - 4, tall);
    context.fillRect(0, 0, width, HEAD);
    for (let r = firstRow; r < lastRow; r++) {
      const row = this.rows[r];
      const y = HEAD + r * this.line - y0;
      if (y < HEAD - this.line / 2) continue;
      const middle = y + (this.narrow ? 10 : this.line / 2);
      context.fillStyle = colours[row.role];
      context.fillRect(10, middle - 4, 8, 8);
      context.textAlign = "left";
      if (row.lost) {
        context.fillStyle = colours.bad;
        context.fillText("\u2715", 22, middle + 0.5);
      }
      const x = row.lost ? 34 : 25;
      context.fillStyle = row.tensor ? colours.text : colours.accent;
      context.fillText(fitted(context, this.label(row), (this.narrow ? width : this.side) - x - 11), x, middle + 0.5);
    }
    context.fillStyle = colours.line;
    context.fillRect(0, HEAD - 1, width, 1);
    this.drawHeads(context, colours, pattern, firstHolder, lastHolder, x0, width);
    if (this.cursor) {
      const [x, y] = [this.side + this.cursor.holder * this.cell - x0, HEAD + this.cursor.row * this.line - y0];
      if (x >= this.side - 1 && y >= HEAD - 1) {
        context.strokeStyle = colours.text;
        context.lineWidth = 1.5;
        context.strokeRect(x - 0.5, y + this.bar + 1, this.cell, this.line - this.bar - 2);
      }
    }
    if (!this.rows.length) {
      context.fillStyle = colours.muted;
      context.textAlign = "left";
      context.fillText(this.damagedOnly ? "No tensor of these roles has lost anything." : "No tensors of these roles.", 10, HEAD + 10);
    }
  }

  // What of a cell is lost: where a tensor's shards can be told apart, those; else a part as large as what is lost.
  drawLost(context, pattern, row, holder, x, y, width) {
    const height = this.line - this.bar - 2;
    const own = row.tensor ? (row.parts ??= shardsOf(row.tensor)).filter((shard) => shard.holder === holder) : [];
    if (own.length > 1 && own.length * 4 <= width) {
      const part = width / own.length;
      own.forEach((shard, i) => { if (shard.lost) striped(context, pattern, x + i * part, y, Math.max(part - 1, 3), height); });
    } else {
      const share = row.gone[holder] / row.held[holder];
      striped(context, pattern, x, y, Math.min(width, Math.max(width * share, 5)), height);
    }
  }

  // The names of holders, as many as there is room for; those with a lost file come first.
  drawHeads(context, colours, pattern, first, last, x0, width) {
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    if (!this.narrow) context.fillText(HOLDERS.noun + "s \u2192", 10, HEAD / 2);
    const taken = [];
    const write = (h, gone) => {
      const x = this.side + h * this.cell - x0;
      if (x < this.side - 1) return;
      const room = HOLDERS.ranked ? Infinity : Math.max(this.cell - 6, 60);
      const text = fitted(context, (gone ? "\u2715 " : "") + (HOLDERS.ranked ? String(HOLDERS.places[h]) : shown(HOLDERS.places[h])), room);
      const half = context.measureText(text).width / 2 + 4;
      const middle = Math.max(this.side + half, Math.min(width - half, x + this.cell / 2));
      if (taken.some(([from, to]) => middle - half < to && middle + half > from)) return;
      taken.push([middle - half, middle + half]);
      context.fillStyle = gone ? colours.bad : colours.muted;
      context.fillText(text, middle, HEAD / 2 - (gone ? 2 : 0));
    };
    context.textAlign = "center";
    for (let h = first; h < last; h++) {
      if (!HOLDERS.gone[h]) continue;
      striped(context, pattern ?? stripes(context), this.side + h * this.cell - x0, HEAD - 5, Math.max(this.cell - 1, 3), 5);
      write(h, true);
    }
    const every = Math.ceil((HOLDERS.ranked ? 26 : 60) / this.cell);
    for (let h = Math.ceil(first / every) * every; h < last; h += every) if (!HOLDERS.gone[h]) write(h, false);
  }

  cellAt(event) {
    const box = this.node.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left - 1, event.clientY - box.top - 1];
    const within = top + this.node.scrollTop - HEAD;
    const row = top < HEAD ? -1 : Math.floor(within / this.line);
    const named = this.narrow ? within - row * this.line < this.bar : left < this.side;
    const holder = named ? -1 : Math.floor((left + this.node.scrollLeft - this.side) / this.cell);
    return row < 0 || row >= this.rows.length || holder >= HOLDERS.places.length ? null : { row, holder: Math.max(holder, -1) };
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

  // What a cell holds, in words: boxes, files and offsets of a tensor, sums of several; and what of it is lost.
  words({ row, holder }) {
    const own = this.measured(this.rows[row]);
    const title = own.title;
    if (holder < 0) {
      const first = own.tensors[0];
      const what = own.tensor || own.alike ? [shapeOf(first.shape) + ", " + first.dtype, first.cut.words] : [];
      const many = own.tensor ? [] : [count(own.tensors.length, "tensor") + (own.alike ? " that are alike" : "")];
      const lost = own.lost ? ["lost: " + bytes(own.lost) + (own.holes ? ", with " + count(own.holes, "hole") + " that no file fills" : "")] : [];
      return { title, lines: [...many, ...what, count(own.shards, "shard") + ", " + bytes(own.total), ...lost] };
    }
    const share = bytes(own.held[holder]) + " of " + bytes(own.total) + (own.total ? " (" + percent(own.held[holder] / own.total) + ")" : "");
    const lost = own.gone[holder] ? ["lost: " + (own.gone[holder] === own.held[holder] ? "all of it" : bytes(own.gone[holder]))] : [];
    if (!own.tensor) {
      const why = lost.length ? this.lostFiles(holder).map(fate) : [];
      return { title, lines: [holderName(holder) + ": " + share, "of " + count(own.tensors.length, "tensor"), ...lost, ...why] };
    }
    const held = shardsOf(own.tensor).filter((shard) => shard.holder === holder).sort((a, b) => b.lost - a.lost);
    if (!held.length) return { title, lines: [holderName(holder) + ": nothing"] };
    const most = 6;
    const lines = held.slice(0, most).map(shardInWords);
    if (held.length > most) lines.push("and " + count(held.length - most, "more shard"));
    return { title, lines: [holderName(holder) + ": " + share, ...lost, ...lines] };
  }

  // The files of a holder that are missing or cut.
  lostFiles(holder) {
    return DATA.files.name.filter((name, i) => HOLDERS.ofFile[i] === holder && FATES.has(name)).slice(0, 3);
  }

  enter() {
    if (!this.cursor) return;
    const row = this.rows[this.cursor.row];
    hideTip();
    if (row.tensor) this.open(row.tensor.index);
    else if (row.alike) this.toggle(row);
    else this.zoom([...this.path, row.path]);
  }

  toggle(row) {
    if (!this.opened.delete(row)) this.opened.add(row);
    this.spread();
    this.live.textContent = shown(row.title) + ": " + (this.opened.has(row) ? count(row.tensors.length, "tensor") + " below" : "folded");
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
    const tall = Math.min(this.fullHeight, TALLEST);
    const [x, y] = [holder * this.cell, row * this.line];
    const wide = this.node.clientWidth - this.side;
    this.node.scrollTop = Math.min(y, Math.max(this.node.scrollTop, y + this.line - (tall - HEAD)));
    this.node.scrollLeft = Math.min(x, Math.max(this.node.scrollLeft, x + this.cell - wide));
    const { title, lines } = this.words(this.cursor);
    requestAnimationFrame(() => { // after the scrolling, which hides what was shown before
      const box = this.node.getBoundingClientRect();
      showTip(box.left + this.side + x - this.node.scrollLeft + this.cell / 2, box.top + HEAD + y + this.bar - this.node.scrollTop, title, lines);
    });
    this.live.textContent = [shown(title), ...lines.map(shown)].join("; ");
    this.soon();
  }
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
