// The page about a checkpoint: its sections in their order.

function lostItems() {
  const { items, files } = DATA.lost;
  const names = files.name.map((name, i) => name + " " + files.reason[i]);
  return [keyList("Files that are missing or cut", names.length > 3 ? names : []), keyList("Items that are lost", items)];
}

function findingsSection(look) {
  const symptoms = DATA.inspection.symptoms;
  const health = DATA.stats ? DATA.stats.health : [];
  const said = [];
  if (!symptoms.length) said.push(`Nothing ${DATA.verdict.sentence ? "else " : ""}looks suspicious in the metadata.`);
  if (!DATA.stats) said.push("The numbers were not measured, so nothing is said of them (--stats none).");
  else if (!health.length && MEASURED.length) said.push(`Nothing is odd in the numbers of ${count(MEASURED.length, "tensor")}.`);
  const leftOut = DATA.stats ? DATA.stats.left_out.length : 0;
  if (leftOut) said.push(`${MEASURED.length ? "" : "No numbers could be measured: "}${count(leftOut, "tensor")} with lost parts ${leftOut === 1 ? "is" : "are"} left out.`);
  const counters = DATA.tensors.role.filter((role) => role === "steps").length;
  if (DATA.stats && counters) said.push(`${count(counters, "step counter")} ${counters === 1 ? "is a number" : "are numbers"} without a norm, so ${counters === 1 ? "it is" : "they are"} not measured.`);
  const listed = [...symptoms.map((found) => finding(found, found.names, null, look)), ...health.map((found) => finding(found, found.keys, found.means, look))];
  return section("findings", "Findings", listed.length ? el("ul", { class: "findings" }, listed) : null, said.length ? el("p", { class: "muted" }, said.join(" ")) : null);
}

function build() {
  const tensors = tensorsSection();
  const look = (name) => {
    const own = INDEX.get(name);
    if (own !== undefined) { openTensor(own); return; }
    tensors.search.set(name);
    tensors.node.scrollIntoView();
    tensors.search.field.focus({ preventScroll: true });
  };
  const found = DATA.inspection;
  const about = [found.step === null ? null : "step " + found.step, count(found.tensors, "tensor"), count(found.chunks, "shard"), bytes(found.bytes),
    HOLDERS.ranked ? count(HOLDERS.places.length, "rank") : count(found.files, "file"), found.kind].filter(Boolean).join(" \u00b7 ");
  const well = DATA.stats ? "Whole, as far as sizes of files and checksums of what was measured tell." : "Whole, as far as names and sizes of files tell; muonckpt verify reads everything.";
  show(found.checkpoint, about, [verdictSection({ well, verdict: DATA.verdict, facts: lostItems() }), findingsSection(look), mapSection(openTensor),
    overviewSection(), balanceSection(), normsSection(), differenceSection(), tensors.node]);
}

build();
performance.mark("ready");
