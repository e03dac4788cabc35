"use strict";
// How values are written and elements are made, on every page.  Names come from files and may be hostile:
// they become text nodes only, with characters that have no glyph escaped.

const DATA = JSON.parse(document.getElementById("data").textContent);
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COLLATOR = new Intl.Collator("en", { numeric: true });
const ROLES = ["weights", "momentum", "moments", "masters", "steps"];

function shown(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

function count(n, noun) {
  return WHOLE.format(n) + (noun ? " " + noun + (n === 1 ? "" : "s") : "");
}

function bytes(n) {
  if (n === null) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return (unit ? Number(n.toPrecision(3)) : n) + " " + units[unit];
}

function flops(n) {
  const units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) { n /= 1000; unit += 1; }
  return Number(n.toPrecision(3)) + " " + units[unit];
}

function short(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value === "string") return shown(value);
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

function percent(share) {
  return share && share < 0.001 ? "<0.1 %" : (100 * share).toFixed(1) + " %";
}

function shapeOf(shape) {
  return shape.length ? shape.join(" \u00d7 ") : "scalar";
}

// el("p", { class: "muted", onclick: f }, "text", child): strings become text, nothing is parsed.
function el(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(typeof child === "object" ? child : shown(child));
  }
  return node;
}

function section(id, title, ...children) {
  const heading = el("h2", { id: id + "-title" }, title);
  return el("section", { id, "aria-labelledby": id + "-title" }, heading, ...children);
}

// Canvases cannot use light-dark(): the browser computes the colour of an element that nobody sees.
const PROBE = document.body.appendChild(el("span", { class: "visually-hidden", "aria-hidden": "true" }));

function colour(name) {
  PROBE.style.color = "var(--" + name + ")";
  return getComputedStyle(PROBE).color;
}

function colourName(role) {
  return ROLES.includes(role) ? role : "other";
}

// A canvas at the resolution of the screen, cleared; its units are CSS pixels.
function context2d(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px " + getComputedStyle(document.body).fontFamily;
  context.textBaseline = "middle";
  return context;
}

// What draws itself on canvases, to be drawn again when the theme or the size of the window changes.
const REDRAWN = new Map();

function drawn(node, draw) {
  REDRAWN.set(node, draw);
  draw();
}

function redrawAll() {
  for (const [node, draw] of REDRAWN) {
    if (node.isConnected) draw(); else REDRAWN.delete(node);
  }
}

const TIP = document.getElementById("tip");

function showTip(x, y, title, lines) {
  TIP.replaceChildren(el("b", {}, title), ...lines.map((line) => el("div", {}, line)));
  TIP.hidden = false;
  const { width, height } = TIP.getBoundingClientRect();
  TIP.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 6)) + "px";
  TIP.style.top = Math.max(4, y + 18 + height > innerHeight ? y - height - 10 : y + 18) + "px";
}

function hideTip() {
  TIP.hidden = true;
}

function nameOf(path) {
  return path.replace(/\/+$/, "").split("/").pop() || path;
}

function tile(value, what) {
  if (value === "1") what = what.replace(/s$/, "");
  return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, what));
}

function plainTable(caption, heads, rows) {
  const numbers = heads.map((head) => head.startsWith("#"));
  return el("table", {}, el("caption", { class: "visually-hidden" }, caption),
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { scope: "col", class: numbers[i] ? "num" : null }, head.replace("#", ""))))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { class: numbers[i] ? "num" : null }, cell))))));
}

function tag(role) {
  const node = el("span", { class: "tag" });
  node.style.background = "var(--" + colourName(role) + ")";
  return node;
}
