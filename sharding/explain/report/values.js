// All values as a tree that expands on demand: named values by path, the others by name scope or line.

class Group {
  // `adds`: whether its values are live at the same time, so that their bytes add up.
  constructor(name, adds) {
    this.name = name;
    this.adds = adds;
    this.groups = new Map();
    this.leaves = []; // [name, value]
  }

  at(parts) {
    let here = this;
    for (const part of parts) {
      if (!here.groups.has(part)) here.groups.set(part, new Group(part, here.adds));
      here = here.groups.get(part);
    }
    return here;
  }

  // A chain of groups with a single child collapses into one, `a/b`.
  items() {
    const groups = [...this.groups.values()].map((group) => {
      let name = group.name, inner = group;
      while (inner.groups.size === 1 && !inner.leaves.length) {
        [inner] = inner.groups.values();
        name += `/${inner.name}`;
      }
      return { name, group: inner };
    });
    return [...groups, ...this.leaves.map(([name, v]) => ({ name, v }))];
  }

  all() {
    return [...this.leaves.map(([, v]) => v), ...[...this.groups.values()].flatMap((group) => group.all())];
  }
}

function byPath(name, named) {
  const root = new Group(name, true);
  for (const [path, v] of named) {
    const parts = path.split("/");
    const last = parts.pop();
    root.at(parts).leaves.push([last, v]);
  }
  return root;
}

function byLocation(name) {
  const root = new Group(name, false);
  for (let v = 0; v < program.num; v++) {
    if (program.names.has(v)) continue;
    const { op, line, scope, phase } = program.origin(v);
    const [, file, where] = /^(.*?):(.*)$/.exec(line) ?? [];
    const location = file ? [file, `line ${where}`] : [op ? "unknown line" : "constants, one per use"];
    root.at(scope ? [...scope.split("/"), line || "unknown line"] : location).leaves.push([`${op || "constant"}${phase === "forward" ? "" : `, ${phase}`}`, v]);
  }
  return root;
}

const roots = [
  byPath("Arguments", data.arguments), byPath("Results", data.results),
  byPath("Named values", data.named), byLocation("Other values"),
].filter((root) => root.groups.size || root.leaves.length);

let tree = null;
let selected = null; // the selected treeitem

const totalBytes = (group) => [...new Set(group.all())].reduce((sum, v) => sum + program.bytes(v), 0);

function leafItem({ name, v }, level) {
  const label = `${name}, ${program.typeText(v)}, ${program.specText(v)}, ${bytesText(program.bytes(v))} per device`;
  return make("li", { role: "treeitem", tabindex: -1, "aria-level": level, "aria-selected": "false", "aria-label": label, "data-value": v },
    make("div", { class: "row leaf", style: `--level:${level}` },
      make("span", { class: "name" }, name), specChips(v),
      make("code", { class: "type" }, program.typeText(v)), make("span", { class: "bytes" }, bytesCell(program.bytes(v)))));
}

function groupItem({ name, group }, level) {
  const num = group.all().length, bytes = group.adds ? totalBytes(group) : 0;
  const label = `${name}, ${counted(num, "value")}${group.adds ? `, ${bytesText(bytes)} per device` : ""}`;
  const item = make("li", { role: "treeitem", tabindex: -1, "aria-level": level, "aria-expanded": "false", "aria-label": label },
    make("div", { class: "row group", style: `--level:${level}` },
      make("span", { class: "name" }, make("span", { class: "twisty", "aria-hidden": "true" }), name),
      make("span", { class: "muted count" }, counted(num, "value")), make("span", { class: "type" }),
      make("span", { class: "bytes muted" }, group.adds ? bytesCell(bytes) : "")));
  item.contents = group;
  return item;
}

const treeItem = (item, level) => (item.group ? groupItem(item, level) : leafItem(item, level));

// Appends items, followed by an item that shows more.
function fill(list, items, level) {
  const rows = growing(list, items, (item) => treeItem(item, level));
  function more() {
    const [first] = rows.grow();
    if (rows.left()) {
      const item = make("li", { role: "treeitem", tabindex: -1, "aria-level": level, class: "more" },
        make("div", { class: "row", style: `--level:${level}` }, `Show more (${rows.left().toLocaleString("en")} left)`));
      item.more = () => { item.remove(); focusOn(more()); };
      list.append(item);
    }
    return first;
  }
  return more();
}

function toggle(item, open = item.getAttribute("aria-expanded") === "false") {
  item.setAttribute("aria-expanded", String(open));
  if (open && !item.querySelector(":scope > ul")) {
    const list = make("ul", { role: "group" });
    fill(list, item.contents.items(), Number(item.getAttribute("aria-level")) + 1);
    item.append(list);
  }
}

function enterWhy(item) {
  activate(item);
  byId("why").focus();
}

function activate(item) {
  if (item.more) item.more();
  else if (item.contents) toggle(item);
  else select(Number(item.dataset.value), item);
}

function focusOn(item) {
  if (!item) return;
  tree.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
  item.setAttribute("tabindex", 0);
  item.focus();
}

const shownItems = () => [...tree.querySelectorAll('[role="treeitem"]')].filter((item) => !item.parentElement.closest('[aria-expanded="false"]'));

function onTreeKey(event) {
  const item = event.target.closest('[role="treeitem"]');
  if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
  const open = item.getAttribute("aria-expanded");
  const shown = shownItems(), at = shown.indexOf(item);
  const moves = {
    ArrowDown: () => focusOn(shown[at + 1]),
    ArrowUp: () => focusOn(shown[at - 1]),
    Home: () => focusOn(shown[0]),
    End: () => focusOn(shown[shown.length - 1]),
    ArrowRight: () => (open === "false" ? toggle(item, true) : open === "true" ? focusOn(shown[at + 1]) : enterWhy(item)),
    ArrowLeft: () => (open === "true" ? toggle(item, false) : focusOn(item.parentElement.closest('[role="treeitem"]'))),
    Enter: () => activate(item),
    " ": () => activate(item),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  moves[event.key]();
}

function showFiltered(words) {
  tree.replaceChildren();
  if (!words.length) {
    fill(tree, roots.map((group) => ({ name: group.name, group })), 1);
    toggle(tree.firstElementChild, true);
  } else {
    const named = [...data.arguments, ...data.results, ...data.named].map(([name, v]) => ({ name, v }));
    const others = [];
    for (let v = 0; v < program.num; v++) if (!program.names.has(v)) others.push({ name: otherName(v), v });
    const found = [...named, ...others].filter(({ name, v }) => {
      const all = `${name} ${program.typeText(v)} ${program.specText(v)}`.toLowerCase();
      return words.every((word) => all.includes(word));
    });
    byId("found").textContent = counted(found.length, "value");
    if (found.length) fill(tree, found, 1);
  }
  if (!words.length) byId("found").textContent = "";
  tree.querySelector('[role="treeitem"]')?.setAttribute("tabindex", 0);
}

function otherName(v) {
  const { op, line } = program.origin(v);
  return `${op || "constant"} ${line}`;
}

function showValues() {
  tree = make("ul", { role: "tree", "aria-label": "Values", "aria-describedby": "tree-keys", onkeydown: onTreeKey, onclick: (event) => {
    const item = event.target.closest('[role="treeitem"]');
    if (item && event.target.closest(".row")) { focusOn(item); activate(item); }
  } });
  let waiting = 0;
  const filter = make("input", { type: "search", id: "filter", placeholder: "w1, dot_general, bfloat16, tensor …", autocomplete: "off",
    oninput: () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => showFiltered(filter.value.toLowerCase().split(/\s+/).filter(Boolean)), 120);
    } });
  byId("values").append(
    make("p", { class: "filter" }, make("label", { for: "filter" }, "Filter "), filter, make("span", { id: "found", class: "muted", role: "status" })),
    make("div", { class: "row head", "aria-hidden": "true" }, make("span", { class: "name" }, "name"), make("span", {}, "spec"),
      make("span", { class: "type" }, "type"), make("span", { class: "bytes" }, "per device")),
    tree,
    make("p", { class: "muted", id: "tree-keys" }, "Arrow keys navigate and expand, Enter explains a value's sharding; Right moves to the explanation, Escape back."));
  showFiltered([]);
}

// The item of a value, with all enclosing groups expanded; null if it is not listed, as when filtered out.
function reveal(v) {
  let items = [...tree.children];
  for (;;) {
    const leaf = items.find((item) => item.dataset.value === String(v));
    if (leaf) {
      leaf.scrollIntoView({ block: "nearest" });
      return leaf;
    }
    const group = items.find((item) => item.contents?.all().includes(v));
    if (!group) return null;
    toggle(group, true);
    items = [...group.querySelector(":scope > ul").children];
  }
}

function markSelected(v, item) {
  selected?.setAttribute("aria-selected", "false");
  selected = v === null ? null : item ?? reveal(v);
  selected?.setAttribute("aria-selected", "true");
}
