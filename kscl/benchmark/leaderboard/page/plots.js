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

// A frame with values from left to right and `height` pixels of lines from top to bottom.
function barFrame(place, values, left, height, label) {
  const width = Math.max(240, place.clientWidth);
  const scale = scaleOf({ values }, (width - left) / 90);
  const px = (v) => left + scale.at(v) * (width - left - MARGIN.right);
  const root = svg("svg", { width, height: height + 30, role: "img", "aria-label": label, class: "chart bars" });
  for (const tick of scale.ticks) {
    root.append(svg("line", { class: "gridline", x1: px(tick), x2: px(tick), y1: 4, y2: height + 4 }),
      svg("text", { class: "tick", x: px(tick), y: height + 20, "text-anchor": "middle" }, short(tick)));
  }
  place.replaceChildren(root);
  return { root, px };
}

function cutTo(name, room) {
  return name.length > room ? `${name.slice(0, Math.max(3, Math.floor(room)) - 1)}…` : name;
}

// The same with a name at the left of every `step` pixels.
function namedFrame(place, names, values, step, label) {
  const longest = Math.max(...names.map((name) => name.length));
  const left = Math.min(Math.max(240, place.clientWidth) * 0.35, 12 + 7 * longest);
  const drawn = barFrame(place, values, left, step * names.length, label);
  names.forEach((name, i) => drawn.root.append(
    svg("text", { class: "tick", x: left - 10, y: step * (i + 0.5) + 8, "text-anchor": "end" },
      svg("title", {}, name), cutTo(name, (left - 12) / 7))));
  return drawn;
}

// Names from top to bottom, a bar from 0 for each entry: [{name, series, values: {name: v}}].
function barChart(place, entries, names, label) {
  const step = BAR * entries.length + 8;
  const values = entries.flatMap((entry) => names.map((name) => entry.values[name])).filter(isNumber);
  const drawn = namedFrame(place, names, [0, ...values], step, label);
  names.forEach((name, i) => entries.forEach((entry, j) => {
    const value = entry.values[name];
    if (!isNumber(value)) return;
    const { root, px } = drawn;
    const [from, to] = [Math.min(px(0), px(value)), Math.max(px(0), px(value))];
    root.append(svg("g", { class: `s${entry.series}` },
      svg("title", {}, `${name}: ${fixed(value, 2)} · ${entry.name}`),
      svg("rect", { class: "bar", x: from, y: 8 + step * i + BAR * j,
        width: Math.max(1, to - from), height: BAR - 2 })));
  }));
}

// A dot and its interval for each entry, its name above it: names of rows are long.
// [{name, value, interval, series}]
function rowDots(place, entries, label) {
  const step = 34;
  const values = entries.flatMap(({ value, interval }) => [value, ...(interval || [])]);
  const { root, px } = barFrame(place, values, 8, step * entries.length, label);
  entries.forEach(({ name, value, interval, series: color }, i) => {
    const y = step * i + 26;
    const words = `${name}: ${fixed(value, 2)}`;
    root.append(svg("text", { class: "tick", x: 8, y: y - 10 }, 
      `${cutTo(name, place.clientWidth / 7 - 10)}: ${fixed(value, 2)}`),
      svg("g", { class: `s${color}` }, svg("title", {}, words),
        interval ? svg("line", { class: "whisker wide", x1: px(interval[0]), x2: px(interval[1]), y1: y, y2: y }) : "",
        svg("circle", { class: "dot", cx: px(value), cy: y, r: 5 })));
  });
}

// Classes from top to bottom, a dot for each row: entries are [{name, series, values: {class: v}}].
function classChart(place, entries, classes, label) {
  const valuesOf = (name) => entries.map((entry) => entry.values[name]).filter(isNumber);
  const { root, px } = namedFrame(place, classes, classes.flatMap(valuesOf), 20, label);
  classes.forEach((name, i) => {
    const [y, values] = [14 + 20 * i, valuesOf(name)];
    root.append(svg("line", { class: "axis", x1: px(Math.min(...values)), x2: px(Math.max(...values)),
      y1: y, y2: y }));
    for (const entry of entries) {
      const words = `${name}: ${fixed(entry.values[name], 2)} · ${entry.name}`;
      if (isNumber(entry.values[name])) dot(root, px(entry.values[name]), y, { series: entry.series, words });
    }
  });
}

// The plots below the table. They show the rows that the filters leave.

const MAX_CURVES = 24;
const MAX_CLASS_ROWS = 6;
const MAX_CLASSES = 24;
const MAX_KEYS = 12;
const MAX_ROWS = 12;
const COLORS = 6;

const series = new Map(); // method → the index of its color

// KSCL has the accent; the others follow by name, and the seventh looks like the second.
function chooseColors() {
  const all = [...DATA.rows, ...DATA.protocols.flatMap((protocol) => protocol.reported)];
  const others = new Set(all.map((row) => row.method).filter((name) => name !== "kscl"));
  [...others].sort().forEach((name, i) => series.set(name, 1 + (i % (COLORS - 1))));
}

const seriesOf = (method) => series.get(method) ?? 0;

function chosenMetric() {
  const [protocol, ...parts] = byId("metric").value.split("/");
  const [i, metric] = [Number(protocol), parts.join("/")]; // a metric may hold a slash: mask/AP
  const label = DATA.protocols[i].labels[DATA.protocols[i].metrics.indexOf(metric)];
  return { protocol: i, metric, label };
}

const passes = (row) => isShown({ row, words: wordsOf(row) });

// Rows with this metric as {row, x, measure}; published ones too when they are shown.
function points(chosen, x) {
  const rows = [...DATA.rows, ...DATA.protocols[chosen.protocol].reported].filter(passes);
  return rows
    .map((row) => ({ row, x: x(row), measure: measureOf(row, chosen.protocol, chosen.metric) }))
    .filter((point) => isNumber(point.x) && point.measure);
}

function scatter(place, chosen, found, axis, joined) {
  const heights = found.flatMap(({ measure }) => [measure.mean, ...(measure.interval || [])]);
  const label = `${chosen.label} against ${axis.name}: ${counted(found.length, "row")}`;
  const x = { ...axis, values: found.map((point) => point.x) };
  const y = { values: heights, label: chosen.label };
  frame(place, { x, y, label }, (px, py, layer) => {
    const places = spreadOut(found.map((point) => px(point.x)), 11);
    found.forEach((point, i) => { point.px = places[i]; });
    for (const line of joined) {
      const ends = line.map((point) => [point.px, py(point.measure.mean)]);
      path(layer, ends, seriesOf(line[0].row.method), rowName(line[0].row));
    }
    for (const { row, measure, px: at } of found) {
      const words = [rowName(row), `${chosen.label} ${metricWords(measure)}`, axis.words?.(row)];
      dot(layer, at, py(measure.mean), { py, interval: measure.interval,
        series: seriesOf(row.method), hollow: Boolean(row.metrics),
        words: [...words, row.metrics && `reported: ${row.source}`].filter(Boolean).join("\n") });
    }
  });
}

function metricWords(measure) {
  const spread = isNumber(measure.std) ? ` ± ${fixed(measure.std, 2)}` : "";
  const interval = measure.interval ? ` (95% ${intervalWords(measure)})` : "";
  return fixed(measure.mean, 2) + spread + interval;
}

const intervalWords = ({ interval, interval_is: kind }) => (interval
  ? `${fixed(interval[0], 2)} to ${fixed(interval[1], 2)}, ${kind}` : "");

// Lines through the rows of a family that agree in `fixed`; `joins` says which row belongs to all.
function lines(found, fixed, joins) {
  const groups = new Map();
  for (const point of found.filter(({ row }) => !joins(row))) {
    const name = JSON.stringify([point.row.family, point.row[fixed]]);
    groups.set(name, [...(groups.get(name) || []), point]);
  }
  return [...groups.values()].map((group) => {
    const common = found.filter(({ row }) => joins(row) && row.family === group[0].row.family);
    return [...common, ...group].sort((a, b) => a.x - b.x);
  }).filter((line) => line.length > 1 && line[0].x < line[line.length - 1].x);
}

function hoursOf(row) {
  const hours = (row.epochs * row.figures.minutes_per_epoch) / 60;
  return hours > 0 ? hours : null;
}

// A panel over K or ρ tells something if a line joins rows that differ in nothing else; one over
// cost, if there are three costs.
const PANELS = {
  shots: { title: "Against K", x: (row) => row.K, name: "K", label: "K, key views per image",
    note: "Lines join rows that differ in nothing else. Whiskers are 95% intervals; rings are reported values.",
    // With K = 1 there is no ρ: the lines of every ρ begin there.
    lines: (found) => lines(found, "rho", (row) => row.K === 1) },
  rho: { title: "Against ρ", x: (row) => row.rho, name: "ρ", label: "ρ, eigenvalue mass kept",
    note: "Lines join rows that differ in nothing else.", format: percent,
    lines: (found) => lines(found, "K", () => false) },
  cost: { title: "Accuracy against cost", x: hoursOf, name: "cost", label: "hours of pretraining",
    note: "Hours on different machines are not comparable; the tooltip names the machine.",
    words: (row) => `${short(hoursOf(row))} h${row.machine ? ` on ${row.machine}` : ""} ${row.note || ""}` },
};

function drawScatter(name, chosen) {
  const panel = PANELS[name];
  const found = points(chosen, panel.x);
  const values = [...new Set(found.map((point) => point.x))].sort((a, b) => a - b);
  const joined = panel.lines ? panel.lines(found) : [];
  const log = !panel.lines && values[values.length - 1] > 20 * values[0];
  const axis = { ...panel, log, label: panel.label + (log ? " (log)" : ""),
    ...(panel.lines ? { ticks: values, padding: 0.1 } : {}) };
  drawOrHide(`plot-${name}`, panel.lines ? joined.length : values.length > 2,
    (place) => scatter(place, chosen, found, axis, joined));
}

// Every row by its name, best first; published ones too when they are shown.
function plotRows(place, chosen) {
  const found = points(chosen, () => 0).sort((a, b) => b.measure.mean - a.measure.mean).slice(0, MAX_ROWS);
  if (!found.length) return empty(place, `No row here has ${chosen.label}.`);
  const entry = ({ row, measure }) => {
    const name = rowName(row) + (row.metrics ? " (reported)" : "");
    return { name, value: measure.mean, interval: measure.interval, series: seriesOf(row.method) };
  };
  return rowDots(place, found.map(entry), `${chosen.label}: ${counted(found.length, "row")}`);
}

function curveNames() {
  const names = new Set();
  for (const row of DATA.rows) {
    for (const run of row.curves) for (const name of Object.keys(run.lines)) names.add(name);
  }
  return [...names].sort((a, b) => (b === "loss") - (a === "loss") || (a < b ? -1 : 1));
}

function plotCurves(place, rows, name) {
  const runs = rows.flatMap((row) => row.curves.map((run) => ({ row, run })))
    .filter(({ run }) => run.lines[name]).slice(0, MAX_CURVES);
  if (!runs.length) return empty(place, "No pretraining record here holds curves.");
  const label = `${name}, training curves of ${counted(runs.length, "run")}`;
  const x = { label: runs[0].run.axis, values: runs.flatMap(({ run }) => run.lines[name][0]) };
  const y = { values: runs.flatMap(({ run }) => run.lines[name][1]), label: name };
  return frame(place, { x, y, label }, (px, py, layer) => {
    for (const { row, run } of runs) {
      const [xs, ys] = run.lines[name];
      path(layer, xs.map((v, i) => [px(v), py(ys[i])]), seriesOf(row.method),
        `${rowName(row)} · seed ${run.seed}`);
    }
  });
}

// Classes of entries [{values}], highest mean first; of many, those in which the entries differ most.
function mostDifferent(entries) {
  const valuesOf = (name) => entries.map((entry) => entry.values[name]).filter(isNumber);
  const spread = (name) => Math.max(...valuesOf(name)) - Math.min(...valuesOf(name));
  const mean = (name) => valuesOf(name).reduce((a, b) => a + b, 0) / valuesOf(name).length;
  const classes = [...new Set(entries.flatMap((entry) => Object.keys(entry.values)))];
  const most = [...classes].sort((a, b) => spread(b) - spread(a)).slice(0, MAX_CLASSES);
  return most.sort((a, b) => mean(b) - mean(a));
}

function plotClasses(place, rows, protocol) {
  const entries = rows.slice(0, MAX_CLASS_ROWS).map((row) => ({ name: rowName(row),
    series: seriesOf(row.method), values: resultOf(row, protocol).classes }));
  const classes = mostDifferent(entries);
  classChart(place, entries, classes, `values of ${counted(classes.length, "class", "classes")}`);
}

// A panel without anything to show is not there.
function drawOrHide(id, any, draw) {
  byId(id).closest(".card").hidden = !any;
  if (any) draw(byId(id));
  else byId(id).replaceChildren();
}

function drawPlots() {
  if (!DATA.protocols.length) return;
  const chosen = chosenMetric();
  const rows = bestFirst(chosen).filter(passes);
  byId("metric-note").textContent = `${chosen.label} under ${fullName(DATA.protocols[chosen.protocol])}`;
  plotRows(byId("plot-rows"), chosen);
  for (const name of Object.keys(PANELS)) drawScatter(name, chosen);
  const withClasses = rows.filter((row) => Object.keys(resultOf(row, chosen.protocol)?.classes || {}).length);
  drawOrHide("plot-curves", rows.some((row) => row.curves.length),
    (place) => plotCurves(place, rows, byId("curve").value));
  drawOrHide("plot-classes", withClasses.length, (place) => plotClasses(place, withClasses, chosen.protocol));
  byId("plots").hidden = !byId("charts").querySelector(".card:not([hidden])");
  const drawn = rows.filter((row) => row.curves.length || resultOf(row, chosen.protocol));
  drawLegend([...drawn, ...DATA.protocols[chosen.protocol].reported.filter(passes)]);
}

function drawLegend(rows) {
  const methods = [...new Set(rows.map((row) => row.method))];
  methods.sort((a, b) => seriesOf(a) - seriesOf(b) || (a < b ? -1 : 1));
  const more = methods.length > MAX_KEYS ? [el("span", {}, `and ${methods.length - MAX_KEYS} more`)] : [];
  const keys = methods.slice(0, MAX_KEYS).map((name) => el("span", { class: `key s${seriesOf(name)}` }, name));
  byId("chart-legend").replaceChildren(...keys, ...more);
}

// Best first by the chosen metric, so that a plot leaves out the last ones.
function bestFirst(chosen) {
  const value = (row) => measureOf(row, chosen.protocol, chosen.metric)?.mean ?? -Infinity;
  return [...DATA.rows].sort((a, b) => value(b) - value(a));
}

function card(id, title, note, control) {
  return el("figure", { class: "card" },
    el("figcaption", {}, el("h3", {}, title), control || "", note && el("p", { class: "quiet" }, note)),
    el("div", { id, class: "plot" }));
}

function buildPlots() {
  if (!DATA.protocols.length) return ["chart", "plots"].forEach((id) => byId(id).remove());
  chooseColors();
  const options = DATA.protocols.flatMap((protocol, i) => protocol.metrics.map((metric, j) =>
    el("option", { value: `${i}/${metric}` }, `${protocol.labels[j]} · ${protocol.name}`)));
  byId("metric").append(...options);
  const counts = DATA.protocols.map((_, i) => DATA.rows.filter((row) => resultOf(row, i)).length);
  const fullest = counts.indexOf(Math.max(...counts));
  byId("metric").value = `${fullest}/${DATA.protocols[fullest].headline}`;
  byId("metric").addEventListener("change", drawPlots);
  const curve = el("select", { id: "curve", "aria-label": "Curve", on: { change: drawPlots } },
    curveNames().map((name) => el("option", {}, name)));
  byId("charts").append(
    ...Object.entries(PANELS).map(([name, { title, note }]) => card(`plot-${name}`, title, note)),
    card("plot-curves", "Training curves", `At most ${MAX_CURVES} runs, best rows first.`, curve),
    card("plot-classes", "Per class", `The best ${MAX_CLASS_ROWS} rows; of many classes, the ${MAX_CLASSES} that differ most.`),
  );
  let timer = 0;
  new ResizeObserver(() => { clearTimeout(timer); timer = setTimeout(() => { drawPlots(); drawCompare(); }, 60); })
    .observe(byId("charts"));
  return undefined;
}
