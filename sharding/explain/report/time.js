// The step time, if the devices are known.

function showTime() {
  const section = byId("time");
  section.append(...data.slow.map((line) => make("p", { class: "muted" }, line[0].toUpperCase() + line.slice(1) + ".")));
  if (!data.time) {
    section.append(make("p", { class: "note" }, data.with_costs
      ? ["The devices are unknown. Specify them: ", make("code", {}, 'completion.report("report.html", hardware="h100")')]
      : ["Omitted from this view because the program is large; see ", make("code", {}, 'completion.report("report.html")'), "."]));
    return;
  }
  const { seconds, compute, communication, exposed, by_op: ops, by_source: lines } = data.time;
  const columns = (name) => [
    (name === "line" ? lineColumn : codeColumn)(name, ([key]) => key || "unknown"),
    secondsColumn("compute", (row) => row[1]), secondsColumn("communication", (row) => row[2]), numberColumn("ops", (row) => row[3]),
    numberColumn("share", (row) => row[1] + row[2], (row) => percentText(row[1] + row[2], compute + communication)),
  ];
  section.append(
    make("p", {}, make("b", {}, secondsText(seconds)), ` estimated on ${data.devices}${data.time.measured ? " from measured rates." : " from data-sheet rates: a lower bound."}`),
    ...stackedBar([{ name: "compute", size: compute, style: "shade s0" },
      { name: "idle", size: Math.max(0, exposed), style: "shade s2" }], secondsText),
    make("p", { class: "muted" }, `Communication takes ${secondsText(communication)} in total; idle time is the part that does not overlap with compute.`),
    make("p", { class: "muted" }, `MFU ${percentText(data.time.mfu, 1)}; bound by ${data.time.bound}.`),
    make("h3", {}, "By op"), sortedTable("Time by op", columns("op"), ops, { by: 4 }),
    make("h3", {}, "By line"), sortedTable("Time by line", columns("line"), lines, { by: 4 }));
}
