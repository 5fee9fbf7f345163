// The side panel: facts about a value, and for each dim the chain from its axes back to the annotation.

const MAX_PERIOD = 256; // the longest repeated sequence of steps, as in sharding/explain/why.py

// A line with `*` for the number of each layer, as in sharding/paths/layers.py.
const layerNames = new Map(data.layers);
const starred = (line) => line.replace(/[^\s/]+(?=\/)/g, (part) => layerNames.get(part) ?? part).replace(/([/#])\d+(?=[/ ,]|$)/g, "$1*");

function stepText(step) {
  const who = `${program.label(step.v)} dim ${step.dim}`;
  if (step.back === null) return `${who} ← ${step.source}`;
  return `${who} ← ${step.word}${step.source ? ` at ${step.source}` : ""}${step.array ? `, from ${step.array}` : ""}`;
}

// [start, period, times] of runs that cover the list.
function repeats(lines) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    let best = [1, 1];
    for (let period = 1; period <= Math.min(MAX_PERIOD, (lines.length - at) >> 1); period++) {
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

function chainList(v, dim, axis) {
  const steps = program.chain(v, dim, axis);
  const items = [];
  for (const [start, period, times] of repeats(steps.map(stepText).map(starred))) {
    items.push(...steps.slice(start, start + period).map(stepItem));
    if (times > 1) {
      const what = period === 1 ? "this step repeats" : `these ${period} steps repeat`;
      items.push(make("li", { class: "again" }, `(${what} ${times - 1} more time${times > 2 ? "s" : ""})`));
    }
  }
  return make("ol", { class: "chain" }, items);
}

function stepItem(step) {
  const [who, rest] = stepText(step).split(" ← ");
  return make("li", {},
    make("button", { type: "button", class: "value", onclick: () => select(step.v) }, who),
    make("span", {}, " ← "), make("span", { class: step.back === null ? "origin" : "" }, rest));
}

function dimPart(v, dim) {
  const axes = program.dims(v)[dim];
  const head = `dim ${dim} (size ${program.shape(v)[dim].toLocaleString("en")})`;
  if (!axes.length) return make("section", {}, make("h3", {}, head, " is replicated"), make("p", {}, program.whyReplicated(v, dim)));
  return axes.map((axis) => make("section", {},
    make("h3", {}, head, " is sharded over ", axisChip(data.axes[axis][0], data.axes[axis][1])), chainList(v, dim, axis)));
}

function facts(v) {
  const { op, line, scope, phase } = program.origin(v);
  const shards = program.shards(v);
  const copies = numDevices / shards;
  const rows = [
    ["type", make("code", {}, program.typeText(v))],
    ["spec", specChips(v)],
    ["per device", make("span", {}, bytesCell(program.bytes(v)),
      ` – ${counted(shards, "shard")}, ${copies === 1 ? "each on one device" : `each on ${counted(copies, "device")}`}`)],
    ["op", op ? `${op}${line ? ` at ${line}` : ""}` : ""],
    ["scope", scope ? `${scope} (${phase})` : ""],
  ];
  return make("dl", { class: "facts" }, rows.filter(([, what]) => what !== "").map(([name, what]) => [
    make("dt", {}, name), make("dd", {}, what)]));
}

function showWhy(v) {
  const panel = byId("why");
  panel.classList.toggle("open", v !== null);
  if (v === null) {
    panel.replaceChildren(make("h2", {}, "Why"),
      make("p", { class: "muted" }, "Select a value to see where each of its axes came from, step by step back to your annotation."));
    return;
  }
  const dims = program.shape(v).map((_, dim) => dimPart(v, dim)).flat();
  panel.replaceChildren(
    make("div", { class: "top" }, make("h2", {}, program.label(v)),
      make("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => { const item = selected; select(null); focusOn(item); } }, "×")),
    facts(v),
    ...(dims.length ? dims : [make("p", {}, "A scalar: no dims to shard.")]));
  panel.scrollTop = 0;
}

function whyText(v) {
  const dims = program.dims(v).map((axes, dim) => {
    const chains = axes.map((axis) => `sharded over ${program.axisText(axis)} from ${program.chain(v, dim, axis).at(-1)?.source ?? "unknown"}`);
    return `dim ${dim} ${chains.join(" and ") || `replicated: ${program.whyReplicated(v, dim)}`}`;
  });
  return `${program.label(v)}: ${dims.join("; ") || "a scalar"}`;
}
