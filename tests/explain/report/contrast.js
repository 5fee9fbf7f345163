// The texts of a page with a contrast ratio below 4.5:1 (WCAG 2.1, AA), each with its ratio.

const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
const pen = canvas.getContext("2d", { willReadFrequently: true });
const known = new Map();

// Relative luminance of an opaque colour; null for a transparent one.
function luminance(color) {
  if (!known.has(color)) {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, opacity] = pen.getImageData(0, 0, 1, 1).data;
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    known.set(color, opacity ? 0.2126 * x + 0.7152 * y + 0.0722 * z : null);
  }
  return known.get(color);
}

function ground(element) {
  if (element instanceof SVGTextElement && element.previousSibling?.matches("rect.device")) {
    return luminance(getComputedStyle(element.previousSibling).fill);
  }
  for (let e = element; e; e = e.parentElement) {
    const found = luminance(getComputedStyle(e).backgroundColor);
    if (found !== null) return found;
  }
  return 1;
}

function isShown(element) {
  return !["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName) && !element.closest(".visually-hidden, .skip") && element.getClientRects().length;
}

const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const faint = new Set();
for (let text = texts.nextNode(); text; text = texts.nextNode()) {
  const element = text.parentElement;
  if (!text.data.trim() || !isShown(element)) continue;
  const style = getComputedStyle(element);
  const own = luminance(element instanceof SVGElement ? style.fill : style.color);
  const [more, less] = [own, ground(element)].sort((a, b) => b - a);
  const ratio = (more + 0.05) / (less + 0.05);
  if (ratio < 4.5) faint.add(`${element.tagName} ${element.getAttribute("class")} ${ratio.toFixed(2)}`);
}
return [...faint];
