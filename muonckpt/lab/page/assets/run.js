// The page about a run: its steps, how sizes, norms and drift went, and what was found at each step.

const STEPS = DATA.steps;
const STATES = { whole: "\u2713", damaged: "\u2715", incomplete: "\u25cb", unread: "?" };

function when(seconds) {
  return seconds === null ? "-" : new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ");
}

function duration(seconds) {
  if (seconds === null) return "-";
  const units = [[86400, "d"], [3600, "h"], [60, "min"]];
  const [size, unit] = units.find(([length]) => seconds >= 2 * length) || [1, "s"];
  return short(seconds / size) + " " + unit;
}

// Seconds since the step before was saved.
const BETWEEN = STEPS.map((step, i) => (i && step.saved !== null && STEPS[i - 1].saved !== null ? Math.max(0, step.saved - STEPS[i - 1].saved) : null));

// One value of a role at each step: the norm of all its tensors, and their drift in terms of the norm before.
function ofRole(role, name) {
  const own = DATA.series.filter((row) => row.role === role);
  return STEPS.map((_, i) => {
    if (!own.length || own.some((row) => typeof row[name][i] !== "number" || typeof row.norm[i] !== "number")) return null;
    if (name === "norm") return Math.hypot(...own.map((row) => row.norm[i]));
    const before = STEPS.findIndex((step) => step.name === DATA.since[i]);
    const then = Math.hypot(...own.map((row) => row.norm[before]));
    return then ? Math.hypot(...own.map((row) => row.drift[i] * row.norm[before])) / then : null;
  });
}

const PRESENT = [...new Set(DATA.series.map((row) => row.role))];
const isOddStep = (i) => STEPS[i].state !== "whole";

function stateCell(step) {
  return el("span", { class: step.state === "whole" ? "status-same" : "bad", title: step.fault }, STATES[step.state] + " " + step.state);
}

function runVerdict() {
  const bad = STEPS.filter((step) => step.state !== "whole");
  const about = (wanted) => DATA.overview.filter(([label]) => wanted.includes(label)).map(([label, text]) => el("p", {}, el("b", { class: "plain" }, label + ": "), text));
  const lines = about(["newest whole", "latest"]);
  if (!bad.length) return section("verdict", "Verdict", el("div", { class: "verdict" }, el("p", {}, "\u2713 " + (STEPS.length === 1 ? "The step is" : "All " + count(STEPS.length, "step") + " are") + " whole, as far as files and the last verification tell."), lines));
  const few = 5;
  const told = (step) => el("li", {}, el("span", { class: "mono" }, step.name), " is " + step.state + ": " + step.fault);
  return section("verdict", "Verdict", el("div", { class: "verdict bad-news" },
    el("p", {}, el("b", {}, "\u2715 "), DATA.verdict + "."),
    el("ul", {}, bad.slice(-few).map(told)), bad.length > few ? el("details", {}, el("summary", {}, count(bad.length - few, "earlier one")), el("ul", {}, bad.slice(0, -few).map(told))) : null, lines));
}

function stepsSection() {
  const perRole = PRESENT.flatMap((role) => ["norm", "drift"].map((name) => [role, name, ofRole(role, name)]));
  const table = new LongTable({
    caption: "Steps of the run", height: 480, open: openStep,
    columns: [
      { label: "step", value: (i) => i, text: (i) => STEPS[i].name },
      { label: "state", width: 112, value: (i) => STEPS[i].state, cell: (i) => stateCell(STEPS[i]) },
      { label: "findings", width: 86, number: true, value: (i) => DATA.findings[i].length, text: (i) => count(DATA.findings[i].length) },
      { label: "bytes", width: 90, number: true, value: (i) => STEPS[i].bytes, text: (i) => bytes(STEPS[i].bytes) },
      { label: "saved (UTC)", width: 140, value: (i) => STEPS[i].saved, text: (i) => when(STEPS[i].saved) },
      { label: "after", width: 84, number: true, value: (i) => BETWEEN[i], text: (i) => duration(BETWEEN[i]) },
      { label: "verified (UTC)", width: 140, value: (i) => (STEPS[i].verified ? STEPS[i].verified.when : null), text: (i) => (STEPS[i].verified ? when(STEPS[i].verified.when) : "never") },
      ...perRole.map(([role, name, values]) => ({ label: (name === "norm" ? "norm of " : "drift of ") + role, width: 140, number: true, value: (i) => values[i], text: (i) => (name === "norm" ? short(values[i]) : values[i] === null ? "-" : percent(values[i])) })),
    ],
  });
  table.setRows(STEPS.map((_, i) => i));
  return section("steps", "Steps", table.node, el("p", { class: "muted below" }, "Press a step to see what was found at it, and what changed since the step before."));
}

function openStep(i) {
  const dialog = document.getElementById("tensor");
  const step = STEPS[i];
  const changes = DATA.changes.filter((change) => change.name === step.name);
  const facts = [["state", stateCell(step)], step.fault ? ["what is wrong", step.fault] : null, ["path", el("span", { class: "mono" }, step.path)], ["bytes", bytes(step.bytes)],
    ["saved", when(step.saved) + " UTC"], ["verified", step.verified ? when(step.verified.when) + " UTC: " + step.verified.verdict : "never"],
    DATA.left_out[i] ? ["not measured", count(DATA.left_out[i], "tensor") + " with lost parts"] : null].filter(Boolean);
  dialog.replaceChildren(
    el("div", { class: "head" }, el("h2", { id: "tensor-title" }, step.name), el("form", { method: "dialog", class: "bar" }, el("button", { autofocus: true }, "Close"))),
    el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    changes.map((change) => [el("h3", { class: "below" }, "Since " + shown(change.since)), el("ul", {}, change.lines.length ? change.lines.map((line) => el("li", {}, line)) : el("li", {}, "nothing but elements"))]),
    el("h3", { class: "below" }, "Findings"),
    DATA.findings[i].length ? el("ul", { class: "findings" }, DATA.findings[i].map((found) => finding(found, found.names, found.means, null))) : el("p", { class: "muted" }, "None."));
  dialog.showModal();
}

function findingsOfRun() {
  const listed = STEPS.map((step, i) => [step, DATA.findings[i]]).filter(([, found]) => found.length);
  const changed = DATA.changes.filter((change) => change.lines.length);
  return section("findings", "Findings",
    listed.length
      ? listed.map(([step, found], n) => el("details", { open: n === listed.length - 1 }, el("summary", {}, el("span", { class: "mono" }, step.name), ": " + count(found.length, "finding")),
        el("ul", { class: "findings" }, found.map((one) => finding(one, one.names, one.means, null)))))
      : el("p", { class: "muted" }, DATA.measured === "none" ? "Nothing looks sick in the metadata. The numbers were not measured (--stats none)." : "Nothing looks sick in the metadata, and nothing is odd in the numbers."),
    changed.length ? el("details", {}, el("summary", {}, "What changed between steps, besides elements: " + count(changed.length)),
      el("ul", {}, changed.map((change) => el("li", {}, el("span", { class: "mono" }, change.since + " \u2192 " + change.name), ": " + change.lines.join("; "))))) : null);
}

function chartsSection() {
  const names = (i) => STEPS[i].name;
  const panel = (node) => el("div", { class: "panel" }, node);
  const figures = [panel(barChart({ title: "Bytes by step", values: STEPS.map((step) => step.bytes), names, format: bytes }))];
  if (BETWEEN.filter((each) => each !== null).length > 1) figures.push(panel(barChart({ title: "Time since the step before", values: BETWEEN.map((each) => each || 0), names, format: duration })));
  for (const role of PRESENT) {
    for (const [name, title, note] of [["norm", "Norm of ", "2-norm of all together"], ["drift", "Drift of ", "change since the step before, over the norm there"]]) {
      const values = ofRole(role, name);
      if (values.some((value) => value !== null)) figures.push(panel(dotChart({ title: title + role, note, values, names, odd: isOddStep, colourOf: colourName(role), by: "step" })));
    }
  }
  return section("charts", "Step by step", el("div", { class: "grid three" }, figures),
    DATA.measured === "none" ? el("p", { class: "muted" }, "Norms and drift were not measured (--stats none).") : el("p", { class: "muted below" }, "Red squares: steps that are not whole. A value is left out where parts of its tensors are lost."));
}

// What is recorded of each resume: exactly this, and nothing that is told from the steps.
function resumesSection() {
  const resumes = DATA.resumes;
  if (!resumes.length && !DATA.unread_resumes) return null;
  const state = (resume) => !resume.proof ? "not checked" : resume.proof.equal ? "\u2713 proved" : "\u2715 differs";
  const odd = resumes.filter((resume) => resume.proof && !resume.proof.equal);
  return section("resumes", "Resumes",
    odd.length ? el("div", { class: "verdict bad-news" }, el("p", {}, el("b", {}, "\u2715 "), count(odd.length, "resume") + " did not go on from what was saved."), el("ul", {}, odd.map((resume) => el("li", {}, "attempt " + resume.attempt + ", from step " + resume.step + ": " + resume.proof.differences.join("; "))))) : null,
    plainTable("Resumes of the run", ["attempt", "when (UTC)", "#from step", "#ranks before", "#ranks", "proof", "what it says"], resumes.map((resume) => [String(resume.attempt), when(resume.when), String(resume.step), resume.ranks_saved === null ? "-" : count(resume.ranks_saved), count(resume.ranks), state(resume), resume.verdict])),
    DATA.unread_resumes ? el("p", { class: "muted below" }, count(DATA.unread_resumes, "line") + " of resumes.jsonl cannot be read.") : null);
}

function seriesSection() {
  const rows = DATA.series;
  if (!rows.length) return null;
  const last = (values) => values.reduceRight((found, value) => found ?? value, null);
  const spark = (name, label) => ({ label, width: 172, number: true, value: (i) => last(rows[i][name]), cell: (i) => sparkline(rows[i][name], isOddStep, colourName(rows[i].role)) });
  const column = (name, label) => ({ label, width: 96, number: true, value: (i) => last(rows[i][name]), text: (i) => short(last(rows[i][name])) });
  const ranks = rows.some((row) => row.stable_rank.some((value) => value !== null));
  const table = new LongTable({
    caption: "Parameters over the steps, layers folded", height: 520,
    columns: [
      { label: "tensors", value: (i) => rows[i].pattern, cell: (i) => keyCell(rows[i].pattern, rows[i].role) },
      { label: "number", width: 76, number: true, value: (i) => rows[i].tensors, text: (i) => count(rows[i].tensors) },
      spark("rms", "RMS by step"), column("rms", "RMS now"), spark("drift", "drift by step"), column("drift", "drift now"),
      ...(ranks ? [spark("stable_rank", "stable rank by step"), column("stable_rank", "now")] : []),
    ],
  });
  REDRAWN.set(table.node, () => table.refresh());
  const { field, said } = searchField({ label: "Search parameters", total: rows.length, noun: "row", table, text: (i) => rows[i].pattern + " " + rows[i].role });
  return section("series", "Parameters", el("div", { class: "bar" }, field, said), table.node);
}

const TOTAL = STEPS.reduce((sum, step) => sum + step.bytes, 0);
show(DATA.run, [count(STEPS.length, "step"), bytes(TOTAL)].join(" \u00b7 "), [runVerdict(), stepsSection(), findingsOfRun(), chartsSection(), resumesSection(), seriesSection()]);
performance.mark("ready");
