// The frame of every page: title, navigation, theme, and what puts sections in.

function show(path, about, sections) {
  const name = nameOf(path);
  const present = sections.filter(Boolean);
  document.getElementById("main").replaceChildren(el("h1", {}, name), el("p", { class: "muted" }, el("span", { class: "mono" }, path), " \u00b7 " + about), ...present,
    el("footer", {}, "Made by muonckpt " + DATA.muonckpt + ". This page is one file, loads nothing and sends nothing."));
  document.getElementById("subject").textContent = shown(name);
  document.getElementById("nav").replaceChildren(...present.map((node) => {
    const findings = node.id === "findings" ? node.querySelectorAll("ul.findings > li").length : 0;
    return el("a", { href: "#" + node.id }, node.querySelector("h2").textContent, findings ? el("span", { class: "n" }, String(findings)) : null);
  }));
}

document.getElementById("theme").addEventListener("change", (event) => {
  document.documentElement.style.colorScheme = event.target.value;
  redrawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("scroll", hideTip, { passive: true, capture: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
