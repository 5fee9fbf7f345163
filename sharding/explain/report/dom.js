// Builds elements from plain data. Strings only become text nodes: the data is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== ""));
  return element;
}

const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);
const announce = (text) => { byId("announcement").textContent = text; };

const counted = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

function scaled(x, units) {
  const [unit, size] = units.find(([, size]) => x >= size) ?? units[units.length - 1];
  return `${Number((x / size).toPrecision(3))} ${unit}`;
}

const bytesText = (n) => (n < 1000 ? `${n} B` : scaled(n, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]));
const secondsText = (s) => (s === 0 ? "0 s" : scaled(s, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]));
function percentText(part, total) {
  const share = (100 * part) / total;
  if (!total) return "";
  return part && share < 0.05 ? "< 0.1 %" : `${share.toFixed(1)} %`;
}

const bytesCell = (n) => make("span", { title: `${n.toLocaleString("en")} bytes` }, bytesText(n));

// A list that renders `size` rows at a time, so that thousands of rows cost nothing until shown.
function growing(parent, items, render, size = 100) {
  let shown = 0;
  function grow() {
    const next = items.slice(shown, shown + size);
    const elements = next.map(render);
    parent.append(...elements);
    shown += next.length;
    return elements;
  }
  return { grow, left: () => items.length - shown };
}

// A stacked bar with a legend that carries all of its information as text.
function stackedBar(parts, text) {
  const total = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  const bar = make("div", { class: "bar", "aria-hidden": "true" },
    parts.map((part) => make("span", { class: part.style, style: `flex-grow:${part.size / total}` })));
  const legend = make("ul", { class: "legend" }, parts.map((part) => make("li", {},
    make("span", { class: `swatch ${part.style}`, "aria-hidden": "true" }), `${part.name} `,
    make("b", {}, text(part.size)), make("span", { class: "muted" }, ` ${percentText(part.size, total)}`))));
  return [bar, legend];
}
