// The program: columns as `sharding/explain/report/values.py` writes them, and what follows from these.

const data = JSON.parse(place("data").textContent);
const text = (number) => data.strings[number];

const program = (() => {
  // Per spec its (dim, axis) pairs; per value where its reasons begin.
  const pairs = data.specs.map((dims) => dims.flatMap((axes, dim) => axes.map((axis) => [dim, axis])));
  const starts = new Int32Array(data.spec.length + 1);
  data.spec.forEach((spec, v) => { starts[v + 1] = starts[v] + pairs[spec].length; });

  const names = new Map();
  for (const [name, v] of [...data.arguments, ...data.named, ...data.results]) if (!names.has(v)) names.set(v, name);

  const whole = new Map(data.whole.map(([v, dim, why]) => [`${v} ${dim}`, text(why)]));
  const size = (axes) => axes.reduce((product, axis) => product * data.axes[axis][2], 1);

  const dims = (v) => data.specs[data.spec[v]];
  const shape = (v) => data.types[data.type[v]][2];
  const dtype = (v) => data.types[data.type[v]][0];
  const written = (v) => `${dtype(v)}[${shape(v).join(", ")}]`;

  function bytes(v) {
    const own = dims(v);
    return shape(v).reduce((n, length, d) => n * Math.ceil(length / size(own[d])), data.types[data.type[v]][1]);
  }

  // The same axis, or one that has a part of it in common by name: what `Assignment.reason` takes.
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
    num: data.spec.length, names, dims, shape, dtype, written, bytes, chain, origin, specText, axisText, size,
    label: (v) => names.get(v) ?? written(v),
    whole: (v, dim) => whole.get(`${v} ${dim}`) ?? "no annotation reaches it",
    shards: (v) => dims(v).reduce((n, axes) => n * size(axes), 1),
  };
})();

const meshAxes = data.mesh.map(([name]) => name);
const numDevices = data.mesh.reduce((n, [, size]) => n * size, 1);

// An axis by its name, in its colour.
function axisChip(name, mesh = name) {
  return make("span", { class: `axis c${Math.max(0, meshAxes.indexOf(mesh)) % 8}` }, name);
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
