// The memory of one device: live arrays at every program point of a call, and at the peak.

const CLASSES = ["parameters", "optimizer state", "inputs", "results", "saved activations", "gradients", "temporaries", "gaps"];
const classStyle = (name) => `class k${Math.max(0, CLASSES.indexOf(name))}`;
const WIDTH = 480, HEIGHT = 160, LISTED = 12;

function memoryTimeline() {
  const { arrays, transient, resident, lines } = data.memory;
  const array = (number) => {
    const [bytes, name, kind, op, source, pattern, axes] = arrays[number];
    return { bytes, name: text(name), kind: text(kind), op: text(op), source: text(source), pattern: text(pattern), axes: data.memory.axes[axes] };
  };
  const num = lines.length;
  const byKind = new Map(CLASSES.map((name) => [name, new Float64Array(num + 1)]));
  for (const number of resident) byKind.get(text(arrays[number][2]))[0] += arrays[number][0];
  for (let k = 0; k < transient.length; k += 3) {
    const change = byKind.get(text(arrays[transient[k]][2])), bytes = arrays[transient[k]][0];
    change[transient[k + 1]] += bytes;
    change[transient[k + 1] + transient[k + 2] + 1] -= bytes;
  }
  const total = new Float64Array(num);
  for (const sums of byKind.values()) {
    for (let m = 0, now = 0; m < num; m++) { now += sums[m]; sums[m] = now; total[m] += now; }
  }
  function live(moment) {
    const found = resident.map(array);
    for (let k = 0; k < transient.length && transient[k + 1] <= moment; k += 3) {
      if (moment <= transient[k + 1] + transient[k + 2]) found.push(array(transient[k]));
    }
    return found.sort((a, b) => b.bytes - a.bytes);
  }
  return { num, byKind, total, live, line: (m) => text(lines[m]), depth: (m) => data.memory.depths[m] ?? 0 };
}

// The program points to draw: the largest of each interval.
function sampled({ num, total }) {
  const found = [];
  const steps = Math.min(num, WIDTH);
  for (let k = 0; k < steps; k++) {
    let best = Math.floor((k * num) / steps);
    for (let m = best; m < Math.floor(((k + 1) * num) / steps); m++) if (total[m] > total[best]) best = m;
    found.push(best);
  }
  return found;
}

// Arrays of equal layers together: the first one, with `*` for its layer, their number and the sum of their bytes.
function ofEqualLayers(arrays) {
  const groups = new Map();
  for (const one of arrays) {
    const key = [one.bytes, one.pattern, one.kind, one.op, one.source, one.axes].join("\n");
    const found = groups.get(key);
    if (found) { found.num += 1; found.bytes += one.bytes; found.name = one.pattern; } else groups.set(key, { ...one, num: 1 });
  }
  return [...groups.values()].sort((a, b) => b.bytes - a.bytes);
}

function chart(history, peak, capacity) {
  const points = sampled(history);
  const step = WIDTH / points.length;
  const y = (bytes) => HEIGHT - (HEIGHT * bytes) / (peak * 1.05);
  const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  let below = points.map(() => 0);
  for (const [name, sums] of history.byKind) {
    const above = points.map((m, k) => below[k] + sums[m]);
    if (above.some((bytes, k) => bytes > below[k])) {
      const top = above.map((bytes, k) => `L${(k * step).toFixed(2)} ${y(bytes).toFixed(2)}H${((k + 1) * step).toFixed(2)}`);
      const bottom = below.map((bytes, k) => `L${((k + 1) * step).toFixed(2)} ${y(bytes).toFixed(2)}H${(k * step).toFixed(2)}`).reverse();
      picture.append(draw("path", { d: `M0 ${y(below[0]).toFixed(2)}${top.join("")}${bottom.join("")}Z`, class: classStyle(name) }));
    }
    below = above;
  }
  picture.append(draw("line", { x1: 0, x2: WIDTH, y1: y(peak), y2: y(peak), class: "peak" }));
  if (capacity < peak) picture.append(draw("line", { x1: 0, x2: WIDTH, y1: y(capacity), y2: y(capacity), class: "capacity" }));
  return picture;
}

function timeline() {
  const history = memoryTimeline();
  const { num, total } = history;
  const peak = data.memory.peak, capacity = data.memory_bytes ?? Infinity;
  let now = total.indexOf(Math.max(...sampled(history).map((m) => total[m])));
  const cursor = make("div", { class: "cursor", "aria-hidden": "true" });
  const list = make("tbody");
  const head = make("p", { id: "live-head" });
  const slider = make("div", { class: "chart", role: "slider", tabindex: 0, "aria-label": "Program point", "aria-valuemin": 0,
    "aria-valuemax": num - 1, "aria-describedby": "chart-keys" }, chart(history, peak, capacity),
    make("span", { class: "top-label", "aria-hidden": "true" }, `peak ${bytesText(peak)}`),
    ...(capacity < peak ? [make("span", { class: "capacity-label", style: `top:${(100 - 100 * capacity / (peak * 1.05)).toFixed(1)}%` }, `device ${bytesText(capacity)}`)] : []), cursor);

  function move(moment) {
    now = Math.max(0, Math.min(num - 1, moment));
    const all = history.live(now);
    const found = ofEqualLayers(all);
    const rest = found.slice(LISTED);
    const line = history.line(now);
    const where = `program point ${(now + 1).toLocaleString("en")} of ${num.toLocaleString("en")}${history.depth(now) ? ", in a loop or branch" : ""}${line ? `, ${shortLine(line)}` : ""}`;
    slider.setAttribute("aria-valuenow", now);
    slider.setAttribute("aria-valuetext", `${where}: ${bytesText(total[now])}, largest ${found.slice(0, 3).map((a) => a.name).join(", ")}`);
    cursor.style.left = `${(100 * (now + 0.5)) / num}%`;
    head.replaceChildren(make("b", {}, bytesText(total[now])), ` live in ${counted(all.length, "array")} at ${where}`);
    const cell = (name, ...what) => make("td", { "data-label": name, class: name === "bytes" ? "number" : null }, ...what);
    list.replaceChildren(...found.slice(0, LISTED).map((a) => make("tr", {},
      cell("array", make("span", { class: `swatch ${classStyle(a.kind)}`, "aria-hidden": "true" }), make("code", {}, a.num > 1 ? `${a.name} (x${a.num})` : a.name)),
      cell("bytes", bytesCell(a.bytes)), cell("category", a.kind),
      cell("op", a.op ? opCell(a.op, a.source) : "argument or result"), cell("sharded over", a.axes.length ? axisNames(a.axes) : "–"))),
    ...(rest.length ? [make("tr", {}, cell("array", `and ${rest.reduce((sum, a) => sum + a.num, 0).toLocaleString("en")} more`),
      cell("bytes", bytesCell(rest.reduce((sum, a) => sum + a.bytes, 0))))] : []));
  }

  const under = (event) => {
    const box = slider.getBoundingClientRect();
    move(Math.floor((num * (event.clientX - box.left)) / box.width));
  };
  slider.addEventListener("pointermove", under);
  slider.addEventListener("pointerdown", under);
  const page = Math.max(1, Math.round(num / 20));
  slider.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1,
      PageUp: now + page, PageDown: now - page, Home: 0, End: num - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    move(moves[event.key]);
  });
  move(now);
  return [slider,
    make("p", { class: "muted", id: "chart-keys" }, "Move the cursor with the pointer or the arrow keys; Page Up and Page Down move it by 5 %. A loop body is drawn once."),
    head,
    make("div", { class: "wide", role: "region", "aria-labelledby": "live-head", tabindex: 0 }, make("table", { id: "live", class: "cards" },
      make("thead", {}, make("tr", {}, ["array", "bytes", "category", "op", "sharded over"].map((name) => (
        make("th", { scope: "col", class: name === "bytes" ? "number" : null }, name))))), list))];
}

const doesNotFit = () => Boolean(data.memory && data.memory_bytes && data.memory.peak > data.memory_bytes);
const opCell = (op, source) => [make("code", {}, `${op} `), source ? lineText(source) : ""];

function showMemory() {
  const section = byId("memory");
  if (!data.memory) {
    section.append(make("p", { class: "note" }, "Omitted from this view because the program is large; see ", make("code", {}, "completion.report(\"report.html\")"), "."));
    return;
  }
  const { peak, by_class: kinds, by_axis: axes, top } = data.memory;
  section.append(
    make("p", { class: doesNotFit() ? "bad" : null }, make("b", {}, bytesText(peak)), " peak memory per device", ...(data.memory_bytes
      ? [`, ${percentText(peak, data.memory_bytes)} of ${bytesText(data.memory_bytes)}`, doesNotFit() ? make("b", {}, ": does not fit") : ""] : [])),
    ...stackedBar(kinds.map(([name, size]) => ({ name, size, style: classStyle(name) })), bytesText),
    make("h3", {}, "Over one step"), ...timeline(),
    make("h3", {}, "Largest arrays at the peak"),
    sortedTable("Largest arrays", [
      codeColumn("array", ([name]) => name), bytesColumn("bytes", ([, bytes]) => bytes), textColumn("category", ([, , kind]) => kind),
      textColumn("op", ([, , , op, source]) => `${op} ${source}`, ([, , , op, source]) => (op ? opCell(op, source) : "–")),
      textColumn("sharded over", (row) => row[5].join(), (row) => axisNames(row[5])),
    ], top, { by: 1 }),
    make("h3", {}, "By mesh axis at the peak"),
    sortedTable("Memory by mesh axis", [
      textColumn("axis", ([axis]) => axis, ([axis]) => axisChip(axis)), numberColumn("devices", ([, num]) => num),
      bytesColumn("sharded over it", (row) => row[2]), bytesColumn("not sharded over it", (row) => row[3]),
      bytesColumn("saved by sharding those", (row) => row[4]),
    ], axes, { by: 2 }));
}
