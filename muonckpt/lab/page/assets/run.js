// The page about a run: its steps, how sizes, norms and drift went, and what was found at each step.

const STEPS = DATA.steps;
const STATES = { whole: "\u2713", faulty: "\u2715", incomplete: "\u25cb", removed: "\u25cb", unread: "?" };

function when(seconds) {
  return seconds === null ? "" : new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ");
}

function duration(seconds) {
  if (seconds === null) return "";
  const units = [[86400, "d"], [3600, "h"], [60, "min"]];
  const [size, unit] = units.find(([length]) => seconds >= 2 * length) || [1, "s"];
  return short(seconds / size) + " " + unit;
}

// The attempt that saved each step: the number of resumes before; 0 is the start.
const ATTEMPT = DATA.attempts;
const attemptName = (number) => (number ? "resume " + number : "start");

// Seconds since the step before of the same attempt was saved.
const SAVED = STEPS.map((step) => (["incomplete", "removed"].includes(step.state) ? null : step.saved));
const BETWEEN = STEPS.map((_, i) => {
  const before = i ? ATTEMPT.lastIndexOf(ATTEMPT[i], i - 1) : -1;
  return before >= 0 && SAVED[i] !== null && SAVED[before] !== null ? Math.max(0, SAVED[i] - SAVED[before]) : null;
});

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
const numberFound = (i) => DATA.findings[i].length + (STEPS[i].fault ? 1 : 0);

function stateCell(step) {
  return el("span", { class: step.state === "whole" ? "status-same" : "bad", title: step.fault }, STATES[step.state] + " " + step.state);
}

// The lines of the verdict that `inspect` prints: facts first, then each fault once.
function runVerdict() {
  const differing = DATA.resumes.filter((resume) => resume.proof && !resume.proof.equal);
  const lines = DATA.overview.filter(([label]) => label && !["run", "missing", "changed", "resumed"].includes(label));
  const told = ([label, text]) => el("p", {}, el("b", { class: label in STATES ? "bad" : "plain" }, label + ": "), text);
  const faults = lines.filter(([label]) => label in STATES).map(told);
  const few = 3;
  return verdictSection({
    well: (STEPS.length === 1 ? "The step is" : "All " + count(STEPS.length, "step") + " are") + " whole, as far as files and the last verification tell.",
    verdict: DATA.verdict,
    facts: [lines.filter(([label]) => !(label in STATES)).map(told),
      differing.map((resume) => el("p", { class: "bad" }, "\u2715 resume " + resume.attempt + ", from step " + resume.step + ": " + resume.verdict)),
      faults.slice(0, few),
      faults.length > few ? el("details", {}, el("summary", {}, count(faults.length - few, "other fault")), faults.slice(few)) : null],
  });
}

function stepsSection() {
  const table = new LongTable({
    caption: "Steps of the run", height: 480, open: openStep,
    columns: [
      { label: "step", value: (i) => i, text: (i) => STEPS[i].name },
      { label: "state", width: 104, value: (i) => STEPS[i].state, cell: (i) => stateCell(STEPS[i]) },
      { label: "findings", width: 78, number: true, value: numberFound, text: (i) => count(numberFound(i)) },
      { label: "bytes", width: 80, number: true, value: (i) => STEPS[i].bytes, text: (i) => bytes(STEPS[i].bytes) },
      { label: "saved (UTC)", width: 132, value: (i) => STEPS[i].saved, text: (i) => when(STEPS[i].saved) },
      { label: "after", width: 84, number: true, value: (i) => BETWEEN[i], text: (i) => duration(BETWEEN[i]) },
      { label: "checked (UTC)", width: 130, value: (i) => (STEPS[i].verified ? STEPS[i].verified.timestamp : null), text: (i) => (STEPS[i].verified ? when(STEPS[i].verified.timestamp) : "never") },
    ],
  });
  table.setRows(STEPS.map((_, i) => i).reverse());
  return section("steps", "Steps", table.node, el("p", { class: "muted below" }, "Press a step for its norms, what was found at it, and what changed since the step before."));
}

function driftSince(role, i) {
  const drift = ofRole(role, "drift")[i];
  return drift === null ? "" : "; drift since " + DATA.since[i] + ": " + percent(drift);
}

function resumed(step) {
  const newest = DATA.newest_whole;
  return step.state !== "whole" && newest && newest !== step.name ? ["a resume", "takes " + newest + ", the newest whole step"] : null;
}

function openStep(i) {
  const dialog = document.getElementById("tensor");
  const step = STEPS[i];
  const changes = DATA.changes.filter((change) => change.name === step.name);
  const facts = [["state", stateCell(step)], step.fault ? ["what is wrong", step.fault] : null, resumed(step), ["path", el("span", { class: "mono" }, step.path)], ["bytes", bytes(step.bytes)],
    ["saved", when(step.saved) + " UTC" + (DATA.resumes.length ? ", after " + attemptName(ATTEMPT[i]) : "")], ["verified", step.verified ? when(step.verified.timestamp) + " UTC: " + step.verified.verdict : "never"],
    ...PRESENT.map((role) => ["norm of " + role, short(ofRole(role, "norm")[i]) + driftSince(role, i)]),
    DATA.left_out[i] ? ["not measured", count(DATA.left_out[i], "tensor") + " with lost parts"] : null].filter(Boolean);
  dialog.replaceChildren(
    el("div", { class: "head" }, el("h2", { id: "tensor-title" }, step.name), el("form", { method: "dialog", class: "bar" }, el("button", { autofocus: true }, "Close"))),
    el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    ...changes.flatMap((change) => [el("h3", { class: "below" }, "Since " + shown(change.since)), el("ul", {}, change.lines.length ? change.lines.map((line) => el("li", {}, line)) : el("li", {}, "nothing but elements"))]),
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
      : el("p", { class: "muted" }, (STEPS.some((_, i) => isOddStep(i)) ? "Apart from steps that are not whole, nothing" : "Nothing") + " looks suspicious in the metadata" + (DATA.measured === "none" ? ". The numbers were not measured (--stats none)." : ", and nothing is odd in the numbers.")),
    changed.length ? el("details", {}, el("summary", {}, "What changed between steps, besides elements: " + count(changed.length)),
      el("ul", {}, changed.map((change) => el("li", {}, el("span", { class: "mono" }, change.since + " \u2192 " + change.name), ": " + change.lines.join("; "))))) : null);
}

function chartsSection() {
  const [figures, figuresInWords] = [[], []];
  const add = (values, about) => {
    if (values.every((value) => value === null)) return;
    const figure = dotChart({ values, names: (i) => STEPS[i].name, odd: isOddStep, colourOf: "accent", by: "step", at: STEPS.map((step) => step.step), lines: ATTEMPT,
      ...about, tell: (i) => [DATA.resumes.length ? "after " + attemptName(ATTEMPT[i]) : null, about.drift && DATA.since[i] ? "since " + DATA.since[i] : null].filter(Boolean) });
    if (figure.querySelector("canvas")) figures.push(el("div", { class: "panel" }, figure)); else figuresInWords.push(el("div", { class: "tile" }, figure));
  };
  for (const role of PRESENT) {
    add(ofRole(role, "norm"), { title: "Norm of " + role, y: "2-norm", note: "2-norm of all together", colourOf: colourName(role) });
    add(ofRole(role, "drift"), { title: "Drift of " + role, y: "drift", note: "change since the step before, over the norm there", colourOf: colourName(role), format: percent, drift: true });
  }
  add(STEPS.map((step) => (step.state === "whole" ? step.bytes : null)), { title: "Bytes of whole steps", y: "bytes", format: bytes });
  add(BETWEEN, { title: "Time since the step before", y: "time", format: duration });
  return section("charts", "Step by step", figures.length ? el("div", { class: "grid three" }, figures) : null, figuresInWords.length ? el("div", { class: "tiles" }, figuresInWords) : null,
    el("p", { class: "muted below" }, DATA.measured === "none" ? "Norms and drift were not measured (--stats none). " : null,
      STEPS.some((_, i) => isOddStep(i)) ? "Red squares: steps that are not whole. A value is left out where parts of its tensors are lost, and no line crosses it." : null,
      DATA.resumes.length ? " A line is one attempt; a dashed line is where a resume saved its first step." : null));
}

// The start and each resume, with exactly what is recorded of it, and the steps that it saved by the times of their files.
function attemptsSection() {
  const resumes = DATA.resumes;
  if (!resumes.length && !DATA.unread_resumes) return null;
  const saved = (number) => {
    const steps = STEPS.filter((_, i) => ATTEMPT[i] === number);
    const bad = steps.filter((step) => step.state !== "whole").length;
    if (!steps.length) return "none";
    const names = steps.length > 1 ? steps[0].step + " to " + steps[steps.length - 1].step : String(steps[0].step);
    return [count(steps.length, "step") + ": " + names, bad ? el("span", { class: "bad" }, ", " + bad + " not whole") : null];
  };
  const proof = ({ proof, verdict }) => (proof ? el("span", { class: proof.equal ? "status-same" : "bad" }, (proof.equal ? "\u2713 " : "\u2715 ") + verdict) : verdict);
  const rows = resumes.map((resume) => [attemptName(resume.attempt), when(resume.timestamp), String(resume.step), (resume.ranks_saved === null ? "?" : count(resume.ranks_saved)) + " \u2192 " + count(resume.ranks), saved(resume.attempt), proof(resume)]);
  return section("attempts", "Attempts",
    el("div", { class: "panel attempts" }, plainTable("Attempts of the run", ["attempt", "began (UTC)", "from step", "ranks", "saved", "proof of the resume"], [["start", "", "", "", saved(0), ""], ...rows])),
    resumes.some((resume) => !resume.proof) ? el("p", { class: "muted below" }, "To prove a resume, call ", el("code", {}, "check(model, optimizer)"), " on what Series.restore returns, before the first step.") : null,
    DATA.unread_resumes ? el("p", { class: "muted below" }, DATA.unread_resumes + ".") : null);
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
show(DATA.run, [count(STEPS.length, "step"), bytes(TOTAL)].join(" \u00b7 "), [runVerdict(), attemptsSection(), stepsSection(), findingsOfRun(), chartsSection(), seriesSection()]);
performance.mark("ready");
