// The program: accessors to the columns that `sharding/explain/report/value_table.py` writes.

const data = JSON.parse(byId("data").textContent);
const text = (number) => data.strings[number];

const program = (() => {
  // Per spec its (dim, axis) pairs; per value the index of its first reason.
  const pairs = data.specs.map((dims) => dims.flatMap((axes, dim) => axes.map((axis) => [dim, axis])));
  const starts = new Int32Array(data.spec.length + 1);
  data.spec.forEach((spec, v) => { starts[v + 1] = starts[v] + pairs[spec].length; });

  const names = new Map();
  for (const [name, v] of [...data.arguments, ...data.named, ...data.results]) if (!names.has(v)) names.set(v, name);

  const replicated = new Map(data.replicated.map(([v, dim, why]) => [`${v} ${dim}`, text(why)]));
  const size = (axes) => axes.reduce((product, axis) => product * data.axes[axis][2], 1);

  const dims = (v) => data.specs[data.spec[v]];
  const shape = (v) => data.types[data.type[v]][2];
  const dtype = (v) => data.types[data.type[v]][0];
  const typeText = (v) => `${dtype(v)}[${shape(v).join(", ")}]`;

  function bytes(v) {
    const own = dims(v);
    return shape(v).reduce((n, length, d) => n * Math.ceil(length / size(own[d])), data.types[data.type[v]][1]);
  }

  // Matches the axis, or else a sub-axis of the same mesh axis, as `Assignment.reason` does.
  function reason(v, dim, axis) {
    const own = pairs[data.spec[v]];
    const name = data.axes[axis][1];
    let at = own.findIndex(([d, a]) => d === dim && a === axis);
    if (at < 0) at = own.findIndex(([d, a]) => d === dim && data.axes[a][1] === name);
    if (at < 0) return null;
    const [word, source, array, from] = data.steps[data.step[starts[v] + at]];
    const back = from < 0 ? null : v - data.link[starts[v] + at];
    return { v, dim, word: text(word), source: text(source), array: text(array), back, from };
  }

  function chain(v, dim, axis) {
    const found = [], seen = new Set();
    for (let at = [v, dim]; at !== null && !seen.has(at.join());) {
      seen.add(at.join());
      const step = reason(at[0], at[1], axis);
      if (step === null) break;
      found.push(step);
      at = step.back === null ? null : [step.back, step.from];
    }
    return found;
  }

  function origin(v) {
    const [op, line, scope, phase] = data.origins[data.origin[v]].map(text);
    return { op, line, scope, phase };
  }

  const axisText = (axis) => data.axes[axis][0];
  function specText(v) {
    return "[" + dims(v).map((axes) => (
      axes.length > 1 ? `(${axes.map(axisText).join(",")})` : axes.map(axisText).join() || "-")).join(", ") + "]";
  }

  return {
    num: data.spec.length, names, dims, shape, dtype, typeText, bytes, chain, origin, specText, axisText, size,
    label: (v) => names.get(v) ?? typeText(v),
    whyReplicated: (v, dim) => replicated.get(`${v} ${dim}`) ?? "not reached by any annotation",
    shards: (v) => dims(v).reduce((n, axes) => n * size(axes), 1),
  };
})();

const meshAxes = data.mesh.map(([name]) => name);
const numDevices = data.mesh.reduce((n, [, size]) => n * size, 1);

// An axis name in its mesh axis' colour.
function axisChip(name, mesh = name) {
  return make("span", { class: `axis c${Math.max(0, meshAxes.indexOf(mesh))}` }, name);
}

function specChips(v) {
  const found = [];
  program.dims(v).forEach((axes, dim) => {
    if (dim) found.push(", ");
    if (axes.length > 1) found.push("(");
    axes.forEach((axis, k) => found.push(...(k ? [","] : []), axisChip(data.axes[axis][0], data.axes[axis][1])));
    if (axes.length > 1) found.push(")");
    if (!axes.length) found.push("-");
  });
  return make("code", { class: "spec" }, "[", ...found, "]");
}

const axisNames = (names) => make("span", { class: "axes" }, names.map((name) => axisChip(name, name.split(":")[0])));
