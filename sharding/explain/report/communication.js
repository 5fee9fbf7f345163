// The ledger of collectives.

const hint = (words) => make("details", { class: "hint" }, make("summary", {}, "how to avoid it"), words);

function showCommunication() {
  const section = place("communication");
  const rows = data.collectives.map(([kind, axes, times, bytes, wire, seconds, line, cause, hint, op, dtype, num]) => (
    { kind, axes, times, bytes, wire, seconds, line, cause, hint, op, dtype, num }));
  if (!rows.length) {
    section.append(make("p", { class: "note" }, "No device sends anything."));
    return;
  }
  const kinds = new Map();
  for (const row of rows) kinds.set(row.kind, (kinds.get(row.kind) ?? 0) + row.bytes);
  const sizes = [...kinds].sort((a, b) => b[1] - a[1]).map(([name, size], k) => ({ name, size, style: `shade s${k}` }));
  const columns = [
    codeColumn("kind", (row) => row.kind),
    textColumn("axes", (row) => row.axes.join(), (row) => axisNames(row.axes)),
    numberColumn("times", (row) => row.times),
    bytesColumn("bytes", (row) => row.bytes),
    bytesColumn("sent", (row) => row.wire),
    ...(rows[0].seconds === null ? [] : [secondsColumn("time", (row) => row.seconds)]),
    lineColumn("line", (row) => row.line),
    textColumn("cause", (row) => row.cause, (row) => [row.cause, ...(row.hint ? [hint(row.hint)] : [])]),
  ];
  section.append(
    make("p", { class: "muted" }, "What each device takes part in over one call: bytes that it gets, and bytes that it sends by the ring algorithm. ",
      "Layers that differ in their number only share a row."),
    ...parted(sizes, bytesText),
    sortedTable("Collectives", columns, rows, { by: 3 }));
}
