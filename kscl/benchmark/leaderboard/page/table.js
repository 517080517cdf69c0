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
const rowName = (row) => [row.method, ...settingsInWords(row)].join(" · ");

// A backbone that all rows share tells none of them apart.
function settingsInWords(row) {
  const words = [];
  if (row.metrics || DATA.rows.some((other) => other.backbone !== row.backbone)) words.push(row.backbone);
  if (isNumber(row.K)) words.push(`K ${row.K}`);
  if (isNumber(row.rho)) words.push(`ρ ${percent(row.rho)}`);
  if (isNumber(row.epochs)) words.push(`${row.epochs} epochs`);
  if (row.tag) words.push(row.tag);
  return words.filter(Boolean);
}

// The columns of a view: the name of each, what it sorts by and what it shows.

const HINTS = {
  method: "What was pretrained, and how",
  K: "Key views per image (shots)",
  rho: "Fraction of the eigenvalue mass that a subspace keeps",
  n_pretrain: "Pretraining seeds: the replicates of every comparison",
  n_finetune: "Trials of the evaluation, over all pretraining seeds",
};

// `protocol` is an index, or -1 for all protocols side by side.
function columnsOf(data, protocol) {
  const chosen = protocol < 0 ? data.protocols.map((_, i) => i) : [protocol];
  const columns = [];
  columns.push(methodColumn(protocol));
  for (const i of chosen) {
    const { metrics, labels, letter } = data.protocols[i];
    metrics.forEach((metric, j) => {
      const label = protocol < 0 && letter ? `${labels[j]} (${letter})` : labels[j];
      columns.push(metricColumn(data, i, metric, label, protocol >= 0));
      if (protocol >= 0 && !j) columns.push(intervalColumn(data, i), rankColumn(i));
    });
  }
  columns.push(plainColumn("epochs", "epochs", short));
  columns.push(plainColumn("K", "K", short));
  columns.push(plainColumn("rho", "ρ", percent));
  columns.push(textColumn("backbone", "backbone"));
  if (protocol >= 0) columns.push(...furtherColumns(data, protocol));
  columns.push(...data.columns.map(figureColumn));
  const stage = protocol < 0 || data.protocols[protocol].stage;
  for (const [key, label] of Object.entries(data.costs)) {
    const mine = stage === true || key.startsWith("pretrain") || key.startsWith(stage);
    if (mine) columns.push(costColumn(key, label));
  }
  for (const key of ["n_pretrain", "n_finetune"]) columns.push(countColumn(key, protocol));
  return columns;
}

function resultOf(row, protocol) {
  return row.results ? row.results[protocol] : undefined;
}

function measureOf(row, protocol, metric) {
  if (row.metrics) {
    // A published row: a number, perhaps a spread, and nothing to test.
    if (!isNumber(row.metrics[metric])) return undefined;
    return { mean: row.metrics[metric], std: row.std[metric] ?? null, verdict: "reported" };
  }
  const result = resultOf(row, protocol);
  return result ? result.metrics[metric] : undefined;
}

function rankColumn(protocol) {
  const headline = (row) => {
    const result = resultOf(row, protocol);
    return result && result.metrics[DATA.protocols[protocol].headline];
  };
  const value = (row) => headline(row)?.rank ?? null;
  return {
    key: "rank", label: "rank", type: "number", ascending: true, value,
    hint: "Rows that the test cannot distinguish from the best remaining one share its rank",
    cell: (row) => (value(row) ?? (row.metrics ? "" : el("span", { class: "faint" }, "–"))),
  };
}

function methodColumn(protocol) {
  return {
    key: "method", label: "method", type: "text", ascending: true, hint: HINTS.method,
    value: (row) => `${row.method} ${row.tag || ""}`,
    cell: (row) => [
      el("span", { class: "method" }, row.method),
      el("span", { class: "tag" }, isOnly(row) ? row.tag : settingsInWords(row).join(", ")),
      badges(row, protocol),
    ],
  };
}

const isOnly = (row) => DATA.rows.filter((other) => other.method === row.method).length < 2;

function badges(row, protocol) {
  const found = [];
  if (row.metrics) found.push(badge("reported", "reported", row.source));
  if (protocol >= 0 && row.results) {
    const measure = measureOf(row, protocol, DATA.protocols[protocol].headline);
    if (measure?.verdict === "not distinguishable") {
      found.push(badge("tied", "not distinguishable", `from the best: ${pValue(measure.p)} (Holm)`));
    } else if (measure?.verdict === "not tested") {
      const one = measure.values.length === 1;
      found.push(one
        ? badge("single", "one seed", "One pretraining seed: not tested, never called different")
        : badge("single", "not tested", "No other row has two or more pretraining seeds, or a warning speaks against this one"));
    }
  }
  const warnings = Object.entries(row.results ?? {})
    .filter(([i]) => protocol < 0 || Number(i) === protocol)
    .flatMap(([, result]) => result.warnings);
  if (warnings.length) found.push(badge("stale", "warning", warnings.join("\n")));
  if (row.stale?.length) found.push(badge("stale", "stale", row.stale.join("\n")));
  return found;
}

const badge = (kind, words, hint) => el("span", { class: `badge ${kind}`, title: hint }, words);

function textColumn(key, label) {
  return {
    key, label, type: "text", ascending: true, value: (row) => row[key] || null,
    cell: (row) => row[key],
  };
}

function plainColumn(key, label, format) {
  return {
    key, label, type: "number", ascending: true, hint: HINTS[key],
    value: (row) => row[key] ?? null, cell: (row) => format(row[key]),
  };
}

// A registered column of the board: a number or a text.
function figureColumn({ name: key, label, digits, hint, lowest_first: ascending }) {
  const value = (row) => row.figures[key] ?? null;
  const isText = DATA.rows.some((row) => typeof value(row) === "string");
  return {
    key, label: label.replace("min/", "min / "), type: isText ? "text" : "number", hint, ascending,
    wraps: true, aside: true, value,
    cell: (row) => {
      const found = value(row);
      if (!isNumber(found)) return found ?? "";
      const title = row.metrics ? row.note : row.machine && `on ${row.machine}`;
      return el("span", { title: title || null }, row.metrics ? short(found) : fixed(found, digits));
    },
  };
}

function costColumn(key, label) {
  const value = (row) => row.costs?.[key] ?? null;
  return {
    key, label, type: "number", wraps: true, aside: true, ascending: true, value,
    hint: "Mean over the runs of the stage (memory: the highest peak); empty if it was not recorded",
    cell: (row) => {
      const found = value(row);
      if (found === null) return "";
      return el("span", { title: row.machine ? `on ${row.machine}` : null }, short(Number(found.toPrecision(3))));
    },
  };
}

function countColumn(key, protocol) {
  const value = (row) => {
    if (row.metrics) return key === "n_finetune" ? row.trials : null;
    return protocol < 0 ? row[key] : (resultOf(row, protocol)?.[key] ?? null);
  };
  return {
    key, label: key.replace("_", " "), type: "number", hint: HINTS[key], wraps: true, aside: true,
    value: (row) => (typeof value(row) === "string" ? parseFloat(value(row)) : value(row)),
    cell: (row) => (value(row) === null ? "" : String(value(row))),
  };
}

function metricColumn(data, protocol, metric, label, alone) {
  const rows = data.rows.map((row) => measureOf(row, protocol, metric)).filter(Boolean);
  const published = alone ? data.protocols[protocol].reported : [];
  const spread = rows.some((measure) => isNumber(measure.std))
    || published.some((row) => isNumber(row.std[metric]));
  const marked = rows.some((measure) => measure.verdict === "not distinguishable");
  return {
    key: `${protocol}/${metric}`, label, type: "number", group: protocol, spread, marked,
    headline: metric === data.protocols[protocol].headline,
    hint: `${data.protocols[protocol].name}: mean ± standard deviation`,
    value: (row) => measureOf(row, protocol, metric)?.mean ?? null,
    ascending: data.protocols[protocol].lower && metric === data.protocols[protocol].headline,
    cell: (row) => metricCell(measureOf(row, protocol, metric), spread, marked,
      data.protocols[protocol].digits[data.protocols[protocol].metrics.indexOf(metric)] ?? 2),
  };
}

// The same detections by the scorers that rank nothing here, and masks by their size.
function furtherColumns(data, protocol) {
  return data.protocols[protocol].further_metrics.map((metric) => {
    const column = metricColumn(data, protocol, metric, metric.replace("/", " "), true);
    return { ...column, wraps: true, aside: true };
  });
}

// Number, spread and mark have spans of their own, so that the decimal points line up.
function metricCell(measure, spread, marked, digits) {
  if (!measure) return "";
  const best = measure.verdict === "best";
  const of = measure.verdict === "reported" ? 1 : digits;
  const pad = of < digits ? el("span", { class: "pad" }, "0".repeat(digits - of)) : "";
  const parts = [el("span", { class: best ? "value best" : "value" }, fixed(measure.mean, of), pad)];
  if (spread) {
    const words = isNumber(measure.std) ? `± ${fixed(measure.std, of)}` : "";
    const trials = measure.std_is && measure.std_is !== "over pretraining seeds";
    parts.push(el("span", { class: "spread", title: measure.std_is || null }, words, trials ? "°" : ""));
  }
  if (marked) {
    const tied = measure.verdict === "not distinguishable";
    const hint = tied ? `not distinguishable from the best, ${pValue(measure.p)}` : null;
    parts.push(el("span", { class: "mark", title: hint }, tied ? "≈" : ""));
  }
  return parts;
}

function intervalColumn(data, protocol) {
  const headline = data.protocols[protocol].headline;
  return {
    key: "interval", label: "95% interval", type: "number",
    hint: "Of the mean over pretraining seeds; † of a single trial, test sampling only",
    value: (row) => measureOf(row, protocol, headline)?.interval?.[0] ?? null,
    cell: (row) => {
      const measure = measureOf(row, protocol, headline);
      if (!measure?.interval) return "";
      const [from, to] = measure.interval;
      const sampled = measure.interval_is === "test sampling only";
      return el("span", { class: "interval", title: measure.interval_is },
        `${fixed(from, 2)} – ${fixed(to, 2)}`, el("sup", {}, sampled ? "†" : ""));
    },
  };
}

// The table. However many rows there are, only those that one has come to are in the page.

const CHUNK = 60;
const state = { protocol: -1, methods: new Set(), search: "", reported: true, key: null, up: false,
  compare: [] }; // the keys of the rows that are compared, in the order in which they were ticked
const view = { columns: [], rows: [], reported: [], shown: [], placed: 0 };

function buildTable() {
  const published = state.protocol < 0 ? [] : DATA.protocols[state.protocol].reported;
  const mine = state.protocol < 0
    ? DATA.rows : DATA.rows.filter((row) => resultOf(row, state.protocol));
  const rows = [...mine, ...published];
  const filled = columnsOf(DATA, state.protocol).filter((column) => column.key === "method"
    || rows.some((row) => column.value(row) !== null && column.value(row) !== ""));
  const shared = filled.filter((column) => isShared(column, rows));
  view.columns = filled.filter((column) => !shared.includes(column));
  const said = shared.map((column) => `${column.label} ${el("span", {}, column.cell(rows[0])).textContent}`);
  byId("shared").textContent = said.length ? `All rows: ${said.join(", ")}.` : "";
  if (!view.columns.some((column) => column.key === state.key)) {
    state.key = null; // in the order of the board: best first
  }
  const entry = (row) => ({ row, tr: null, panel: null, words: wordsOf(row) });
  view.rows = ordered(mine).map(entry);
  view.reported = published.map(entry);
  const bodies = ["rows", "reported-rows"].map((id) =>
    el("tbody", { id, on: { keydown: onRowKey } }));
  byId("board").replaceChildren(header(), ...bodies);
  if (view.watch) view.watch.disconnect();
  view.watch = new IntersectionObserver(([seen]) => { if (seen.isIntersecting) placeMore(CHUNK); },
    { root: byId("frame"), rootMargin: "800px" });
}

// What all rows have in common is said once, below the table.
function isShared(column, rows) {
  const speaks = column.group !== undefined || ["method", "rank", "interval"].includes(column.key);
  return !speaks && rows.length > 1
    && rows.every((row) => column.value(row) === column.value(rows[0]));
}

// Filter, sort, and put the first rows into the page; the others follow as one scrolls.
function render() {
  const column = view.columns.find((candidate) => candidate.key === state.key);
  for (const th of byId("board").querySelectorAll("thead th[data-column]")) {
    if (th.dataset.column !== state.key) th.removeAttribute("aria-sort");
    else th.setAttribute("aria-sort", state.up ? "ascending" : "descending");
  }
  const chosen = (entries) => {
    const shown = entries.filter(isShown);
    return column ? sortedBy(shown, column) : shown;
  };
  view.shown = chosen(view.rows);
  view.placed = 0;
  byId("rows").replaceChildren();
  byId("frame").scrollTop = 0;
  const published = chosen(view.reported);
  byId("reported-rows").replaceChildren(divider(), ...published.flatMap(elementsOf));
  view.publishes = published.length > 0;
  placeMore(CHUNK);
  writeAddress();
}

function placeMore(count) {
  const next = view.shown.slice(view.placed, view.placed + count);
  byId("rows").append(...next.flatMap(elementsOf));
  view.placed += next.length;
  const all = view.placed === view.shown.length;
  byId("reported-rows").hidden = !(all && view.publishes);
  view.watch.disconnect();
  if (!all) view.watch.observe(byId("rows").lastElementChild);
}

function elementsOf(entry) {
  if (!entry.tr) entry.tr = makeRow(entry);
  return entry.panel ? [entry.tr, entry.panel] : [entry.tr];
}

// The board's own order within a protocol: by the mean that ranks, best first.
function ordered(rows) {
  if (state.protocol < 0) return rows;
  const { headline, lower } = DATA.protocols[state.protocol];
  const value = (row) => (lower ? -1 : 1) * measureOf(row, state.protocol, headline).mean;
  return [...rows].sort((a, b) => value(b) - value(a));
}

function header() {
  const head = el("thead", {});
  if (state.protocol < 0 && DATA.protocols.length) head.append(groupRow());
  const cells = view.columns.map((column) => {
    const button = el("button", { type: "button", title: column.hint, "data-key": column.key,
      on: { click: () => sortBy(column) } }, column.label);
    return el("th", { scope: "col", class: cellClass(column), "data-column": column.key }, button);
  });
  head.append(el("tr", { class: "names" }, cells));
  return head;
}

// Over the columns: which protocol each belongs to.
function groupRow() {
  const cells = [];
  for (const column of view.columns) {
    const last = cells[cells.length - 1];
    if (last && last.group === column.group) last.span += 1;
    else cells.push({ group: column.group, span: 1 });
  }
  return el("tr", { class: "groups" }, cells.map(({ group, span }, i) => {
    if (group === undefined) return el("td", { colspan: span, class: i ? "aside" : "first" });
    const protocol = DATA.protocols[group];
    return el("th", { colspan: span, scope: "colgroup", class: "group", title: protocol.name },
      el("span", {}, protocol.id), " ", el("span", { class: "faint" }, protocol.hash.slice(0, 6)));
  }));
}

// What the search looks through.
const wordsOf = (row) => [rowName(row), row.backbone, row.source, row.note].join(" ").toLowerCase();

const cellClass = (column) => [column.type, `col-${column.key.replace(/\W/g, "-")}`, column.key === "method" && "first",
  column.wraps && "wraps", column.aside && "aside", column.spread && "has-spread", column.marked && "has-mark"]
  .filter(Boolean).join(" ");

function makeRow(entry) {
  const { row } = entry;
  const cells = view.columns.map((column) => {
    const shown = column.cell(row);
    if (column.key !== "method") return el("td", { class: cellClass(column) }, shown);
    const inside = el("button", { type: "button", class: "open", "aria-expanded": "false",
      on: { click: () => toggle(entry) } }, shown, el("span", { class: "unseen" }, "details"));
    return el("th", { scope: "row", class: cellClass(column) },
      el("div", { class: "name" }, row.metrics ? "" : pickBox(row), inside));
  });
  return el("tr", { class: row.metrics ? "reported" : null }, cells);
}

function divider() {
  const title = "Reported elsewhere: published figures, neither ranked nor tested";
  return el("tr", { class: "divider" },
    el("td", { colspan: view.columns.length }, el("span", {}, title)));
}

function sortBy(column) {
  const first = Boolean(column.ascending);
  state.up = state.key === column.key ? !state.up : first;
  state.key = column.key;
  render();
  say(`Sorted by ${column.label}, ${state.up ? "ascending" : "descending"}.`);
}

// Empty cells come last in both directions; equals keep the board's order.
function sortedBy(entries, column) {
  const sign = state.up ? 1 : -1;
  const keyed = entries.map((entry, i) => ({ entry, i, value: column.value(entry.row) }));
  keyed.sort((a, b) => {
    if (a.value === null || b.value === null) {
      return (a.value === null) - (b.value === null) || a.i - b.i;
    }
    const order = column.type === "text"
      ? (a.value < b.value ? -1 : Number(a.value > b.value)) : a.value - b.value;
    return sign * order || a.i - b.i;
  });
  return keyed.map(({ entry }) => entry);
}

function isShown(entry) {
  const { row } = entry;
  if (row.metrics && !state.reported) return false;
  if (state.methods.size && !state.methods.has(row.method)) return false;
  return entry.words.includes(state.search);
}

function sayCount() {
  const [shown, all] = [view.shown.length, view.rows.length];
  say(shown === all ? counted(all, "row") : `${shown.toLocaleString("en")} of ${counted(all, "row")}`);
}

const say = (words) => { byId("status").textContent = words; };

function toggle(entry) {
  const button = entry.tr.querySelector("button.open");
  const open = !entry.panel;
  if (open) {
    const cell = el("td", { colspan: view.columns.length }, panelOf(entry.row));
    entry.panel = el("tr", { class: "panel-row" }, cell);
    entry.tr.after(entry.panel);
    drawPanel(entry.panel, entry.row);
  } else {
    entry.panel.remove();
    entry.panel = null;
  }
  entry.tr.classList.toggle("opened", open);
  button.setAttribute("aria-expanded", String(open));
}

// Arrow keys walk over the rows, Home and End to the ends, Escape closes the row one is in.
function onRowKey(event) {
  const here = [...view.shown, ...view.reported].find((entry) =>
    entry.tr?.contains(event.target) || entry.panel?.contains(event.target));
  if (!here) return;
  if (event.key === "Escape" && here.panel) {
    toggle(here);
    here.tr.querySelector("button.open").focus();
    return;
  }
  if (!event.target.classList.contains("open")) return;
  if (event.key === "End") placeMore(view.shown.length);
  const buttons = [...byId("board").querySelectorAll("tbody:not([hidden]) button.open")];
  const place = buttons.indexOf(event.target);
  const goal = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (goal === undefined) return;
  event.preventDefault();
  buttons[Math.min(Math.max(goal, 0), buttons.length - 1)].focus();
}

// What is behind a row: numbers per seed, hashes, files, curves, classes, pictures.

const pooled = (i) => (i === null || i === undefined ? null : DATA.pool[i]);
const code = (words) => el("code", {}, words);

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, shown.flatMap(([name, value]) =>
    [el("dt", {}, name), el("dd", {}, value)]));
}

function link({ shown, link: target }) {
  return target ? el("a", { href: target }, shown) : code(shown);
}

const json = (value) => el("pre", { tabindex: "0" }, JSON.stringify(value, null, 2));

function fold(title, make) {
  const details = el("details", {}, el("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(...[make()].flat());
  });
  return details;
}

function panelOf(row) {
  if (row.metrics) return reportedPanel(row);
  return el("div", { class: "panel" },
    row.stale.length ? el("div", { class: "notice" },
      el("strong", {}, "Stale: "), "code, data or files have changed since.",
      el("ul", {}, row.stale.map((reason) => el("li", {}, reason)))) : "",
    el("div", { class: "panel-grid wide-first" },
      el("div", {}, el("h3", {}, "Results"), shownFirst(row.results).map((entry) => resultTable(row, entry)),
        Object.keys(row.results).length ? "" : el("p", { class: "quiet" }, "Not evaluated yet.")),
      el("div", {}, el("h3", {}, "Entry"), entryFacts(row))),
    el("div", { class: "panel-grid" },
      row.curves.length ? el("div", {}, el("h3", {}, "Training"), el("div", { class: "plot curves" })) : "",
      Object.values(row.results).some((result) => Object.keys(result.classes).length)
        ? el("div", {}, el("h3", {}, "Per class"), el("div", { class: "plot classes" })) : ""),
    row.basis ? el("figure", { class: "basis" },
      el("img", { src: row.basis, alt: `Basis images of ${row.method}` }),
      el("figcaption", { class: "quiet" }, "Views of one image, the basis images they span, and their weights.")) : "",
    el("h3", {}, counted(row.records.length, "record")),
    el("div", { class: "records" }, row.records.map(recordFold)));
}

function reportedPanel(row) {
  return el("div", { class: "panel" }, facts([
    ["Source", row.source], ["Protocol", code(row.protocol)], ["Note", row.note],
    ["Trials", row.trials && String(row.trials)],
    ["Standing", "A published figure without a protocol hash: neither ranked nor tested."],
  ]));
}

function entryFacts(row) {
  const first = row.records[0];
  const { commit, dirty, version, source_hash: source } = pooled(first.code);
  const seeds = [...new Set(row.records.filter((r) => r.kind === "pretrain").map((r) => r.seed))];
  const shape = [row.backbone, isNumber(row.epochs) && `${row.epochs} epochs`,
    isNumber(row.K) && `K ${row.K}`, isNumber(row.rho) && `ρ ${percent(row.rho)}`];
  return facts([
    ["Backbone", shape.filter(Boolean).join(", ")],
    ["Settings", code(row.config)],
    ["Pretraining data", row.data && code(row.data)],
    ["Pretraining seeds", seeds.join(", ")],
    ["Measured on", row.machine],
    ["Code", [`version ${version}, source `, code(source || "?"), commit ? `, commit ${commit.slice(0, 10)}` : "",
      dirty ? ", with uncommitted changes" : ""]],
  ]);
}

// The command that makes the pretraining and the evaluation under a protocol again.
function commandOf(row, { kind, id, hash }) {
  return row.records.find((record) => record.kind === kind && record.protocol === `${id} · ${hash}`).command;
}

// The results, the one of the chosen protocol first.
function shownFirst(results) {
  const mine = ([i]) => Number(Number(i) === state.protocol);
  return Object.entries(results).sort((a, b) => mine(b) - mine(a));
}

function resultTable(row, [i, result]) {
  const protocol = DATA.protocols[i];
  const names = Object.keys(result.metrics);
  const rows = names.map((name) => {
    const measure = result.metrics[name];
    const place = protocol.metrics.indexOf(name);
    const standing = measure.rank ? `rank ${measure.rank}, ${measure.verdict}` : measure.verdict;
    const tested = place >= 0 ? [standing, pValue(measure.p)].filter(Boolean).join(", ") : "";
    return el("tr", {}, el("th", { scope: "row" }, place >= 0 ? protocol.labels[place] : name),
      el("td", { title: measure.std_is || null }, metricWords({ ...measure, interval: null })),
      el("td", { class: "quiet" }, intervalWords(measure)),
      el("td", { class: "quiet", title: measure.replicates.join(", ") },
        measure.values.map((value) => fixed(value, 2)).join("  ")),
      el("td", { class: "quiet" }, tested));
  });
  const counts = `${counted(result.n_pretrain, "pretraining seed")}, ${counted(result.n_finetune, "trial")}`;
  return el("div", { class: "result" },
    el("p", {}, el("strong", {}, protocol.id), " ", code(protocol.hash), " ",
      el("span", { class: "quiet" }, counts)),
    el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Results under ${protocol.id}` },
      el("table", { class: "small" },
        el("thead", {}, el("tr", {}, ["metric", "mean ± std", "95% interval", "each pretraining seed", "test"].map((name) =>
          el("th", { scope: "col" }, name)))), el("tbody", {}, rows))),
    el("p", { class: "command" }, "Reproduce this row: ", code(commandOf(row, protocol))),
    fold("Protocol definition", () => json(pooled(protocol.definition))));
}

function recordFold(record) {
  const title = [el("span", { class: "kind" }, record.kind), ` ${record.name} `,
    el("span", { class: "quiet" }, `seed ${record.seed} · ${record.created}`)];
  return fold(title, () => recordFacts(record));
}

function recordFacts(record) {
  const { commit, dirty, source_hash: source } = pooled(record.code);
  const config = pooled(record.config);
  const prints = Object.entries(record.data).map(([role, print]) => [`Data, ${role}`,
    [code(print.hash || "?"), isNumber(print.files) ? ` ${counted(print.files, "file")}` : "",
      print.path && ` ${print.path}`]]);
  const hashes = (things, word) => Object.entries(things).map(([role, sha]) =>
    [`${word}, ${role}`, code(String(sha))]);
  return el("div", { class: "record" },
    facts([
      ["File", link(record.file)],
      ["Record", code(record.id)],
      ["Protocol", code(record.protocol)],
      ["Duration", duration(record.seconds)],
      ...prints, ...hashes(record.inputs, "Input"), ...hashes(record.outputs, "Output"),
      ["Config", code(config.hash)],
      ["Code", [code(source || "?"), commit ? ` commit ${commit.slice(0, 10)}` : "", dirty ? " + changes" : ""]],
      ["Files", record.files.flatMap((file, i) => (i ? [", ", link(file)] : [link(file)]))],
      ["Metrics", Object.entries(record.metrics).map(([name, value]) => `${name} ${short(value)}`).join(", ")],
    ]),
    fold("Config", () => json(config.values)),
    fold("Libraries and hardware", () => json({ ...pooled(record.libraries), ...pooled(record.hardware) })),
    record.certificate === null ? "" : fold("Certificate of the conversion", () => json(pooled(record.certificate))));
}

// Plots need an element with a width, so they are drawn once the panel is in the page.
function drawPanel(panel, row) {
  const curves = panel.querySelector(".plot.curves");
  if (curves) plotCurves(curves, [row], Object.keys(row.curves[0].lines).includes("loss")
    ? "loss" : Object.keys(row.curves[0].lines)[0]);
  const classes = panel.querySelector(".plot.classes");
  if (!classes) return;
  const wanted = [state.protocol, ...Object.keys(row.results)].find((i) =>
    Object.keys(row.results[i]?.classes || {}).length);
  plotClasses(classes, [row], wanted);
}
