// Making elements, and numbers as people read them. No HTML is ever parsed: text stays text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

// A bar of segments [class, share, title]; widths go through the style object, which the policy allows.
export function bar(segments, share = 1) {
  const element = h("div", { class: "bar" });
  const total = segments.reduce((sum, [, value]) => sum + value, 0) || 1;
  for (const [name, value, title] of segments) {
    const part = h("i", { class: name, title });
    part.style.width = `${(100 * share * value) / total}%`;
    element.append(part);
  }
  return element;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e3) return `${(value / 1e3).toFixed(value >= 1e4 ? 1 : 2)} s`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

export const percent = (value) => (Number.isFinite(value) ? `${Math.round(100 * value)}%` : "–");

// The end of a long name tells workers and calls apart.
export const short = (name, length = 18) => (name.length <= length ? name : `…${name.slice(1 - length)}`);
