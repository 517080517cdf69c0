// Elements and numbers. Text of a record only ever becomes a text node or an attribute's value.

const byId = (id) => document.getElementById(id);
const DATA = JSON.parse(byId("data").textContent);

// Attributes without a value and empty children are left out.
function fill(node, { on = {}, ...attributes }, children) {
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  for (const [name, value] of Object.entries(attributes)) {
    if (value || value === 0) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(Boolean));
  return node;
}

const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const code = (words) => el("code", {}, words);

const isNumber = Number.isFinite;
const fixed = (value, digits = 2) => value.toFixed(digits);
const short = (value) => String(Number(value.toPrecision(4)));
const percent = (rho) => `${Number((100 * rho).toPrecision(6))}%`;
const range = ([from, to]) => `${fixed(from)} to ${fixed(to)}`;
const pValue = (p) => (p < 0.001 ? "p < 0.001" : `p = ${fixed(p, 3)}`);
const counted = (n, word, many = `${word}s`) => `${n.toLocaleString("en")} ${n === 1 ? word : many}`;

function duration(seconds) {
  if (seconds < 90) return `${fixed(seconds, 0)} s`;
  if (seconds < 5400) return `${fixed(seconds / 60, 1)} min`;
  return `${fixed(seconds / 3600, 1)} h`;
}

// The name of a row outside of the table: in a plot, in a message.
const rowName = (row) => [row.method, ...settingsInWords(row)].join(" · ");

const numbersInWords = (row) => [isNumber(row.K) && `K ${row.K}`,
  isNumber(row.rho) && `ρ ${percent(row.rho)}`, isNumber(row.epochs) && `${row.epochs} epochs`].filter(Boolean);

// A backbone that all rows share tells none of them apart.
const SEVERAL_BACKBONES = new Set(DATA.rows.map((row) => row.backbone)).size > 1;

const settingsInWords = (row) => [(row.reported || SEVERAL_BACKBONES) && row.backbone,
  ...numbersInWords(row), row.tag].filter(Boolean);

// The columns of a view: the name of each, what it sorts by (null comes last) and what it shows.

const measureOf = (row, protocol, metric) => row.results[protocol]?.metrics[metric];
const headlineOf = (row, protocol) => measureOf(row, protocol, DATA.protocols[protocol].headline);

// `protocol` is an index, or -1 for all protocols side by side.
function columnsOf(protocol) {
  const isAlone = protocol >= 0;
  const chosen = isAlone ? [protocol] : DATA.protocols.map((_, i) => i);
  const metricColumns = (i, further) => Object.entries(DATA.protocols[i].metrics)
    .filter(([, about]) => about.further === further).map(([name]) => metricColumn(i, name, isAlone));
  const isMine = ([key]) => !isAlone || key.startsWith("pretrain") || key.startsWith(DATA.protocols[protocol].stage);
  return [
    methodColumn(protocol),
    ...chosen.flatMap((i) => {
      const [headline, ...others] = metricColumns(i, false);
      return isAlone ? [headline, intervalColumn(i), rankColumn(i), ...others] : [headline, ...others];
    }),
    plainColumn("epochs", "epochs", short),
    plainColumn("K", "K", short, "Key views per image (shots)"),
    plainColumn("rho", "ρ", percent, "Fraction of the eigenvalue mass that a subspace keeps"),
    plainColumn("backbone", "backbone", String),
    // The same detections by the scorers that rank nothing here, and masks by their size.
    ...(isAlone ? metricColumns(protocol, true) : []),
    ...DATA.columns.map(boardColumn),
    ...Object.entries(DATA.costs).filter(isMine).map(costColumn),
    countColumn("n_pretrain", protocol, "Pretraining seeds: the replicates of every comparison"),
    countColumn("n_finetune", protocol, "Trials of the evaluation, over all pretraining seeds"),
  ];
}

function methodColumn(protocol) {
  const isOnly = (row) => DATA.rows.filter((other) => other.method === row.method).length < 2;
  return {
    key: "method", label: "method", ascending: true, hint: "What was pretrained, and how",
    value: (row) => `${row.method} ${row.tag || ""}`,
    cell: (row) => [
      el("span", { class: "method" }, row.method),
      el("span", { class: "tag" }, isOnly(row) ? row.tag : settingsInWords(row).join(", ")),
      badges(row, protocol),
    ],
  };
}

function badges(row, protocol) {
  const badge = (kind, words, hint) => el("span", { class: `badge ${kind}`, title: hint }, words);
  if (row.reported) return badge("reported", "reported", row.source);
  const found = [];
  const measure = protocol >= 0 && headlineOf(row, protocol);
  if (measure?.verdict === "not distinguishable") {
    found.push(badge("tied", "not distinguishable", `from the best: ${pValue(measure.p)} (Holm)`));
  } else if (measure?.verdict === "not tested") {
    found.push(measure.values.length === 1
      ? badge("single", "one seed", "One pretraining seed: not tested, never called different")
      : badge("single", "not tested", "No other row has two or more pretraining seeds, or a warning speaks against this one"));
  }
  const results = protocol >= 0 ? [row.results[protocol]] : Object.values(row.results);
  const warnings = results.flatMap((result) => result.warnings);
  if (warnings.length) found.push(badge("stale", "warning", warnings.join("\n")));
  if (row.stale.length) found.push(badge("stale", "stale", row.stale.join("\n")));
  return found;
}

function plainColumn(key, label, format, hint) {
  const value = (row) => row[key] ?? null;
  return { key, label, hint, ascending: true, value, cell: (row) => value(row) !== null && format(value(row)) };
}

function rankColumn(protocol) {
  const value = (row) => headlineOf(row, protocol)?.rank ?? null;
  return {
    key: "rank", label: "rank", ascending: true, value,
    hint: "Rows that the test cannot distinguish from the best remaining one share its rank",
    cell: (row) => value(row) ?? (!row.reported && el("span", { class: "faint" }, "–")),
  };
}

function intervalColumn(protocol) {
  const interval = (row) => headlineOf(row, protocol)?.interval;
  return {
    key: "interval", label: "95% interval", value: (row) => interval(row)?.[0] ?? null,
    hint: "Of the mean over pretraining seeds; † of a single trial, test sampling only",
    cell: (row) => {
      if (!interval(row)) return "";
      const kind = headlineOf(row, protocol).interval_is;
      return el("span", { class: "interval", title: kind }, interval(row).map((end) => fixed(end)).join(" – "),
        el("sup", {}, kind === "test sampling only" && "†"));
    },
  };
}

function metricColumn(protocol, metric, isAlone) {
  const { name, letter, metrics, reported } = DATA.protocols[protocol];
  const { label, digits, lower_is_better: ascending, further } = metrics[metric];
  const measure = (row) => measureOf(row, protocol, metric);
  const measures = [...DATA.rows, ...(isAlone ? reported : [])].map(measure).filter(Boolean);
  const spread = measures.some(({ std }) => isNumber(std));
  const marked = measures.some(({ verdict }) => verdict === "not distinguishable");
  return {
    key: `${protocol}/${metric}`, label: isAlone || !letter ? label : `${label} (${letter})`,
    group: protocol, aside: further, spread, marked, ascending,
    hint: `${name}: mean ± standard deviation`,
    value: (row) => measure(row)?.mean ?? null,
    cell: (row) => measure(row) && metricCell(measure(row), spread, marked, digits),
  };
}

// Number, spread and mark have spans of their own, so that the decimal points line up.
function metricCell({ mean, std, std_is: kind, verdict, p }, spread, marked, digits) {
  const shown = verdict === "reported" ? 1 : digits;
  const isTied = verdict === "not distinguishable";
  return [
    el("span", { class: verdict === "best" ? "value best" : "value" }, fixed(mean, shown),
      shown < digits && el("span", { class: "pad" }, "0".repeat(digits - shown))),
    spread && el("span", { class: "spread", title: kind }, isNumber(std) && `± ${fixed(std, shown)}`,
      kind && kind !== "over pretraining seeds" && "°"),
    marked && el("span", { class: "mark", title: isTied && `not distinguishable from the best, ${pValue(p)}` },
      isTied && "≈"),
  ];
}

// A figure or a cost; its tooltip names the machine that it was measured on.
function figureColumn(key, label, value, format, more) {
  return {
    key, label, value, aside: true, ...more,
    cell: (row) => value(row) !== null
      && el("span", { title: row.note || (row.machine && `on ${row.machine}`) }, format(value(row), row)),
  };
}

// A registered column of the board: a number or a text.
function boardColumn({ name, label, digits, hint, lowest_first: ascending }) {
  const number = (found, row) => (row.reported ? short(found) : fixed(found, digits));
  return figureColumn(name, label.replace("min/", "min / "), (row) => row.figures[name] ?? null,
    (found, row) => (isNumber(found) ? number(found, row) : found), { hint, ascending });
}

function costColumn([name, label]) {
  return figureColumn(name, label, (row) => row.costs[name] ?? null, (found) => short(Number(found.toPrecision(3))),
    { hint: "Mean over the runs of the stage (memory: the highest peak); empty if it was not recorded", ascending: true });
}

function countColumn(key, protocol, hint) {
  const found = (row) => (row.results[protocol] ?? row)[key];
  return {
    key, label: key.replace("_", " "), hint, aside: true,
    value: (row) => parseFloat(found(row)) || null, // a range counts as its lower end
    cell: (row) => found(row) && String(found(row)),
  };
}

// The table. However many rows there are, only those that one has scrolled to are in the page.

const CHUNK = 60;
const state = { protocol: -1, methods: new Set(), search: "", reported: true, key: null, up: false,
  compare: [] }; // the keys of the rows that are compared, in the order in which they were ticked
const view = { columns: [], rows: [], reported: [], shown: [], placed: 0 };
const watch = new IntersectionObserver(([seen]) => { if (seen.isIntersecting) placeMore(CHUNK); },
  { root: byId("frame"), rootMargin: "800px" });

function buildTable() {
  const chosen = DATA.protocols[state.protocol];
  const [mine, published] = chosen ? [chosen.rows.map((i) => DATA.rows[i]), chosen.reported] : [DATA.rows, []];
  const rows = [...mine, ...published];
  const filled = columnsOf(state.protocol).filter((column) => rows.some((row) => column.value(row) !== null));
  const shared = filled.filter((column) => isShared(column, rows));
  view.columns = filled.filter((column) => !shared.includes(column));
  for (const column of view.columns) {
    const isText = rows.some((row) => typeof column.value(row) === "string");
    column.class = [!isText && "number", `col-${column.key.replace(/\W/g, "-")}`, column.key === "method" && "first",
      column.aside && "aside", column.spread && "has-spread", column.marked && "has-mark"].filter(Boolean).join(" ");
  }
  const said = shared.map((column) => `${column.label} ${el("span", {}, column.cell(rows[0])).textContent}`);
  byId("shared").textContent = said.length ? `All rows: ${said.join(", ")}.` : "";
  if (!view.columns.some((column) => column.key === state.key)) {
    state.key = null; // in the order of the board: best first
  }
  const entry = (row) => ({ row, tr: null, panel: null });
  view.rows = mine.map(entry);
  view.reported = published.map(entry);
  byId("head").replaceChildren(...header());
}

// What all rows have in common is said once, below the table.
function isShared(column, rows) {
  const speaks = column.group !== undefined || ["method", "rank", "interval"].includes(column.key);
  return !speaks && rows.length > 1
    && rows.every((row) => column.value(row) === column.value(rows[0]));
}

function header() {
  const cells = view.columns.map((column) => {
    const button = el("button", { type: "button", title: column.hint, "data-key": column.key,
      on: { click: () => sortBy(column) } }, column.label);
    return el("th", { scope: "col", class: column.class, "data-column": column.key }, button);
  });
  const names = el("tr", { class: "names" }, cells);
  return state.protocol < 0 && DATA.protocols.length ? [groupRow(), names] : [names];
}

// Over the columns: which protocol each belongs to.
function groupRow() {
  const cells = [];
  for (const { group } of view.columns) {
    const last = cells.at(-1);
    if (last && last.group === group) last.span += 1;
    else cells.push({ group, span: 1 });
  }
  return el("tr", { class: "groups" }, cells.map(({ group, span }, i) => {
    if (group === undefined) return el("td", { colspan: span, class: i ? "aside" : "first" });
    const { name, id, hash } = DATA.protocols[group];
    return el("th", { colspan: span, scope: "colgroup", class: "group", title: name },
      el("span", {}, id), " ", el("span", { class: "faint" }, hash.slice(0, 6)));
  }));
}

// Filter, sort, and put the first rows into the page; the others follow as one scrolls.
function render() {
  for (const th of byId("head").querySelectorAll("th[data-column]")) {
    if (th.dataset.column !== state.key) th.removeAttribute("aria-sort");
    else th.setAttribute("aria-sort", state.up ? "ascending" : "descending");
  }
  view.shown = chosenOf(view.rows);
  view.placed = 0;
  byId("rows").replaceChildren();
  byId("frame").scrollTop = 0;
  const published = chosenOf(view.reported).flatMap(elementsOf);
  byId("reported-rows").replaceChildren(...(published.length ? [divider(), ...published] : []));
  placeMore(CHUNK);
  writeAddress();
}

function divider() {
  const title = "Reported elsewhere: published figures, neither ranked nor tested";
  return el("tr", { class: "divider" },
    el("td", { colspan: view.columns.length }, el("span", {}, title)));
}

function placeMore(count) {
  const next = view.shown.slice(view.placed, view.placed + count);
  byId("rows").append(...next.flatMap(elementsOf));
  view.placed += next.length;
  const all = view.placed === view.shown.length;
  byId("reported-rows").hidden = !all;
  watch.disconnect();
  if (!all) watch.observe(byId("rows").lastElementChild);
}

function elementsOf(entry) {
  entry.tr ??= makeRow(entry);
  return entry.panel ? [entry.tr, entry.panel] : [entry.tr];
}

function makeRow(entry) {
  const { row } = entry;
  const [first, ...cells] = view.columns.map((column) => [column.class, column.cell(row)]);
  const button = el("button", { type: "button", class: "open", "aria-expanded": "false",
    on: { click: () => toggle(entry) } }, first[1], el("span", { class: "unseen" }, "details"));
  return el("tr", { class: row.reported && "reported" },
    el("th", { scope: "row", class: first[0] },
      el("div", { class: "name" }, !row.reported && pickBox(row), button)),
    cells.map(([name, shown]) => el("td", { class: name }, shown)));
}

function sortBy(column) {
  state.up = state.key === column.key ? !state.up : Boolean(column.ascending);
  state.key = column.key;
  render();
  say(`Sorted by ${column.label}, ${state.up ? "ascending" : "descending"}.`);
}

// The entries that the filters leave. Empty cells come last in both directions; equals keep the board's order.
function chosenOf(entries) {
  const shown = entries.filter(({ row }) => isShown(row));
  const column = view.columns.find(({ key }) => key === state.key);
  if (!column) return shown;
  return shown.sort((one, other) => {
    const [a, b] = [one, other].map(({ row }) => column.value(row));
    if (a === null || b === null) return (a === null) - (b === null);
    return (state.up ? 1 : -1) * ((a > b) - (a < b));
  });
}

function isShown(row) {
  if (row.reported && !state.reported) return false;
  if (state.methods.size && !state.methods.has(row.method)) return false;
  const words = [rowName(row), row.backbone, row.source, row.note].join(" ").toLowerCase();
  return words.includes(state.search);
}

const say = (words) => { byId("status").textContent = words; };

function toggle(entry) {
  const open = !entry.panel;
  if (open) {
    const cell = el("td", { colspan: view.columns.length }, panelOf(entry.row));
    entry.panel = el("tr", { class: "panel-row" }, cell);
    entry.tr.after(entry.panel);
    drawWithin(entry.panel);
  } else {
    entry.panel.remove();
    entry.panel = null;
  }
  entry.tr.classList.toggle("opened", open);
  entry.tr.querySelector(".open").setAttribute("aria-expanded", String(open));
}

// Arrow keys walk over the rows, Home and End to the ends, Escape closes the row one is in.
function onRowKey(event) {
  const row = event.target.closest(".panel-row")?.previousElementSibling ?? event.target.closest("tr");
  const button = row.querySelector(".open");
  if (event.key === "Escape" && row.matches(".opened")) {
    button.click();
    button.focus();
  }
  if (event.target !== button) return;
  if (event.key === "End") placeMore(view.shown.length);
  const buttons = [...byId("board").querySelectorAll("tbody:not([hidden]) .open")];
  const place = buttons.indexOf(button);
  const goal = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (goal === undefined) return;
  event.preventDefault();
  buttons[Math.min(Math.max(goal, 0), buttons.length - 1)].focus();
}

// What is behind a row: numbers per seed, hashes, files, curves, classes, pictures.

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value).map(([name, value]) =>
    [el("dt", {}, name), el("dd", {}, value)]));
}

function smallTable({ id, label = `Table of ${id}` }, header, lines) {
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label },
    el("table", { class: "small", id },
      el("thead", {}, el("tr", {}, header.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, lines.map(([first, ...cells]) => el("tr", {},
        el("th", { scope: "row" }, first), cells.map((cell) => el("td", {}, cell)))))));
}

const link = ({ shown, link: target }) => (target ? el("a", { href: target }, shown) : code(shown));
const json = (value) => el("pre", { tabindex: "0" }, JSON.stringify(value, null, 2));
const quiet = (words, title) => el("span", { class: "quiet", title }, words);

// What is folded is made when it is opened for the first time.
function fold(title, make) {
  const details = el("details", {}, el("summary", {}, title));
  details.addEventListener("toggle", () => details.append(make()), { once: true });
  return details;
}

function panelOf(row) {
  if (row.reported) return reportedPanel(row);
  const results = shownFirst(row.results);
  const withClasses = results.find(([, result]) => result.classes);
  const curve = curveNames([row])[0];
  return el("div", { class: "panel" },
    row.stale.length && el("div", { class: "notice" },
      el("strong", {}, "Stale: "), "code, data or files have changed since.",
      el("ul", {}, row.stale.map((reason) => el("li", {}, reason)))),
    el("div", { class: "panel-grid wide-first" },
      el("div", {}, el("h3", {}, "Results"), results.map((entry) => resultTable(row, entry)),
        !results.length && el("p", { class: "quiet" }, "Not evaluated yet.")),
      el("div", {}, el("h3", {}, "Entry"), entryFacts(row))),
    el("div", { class: "panel-grid" },
      curve && el("div", {}, el("h3", {}, "Training"), plot((place) => plotCurves(place, [row], curve), "curves")),
      withClasses && el("div", {}, el("h3", {}, "Per class"),
        plot((place) => plotClasses(place, [row], withClasses[0]), "classes"))),
    row.basis && el("figure", { class: "basis" },
      el("img", { src: row.basis, alt: `Basis images of ${row.method}` }),
      el("figcaption", { class: "quiet" }, "Views of one image, the basis images they span, and their weights.")),
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
  const seeds = new Set(row.records.filter((r) => r.kind === "pretrain").map((r) => r.seed));
  return facts([
    ["Backbone", [row.backbone, ...numbersInWords(row)].join(", ")],
    ["Settings", code(row.config)],
    ["Pretraining data", row.data && code(row.data)],
    ["Pretraining seeds", [...seeds].join(", ")],
    ["Measured on", row.machine],
    ["Code", codeInWords(row.records[0])],
  ]);
}

function codeInWords(record) {
  const { commit, dirty, version, source_hash: source } = DATA.pool[record.code];
  return [`version ${version}, source `, code(source || "?"), commit && `, commit ${commit.slice(0, 10)}`,
    dirty && ", with uncommitted changes"];
}

// The results, the one of the chosen protocol first.
function shownFirst(results) {
  const isChosen = ([i]) => Number(i) === state.protocol;
  return Object.entries(results).sort((a, b) => isChosen(b) - isChosen(a));
}

function resultTable(row, [i, result]) {
  const { kind, id, hash, metrics, definition } = DATA.protocols[i];
  const lines = Object.entries(result.metrics).map(([name, measure]) => {
    const standing = [measure.rank && `rank ${measure.rank}`, measure.verdict, measure.p !== null && pValue(measure.p)];
    return [
      metrics[name].label,
      el("span", { title: measure.std_is }, meanInWords(measure)),
      quiet(intervalInWords(measure)),
      quiet(measure.values.map((value) => fixed(value)).join("  "), measure.replicates.join(", ")),
      quiet(!metrics[name].further && standing.filter(Boolean).join(", ")),
    ];
  });
  const counts = `${counted(result.n_pretrain, "pretraining seed")}, ${counted(result.n_finetune, "trial")}`;
  // Its command makes the pretraining and the evaluation under this protocol again.
  const record = row.records.find((it) => it.kind === kind && it.protocol === `${id} · ${hash}`);
  return el("div", { class: "result" },
    el("p", {}, el("strong", {}, id), " ", code(hash), " ", quiet(counts)),
    smallTable({ label: `Results under ${id}` },
      ["metric", "mean ± std", "95% interval", "each pretraining seed", "test"], lines),
    el("p", { class: "command" }, "Reproduce this row: ", code(record.command)),
    fold("Protocol definition", () => json(DATA.pool[definition])));
}

function recordFold(record) {
  const title = [el("span", { class: "kind" }, record.kind), ` ${record.name} `,
    quiet(`seed ${record.seed} · ${record.created}`)];
  return fold(title, () => recordFacts(record));
}

function recordFacts(record) {
  const config = DATA.pool[record.config];
  const prints = Object.entries(record.data).map(([role, print]) => [`Data, ${role}`,
    [code(print.hash || "?"), isNumber(print.files) && ` ${counted(print.files, "file")}`,
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
      ["Code", codeInWords(record)],
      ["Files", record.files.map((file, i) => [i > 0 && ", ", link(file)])],
      ["Metrics", Object.entries(record.metrics).map(([name, value]) => `${name} ${short(value)}`).join(", ")],
    ]),
    fold("Config", () => json(config.values)),
    fold("Libraries and hardware", () => json({ ...DATA.pool[record.libraries], ...DATA.pool[record.hardware] })),
    record.certificate !== null && fold("Certificate of the conversion", () => json(DATA.pool[record.certificate])));
}
