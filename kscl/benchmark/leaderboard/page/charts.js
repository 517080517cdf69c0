// Draws axes, dots and lines. A chart is an SVG as wide as the element it is in.

const MARGIN = { top: 28, right: 18, bottom: 40, left: 48 };

function niceTicks(low, high, about) {
  const rough = (high - low) / Math.max(1, about) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) {
    ticks.push(Number(tick.toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const m of [1, 2, 5]) if (m * power >= low && m * power <= high) ticks.push(m * power);
  }
  return ticks.length > 1 ? ticks : [low, high];
}

function padded(values, fraction) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (low === high) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
  const room = (high - low) * fraction;
  return [low - room, high + room];
}

// axis: {values, label, ticks?, log?, padding?}; returns its ticks and a 0..1 scale.
function scaleOf(axis, about) {
  const log = axis.log && Math.min(...axis.values) > 0;
  const f = log ? Math.log : (v) => v;
  const [low, high] = padded(axis.values.map(f), axis.padding ?? 0.06);
  const back = log ? Math.exp : (v) => v;
  const ticks = axis.ticks || (log ? logTicks(back(low), back(high)) : niceTicks(low, high, about));
  return { at: (v) => (f(v) - low) / (high - low), ticks };
}

// A frame with axes; `draw(x, y, layer)` puts the data into it.
function frame(place, { x, y, height = 280, label }, draw) {
  const width = Math.max(240, place.clientWidth);
  const inner = { w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
  const xs = scaleOf(x, width / 90);
  const ys = scaleOf(y, height / 50);
  const px = (v) => MARGIN.left + xs.at(v) * inner.w;
  const py = (v) => MARGIN.top + (1 - ys.at(v)) * inner.h;
  const bottom = height - MARGIN.bottom;
  const root = svg("svg", { width, height, role: "img", "aria-label": label, class: "chart" });
  for (const tick of ys.ticks) {
    root.append(svg("line", { class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right,
      y1: py(tick), y2: py(tick) }));
    root.append(svg("text", { class: "tick", x: MARGIN.left - 8, y: py(tick) + 4,
      "text-anchor": "end" }, short(tick)));
  }
  for (const tick of xs.ticks) {
    root.append(svg("text", { class: "tick", x: px(tick), y: bottom + 16,
      "text-anchor": "middle" }, (x.format || short)(tick)));
  }
  root.append(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right,
    y1: bottom, y2: bottom }));
  root.append(svg("text", { class: "axis-label", x: width - MARGIN.right, y: height - 6,
    "text-anchor": "end" }, x.label));
  root.append(svg("text", { class: "axis-label", x: 0, y: 12 }, y.label));
  const layer = svg("g", {});
  root.append(layer);
  draw(px, py, layer);
  place.replaceChildren(root);
}

// A dot with its interval; a published value is a ring.
function dot(layer, x, y, { series, hollow, interval, words, py }) {
  const group = svg("g", { class: `s${series}` }, svg("title", {}, words));
  if (interval) {
    group.append(svg("line", { class: "whisker", x1: x, x2: x, y1: py(interval[0]),
      y2: py(interval[1]) }));
  }
  group.append(svg("circle", { class: hollow ? "dot hollow" : "dot", cx: x, cy: y, r: 4.5 }));
  layer.append(group);
}

function path(layer, points, series, words) {
  const d = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  layer.append(svg("g", { class: `s${series}` }, svg("title", {}, words),
    svg("path", { class: "line", d })));
}

// Moves overlapping dots apart sideways: [pixel, ...] in, as many out.
function spreadOut(pixels, step) {
  const sharing = new Map();
  pixels.forEach((x, i) => {
    const key = Math.round(x / 4);
    sharing.set(key, [...(sharing.get(key) || []), i]);
  });
  const moved = [...pixels];
  for (const places of sharing.values()) {
    const room = Math.min(step, 48 / places.length);
    places.forEach((i, j) => { moved[i] += (j - (places.length - 1) / 2) * room; });
  }
  return moved;
}

const empty = (place, words) => place.replaceChildren(el("p", { class: "quiet empty" }, words));

// Classes from top to bottom, a dot for each row: entries are [{name, series, values: {class: v}}].
function classChart(place, entries, classes, label) {
  const width = Math.max(240, place.clientWidth);
  const left = Math.min(width * 0.35, 12 + 7 * Math.max(...classes.map((c) => c.length)));
  const height = 34 + 20 * classes.length;
  const all = entries.flatMap((entry) => classes.map((c) => entry.values[c]).filter(isNumber));
  const scale = scaleOf({ values: all, padding: 0.04 }, (width - left) / 90);
  const px = (v) => left + scale.at(v) * (width - left - MARGIN.right);
  const root = svg("svg", { width, height, role: "img", "aria-label": label, class: "chart" });
  for (const tick of scale.ticks) {
    root.append(svg("line", { class: "gridline", x1: px(tick), x2: px(tick), y1: 4, y2: height - 26 }));
    root.append(svg("text", { class: "tick", x: px(tick), y: height - 10, "text-anchor": "middle" },
      short(tick)));
  }
  const room = Math.max(3, Math.floor((left - 12) / 7));
  classes.forEach((name, i) => {
    const y = 16 + 20 * i;
    const shown = name.length > room ? `${name.slice(0, room - 1)}…` : name;
    root.append(svg("text", { class: "tick", x: left - 10, y: y + 4, "text-anchor": "end" },
      svg("title", {}, name), shown));
    const values = entries.map((entry) => entry.values[name]).filter(isNumber);
    root.append(svg("line", { class: "axis", x1: px(Math.min(...values)), x2: px(Math.max(...values)),
      y1: y, y2: y }));
    for (const entry of entries) {
      if (!isNumber(entry.values[name])) continue;
      const words = `${name}: ${fixed(entry.values[name], 2)} · ${entry.name}`;
      dot(root, px(entry.values[name]), y, { series: entry.series, words });
    }
  });
  place.replaceChildren(root);
}
