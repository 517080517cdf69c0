// Draws axes, dots and lines. A chart is an SVG as wide as the element it is in.

const BAR = 10; // pixels from one bar to the next
const MARGIN = { top: 28, right: 18, bottom: 40, left: 48 };

// Ticks at round numbers, the first at or below `low` and the last at or above `high`.
function niceTicks(low, high, about) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [];
  // What differs by rounding alone is equal: a step of 1e-15 could not be counted with.
  const span = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)) ? high - low : 0;
  const rough = span / Math.max(1, about) || Math.abs(low) / 10 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  let [from, to] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  if (from === to) { from -= 1; to += 1; }
  const ticks = [];
  for (let i = from; i <= to; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

// The same for a logarithmic axis: at 1, 2 and 5 times powers of ten.
function logTicks(low, high) {
  const all = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) {
    for (const m of [1, 2, 5]) all.push(Number((m * 10 ** p).toPrecision(3)));
  }
  const first = all.findLastIndex((tick) => tick <= low);
  const last = all.findIndex((tick) => tick >= high);
  return first === last ? all.slice(first - 1, last + 2) : all.slice(first, last + 1);
}

function padded(values, fraction) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (low === high) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
  const room = (high - low) * fraction;
  return [low - room, high + room];
}

// axis: {values, label, ticks?, log?, padding?}; returns its ticks and a 0..1 scale, which begins
// and ends at a tick unless the axis brings ticks of its own.
function scaleOf(axis, about) {
  const [least, most] = [Math.min(...axis.values), Math.max(...axis.values)];
  const log = axis.log && least > 0;
  const f = log ? Math.log : (v) => v;
  const ticks = axis.ticks || (log ? logTicks(least, most) : niceTicks(least, most, about));
  const [low, high] = axis.ticks ? padded(axis.values, axis.padding ?? 0.06)
    : [f(ticks[0]), f(ticks[ticks.length - 1])];
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

// A frame for bars: from left to right the values, from top to bottom `height` pixels of lines.
function barFrame(place, values, left, height, label) {
  const width = Math.max(240, place.clientWidth);
  const scale = scaleOf({ values: [0, ...values] }, (width - left) / 90);
  const px = (v) => left + scale.at(v) * (width - left - MARGIN.right);
  const root = svg("svg", { width, height: height + 30, role: "img", "aria-label": label, class: "chart bars" });
  for (const tick of scale.ticks) {
    root.append(svg("line", { class: "gridline", x1: px(tick), x2: px(tick), y1: 4, y2: height + 4 }),
      svg("text", { class: "tick", x: px(tick), y: height + 20, "text-anchor": "middle" }, short(tick)));
  }
  place.replaceChildren(root);
  return { root, px };
}

function bar({ root, px }, y, { value, interval, series: color, words }) {
  const [from, to] = [Math.min(px(0), px(value)), Math.max(px(0), px(value))];
  root.append(svg("g", { class: `s${color}` }, svg("title", {}, words),
    svg("rect", { class: "bar", x: from, y, width: Math.max(1, to - from), height: BAR - 2 }),
    interval ? svg("line", { class: "whisker", x1: px(interval[0]), x2: px(interval[1]),
      y1: y + BAR / 2 - 1, y2: y + BAR / 2 - 1 }) : ""));
}

// Names from top to bottom, a bar from 0 for each entry: [{name, series, values: {name: v}}].
function barChart(place, entries, names, label) {
  const width = Math.max(240, place.clientWidth);
  const left = Math.min(width * 0.35, 12 + 7 * Math.max(...names.map((name) => name.length)));
  const step = BAR * entries.length + 8;
  const values = entries.flatMap((entry) => names.map((name) => entry.values[name])).filter(isNumber);
  const drawn = barFrame(place, values, left, step * names.length, label);
  const room = Math.max(3, Math.floor((left - 12) / 7));
  names.forEach((name, i) => {
    const top = 8 + step * i;
    drawn.root.append(svg("text", { class: "tick", x: left - 10, y: top + (BAR * entries.length) / 2 + 4,
      "text-anchor": "end" }, svg("title", {}, name), name.length > room ? `${name.slice(0, room - 1)}…` : name));
    entries.forEach((entry, j) => {
      const value = entry.values[name];
      if (!isNumber(value)) return;
      bar(drawn, top + BAR * j, { value, series: entry.series, words: `${name}: ${fixed(value, 2)} · ${entry.name}` });
    });
  });
}

// One bar for each entry, its name above it: names of rows are long. [{name, value, interval, series}]
function rowBars(place, entries, label) {
  const step = 34;
  const values = entries.flatMap(({ value, interval }) => [value, ...(interval || [])]);
  const drawn = barFrame(place, values, 8, step * entries.length, label);
  entries.forEach((entry, i) => {
    drawn.root.append(svg("text", { class: "tick", x: 8, y: step * i + 16 }, `${entry.name}: ${fixed(entry.value, 2)}`));
    bar(drawn, step * i + 21, { ...entry, words: `${entry.name}: ${fixed(entry.value, 2)}` });
  });
}

// Classes from top to bottom, a dot for each row: entries are [{name, series, values: {class: v}}].
function classChart(place, entries, classes, label) {
  const width = Math.max(240, place.clientWidth);
  const left = Math.min(width * 0.35, 12 + 7 * Math.max(...classes.map((c) => c.length)));
  const height = 34 + 20 * classes.length;
  const all = entries.flatMap((entry) => classes.map((c) => entry.values[c]).filter(isNumber));
  const scale = scaleOf({ values: all }, (width - left) / 90);
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
