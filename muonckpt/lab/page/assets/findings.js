// The verdict on a checkpoint or a run, what to do about it, and findings.

// One box: whether all is well, in the sentence that every tool has; the facts; and what to do.
function verdictSection({ well, verdict, facts }) {
  if (!verdict.sentence) return section("verdict", "Verdict", el("div", { class: "verdict good" }, el("p", {}, "\u2713 " + well), facts));
  const remedies = verdict.remedies.map((remedy) => el("li", {}, el("code", { class: "command" }, remedy.command), el("p", { class: "muted" }, remedy.gives)));
  return section("verdict", "Verdict",
    el("div", { class: "verdict bad-news" }, el("p", {}, el("b", {}, "\u2715 "), verdict.sentence + "."), facts,
      remedies.length ? [el("h3", {}, "What to do"), el("ol", { type: "a", class: "remedies" }, remedies)] : null));
}

const GRAVE = new Set(["hole", "nonfinite", "muon_off"]);

// A finding; look(name), if given, shows what has one of its names.
function finding(found, names, means, look) {
  const [few, most] = [3, 200];
  const link = (name) => (look ? el("button", { type: "button", class: "link mono", onclick: () => look(name) }, name) : el("span", { class: "mono" }, name));
  const listed = names.slice(0, most).map((name) => el("li", {}, link(name)));
  if (names.length > most) listed.push(el("li", {}, "and " + count(names.length - most) + " more"));
  return el("li", { class: GRAVE.has(found.kind) ? "grave" : null }, el("span", { class: "kind" }, found.kind), found.message,
    el("div", { class: "more" }, means ? el("p", {}, "usually " + means) : null,
      look && names.length && names.length <= few ? el("p", {}, "open ", names.map((name) => [link(name), " "])) : null),
    names.length > few ? el("details", {}, el("summary", {}, count(names.length, "name")), el("ul", {}, listed)) : null);
}
