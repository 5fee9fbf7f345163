// The mesh as a grid of devices: the last axis across, the one before it down, the others as panels.

const MOST = { panels: 4, rows: 8, columns: 16 };
const CELL = 26, GAP = 3, EDGE = 22;

// 0 to n - 1, with null for an omitted middle.
function visible(n, most) {
  if (n <= most) return [...Array(n).keys()];
  return [...Array(most - 2).keys(), null, n - 1];
}

// The coordinate along an axis or sub-axis of a device with a given coordinate along its mesh axis.
function axisIndex(axis, coordinate) {
  const [label, name, size] = data.axes[axis];
  const subAxis = /\((\d+)\)/.exec(label.slice(name.length));
  const meshSize = data.mesh.find(([own]) => own === name)[1];
  return subAxis ? Math.floor(coordinate / (meshSize / (Number(subAxis[1]) * size))) % size : coordinate;
}

// Whether a device holds the same shard of a value as device 0.
function hasFirstShard(v, coordinates) {
  return program.dims(v).flat().every((axis) => axisIndex(axis, coordinates[meshAxes.indexOf(data.axes[axis][1])]) === 0);
}

function meshPicture(v) {
  const axes = data.mesh;
  const [rowName, numRows] = axes.length > 1 ? axes[axes.length - 2] : ["", 1];
  const [columnName, numColumns] = axes.length ? axes[axes.length - 1] : ["", 1];
  const outer = axes.slice(0, -2);
  const numPanels = outer.reduce((n, [, size]) => n * size, 1);
  const rows = visible(numRows, MOST.rows), columns = visible(numColumns, MOST.columns);
  const width = EDGE + columns.length * (CELL + GAP), height = EDGE + rows.length * (CELL + GAP);

  function panel(number) {
    if (number === null) return make("div", { class: "left-out" }, "…");
    const coordinates = [];
    let rest = number;
    for (const [, size] of [...outer].reverse()) { coordinates.unshift(rest % size); rest = Math.floor(rest / size); }
    const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    columns.forEach((column, i) => {
      const x = EDGE + i * (CELL + GAP);
      picture.append(draw("rect", { x, y: 14, width: CELL, height: 4, rx: 2, class: `fill c${axes.length - 1}` }),
        draw("text", { x: x + CELL / 2, y: 10, class: "tick" }, column === null ? "…" : String(column)));
    });
    rows.forEach((row, j) => {
      const y = EDGE + j * (CELL + GAP);
      if (axes.length > 1) {
        picture.append(draw("rect", { x: 14, y, width: 4, height: CELL, rx: 2, class: `fill c${axes.length - 2}` }),
          draw("text", { x: 6, y: y + CELL / 2 + 4, class: "tick" }, row === null ? "…" : String(row)));
      }
      columns.forEach((column, i) => {
        if (row === null || column === null) return;
        const x = EDGE + i * (CELL + GAP), device = (number * numRows + row) * numColumns + column;
        const at = axes.length > 1 ? [...coordinates, row, column] : [column];
        const marked = v !== null && hasFirstShard(v, at);
        picture.append(draw("rect", { x, y, width: CELL, height: CELL, rx: 4, class: marked ? "device marked" : "device" }),
          draw("text", { x: x + CELL / 2, y: y + CELL / 2 + 4, class: marked ? "number marked" : "number" }, String(device)));
      });
    });
    const place = outer.map(([name], k) => `${name} ${coordinates[k]}`).join(", ");
    return make("div", {}, place ? make("p", {}, place) : "", picture);
  }

  return make("div", { class: "panels" }, visible(numPanels, MOST.panels).map(panel));
}

function meshText(v) {
  const sizes = data.mesh.map(([name, size]) => `${name}=${size}`).join(", ");
  const all = `${counted(numDevices, "device")}: ${sizes || "no axes"}.`;
  if (v === null) return `${all} Select a value to mark the devices that hold the same shard as device 0.`;
  const copies = numDevices / program.shards(v);
  return `${all} Marked: the ${counted(copies, "device")} that hold the same shard of ${program.label(v)} as device 0.`;
}

function showMesh(v) {
  byId("mesh").replaceChildren(byId("mesh-title"),
    make("p", { class: "axes" }, data.mesh.map(([name, size]) => [axisChip(name), ` ${size} `])),
    make("div", { class: "wide", role: "img", "aria-label": meshText(v) }, meshPicture(v)),
    make("p", { class: "muted" }, meshText(v)));
}
