// A table of any length: real rows of a real table, of which only those in view exist.

const ROW = 26;
const TAIL = 24;
const AHEAD = 12;

// columns: { label, width (pixels; none takes the rest), number (bool), value(i) to sort by, text(i), cell(i) a node }.
// The first column is the header of its row; open(i), if given, runs when its button is pressed.
class LongTable {
  constructor({ caption, columns, open, height }) {
    this.columns = columns;
    this.open = open;
    this.rows = [];
    this.order = [];
    this.sorted = { column: -1, down: false };
    this.alive = new Map();
    this.chosen = -1;
    this.heads = columns.map((column, i) =>
      el("th", { scope: "col", class: column.number ? "num" : null, "aria-colindex": i + 1 },
        el("button", { type: "button", onclick: () => this.sortBy(i), title: "Sort by " + column.label }, column.label)));
    this.above = el("td", { colspan: columns.length });
    this.below = el("td", { colspan: columns.length });
    this.body = el("tbody", {}, el("tr", { class: "space", "aria-hidden": "true" }, this.above),
      el("tr", { class: "space", "aria-hidden": "true" }, this.below));
    const widths = columns.map((column) => {
      const col = el("col");
      if (column.width) col.style.width = column.width + "px";
      return col;
    });
    this.table = el("table", { "aria-colcount": columns.length }, el("caption", { class: "visually-hidden" }, caption),
      el("colgroup", {}, widths), el("thead", {}, el("tr", { "aria-rowindex": 1 }, this.heads)), this.body);
    const least = columns.reduce((sum, column) => sum + (column.width || (innerWidth < 640 ? 190 : 250)), 0);
    this.table.style.minWidth = least + "px";
    this.view = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, onscroll: () => this.soon() },
      this.table);
    if (height) this.view.style.maxHeight = height + "px";
    this.unseen = el("p", { class: "muted below", hidden: true });
    this.node = el("div", {}, this.view, this.unseen);
    new ResizeObserver(() => this.soon()).observe(this.view);
  }

  setRows(rows) {
    this.rows = rows;
    this.arrange();
  }

  sortBy(column, down) {
    const same = this.sorted.column === column;
    const first = Boolean(this.columns[column].number);
    if (down !== undefined) this.sorted = { column, down };
    else if (!same) this.sorted = { column, down: first };
    else if (this.sorted.down === first) this.sorted = { column, down: !first };
    else this.sorted = { column: -1, down: false };
    this.arrange();
  }

  arrange() {
    const { column, down } = this.sorted;
    this.heads.forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.order = Array.from(this.rows);
    if (column >= 0) {
      const value = this.columns[column].value;
      const keys = new Map(this.order.map((i) => [i, value(i)]));
      const sign = down ? -1 : 1;
      this.order.sort((i, j) => {
        const [a, b] = [keys.get(i), keys.get(j)];
        if (a === null || b === null || a === undefined || b === undefined) return (a ?? null) === null ? ((b ?? null) === null ? i - j : 1) : -1;
        return sign * (typeof a === "number" && typeof b === "number" ? a - b : COLLATOR.compare(a, b)) || i - j;
      });
    }
    this.table.setAttribute("aria-rowcount", this.order.length + 1);
    this.view.scrollTop = 0;
    this.refresh();
  }

  refresh() {
    for (const row of this.alive.values()) row.remove();
    this.alive.clear();
    this.draw();
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const first = Math.max(0, Math.floor((this.view.scrollTop - 28) / ROW) - AHEAD);
    const last = Math.min(this.order.length, Math.ceil((this.view.scrollTop + (this.view.clientHeight || 560)) / ROW) + AHEAD);
    for (const [position, row] of this.alive) {
      if (position < first || position >= last) { row.remove(); this.alive.delete(position); }
    }
    // Rows that stay are not touched, so that the focus stays where it is.
    let after = this.body.lastChild;
    for (let position = last - 1; position >= first; position--) {
      let row = this.alive.get(position);
      if (!row) {
        row = this.row(position);
        this.alive.set(position, row);
        this.body.insertBefore(row, after);
      }
      after = row;
    }
    this.above.style.height = first * ROW + "px";
    this.below.style.height = (this.order.length - last) * ROW + "px";
    // What a narrow window does not show is named.
    const edge = this.view.scrollLeft + this.view.clientWidth + 1;
    const unseen = this.view.clientWidth ? this.columns.filter((_, i) => this.heads[i].offsetLeft + this.heads[i].offsetWidth > edge) : [];
    this.unseen.hidden = !unseen.length;
    this.unseen.textContent = "Further to the right: " + unseen.map((column) => shown(column.label)).join(", ") + ".";
  }

  row(position) {
    const i = this.order[position];
    const cells = this.columns.map((column, c) => {
      const content = column.cell ? column.cell(i) : column.text(i);
      const title = column.cell ? null : shown(content);
      if (c) return el("td", { class: column.number ? "num" : null, title }, content);
      const label = this.open ? el("button", { type: "button", class: "link", onclick: () => this.open(i) }, content) : content;
      return el("th", { scope: "row", class: "mono", title }, label);
    });
    const chosen = i === this.chosen;
    return el("tr", { class: "row" + (chosen ? " chosen" : ""), "aria-rowindex": position + 2,
      "aria-current": chosen ? "true" : null }, cells);
  }

  choose(i) {
    this.chosen = i;
    for (const [position, row] of this.alive) {
      row.classList.toggle("chosen", this.order[position] === i);
      if (this.order[position] === i) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
    }
  }
}

// A key in a cell: where it does not fit, its middle is left out, because keys differ at their ends.
function keyCell(key, role) {
  const text = shown(key);
  const cut = text.length > 1.15 * TAIL ? text.length - TAIL : 0;
  return el("span", { class: "key", title: text }, role ? tag(role) : null, cut ? el("span", { class: "front" }, text.slice(0, cut)) : null,
    el("span", { class: "tail" }, text.slice(cut)));
}

// A field that filters a table by words, all of which a row's text must contain.
function searchField({ label, total, noun, text, table, also }) {
  const said = el("span", { class: "muted", role: "status" });
  const field = el("input", { type: "search", "aria-label": label, placeholder: label, spellcheck: "false", autocomplete: "off" });
  const texts = [];
  let searched = "";
  const search = () => {
    searched = field.value;
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (let i = 0; i < total; i++) {
      if (also && !also(i)) continue;
      const own = words.length ? (texts[i] ??= text(i).toLowerCase()) : "";
      if (words.every((word) => own.includes(word))) found.push(i);
    }
    table.setRows(found);
    said.textContent = found.length === total ? count(total, noun) : count(found.length) + " of " + count(total, noun);
  };
  let timer = 0;
  field.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 60); });
  field.addEventListener("change", () => { if (field.value !== searched) search(); }); // rows being pressed must stay
  search();
  return { field, said, search, set(value) { field.value = value; search(); } };
}
