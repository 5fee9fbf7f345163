// The page: its initial state, and selecting a value. `report.html#value=params/w1` opens with that value selected.

function select(v, item = null) {
  const panel = byId("why");
  const isInside = panel.contains(document.activeElement);
  markSelected(v, item);
  showWhy(v);
  showMesh(v);
  announce(v === null ? "" : whyText(v));
  if (isInside && v !== null) panel.focus();
}

// Escape: from the explanation back to its value, then to no selection.
function leave() {
  if (selected && byId("why").contains(document.activeElement)) focusOn(selected);
  else select(null);
}

function showNotes() {
  const { conflicts, uneven, unknown } = data;
  const list = (title, lines) => (lines.length ? [make("h3", {}, title), make("ul", { class: "lines" }, lines.map((line) => make("li", {}, line)))] : []);
  const parts = [
    ...(conflicts.length ? [make("h3", {}, "Conflicts"), sortedTable("Conflicts", [
      bytesColumn("bytes lost", (row) => row[1]), numberColumn("count", (row) => row[2]),
      textColumn("conflict", (row) => row[0]), textColumn("cure", (row) => row[3]),
    ], conflicts)] : []),
    ...list("Uneven shardings", uneven),
    ...list("Primitives without a rule", unknown.map(([name, times]) => `${name} (x${times}): shardings do not propagate through it`)),
  ];
  byId("notes").append(...(parts.length ? parts : [make("p", { class: "note" }, "No conflicts, no uneven shardings, no primitives without a rule.")]));
}

function card(name, href, value, below, style = null) {
  return make("div", { class: style }, make("dt", {}, name), make("dd", {}, make("a", { href }, value), make("span", { class: "muted" }, below)));
}

function showSummary() {
  const { collectives, memory, time } = data;
  const sum = (at) => collectives.reduce((total, row) => total + row[at], 0);
  const noted = [[data.conflicts.reduce((n, row) => n + row[2], 0), "conflict"], [data.uneven.length, "uneven sharding"], [data.unknown.length, "primitive without a rule", "primitives without a rule"]];
  const notes = noted.filter(([n]) => n).map(([n, ...words]) => counted(n, ...words));
  byId("name").textContent = data.name;
  byId("about").textContent = `on ${data.mesh.length ? `mesh ${data.mesh.map(([name, size]) => `${name}=${size}`).join(", ")}` : "one device"}${data.devices ? ` of ${data.devices}` : ""}`;
  byId("summary").append(
    card("mesh", "#mesh", counted(numDevices, "device"), data.mesh.map(([, size]) => size).join(" × ")),
    card("values", "#values", program.num.toLocaleString("en"), `in ${counted(data.ops, "op")}`),
    card("sent per device", "#communication", bytesText(sum(4)), `in ${counted(sum(2), "collective")}`),
    card("peak memory", "#memory", memory ? bytesText(memory.peak) : "–",
      memory && data.memory_bytes ? `${percentText(memory.peak, data.memory_bytes)} of ${bytesText(data.memory_bytes)}${doesNotFit() ? ": does not fit" : ""}` : "predicted",
      doesNotFit() ? "bad" : null),
    card("step time", "#time", time ? secondsText(time.seconds) : "–", time ? "estimated" : "unknown devices"),
    card("notes", "#notes", notes[0] ?? "none", notes.slice(1).join(", ") || (notes.length ? "" : "no conflicts")));
}

showSummary();
showValues();
showMesh(null);
showCommunication();
showMemory();
showTables();
showTime();
showNotes();
showWhy(null);
function followHash() {
  const name = /^#value=(.*)/.exec(location.hash)?.[1];
  const v = name && [...data.arguments, ...data.named, ...data.results].find(([own]) => own === decodeURIComponent(name))?.[1];
  if (v !== undefined) select(v);
}

followHash();
window.addEventListener("hashchange", followHash);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
