// Tables that sort by clicking a column header, and show more rows on demand.

// columns: { name, key: row -> sort key, cell: row -> contents, number: whether it is numeric }
// by: the column to sort by at first; -1 for the order of the rows
function sortedTable(caption, columns, rows, { by = 0, size = 12 } = {}) {
  let sorted = columns[by]?.number ? "descending" : "ascending", column = by;
  const body = make("tbody");
  const more = make("button", { type: "button", class: "more", onclick: () => { list.grow(); update(); } });
  const heads = columns.map((one, k) => make("th", { scope: "col", class: one.number ? "number" : null },
    make("button", { type: "button", onclick: () => {
      sorted = column === k ? (sorted === "ascending" ? "descending" : "ascending") : one.number ? "descending" : "ascending";
      column = k;
      sort();
      announce(`${caption}: sorted by ${one.name}, ${sorted}`);
    } }, one.name)));
  let list = null;

  function row(values) {
    return make("tr", {}, columns.map((one) => make("td", { class: one.number ? "number" : null, "data-label": one.name }, one.cell(values))));
  }

  function update() {
    more.hidden = list.left() === 0;
    more.textContent = `Show more (${list.left().toLocaleString("en")} left)`;
  }

  function sort() {
    const key = columns[column]?.key ?? (() => 0);
    const sign = sorted === "ascending" ? 1 : -1;
    const ordered = [...rows].sort((a, b) => {
      const x = key(a), y = key(b);
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
    heads.forEach((head, k) => (k === column ? head.setAttribute("aria-sort", sorted) : head.removeAttribute("aria-sort")));
    body.replaceChildren();
    list = growing(body, ordered, row, size);
    list.grow();
    update();
  }

  sort();
  return make("div", { class: "wide", role: "region", "aria-label": caption, tabindex: 0 },
    make("table", { class: "cards" }, make("caption", { class: "visually-hidden" }, caption),
      make("thead", {}, make("tr", {}, heads)), body), more);
}

const textColumn = (name, key, cell = key) => ({ name, key: (row) => String(key(row)), cell });
const numberColumn = (name, key, cell = (row) => key(row).toLocaleString("en")) => ({ name, key, cell, number: true });
const bytesColumn = (name, key) => numberColumn(name, key, (row) => bytesCell(key(row)));
const secondsColumn = (name, key) => numberColumn(name, (row) => key(row) ?? -1, (row) => (key(row) === null ? "–" : secondsText(key(row))));
// A line without the functions around the one that it is in.
const shortLine = (line) => line.replace(/\((.*)\)$/, (all, name) => {
  const functions = name.split(".<locals>.");
  return `(${functions.slice(functions.at(-1).startsWith("<") ? -2 : -1).join(".")})`;
});
const lineText = (line) => {
  const [, where, name] = /^(\S+) (\(.*\))$/.exec(shortLine(line)) ?? [null, line, ""];
  return make("code", { class: "line", title: line }, where || "–", ...(name ? [" ", make("span", { class: "muted function" }, name)] : []));
};
const lineColumn = (name, key) => textColumn(name, key, (row) => lineText(key(row)));
const codeColumn = (name, key) => textColumn(name, key, (row) => make("code", {}, key(row) || "–"));

// Further tables, of plain rows in their order; null is unknown.
function showTables() {
  const kinds = { bytes: bytesColumn, seconds: secondsColumn, number: numberColumn, share: numberColumn, code: codeColumn };
  const column = ([name, unit], k) => {
    const one = (kinds[unit] ?? textColumn)(name, (row) => row[k] ?? (unit in kinds && unit !== "code" ? -1 : ""));
    return { ...one, cell: (row) => (row[k] === null ? "–" : one.cell(row)) };
  };
  for (const one of data.tables.length ? document.querySelectorAll("[hidden].tables") : []) one.hidden = false;
  for (const [title, columns, rows] of data.tables) {
    const name = title[0].toUpperCase() + title.slice(1);
    byId("tables").append(make("h3", {}, name), ...(rows.length ? [sortedTable(title, columns.map(column), rows, { by: -1 })] : []));
  }
}
