// Elements and numbers. Text of a record only ever becomes a text node or an attribute's value.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== "") node.append(child); // text or node
  }
  return node;
}

const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) => (isNumber(value) ? value.toFixed(digits) : "");
const short = (value) => (isNumber(value) ? String(Number(value.toPrecision(4))) : "");
const percent = (rho) => (isNumber(rho) ? `${Number((100 * rho).toPrecision(6))}%` : "");
const counted = (n, word, many = `${word}s`) => `${n.toLocaleString("en")} ${n === 1 ? word : many}`;

function pValue(p) {
  if (!isNumber(p)) return "";
  return p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`;
}

function duration(seconds) {
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// The name of a row outside of the table: in a plot, in a message.
function rowName(row) {
  const words = [row.method, row.backbone];
  if (isNumber(row.K)) words.push(`K ${row.K}`);
  if (isNumber(row.rho)) words.push(`ρ ${percent(row.rho)}`);
  if (isNumber(row.epochs)) words.push(`${row.epochs} epochs`);
  if (row.tag) words.push(row.tag);
  return words.filter(Boolean).join(" · ");
}
