// The communication ledger.

const hint = (text) => make("details", { class: "hint" }, make("summary", {}, "how to avoid it"), text);

function showCommunication() {
  const section = byId("communication");
  const rows = data.collectives.map(([kind, axes, times, bytes, wire, seconds, line, cause, hint, op, dtype, num]) => (
    { kind, axes, times, bytes, wire, seconds, line, cause, hint, op, dtype, num }));
  if (!rows.length) {
    section.append(make("p", { class: "note" }, "No collectives."));
    return;
  }
  const kinds = new Map();
  for (const row of rows) kinds.set(row.kind, (kinds.get(row.kind) ?? 0) + row.bytes);
  const sizes = [...kinds].sort((a, b) => b[1] - a[1]).map(([name, size], k) => ({ name, size, style: `shade s${k}` }));
  const columns = [
    codeColumn("kind", (row) => row.kind),
    textColumn("axes", (row) => row.axes.join(), (row) => axisNames(row.axes)),
    numberColumn("count", (row) => row.times),
    bytesColumn("bytes", (row) => row.bytes),
    bytesColumn("sent", (row) => row.wire),
    ...(rows[0].seconds === null ? [] : [secondsColumn("time", (row) => row.seconds)]),
    lineColumn("line", (row) => row.line),
    textColumn("cause", (row) => row.cause, (row) => [row.cause, ...(row.hint ? [hint(row.hint)] : [])]),
  ];
  section.append(
    make("p", { class: "muted" }, "Collectives of one device over one call: result bytes, and bytes sent with ring algorithms. ",
      "Layers that differ only in their index share a row."),
    ...stackedBar(sizes, bytesText),
    sortedTable("Collectives", columns, rows, { by: 3 }));
}
