// The page: what is shown first, and what a choice changes. `report.html#value=params/w1` opens with that value chosen.

function choose(v, item = null) {
  const panel = place("why");
  const isInside = panel.contains(document.activeElement);
  markChosen(v, item);
  showWhy(v);
  showMesh(v);
  say(v === null ? "" : whyText(v));
  if (isInside && v !== null) panel.focus();
}

// From the reasons back to the value, from there to none.
function leave() {
  if (chosen && place("why").contains(document.activeElement)) focusOn(chosen);
  else choose(null);
}

function showNotes() {
  const { conflicts, uneven, unknown } = data;
  const list = (title, lines) => (lines.length ? [make("h3", {}, title), make("ul", { class: "lines" }, lines.map((line) => make("li", {}, line)))] : []);
  const parts = [
    ...list("Conflicts", conflicts.map(([line, , times]) => (times > 1 ? `${line} (x${times})` : line))),
    ...list("Splits that don't divide", uneven),
    ...list("Primitives without a rule", unknown.map(([name, times]) => `${name} (x${times}): nothing flows through it`)),
  ];
  place("notes").append(...(parts.length ? parts : [make("p", { class: "note" }, "No conflict, no uneven split, no unknown primitive.")]));
}

function card(name, href, value, below) {
  return make("div", {}, make("dt", {}, name), make("dd", {}, make("a", { href }, value), make("span", { class: "muted" }, below)));
}

function showSummary() {
  const { collectives, memory, time } = data;
  const sum = (at) => collectives.reduce((total, row) => total + row[at], 0);
  const noted = [[data.conflicts.reduce((n, row) => n + row[2], 0), "conflict"], [data.uneven.length, "uneven split", "uneven splits"], [data.unknown.length, "unknown primitive"]];
  const notes = noted.filter(([n]) => n).map(([n, ...words]) => counted(n, ...words));
  place("name").textContent = data.name;
  place("about").textContent = `on ${data.mesh.map(([name, size]) => `${name}=${size}`).join(", ") || "one device"}${data.devices ? ` over ${data.devices}` : ""}`;
  place("summary").append(
    card("mesh", "#mesh", counted(numDevices, "device"), data.mesh.map(([, size]) => size).join(" × ")),
    card("values", "#values", program.num.toLocaleString("en"), `of ${counted(data.ops, "op")}`),
    card("a device sends", "#communication", bytesText(sum(4)), `in ${counted(sum(2), "collective")}`),
    card("a device holds", "#memory", memory ? bytesText(memory.peak) : "–",
      memory && data.memory_bytes ? `${shareText(memory.peak, data.memory_bytes)} of its memory` : "at the peak"),
    card("a step takes", "#time", time ? secondsText(time.seconds) : "–", time ? "estimated" : "devices unknown"),
    card("notes", "#notes", notes[0] ?? "none", notes.slice(1).join(", ") || (notes.length ? "nothing else" : "nothing amiss")));
}

showSummary();
showValues();
showMesh(null);
showCommunication();
showMemory();
showTime();
showNotes();
showWhy(null);
function followHash() {
  const name = /^#value=(.*)/.exec(location.hash)?.[1];
  const v = name && [...data.arguments, ...data.named, ...data.results].find(([own]) => own === decodeURIComponent(name))?.[1];
  if (v !== undefined) choose(v);
}

followHash();
window.addEventListener("hashchange", followHash);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
