// Puts the sections together.

function build() {
  const tensors = tensorsSection();
  const look = (name) => {
    const own = INDEX.get(name);
    if (own !== undefined) { openTensor(own); return; }
    tensors.search.set(name);
    tensors.node.scrollIntoView();
    tensors.search.field.focus({ preventScroll: true });
  };
  const name = nameOf(DATA.inspection.checkpoint);
  const sections = [overviewSection(), findingsSection(look), mapSection(openTensor), balanceSection(), normsSection(), differenceSection(), tensors.node].filter(Boolean);
  document.getElementById("main").replaceChildren(el("h1", {}, name), el("p", { class: "muted mono" }, DATA.inspection.checkpoint), ...sections,
    el("footer", {}, "Made by muonckpt " + DATA.muonckpt + ". This page is one file, loads nothing and sends nothing."));
  document.getElementById("subject").textContent = shown(name);
  const findings = DATA.inspection.symptoms.length + (DATA.stats ? DATA.stats.health.length : 0);
  document.getElementById("nav").replaceChildren(...sections.map((node) =>
    el("a", { href: "#" + node.id }, node.querySelector("h2").textContent, node.id === "findings" && findings ? el("span", { class: "n" }, String(findings)) : null)));
}

document.getElementById("theme").addEventListener("change", (event) => {
  document.documentElement.style.colorScheme = event.target.value;
  redrawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("scroll", hideTip, { passive: true, capture: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
build();
performance.mark("ready");
