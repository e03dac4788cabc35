// Charts on canvases.  Each has a sentence for who cannot see it, and a table beside or below it has the numbers.

// A frame that fills its figure's width and draws itself again when that changes; draw(context, width, height) may
// return hit(x, y): what lies there, as { title, lines }, or null.
function chart({ title, note, label, height, draw }) {
  const canvas = el("canvas", { role: "img", "aria-label": label });
  const figure = el("figure", {}, el("figcaption", {}, title, note ? el("span", { class: "muted" }, note) : null), canvas);
  let hit = null;
  let width = 0;
  const paint = () => {
    if (!width) return;
    hit = draw(context2d(canvas, width, height), width, height) || null;
  };
  const observer = new ResizeObserver(([entry]) => {
    const found = Math.floor(entry.contentRect.width);
    if (found && found !== width) { width = found; paint(); }
  });
  observer.observe(figure);
  canvas.addEventListener("pointermove", (event) => {
    const found = hit && hit(event.offsetX, event.offsetY);
    if (found) showTip(event.clientX, event.clientY, found.title, found.lines); else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  drawn(figure, paint);
  return figure;
}

// What is one number for all of them needs no picture: a figure that says it; null if they differ.
function sameForAll(title, note, values, format) {
  const texts = new Set(values.map((value) => (typeof value === "string" ? shown(value) : format(value))));
  if (texts.size > 1) return null;
  return el("figure", {}, el("figcaption", {}, title, note ? el("span", { class: "muted" }, note) : null), el("p", {}, [...texts], values.length > 1 ? " each" : null));
}

// Bars of one quantity over ranks or files, with a line at the mean; more bars than pixels become their maxima.
function barChart({ title, values, names, format }) {
  const alike = sameForAll(title, null, values, format);
  if (alike) return alike;
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  const least = values.reduce((a, b) => Math.min(a, b), Infinity);
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const busiest = values.indexOf(most);
  const ratio = mean ? (most / mean).toPrecision(3) : "-";
  const note = `at most ${format(most)} (${names(busiest)}), ${ratio} of the mean ${format(mean)}, at least ${format(least)}`;
  const draw = (context, width, height) => {
    const bottom = height - 18;
    const top = 6;
    const shownBars = Math.min(values.length, Math.floor(width / 2));
    const step = Math.min(width / shownBars, 64);
    const gap = step > 6 ? Math.min(4, step / 5) : step > 3 ? 1 : 0;
    const heights = [];
    for (let bar = 0; bar < shownBars; bar++) {
      let highest = 0;
      const from = Math.floor((bar * values.length) / shownBars);
      const to = Math.floor(((bar + 1) * values.length) / shownBars);
      for (let i = from; i < to; i++) highest = Math.max(highest, values[i]);
      heights.push(most ? (highest / most) * (bottom - top) : 0);
      context.fillStyle = from <= busiest && busiest < to && most > 1.05 * mean ? colour("warn") : colour("accent");
      context.fillRect(bar * step, bottom - heights[bar], Math.max(step - gap, 1), heights[bar]);
    }
    const y = bottom - (most ? (mean / most) * (bottom - top) : 0);
    context.strokeStyle = colour("text");
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(0, y + 0.5);
    context.lineTo(step * shownBars, y + 0.5);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = colour("line");
    context.fillRect(0, bottom, step * shownBars, 1);
    context.fillStyle = colour("muted");
    context.textAlign = "left";
    context.fillText(names(0), 0, bottom + 10);
    if (values.length > 1 && step * shownBars > 160) {
      context.textAlign = "right";
      context.fillText(names(values.length - 1), step * shownBars, bottom + 10);
    }
    return (x) => {
      const bar = Math.floor(x / step);
      if (bar < 0 || bar >= shownBars) return null;
      const i = Math.floor((bar * values.length) / shownBars);
      return { title: names(i), lines: [format(values[i]), mean ? (values[i] / mean).toPrecision(3) + " of the mean" : "-"] };
    };
  };
  return chart({ title, note, label: title + ": " + note, height: 150, draw });
}

function logScale(values, from, to) {
  const positive = values.filter((value) => value > 0);
  let low = Math.log10(positive.reduce((a, b) => Math.min(a, b), Infinity));
  let high = Math.log10(positive.reduce((a, b) => Math.max(a, b), 0));
  if (!positive.length) [low, high] = [0, 1];
  const pad = Math.max(0.08 * (high - low), 0.05);
  [low, high] = [low - pad, high + pad];
  const place = (value) => (value > 0 ? from + ((Math.log10(value) - low) / (high - low)) * (to - from) : from);
  return { low, high, place };
}

// Numbers for an axis from 10^low to 10^high: powers of ten if there are two and they are plain numbers, else the ends.
function ticks(low, high, format) {
  const powers = [];
  if (format === short) for (let power = Math.ceil(low); power <= high; power++) powers.push(10 ** power);
  if (powers.length > 6) return powers.filter((_, i) => i % Math.ceil(powers.length / 5) === 0);
  if (powers.length >= 2) return powers;
  return [10 ** (low + 0.12 * (high - low)), 10 ** (high - 0.12 * (high - low))].map((value) => Number(value.toPrecision(3)));
}

function axis(context, scale, left, width, format = short) {
  context.textAlign = "right";
  for (const value of ticks(scale.low, scale.high, format)) {
    const y = Math.round(scale.place(value));
    context.fillStyle = colour("line");
    context.fillRect(left, y, width - left, 1);
    context.fillStyle = colour("muted");
    context.fillText(format(value), left - 6, y);
  }
}

// What a finding names is a larger, red square: not told by its colour alone.
function dot(context, x, y, radius, odd, colourOf) {
  context.fillStyle = colour(odd ? "bad" : colourOf);
  if (odd) { context.fillRect(x - radius - 1, y - radius - 1, 2 * radius + 2, 2 * radius + 2); return; }
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}

// Places along an axis, so far apart that numbers fit; the last always has one.
function spread(places, x) {
  const sorted = [...new Set(places)].sort((a, b) => b - a);
  return sorted.filter((place, n) => (n ? sorted.last - x(place) >= 52 : true) && ((sorted.last = x(place)), true));
}

// One dot a layer or a step, from the first to the last or `at` its number, on a logarithmic scale named `y`; `odd` ones
// stand out, and null has none.  Those of one of `lines` are joined unless null lies between; where another line begins,
// there is a dashed one.
function dotChart({ title, note, y = title, format = short, values, names, odd, colourOf, by = "layer", at = null, lines = values.map(() => 0), tell = () => [] }) {
  const known = values.map((value) => (value === null || typeof value === "number" ? value : 0));
  const alike = sameForAll(title, note, values.filter((value) => value !== null), format);
  if (alike) return alike;
  const label = `${title} by ${by}: ` + known.slice(0, 40).map(format).join(", ");
  const places = at || values.map((_, i) => i);
  const [least, most] = places.reduce(([a, b], place) => [Math.min(a, place), Math.max(b, place)], [Infinity, -Infinity]);
  const members = [...new Set(lines)].map((line) => known.map((_, i) => i).filter((i) => lines[i] === line));
  const draw = (context, width, height) => {
    const [left, bottom] = [68, height - 32];
    const scale = logScale(known, bottom - 4, 6);
    axis(context, scale, left, width, format);
    context.save();
    context.translate(8, (bottom + 6) / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(y + ", logarithmic", 0, 0);
    context.restore();
    const x = (place) => left + 10 + (most > least ? ((place - least) * (width - left - 30)) / (most - least) : (width - left - 30) / 2);
    context.strokeStyle = colour("muted");
    context.setLineDash([4, 3]);
    context.beginPath();
    for (const [first] of members.slice(1)) { context.moveTo(x(places[first]), 6); context.lineTo(x(places[first]), bottom); }
    context.stroke();
    context.setLineDash([]);
    context.strokeStyle = colour(colourOf);
    context.globalAlpha = 0.45;
    context.beginPath();
    for (const line of members) {
      let joined = false;
      for (const i of line) {
        const point = [x(places[i]), scale.place(known[i] ?? 0)];
        if (known[i] !== null && joined) context.lineTo(...point); else context.moveTo(...point);
        joined = known[i] !== null;
      }
    }
    context.stroke();
    context.globalAlpha = 1;
    const radius = known.length > 200 ? 1.5 : 3;
    known.forEach((value, i) => {
      if (value !== null) dot(context, x(places[i]), scale.place(value), radius, odd(i), colourOf);
    });
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    if (at) for (const place of spread(places, x)) context.fillText(String(place), x(place), bottom + 9);
    context.fillText(at ? by : by + ", first to last", (left + width) / 2, bottom + 23);
    return (mouseX, mouseY) => {
      if (mouseX < left) return null;
      const away = (i) => (known[i] === null ? Infinity : Math.hypot(x(places[i]) - mouseX, (scale.place(known[i]) - mouseY) / 4));
      const i = known.reduce((best, _, n) => (away(n) <= away(best) ? n : best), 0);
      return { title: names(i), lines: [title + " " + (typeof values[i] === "string" ? shown(values[i]) : format(values[i])), ...tell(i)] };
    };
  };
  return chart({ title, note, label, height: 184, draw });
}

// The largest singular values of each tensor as a line, in terms of the largest, on a logarithmic scale.
function spectraChart({ spectra, names, odd, colourOf }) {
  const lines = spectra.map((values) => (values.length && values[0] > 0 ? values.map((value) => value / values[0]) : []));
  const longest = lines.reduce((most, line) => Math.max(most, line.length), 0);
  if (longest < 2) return el("figure", {}, el("figcaption", {}, "Spectra"), el("p", { class: "muted" }, "No spectra: these are no matrices, or none were sketched."));
  const every = lines.flat();
  const draw = (context, width, height) => {
    const [left, bottom] = [54, height - 18];
    const scale = logScale(every.map((value) => Math.max(value, 1e-6)), bottom - 4, 6);
    axis(context, scale, left, width);
    const x = (i) => left + 10 + (i * (width - left - 20)) / (longest - 1);
    const places = [];
    const order = lines.map((_, i) => i).sort((i, j) => odd(i) - odd(j));
    for (const i of order) {
      context.strokeStyle = odd(i) ? colour("bad") : colour(colourOf);
      context.globalAlpha = odd(i) ? 1 : Math.max(0.12, Math.min(0.8, 8 / lines.length));
      context.beginPath();
      lines[i].forEach((value, n) => {
        const y = scale.place(Math.max(value, 1e-6));
        context.lineTo(x(n), y);
        places.push([x(n), y, i, n]);
      });
      context.stroke();
    }
    context.globalAlpha = 1;
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    context.fillText("1st to " + longest + "th singular value over the 1st, logarithmic", (left + width) / 2, bottom + 11);
    return (mouseX, mouseY) => {
      let [best, found] = [200, null];
      for (const [px, py, i, n] of places) {
        const distance = (px - mouseX) ** 2 + (py - mouseY) ** 2;
        if (distance < best) [best, found] = [distance, { title: names(i), lines: ["singular value " + (n + 1) + ": " + short(spectra[i][n])] }];
      }
      return found;
    };
  };
  return chart({ title: "Spectra", note: "largest singular values", label: "Largest singular values of " + count(lines.length, "tensor"), height: 170, draw });
}

// A small picture of values from the first layer or step to the last, for a cell of a table; one dot is none.
function sparkline(values, odd, colourOf) {
  if (values.filter((value) => value !== null).length < 2) return "-";
  const canvas = el("canvas", { "aria-hidden": "true" });
  const [width, height] = [150, 25];
  const context = context2d(canvas, width, height);
  const scale = logScale(values, height - 4, 4);
  const flat = scale.high - scale.low < 0.7 ? { place: (v) => (v > 0 ? height / 2 - ((Math.log10(v) - (scale.low + scale.high) / 2) / 0.7) * (height - 8) : height - 4) } : scale;
  values.forEach((value, i) => {
    if (value === null) return;
    const x = 3 + (values.length > 1 ? (i * (width - 6)) / (values.length - 1) : (width - 6) / 2);
    dot(context, x, flat.place(value), values.length > 60 ? 1 : 1.7, odd(i), colourOf);
  });
  return canvas;
}
