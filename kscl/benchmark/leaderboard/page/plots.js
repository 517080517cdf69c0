// Draws axes, dots and lines. A chart is an SVG as wide as the element it is in.

const [LEFT, RIGHT, TOP, BOTTOM] = [48, 18, 28, 240]; // of the area with data, in pixels

// Ticks at round numbers, the first at or below `low` and the last at or above `high`.
function niceTicks(low, high, about) {
  if (!isFinite(high - low)) return [];
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

// Returns the ticks and a 0..1 scale, which begins and ends at a tick unless the axis brings its own.
function scaleOf({ values, ticks, log }, about) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = (most - least) / 10;
  const round = log ? logTicks(least, most) : niceTicks(least, most, about);
  const f = log ? Math.log : (v) => v;
  const [low, high] = (ticks ? [least - room, most + room] : [round[0], round.at(-1)]).map(f);
  return { at: (v) => (f(v) - low) / (high - low), ticks: ticks ?? round };
}

// An SVG with an axis below; x is {values, ticks?, log?, format?}.
function chart(place, x, left, bottom, height, kind, label) {
  const width = Math.max(240, place.clientWidth);
  const scale = scaleOf(x, (width - left) / 90);
  const px = (v) => left + scale.at(v) * (width - left - RIGHT);
  const root = svg("svg", { width, height, role: "img", "aria-label": label, class: kind });
  for (const tick of scale.ticks) {
    root.append(svg("text", { class: "tick", x: px(tick), y: bottom + 16, "text-anchor": "middle" },
      (x.format || short)(tick)));
  }
  place.replaceChildren(root);
  return { root, px, width, ticks: scale.ticks };
}

// A chart with an axis at the left too; `draw(x, y, layer)` puts the data into it.
function frame(place, x, y, label, draw) {
  const height = BOTTOM + 40;
  const { root, px, width } = chart(place, x, LEFT, BOTTOM, height, "chart", label);
  const scale = scaleOf(y, height / 50);
  const py = (v) => BOTTOM - scale.at(v) * (BOTTOM - TOP);
  const line = (at, name) => svg("line", { class: name, x1: LEFT, x2: width - RIGHT, y1: at, y2: at });
  for (const tick of scale.ticks) {
    root.append(line(py(tick), "gridline"),
      svg("text", { class: "tick", x: LEFT - 8, y: py(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  root.append(line(BOTTOM, "axis"),
    svg("text", { x: width - RIGHT, y: height - 6, "text-anchor": "end" }, x.label),
    svg("text", { x: 0, y: 12 }, y.label));
  draw(px, py, root);
}

// A chart with `height` pixels of lines from top to bottom.
function lineChart(place, values, left, height, label) {
  const drawn = chart(place, { values }, left, height + 4, height + 30, "chart bars", label);
  drawn.root.prepend(...drawn.ticks.map((tick) =>
    svg("line", { class: "gridline", x1: drawn.px(tick), x2: drawn.px(tick), y1: 4, y2: height + 4 })));
  return drawn;
}

// A dot with its interval, the line `whisker`; a published value is a ring.
function dot(layer, x, y, { series, hollow, whisker, words }) {
  layer.append(svg("g", { class: `s${series}` }, svg("title", {}, words),
    whisker && svg("line", { class: "whisker", ...whisker }),
    svg("circle", { class: hollow ? "dot hollow" : "dot", cx: x, cy: y, r: 4.5 })));
}

function path(layer, points, series, words) {
  const d = points.map(([x, y], i) => `${i ? "L" : "M"}${fixed(x, 1)} ${fixed(y, 1)}`).join("");
  layer.append(svg("g", { class: `s${series}` }, svg("title", {}, words),
    svg("path", { class: "line", d })));
}

// Moves overlapping dots apart sideways.
function spreadOut(points) {
  for (const group of Map.groupBy(points, ({ px }) => Math.round(px / 4)).values()) {
    const room = Math.min(11, 48 / group.length);
    group.forEach((point, j) => { point.px += (j - (group.length - 1) / 2) * room; });
  }
}

function cutTo(name, room) {
  return name.length > room ? `${name.slice(0, Math.max(3, Math.floor(room)) - 1)}…` : name;
}

// A dot and its interval for each entry, its name above it: names of rows are long.
// [{name, value, interval, series}]
function rowDots(place, entries, label) {
  const step = 34;
  const values = entries.flatMap(({ value, interval }) => [value, ...(interval || [])]);
  const { root, px } = lineChart(place, values, 8, step * entries.length, label);
  entries.forEach(({ name, value, interval, series }, i) => {
    const y = step * i + 26;
    root.append(svg("text", { class: "tick", x: 8, y: y - 10 },
      `${cutTo(name, place.clientWidth / 7 - 10)}: ${fixed(value)}`));
    const whisker = interval && { x1: px(interval[0]), x2: px(interval[1]), y1: y, y2: y };
    dot(root, px(value), y, { series, whisker, words: `${name}: ${fixed(value)}` });
  });
}

// Classes from top to bottom, a dot for each row: entries are [{name, series, values: {class: v}}].
function classChart(place, entries) {
  const classes = mostDifferent(entries);
  const longest = Math.max(...classes.map((name) => name.length));
  const left = Math.min(Math.max(240, place.clientWidth) * 0.35, 12 + 7 * longest);
  const values = entries.flatMap((entry) => classes.map((name) => entry.values[name])).filter(isNumber);
  const { root, px } = lineChart(place, values, left, 20 * classes.length,
    `values of ${counted(classes.length, "class", "classes")}`);
  classes.forEach((name, i) => {
    const y = 14 + 20 * i;
    const having = entries.filter((entry) => isNumber(entry.values[name]));
    const ends = having.map((entry) => px(entry.values[name]));
    root.append(
      svg("text", { class: "tick", x: left - 10, y: y + 4, "text-anchor": "end" },
        svg("title", {}, name), cutTo(name, (left - 12) / 7)),
      svg("line", { class: "axis", x1: Math.min(...ends), x2: Math.max(...ends), y1: y, y2: y }));
    having.forEach((entry, j) => dot(root, ends[j], y, { series: entry.series,
      words: `${name}: ${fixed(entry.values[name])} · ${entry.name}` }));
  });
}

// Classes of entries [{values}], highest mean first; of many, those in which the entries differ most.
function mostDifferent(entries) {
  const valuesOf = (name) => entries.map((entry) => entry.values[name]).filter(isNumber);
  const spread = (name) => Math.max(...valuesOf(name)) - Math.min(...valuesOf(name));
  const mean = (name) => valuesOf(name).reduce((a, b) => a + b, 0) / valuesOf(name).length;
  const classes = [...new Set(entries.flatMap((entry) => Object.keys(entry.values)))];
  const most = classes.sort((a, b) => spread(b) - spread(a)).slice(0, MAX_CLASSES);
  return most.sort((a, b) => mean(b) - mean(a));
}

// A chart needs the width of its element, so it is drawn when that is in the page, and on resize.
const plot = (draw, kind) => Object.assign(el("div", { class: `plot ${kind}` }), { draw });

function drawWithin(node) {
  for (const place of node.querySelectorAll(".plot")) place.draw?.(place);
}

// The plots below the table. They show the rows that the filters leave.

const MAX_CURVES = 24;
const MAX_CLASS_ROWS = 6;
const MAX_CLASSES = 24;
const MAX_KEYS = 12;
const MAX_ROWS = 12;
const COLORS = 6;

// KSCL has the accent; the others follow by name, and the seventh looks like the second.
const OTHER_METHODS = [...new Set([...DATA.rows, ...DATA.protocols.flatMap((protocol) => protocol.reported)]
  .map((row) => row.method))].filter((name) => name !== "kscl").sort();
const seriesOf = (method) => (method === "kscl" ? 0 : 1 + (OTHER_METHODS.indexOf(method) % (COLORS - 1)));

// The metric to plot, and the rows that are shown, best first; published ones too.
function chosenMetric() {
  const [i, metric] = byId("metric").value.split(/\/(.*)/); // a metric may contain a slash: mask/AP
  const { label, lower_is_better: lower } = DATA.protocols[i].metrics[metric];
  const order = (row) => (lower ? 1 : -1) * (measureOf(row, i, metric)?.mean ?? NaN);
  const rows = [...DATA.rows, ...DATA.protocols[i].reported].filter(isShown)
    .sort((a, b) => isNaN(order(a)) - isNaN(order(b)) || order(a) - order(b));
  return { protocol: i, metric, label, rows };
}

// Rows with this metric as {row, x, measure}.
function points({ protocol, metric, rows }, x) {
  return rows.map((row) => ({ row, x: x(row), measure: measureOf(row, protocol, metric) }))
    .filter((point) => isNumber(point.x) && point.measure);
}

const meanInWords = ({ mean, std }) => fixed(mean) + (isNumber(std) ? ` ± ${fixed(std)}` : "");
const intervalInWords = ({ interval, interval_is: kind }) => interval && `${range(interval)}, ${kind}`;

function scatter(place, chosen, found, axis, joined) {
  const label = `${chosen.label} against ${axis.name}: ${counted(found.length, "row")}`;
  const x = { ...axis, values: found.map((point) => point.x) };
  const heights = found.flatMap(({ measure }) => [measure.mean, ...(measure.interval || [])]);
  frame(place, x, { values: heights, label: chosen.label }, label, (px, py, layer) => {
    for (const point of found) point.px = px(point.x);
    spreadOut(found);
    for (const line of joined) {
      const ends = line.map((point) => [point.px, py(point.measure.mean)]);
      path(layer, ends, seriesOf(line[0].row.method), rowName(line[0].row));
    }
    for (const { row, measure, px: at } of found) {
      const interval = intervalInWords(measure);
      const words = [rowName(row), `${chosen.label} ${meanInWords(measure)}${interval ? ` (95% ${interval})` : ""}`,
        axis.words?.(row), row.reported && `reported: ${row.source}`];
      const [from, to] = measure.interval || [];
      dot(layer, at, py(measure.mean), { series: seriesOf(row.method), hollow: row.reported,
        whisker: measure.interval && { x1: at, x2: at, y1: py(from), y2: py(to) },
        words: words.filter(Boolean).join("\n") });
    }
  });
}

// Lines through the rows of a family that agree in `key`; `joins` says which row belongs to all.
function lines(found, key, joins) {
  const groups = Map.groupBy(found.filter(({ row }) => !joins(row)),
    ({ row }) => JSON.stringify([row.family, row[key]]));
  return [...groups.values()].map((group) => {
    const common = found.filter(({ row }) => joins(row) && row.family === group[0].row.family);
    return [...common, ...group].sort((a, b) => a.x - b.x);
  }).filter((line) => line[0].x < line.at(-1).x);
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
  const joined = panel.lines?.(found);
  const log = !joined && values.at(-1) > 20 * values[0];
  const axis = { ...panel, log, label: panel.label + (log ? " (log)" : ""), ticks: joined && values };
  drawOrHide(`plot-${name}`, joined ? joined.length : values.length > 2,
    (place) => scatter(place, chosen, found, axis, joined ?? []));
}

const empty = (place, words) => place.replaceChildren(el("p", { class: "quiet empty" }, words));

// Every row by its name, best first.
function plotRows(place, chosen) {
  const found = points(chosen, () => 0).slice(0, MAX_ROWS);
  if (!found.length) return empty(place, `No row here has ${chosen.label}.`);
  const entries = found.map(({ row, measure }) => ({ name: rowName(row) + (row.reported ? " (reported)" : ""),
    value: measure.mean, interval: measure.interval, series: seriesOf(row.method) }));
  return rowDots(place, entries, `${chosen.label}: ${counted(found.length, "row")}`);
}

function curveNames(rows) {
  const names = new Set(rows.flatMap((row) => row.curves.flatMap((run) => Object.keys(run.lines))));
  return [...names].sort((a, b) => (b === "loss") - (a === "loss") || (a < b ? -1 : 1));
}

function plotCurves(place, rows, name) {
  const runs = rows.flatMap((row) => row.curves.map((run) => ({ row, run })))
    .filter(({ run }) => run.lines[name]).slice(0, MAX_CURVES);
  if (!runs.length) return empty(place, "No pretraining record here holds curves.");
  const x = { label: runs[0].run.axis, values: runs.flatMap(({ run }) => run.lines[name][0]) };
  const y = { label: name, values: runs.flatMap(({ run }) => run.lines[name][1]) };
  return frame(place, x, y, `${name}, training curves of ${counted(runs.length, "run")}`, (px, py, layer) => {
    for (const { row, run } of runs) {
      const [xs, ys] = run.lines[name];
      path(layer, xs.map((v, i) => [px(v), py(ys[i])]), seriesOf(row.method),
        `${rowName(row)} · seed ${run.seed}`);
    }
  });
}

function plotClasses(place, rows, protocol) {
  classChart(place, rows.slice(0, MAX_CLASS_ROWS).map((row) => ({ name: rowName(row),
    series: seriesOf(row.method), values: row.results[protocol].classes })));
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
  const { protocol, metric, label, rows } = chosen;
  byId("metric-note").textContent = `${label} under ${fullName(DATA.protocols[protocol])}`;
  plotRows(byId("plot-rows"), chosen);
  for (const name of Object.keys(PANELS)) drawScatter(name, chosen);
  drawOrHide("plot-curves", rows.some((row) => row.curves.length),
    (place) => plotCurves(place, rows, byId("curve").value));
  const withClasses = rows.filter((row) => row.results[protocol]?.classes);
  drawOrHide("plot-classes", withClasses.length, (place) => plotClasses(place, withClasses, protocol));
  byId("plots").hidden = !byId("charts").querySelector(".card:not([hidden])");
  drawLegend(rows.filter((row) => row.curves.length || measureOf(row, protocol, metric)));
}

function drawLegend(rows) {
  const methods = [...new Set(rows.map((row) => row.method))];
  methods.sort((a, b) => seriesOf(a) - seriesOf(b) || (a < b ? -1 : 1));
  const keys = methods.slice(0, MAX_KEYS).map((name) => el("span", { class: `key s${seriesOf(name)}` }, name));
  const more = methods.length - keys.length;
  byId("chart-legend").replaceChildren(...keys, more ? el("span", {}, `and ${more} more`) : "");
}

function card(id, title, note, control) {
  return el("figure", { class: "card" },
    el("figcaption", {}, el("h3", {}, title), control, el("p", { class: "quiet" }, note)),
    el("div", { id, class: "plot" }));
}

function buildPlots() {
  if (!DATA.protocols.length) {
    byId("chart").remove();
    byId("plots").remove();
    return;
  }
  byId("metric").append(...DATA.protocols.flatMap((protocol, i) => Object.entries(protocol.metrics)
    .filter(([, { further }]) => !further)
    .map(([metric, { label }]) => el("option", { value: `${i}/${metric}` }, `${label} · ${protocol.name}`))));
  const counts = DATA.protocols.map((protocol) => protocol.rows.length);
  const fullest = counts.indexOf(Math.max(...counts));
  byId("metric").value = `${fullest}/${DATA.protocols[fullest].headline}`;
  byId("metric").addEventListener("change", drawPlots);
  const curve = el("select", { id: "curve", "aria-label": "Curve", on: { change: drawPlots } },
    curveNames(DATA.rows).map((name) => el("option", {}, name)));
  byId("charts").append(
    ...Object.entries(PANELS).map(([name, { title, note }]) => card(`plot-${name}`, title, note)),
    card("plot-curves", "Training curves", `At most ${MAX_CURVES} runs, best rows first.`, curve),
    card("plot-classes", "Per class", `The best ${MAX_CLASS_ROWS} rows; of many classes, the ${MAX_CLASSES} that differ most.`),
  );
  let timer = 0;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => { drawPlots(); drawWithin(document); }, 60);
  }).observe(byId("charts"));
}
