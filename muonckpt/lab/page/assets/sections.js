// The sections of the page, from the data that `muonckpt inspect`, `stats` and `diff` give.

// Figures of the measured tensors, one object each, and by key.
const MEASURED = [];
if (DATA.stats) {
  const { tensor, norm, rms, largest, zeros, nan, infinite, stable_rank, spectrum } = DATA.stats.tensors;
  tensor.forEach((index, i) => MEASURED.push({ key: TENSORS[index].key, norm: norm[i], rms: rms[i], largest: largest[i], zeros: zeros[i], nan: nan[i],
    infinite: infinite[i], stable_rank: stable_rank[i], spectrum: spectrum[i] }));
}
const FIGURES = new Map(MEASURED.map((figures) => [figures.key, figures]));
const INDEX = new Map(TENSORS.map((tensor) => [tensor.key, tensor.index]));
const ODD = new Set(DATA.stats ? DATA.stats.health.flatMap((finding) => finding.keys) : []);

function overviewSection() {
  const found = DATA.inspection;
  const total = found.roles.reduce((sum, role) => sum + role.bytes, 0);
  const shares = (share, role) => {
    const part = el("i");
    part.style.width = 100 * share + "%";
    part.style.background = "var(--" + colourName(role) + ")";
    return el("div", { class: "share", "aria-hidden": "true" }, part);
  };
  const lines = DATA.overview.filter(([label]) => !["checkpoint", "tensors", "files", "other items"].includes(label));
  const roles = found.roles.map((role) => [[tag(role.role), role.role], role.slots.join(", ") || "-", count(role.tensors), count(role.elements), bytes(role.bytes),
    shares(total ? role.bytes / total : 0, role.role), role.dtypes.join(", ")]);
  return section("overview", "What is in it",
    el("div", { class: "tiles" }, tile(found.step === null ? "-" : String(found.step), "step"), tile(count(found.tensors), "tensors"),
      tile(count(found.chunks), "shards"), tile(bytes(found.bytes), "of elements"), HOLDERS.ranked ? tile(count(HOLDERS.places.length), "ranks") : null, tile(count(found.files), "files"), tile(found.kind, "format")),
    el("div", { class: "panel" }, el("dl", { class: "facts" }, lines.map(([label, text]) => [el("dt", {}, label), el("dd", {}, text)]))),
    el("h3", { class: "visually-hidden" }, "Contents"),
    roles.length
      ? el("div", { class: "panel roles" }, plainTable("Contents by role", ["contents", "slots", "#tensors", "#elements", "#bytes", "share", "dtypes"], roles))
      : el("p", { class: "empty" }, "This checkpoint has no tensors."));
}

function mapSection(open) {
  if (!TENSORS.length || !HOLDERS.places.length) return section("map", "Map of shards", el("p", { class: "empty" }, "There are no shards to show."));
  const map = new ShardMap(open);
  const present = [...new Set(TENSORS.map((tensor) => colourName(tensor.role)))];
  const toggles = present.map((role) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = "var(--" + role + ")";
    return el("button", { type: "button", "aria-pressed": "true", onclick: (event) => {
      const isShown = map.hiddenRoles.has(role);
      if (isShown) map.hiddenRoles.delete(role); else map.hiddenRoles.add(role);
      event.currentTarget.setAttribute("aria-pressed", String(isShown));
      map.rebuild();
    } }, swatch, role);
  });
  const box = (field, words) => {
    const input = el("input", { type: "checkbox", onchange: () => { map[field] = input.checked; map.rebuild(); } });
    return el("label", {}, input, " " + words);
  };
  return section("map", "Map of shards",
    el("div", { class: "bar" }, map.crumbs, map.modules, el("span", { role: "group", "aria-label": "Roles shown", class: "bar" }, toggles),
      box("every", "every tensor a row"), ANY_LOST ? box("damagedOnly", "damaged only") : null),
    map.node, map.live,
    el("p", { class: "muted below", id: "map-help" }, `A row is a tensor, tensors that are alike in many layers, or a module; a column is a ${HOLDERS.noun}. A cell is the stronger, the more bytes of its row it holds. `,
      ANY_LOST ? [el("span", { class: "stripes", "aria-hidden": "true" }), " and \u2715 mark what is lost. "] : null,
      "Click or Enter opens a row; arrow keys move, Backspace goes up."));
}

function balanceSection() {
  const figures = [];
  const { bytes: held, newton_schulz: work } = DATA.ranks;
  const places = HOLDERS.places;
  const add = (title, values, names, format) => { if (values.length) figures.push(el("div", { class: "panel" }, barChart({ title, values, names, format }))); };
  add("Bytes by " + HOLDERS.noun, held ? held.share : HOLDERS.held, (i) => (held ? "rank " + held.rank[i] : places[i]), bytes);
  if (work) add("Newton\u2013Schulz work of an iteration, by rank", work.share, (i) => "rank " + work.rank[i], flops);
  for (const buffer of DATA.inspection.buffers) {
    const of = buffer.of + " (" + buffer.algorithm + ")";
    add("Elements in flat buffers, " + of, buffer.ranks.map((rank) => rank.elements), (i) => "rank " + buffer.ranks[i].rank, (value) => count(Math.round(value)));
    if (!work && buffer.ranks.some((rank) => rank.newton_schulz !== null)) {
      add("Newton\u2013Schulz work by owner, " + of, buffer.ranks.map((rank) => rank.newton_schulz || 0), (i) => "rank " + buffer.ranks[i].rank, flops);
    }
  }
  const padding = DATA.inspection.buffers.map((buffer) => {
    const all = buffer.elements + buffer.padding;
    const part = el("i");
    part.style.width = (all ? (100 * buffer.padding) / all : 0) + "%";
    part.style.background = "var(--warn)";
    return [buffer.of, buffer.algorithm + " v" + buffer.version, count(buffer.buffers), count(buffer.elements), count(buffer.padding), buffer.padding_percent + " %",
      el("div", { class: "share", "aria-hidden": "true" }, part)];
  });
  const numbers = held ? held.rank.map((rank, i) => ["rank " + rank, bytes(held.share[i]), work ? flops(work.share[i]) : "-"]) : places.map((place, i) => [place, bytes(HOLDERS.held[i]), "-"]);
  const details = el("details", { ontoggle: () => {
    if (details.open && details.children.length === 1) {
      const table = new LongTable({ caption: "Bytes and work by " + HOLDERS.noun, height: 320, columns: [
        { label: HOLDERS.noun, value: (i) => i, text: (i) => numbers[i][0] },
        { label: "bytes", width: 140, number: true, value: (i) => (held ? held.share[i] : HOLDERS.held[i]), text: (i) => numbers[i][1] },
        { label: "Newton\u2013Schulz", width: 160, number: true, value: (i) => (work ? work.share[i] : null), text: (i) => numbers[i][2] }] });
      details.append(table.node);
      table.setRows(numbers.map((_, i) => i));
    }
  } }, el("summary", {}, "As a table"));
  return section("balance", "Balance and padding",
    figures.length ? el("div", { class: "grid" }, figures) : el("p", { class: "empty" }, "There is nothing to balance: no file holds an element."),
    figures.length ? details : null,
    padding.length
      ? el("div", { class: "panel" }, el("h3", {}, "Padding of flat buffers"), plainTable("Padding of flat buffers", ["of", "placement", "#buffers", "#elements", "#padding", "#share", ""], padding))
      : el("p", { class: "muted" }, "No padding is recorded: the tensors are not in flat buffers."),
    work || !held ? null : el("p", { class: "muted" }, "Newton\u2013Schulz work is not shown: no rank holds every matrix whole, so the training program decides who orthogonalises what."));
}

function normsSection() {
  if (!DATA.stats) return section("norms", "Norms and spectra", el("p", { class: "empty" }, "The numbers were not measured. Without --stats none, muonckpt report reads the elements, and shows norms and spectra by layer."));
  const { folded } = DATA.stats;
  const tensors = MEASURED;
  const leftOut = DATA.stats.left_out.map((index) => TENSORS[index].key);
  if (!folded.length) return section("norms", "Norms and spectra", el("p", { class: "empty" }, "No tensor of weights or state has numbers to measure."));
  const charts = el("div", { class: "grid three", id: "norm-charts" });
  const heading = el("h3", { class: "mono" });
  const isOdd = (row) => (n) => ODD.has(tensors[row.members[n]].key);
  const choose = (i) => {
    const row = folded[i];
    const members = row.members.map((n) => tensors[n]);
    const about = { names: (n) => members[n].key, odd: isOdd(row), colourOf: colourName(row.role) };
    heading.replaceChildren(tag(row.role), shown(row.pattern), el("span", { class: "muted" }, " \u2014 " + count(members.length, "tensor") + " of " + row.role));
    charts.replaceChildren(
      dotChart({ title: "RMS", note: "root mean square of the elements", values: members.map((t) => t.rms), ...about }),
      members.some((t) => t.stable_rank !== null)
        ? dotChart({ title: "Stable rank", note: "(norm / largest singular value)\u00b2", values: members.map((t) => t.stable_rank), ...about })
        : dotChart({ title: "Largest", note: "largest magnitude", values: members.map((t) => t.largest), ...about }),
      spectraChart({ spectra: members.map((t) => t.spectrum), ...about }));
    table.choose(i);
  };
  const value = (name) => ({ value: (i) => folded[i][name], text: (i) => short(folded[i][name]), number: true });
  const table = new LongTable({
    caption: "Norms by parameter, layers folded", height: 330, open: choose,
    columns: [
      { label: "tensors", value: (i) => folded[i].pattern, cell: (i) => keyCell(folded[i].pattern, folded[i].role) },
      { label: "number", width: 76, ...value("tensors") },
      { label: "RMS by layer", width: 172, value: (i) => (folded[i].rms.least > 0 ? folded[i].rms.most / folded[i].rms.least : folded[i].rms.most > 0 ? Infinity : 1), number: true,
        cell: (i) => sparkline(folded[i].members.map((n) => tensors[n].rms), isOdd(folded[i]), colourName(folded[i].role)) },
      { label: "RMS median", width: 104, number: true, value: (i) => folded[i].rms.median, text: (i) => short(folded[i].rms.median) },
      { label: "least", width: 84, number: true, value: (i) => folded[i].rms.least, text: (i) => short(folded[i].rms.least) },
      { label: "most", width: 84, number: true, value: (i) => folded[i].rms.most, text: (i) => short(folded[i].rms.most) },
      { label: "largest", width: 84, ...value("largest") },
      { label: "zeros", width: 76, number: true, value: (i) => folded[i].zeros, text: (i) => percent(folded[i].zeros) },
      { label: "NaN, inf", width: 84, number: true, value: (i) => folded[i].nonfinite, cell: (i) => el("span", { class: folded[i].nonfinite ? "bad" : null }, count(folded[i].nonfinite)) },
      { label: "stable rank", width: 100, ...value("stable_rank") },
    ],
  });
  REDRAWN.set(table.node, () => table.refresh());
  const { field, said } = searchField({ label: "Search parameters", total: folded.length, noun: "row", table, text: (i) => folded[i].pattern + " " + folded[i].role });
  const first = folded.findIndex((row) => row.members.some((n) => ODD.has(tensors[n].key)));
  choose(first < 0 ? 0 : first);
  return section("norms", "Norms and spectra", el("div", { class: "panel" }, el("div", { role: "status" }, heading), charts),
    el("div", { class: "bar below" }, field, said, el("span", { class: "muted" }, "A row is a parameter or a slot in all layers; press one to see its charts. Red squares: named by a finding.")), table.node,
    keyList("Not measured, because parts of them are lost", leftOut));
}

function differenceSection() {
  const found = DATA.difference;
  if (!found) return null;
  const { tensors, counts } = found;
  const updates = new Map(DATA.stats ? DATA.stats.updates.map((update) => [update.key, update]) : []);
  const relative = (t) => (t.norm_a === null ? (t.status === "changed" ? Infinity : 0) : [t.norm_a, t.norm_b, t.rms_change].some((n) => typeof n !== "number") ? Infinity : Math.max(t.norm_a, t.norm_b) ? (t.rms_change * Math.sqrt(t.elements)) / Math.max(t.norm_a, t.norm_b) : 0);
  const hidden = new Set();
  const value = (name) => ({ number: true, value: (i) => tensors[i][name], text: (i) => short(tensors[i][name]) });
  const hasUpdates = [...updates.values()].some((update) => update.per_step !== null);
  const update = (name, label, width) => ({ label, width, number: true, value: (i) => updates.get(tensors[i].key)?.[name] ?? null, text: (i) => short(updates.get(tensors[i].key)?.[name]) });
  const table = new LongTable({
    caption: "Tensors in both checkpoints", height: 400, open: (i) => { const own = INDEX.get(tensors[i].key); if (own !== undefined) openTensor(own); },
    columns: [
      { label: "tensor", value: (i) => tensors[i].key, cell: (i) => keyCell(tensors[i].key) },
      { label: "status", width: 90, value: (i) => tensors[i].status, cell: (i) => el("span", { class: "status-" + tensors[i].status }, tensors[i].status === "moved" ? "moved only" : tensors[i].status) },
      { label: "by", width: 90, value: (i) => tensors[i].by, text: (i) => tensors[i].by },
      { label: "relative", width: 88, number: true, value: (i) => relative(tensors[i]), text: (i) => short(relative(tensors[i])) },
      { label: "max abs", width: 88, ...value("max_abs") },
      { label: "cosine", width: 88, number: true, value: (i) => tensors[i].cosine, text: (i) => (typeof tensors[i].cosine === "number" ? tensors[i].cosine.toFixed(4) : "-") },
      { label: "norm before", width: 114, ...value("norm_a") },
      { label: "norm now", width: 100, ...value("norm_b") },
      { label: "RMS change", width: 114, ...value("rms_change") },
      ...(hasUpdates ? [update("per_step", "per step", 88), update("factor", "factor", 80)] : []),
    ],
  });
  table.sorted = { column: 3, down: true };
  const search = searchField({ label: "Search tensors in both", total: tensors.length, noun: "tensor", table, text: (i) => tensors[i].key, also: (i) => !hidden.has(tensors[i].status) });
  const toggles = Object.entries(counts).filter(([, n]) => n).map(([status, n]) => el("button", { type: "button", "aria-pressed": "true", onclick: (event) => {
    const isShown = hidden.has(status);
    if (isShown) hidden.delete(status); else hidden.add(status);
    event.currentTarget.setAttribute("aria-pressed", String(isShown));
    search.search();
  } }, count(n) + " " + (status === "moved" ? "moved only" : status)));
  const text = (data) => { const written = typeof data === "string" ? data : JSON.stringify(data); return written.length > 300 ? written.slice(0, 300) + " \u2026" : written; };
  const steps = found.steps.every((step) => step !== null) ? ` (step ${found.steps[0]} \u2192 ${found.steps[1]})` : "";
  return section("difference", "What has changed",
    el("p", {}, "Since ", el("span", { class: "mono" }, found.a), steps + ": ", found.differs ? "the two differ." : found.left_out.length ? "nothing, as far as both are whole." : "nothing; the two are the same.",
      found.left_out.length ? ` ${count(found.left_out.length, "key")} with lost parts are not compared.` : null),
    el("div", { class: "bar" }, search.field, el("span", { role: "group", "aria-label": "Statuses shown", class: "bar" }, toggles), search.said),
    tensors.length ? table.node : el("p", { class: "empty" }, "The two have no tensor of one key. Checkpoints of different programs are compared by muonckpt diff --to."),
    found.unmoved.length ? keyList("Weights and state that are identical although the steps differ (stale, frozen or without gradients)", found.unmoved) : null,
    found.items.length ? el("div", { class: "panel" }, el("h3", {}, "Other items that changed"),
      plainTable("Other items that changed", ["item", "before", "now"], found.items.slice(0, 500).map((item) => [el("code", {}, item.key), text(item.a), text(item.b)]))) : null,
    keyList("Not compared, because parts of them are lost in one of the two", found.left_out),
    keyList("Only in the other", found.only_a), keyList("Only in this one", found.only_b));
}

function keyList(title, keys) {
  return keys.length ? el("details", {}, el("summary", {}, title + ": " + count(keys.length)),
    el("ul", {}, keys.slice(0, 500).map((key) => el("li", { class: "mono" }, key)), keys.length > 500 ? el("li", {}, "and " + count(keys.length - 500) + " more") : null)) : null;
}

function tensorsSection() {
  const columns = [
    { label: "tensor", value: (i) => TENSORS[i].key, cell: (i) => keyCell(TENSORS[i].key) },
    { label: "contents", width: 122, value: (i) => TENSORS[i].role, cell: (i) => el("span", {}, tag(TENSORS[i].role), shown(TENSORS[i].role)) },
    { label: "shape", width: 124, number: true, value: (i) => TENSORS[i].bytes / (itemBytes(TENSORS[i]) || 1), text: (i) => shapeOf(TENSORS[i].shape) },
    { label: "dtype", width: 88, value: (i) => TENSORS[i].dtype, text: (i) => TENSORS[i].dtype },
    { label: "bytes", width: 92, number: true, value: (i) => TENSORS[i].bytes, text: (i) => bytes(TENSORS[i].bytes) },
    { label: "shards", width: 76, number: true, value: (i) => TENSORS[i].stop - TENSORS[i].start, text: (i) => count(TENSORS[i].stop - TENSORS[i].start) },
    { label: "cut into", width: 156, value: (i) => TENSORS[i].cut.words, text: (i) => TENSORS[i].cut.words },
  ];
  if (ANY_LOST) columns.splice(1, 0, { label: "lost", width: 92, number: true, value: (i) => TENSORS[i].lost, cell: (i) => (TENSORS[i].lost ? el("span", { class: "bad" }, "\u2715 " + bytes(TENSORS[i].lost)) : "-") });
  const figure = (name, label, width) => ({ label, width, number: true, value: (i) => FIGURES.get(TENSORS[i].key)?.[name] ?? null, text: (i) => short(FIGURES.get(TENSORS[i].key)?.[name]) });
  if (DATA.stats) columns.push(figure("rms", "RMS", 88));
  if (TENSORS.some((tensor) => tensor.fingerprint)) columns.push({ label: "fingerprint", width: 148, value: (i) => TENSORS[i].fingerprint, text: (i) => TENSORS[i].fingerprint || "-" });
  const table = new LongTable({ caption: "Every tensor", columns, open: openTensor });
  const search = searchField({ label: "Search tensors", total: TENSORS.length, noun: "tensor", table,
    text: (i) => [TENSORS[i].key, TENSORS[i].role, TENSORS[i].slot, TENSORS[i].dtype, TENSORS[i].cut.words].join(" ") });
  const node = section("tensors", "Tensors", el("div", { class: "bar" }, search.field, search.said,
    el("span", { class: "muted" }, "All words must occur in the name, the contents, the slot, the dtype or the cut.")), table.node);
  return { node, search };
}
