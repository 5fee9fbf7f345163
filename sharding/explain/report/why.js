// The panel beside: what a value is, and for each dim the way of its axes back to the annotation.

const LONGEST = 256; // steps that are looked for as one repeated layer, as in sharding/why.py

const starred = (line) => line.replace(/([/#])\d+(?=[/ ,]|$)/g, "$1*");

function stepText(step) {
  const who = `${program.label(step.v)} dim ${step.dim}`;
  if (step.back === null) return `${who} ← ${step.source}`;
  return `${who} ← ${step.word}${step.source ? ` at ${step.source}` : ""}${step.array ? `, from ${step.array}` : ""}`;
}

// [start, period, times] of runs that make up the whole list.
function repeats(lines) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    let best = [1, 1];
    for (let period = 1; period <= Math.min(LONGEST, (lines.length - at) >> 1); period++) {
      let length = period;
      while (at + length < lines.length && lines[at + length] === lines[at + length - period]) length++;
      const times = Math.floor(length / period);
      if (times > 1 && period * times > best[0] * best[1]) best = [period, times];
    }
    found.push([at, ...best]);
    at += best[0] * best[1];
  }
  return found;
}

function way(v, dim, axis) {
  const steps = program.chain(v, dim, axis);
  const items = [];
  for (const [start, period, times] of repeats(steps.map(stepText).map(starred))) {
    items.push(...steps.slice(start, start + period).map(stepItem));
    if (times > 1) {
      const what = period === 1 ? "this step" : `these ${period} steps`;
      items.push(make("li", { class: "again" }, `(${what} ${times - 1} times more)`));
    }
  }
  return make("ol", { class: "way" }, items);
}

function stepItem(step) {
  const [who, rest] = stepText(step).split(" ← ");
  return make("li", {},
    make("button", { type: "button", class: "value", onclick: () => choose(step.v) }, who),
    make("span", {}, " ← "), make("span", { class: step.back === null ? "origin" : "" }, rest));
}

function dimPart(v, dim) {
  const axes = program.dims(v)[dim];
  const head = `dim ${dim} of ${program.shape(v)[dim].toLocaleString("en")}`;
  if (!axes.length) return make("section", {}, make("h3", {}, head, " is whole"), make("p", {}, program.whole(v, dim)));
  return axes.map((axis) => make("section", {},
    make("h3", {}, head, " is split by ", axisChip(data.axes[axis][0], data.axes[axis][1])), way(v, dim, axis)));
}

function facts(v) {
  const { op, line, scope, phase } = program.origin(v);
  const shards = program.shards(v);
  const copies = numDevices / shards;
  const rows = [
    ["type", make("code", {}, program.written(v))],
    ["split", specChips(v)],
    ["on a device", make("span", {}, bytesCell(program.bytes(v)),
      ` – ${counted(shards, "part")}, ${copies === 1 ? "each on one device" : `each on ${counted(copies, "device")}`}`)],
    ["made by", op ? `${op}${line ? ` at ${line}` : ""}` : ""],
    ["scope", scope ? `${scope} (${phase})` : ""],
  ];
  return make("dl", { class: "facts" }, rows.filter(([, what]) => what !== "").map(([name, what]) => [
    make("dt", {}, name), make("dd", {}, what)]));
}

function showWhy(v) {
  const panel = place("why");
  panel.classList.toggle("open", v !== null);
  if (v === null) {
    panel.replaceChildren(make("h2", {}, "Why"),
      make("p", { class: "muted" }, "Choose a value to see where each of its axes comes from, step by step back to your line."));
    return;
  }
  const dims = program.shape(v).map((_, dim) => dimPart(v, dim)).flat();
  panel.replaceChildren(
    make("div", { class: "top" }, make("h2", {}, program.label(v)),
      make("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => { const item = chosen; choose(null); focusOn(item); } }, "×")),
    facts(v),
    ...(dims.length ? dims : [make("p", {}, "A scalar: there is nothing to split.")]));
  panel.scrollTop = 0;
}

function whyText(v) {
  const dims = program.dims(v).map((axes, dim) => {
    const ways = axes.map((axis) => `by ${program.axisText(axis)} from ${program.chain(v, dim, axis).at(-1)?.source ?? "unknown"}`);
    return `dim ${dim} ${ways.join(" and ") || `is whole: ${program.whole(v, dim)}`}`;
  });
  return `${program.label(v)}: ${dims.join("; ") || "a scalar"}`;
}
