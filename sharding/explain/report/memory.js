// What a device holds: over the moments of a call, and at the worst of them.

const CLASSES = ["parameters", "optimizer state", "inputs", "results", "saved activations", "gradients", "temporaries", "gaps"];
const classStyle = (name) => `class k${Math.max(0, CLASSES.indexOf(name))}`;
const WIDTH = 480, HEIGHT = 160, LISTED = 12;

function past() {
  const { arrays, passing, lasting, lines } = data.memory;
  const array = (number) => {
    const [bytes, name, kind, op, source, axes] = arrays[number];
    return { bytes, name: text(name), kind: text(kind), op: text(op), source: text(source), axes: data.memory.divided[axes] };
  };
  const num = lines.length;
  const byKind = new Map(CLASSES.map((name) => [name, new Float64Array(num + 1)]));
  for (const number of lasting) byKind.get(text(arrays[number][2]))[0] += arrays[number][0];
  for (let k = 0; k < passing.length; k += 3) {
    const change = byKind.get(text(arrays[passing[k]][2])), bytes = arrays[passing[k]][0];
    change[passing[k + 1]] += bytes;
    change[passing[k + 1] + passing[k + 2] + 1] -= bytes;
  }
  const total = new Float64Array(num);
  for (const sums of byKind.values()) {
    for (let m = 0, now = 0; m < num; m++) { now += sums[m]; sums[m] = now; total[m] += now; }
  }
  function alive(moment) {
    const found = lasting.map(array);
    for (let k = 0; k < passing.length && passing[k + 1] <= moment; k += 3) {
      if (moment <= passing[k + 1] + passing[k + 2]) found.push(array(passing[k]));
    }
    return found.sort((a, b) => b.bytes - a.bytes);
  }
  return { num, byKind, total, alive, line: (m) => text(lines[m]), depth: (m) => data.memory.depths[m] ?? 0 };
}

// The moments that are drawn: of each stretch the one with most.
function drawn({ num, total }) {
  const found = [];
  const steps = Math.min(num, WIDTH);
  for (let k = 0; k < steps; k++) {
    let best = Math.floor((k * num) / steps);
    for (let m = best; m < Math.floor(((k + 1) * num) / steps); m++) if (total[m] > total[best]) best = m;
    found.push(best);
  }
  return found;
}

function chart(history, peak) {
  const moments = drawn(history);
  const step = WIDTH / moments.length;
  const y = (bytes) => HEIGHT - (HEIGHT * bytes) / (peak * 1.05);
  const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  let below = moments.map(() => 0);
  for (const [name, sums] of history.byKind) {
    const above = moments.map((m, k) => below[k] + sums[m]);
    if (above.some((bytes, k) => bytes > below[k])) {
      const top = above.map((bytes, k) => `L${(k * step).toFixed(2)} ${y(bytes).toFixed(2)}H${((k + 1) * step).toFixed(2)}`);
      const bottom = below.map((bytes, k) => `L${((k + 1) * step).toFixed(2)} ${y(bytes).toFixed(2)}H${(k * step).toFixed(2)}`).reverse();
      picture.append(draw("path", { d: `M0 ${y(below[0]).toFixed(2)}${top.join("")}${bottom.join("")}Z`, class: classStyle(name) }));
    }
    below = above;
  }
  picture.append(draw("line", { x1: 0, x2: WIDTH, y1: y(peak), y2: y(peak), class: "peak" }));
  return picture;
}

function timeline() {
  const history = past();
  const { num, total } = history;
  let now = total.indexOf(Math.max(...drawn(history).map((m) => total[m])));
  const cursor = make("div", { class: "cursor", "aria-hidden": "true" });
  const list = make("tbody");
  const head = make("p", { id: "alive-head" });
  const slider = make("div", { class: "chart", role: "slider", tabindex: 0, "aria-label": "Moment of the step", "aria-valuemin": 0,
    "aria-valuemax": num - 1, "aria-describedby": "chart-keys" }, chart(history, data.memory.peak),
    make("span", { class: "top-label", "aria-hidden": "true" }, `peak ${bytesText(data.memory.peak)}`), cursor);

  function move(moment) {
    now = Math.max(0, Math.min(num - 1, moment));
    const found = history.alive(now);
    const rest = found.slice(LISTED);
    const line = history.line(now);
    const where = `moment ${(now + 1).toLocaleString("en")} of ${num.toLocaleString("en")}${history.depth(now) ? ", in a loop or branch" : ""}${line ? `, ${line}` : ""}`;
    slider.setAttribute("aria-valuenow", now);
    slider.setAttribute("aria-valuetext", `${where}: ${bytesText(total[now])}, most of it ${found.slice(0, 3).map((a) => a.name).join(", ")}`);
    cursor.style.left = `${(100 * (now + 0.5)) / num}%`;
    head.replaceChildren(make("b", {}, bytesText(total[now])), ` in ${counted(found.length, "array")} at ${where}`);
    const cell = (name, ...what) => make("td", { "data-label": name, class: name === "bytes" ? "number" : null }, ...what);
    list.replaceChildren(...found.slice(0, LISTED).map((a) => make("tr", {},
      cell("array", make("span", { class: `swatch ${classStyle(a.kind)}`, "aria-hidden": "true" }), make("code", {}, a.name)),
      cell("bytes", bytesCell(a.bytes)), cell("for", a.kind),
      cell("made by", a.op ? make("code", {}, `${a.op} `, make("span", { class: "muted" }, a.source)) : "argument or result"), cell("divided by", a.axes.length ? axisNames(a.axes) : "–"))),
    ...(rest.length ? [make("tr", {}, cell("array", `and ${counted(rest.length, "other")}`),
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
    make("p", { class: "muted", id: "chart-keys" }, "The pointer or the arrow keys move the cursor; Page up and down by a twentieth. A loop's body is drawn once."),
    head,
    make("div", { class: "wide", role: "region", "aria-labelledby": "alive-head", tabindex: 0 }, make("table", { id: "alive", class: "cards" },
      make("thead", {}, make("tr", {}, ["array", "bytes", "for", "made by", "divided by"].map((name) => (
        make("th", { scope: "col", class: name === "bytes" ? "number" : null }, name))))), list))];
}

function showMemory() {
  const section = place("memory");
  if (!data.memory) {
    section.append(make("p", { class: "note" }, "Left out here, as the program is long: ", make("code", {}, "completion.report(\"report.html\")"), " has it."));
    return;
  }
  const { peak, by_class: kinds, by_axis: axes, top } = data.memory;
  section.append(
    make("p", {}, make("b", {}, bytesText(peak)), " at the peak", ...(data.memory_bytes
      ? [`, ${shareText(peak, data.memory_bytes)} of the ${bytesText(data.memory_bytes)} of a device`, peak > data.memory_bytes ? make("b", {}, ": too much") : ""] : [])),
    ...parted(kinds.map(([name, size]) => ({ name, size, style: classStyle(name) })), bytesText),
    make("h3", {}, "Over a step"), ...timeline(),
    make("h3", {}, "Largest arrays at the peak"),
    sortedTable("Largest arrays", [
      codeColumn("array", ([name]) => name), bytesColumn("bytes", ([, bytes]) => bytes), textColumn("for", ([, , kind]) => kind),
      codeColumn("made by", ([, , , op, source]) => `${op} ${source}`.trim()),
      textColumn("divided by", (row) => row[5].join(), (row) => axisNames(row[5])),
    ], top, { by: 1 }),
    make("h3", {}, "By mesh axis, at the peak"),
    sortedTable("Memory by mesh axis", [
      textColumn("axis", ([axis]) => axis, ([axis]) => axisChip(axis)), numberColumn("devices", ([, num]) => num),
      bytesColumn("split by it", (row) => row[2]), bytesColumn("not split by it", (row) => row[3]),
      bytesColumn("splitting those saves", (row) => row[4]),
    ], axes, { by: 2 }));
}
