// What a step takes, where it is known what the devices are.

function showTime() {
  const section = place("time");
  if (!data.time) {
    section.append(make("p", { class: "note" }, data.with_costs
      ? ["Nothing says what the devices are. Name them: ", make("code", {}, 'completion.report("report.html", hardware="h100")')]
      : ["Left out here, as the program is long: ", make("code", {}, 'completion.report("report.html")'), " has it."]));
    return;
  }
  const { seconds, compute, communication, exposed, by_op: ops, by_source: lines } = data.time;
  const columns = (name) => [
    (name === "line" ? lineColumn : codeColumn)(name, ([key]) => key || "unknown"),
    secondsColumn("computing", (row) => row[1]), secondsColumn("sending", (row) => row[2]), numberColumn("ops", (row) => row[3]),
    numberColumn("share", (row) => row[1] + row[2], (row) => shareText(row[1] + row[2], compute + communication)),
  ];
  section.append(
    make("p", {}, make("b", {}, secondsText(seconds)), ` estimated on ${data.devices}${data.time.measured ? " by measured rates." : ", by its data sheet: a bound from below."}`),
    ...parted([{ name: "computing", size: compute, style: "shade s0" },
      { name: "waiting for collectives", size: Math.max(0, exposed), style: "shade s2" }], secondsText),
    make("p", { class: "muted" }, `Collectives take ${secondsText(communication)} in all; what is not waited for is hidden behind ops.`),
    make("h3", {}, "By op"), sortedTable("Time by op", columns("op"), ops, { by: 4 }),
    make("h3", {}, "By line"), sortedTable("Time by line", columns("line"), lines, { by: 4 }));
}
