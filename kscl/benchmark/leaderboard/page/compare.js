// Rows side by side: what they differ by, in which classes and settings, and what they cost.

const MAX_COMPARED = 6; // as many as there are colors

const rowOfKey = (key) => DATA.rows.find((row) => row.key === key);
const comparedRows = () => state.compare.map(rowOfKey).filter(Boolean);

function pickBox(row) {
  const box = el("input", { type: "checkbox", class: "pick", "data-key": row.key,
    "aria-label": `Compare ${rowName(row)}`, title: "Compare this row",
    on: { change: (event) => pick(row, event.target.checked) } });
  box.checked = state.compare.includes(row.key);
  return el("label", { class: "picker" }, box);
}

function pick(row, on) {
  const others = state.compare.filter((key) => key !== row.key);
  if (on && others.length >= MAX_COMPARED) say(`At most ${MAX_COMPARED} rows can be compared.`);
  setCompared(on && others.length < MAX_COMPARED ? [...others, row.key] : others);
}

function setCompared(keys) {
  state.compare = keys;
  for (const box of byId("board").querySelectorAll(".pick")) {
    box.checked = keys.includes(box.dataset.key);
  }
  drawCompare();
  writeAddress();
}

// One row − another; the page holds each pair once.
function differenceOf(protocol, row, to) {
  const [i, j] = [DATA.rows.indexOf(row), DATA.rows.indexOf(to)];
  const { pairs } = DATA.protocols[protocol];
  if (pairs[`${i}-${j}`]) return pairs[`${i}-${j}`];
  const found = pairs[`${j}-${i}`];
  if (!found) return null;
  const turned = (ends) => ends && [-ends[1], -ends[0]];
  return { ...found, mean: -found.mean, welch: turned(found.welch), by_seed: turned(found.by_seed),
    by_image: turned(found.by_image) };
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
const signedEnds = (ends) => (ends ? `${signed(ends[0])} to ${signed(ends[1])}` : "");

function smallTable(id, header, lines) {
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Table of ${id}` },
    el("table", { class: "small", id },
      el("thead", {}, el("tr", {}, header.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, lines.map(([first, ...cells]) => el("tr", {},
        el("th", { scope: "row" }, first), cells.map((cell) => el("td", {}, cell)))))));
}

function compareUnder(protocol, rows) {
  const { headline, labels, metrics, name } = DATA.protocols[protocol];
  const having = rows.filter((row) => measureOf(row, protocol, headline));
  if (having.length < 2) return [];
  const label = labels[metrics.indexOf(headline)];
  const seeds = (row) => measureOf(row, protocol, headline).values.length;
  const lines = having.map((row, i) => {
    const first = [rowName(row), fixed(measureOf(row, protocol, headline).mean, 2)];
    if (!i) return [...first, "reference", "", "", "", String(seeds(row))];
    const found = differenceOf(protocol, row, having[0]);
    if (!found) return [...first, "not in this page: use the command below", "", "", "", ""];
    return [...first, signed(found.mean), signedEnds(found.welch) || "one seed: none",
      signedEnds(found.by_seed) || "one seed: none", signedEnds(found.by_image) || "not recorded",
      `${seeds(row)}, ${found.shared} shared`];
  });
  const bars = el("div", { class: "plot compare-classes", "data-protocol": String(protocol) });
  const classes = having.filter((row) => Object.keys(resultOf(row, protocol).classes).length);
  return [el("h3", {}, name),
    smallTable(`differences-${protocol}`, ["row", label, `${label} − reference`, "Welch", "by seed",
      "by image", "seeds"], lines),
    classes.length > 1 ? el("div", {}, el("h4", {}, `${label} of each class`), bars) : ""];
}

function flat(node, prefix = "") {
  if (node === null || typeof node !== "object" || Array.isArray(node)) return [[prefix, node]];
  return Object.entries(node).flatMap(([key, value]) => flat(value, prefix ? `${prefix}.${key}` : key));
}

const isCompared = (key) => !DATA.not_compared.some((name) => key === name || key.startsWith(`${name}.`));

// The settings of a row's pretraining that can change a result; null if no record says them.
function settingsOf(row) {
  const made = row.records.find((record) => record.kind === "pretrain");
  if (!made) return null;
  return new Map(flat(pooled(made.config).values).filter(([key]) => isCompared(key))
    .map(([key, value]) => [key, JSON.stringify(value)]));
}

function compareSettings(rows) {
  const settings = rows.map(settingsOf);
  const known = settings.filter(Boolean);
  const keys = [...new Set(known.flatMap((of) => [...of.keys()]))].sort();
  const differing = keys.filter((key) => new Set(known.map((of) => of.get(key))).size > 1);
  const parts = [];
  if (differing.length) {
    parts.push(smallTable("settings", ["setting", ...rows.map(rowName)], differing.map((key) => [key,
      ...settings.map((of) => (of ? of.get(key) ?? "–" : "no pretraining record"))])));
  } else {
    parts.push(el("p", { class: "quiet" }, known.length > 1 ? "None that can change a result."
      : "Fewer than two of these rows have a pretraining record."));
  }
  return parts;
}

function compareCosts(rows) {
  const names = Object.keys(DATA.costs).filter((name) => rows.some((row) => isNumber(row.costs[name])));
  return smallTable("costs", ["cost", ...rows.map(rowName)], names.map((name) => [DATA.costs[name],
    ...rows.map((row) => (isNumber(row.costs[name]) ? short(row.costs[name]) : "not recorded"))]));
}

function drawCompare() {
  const rows = comparedRows();
  byId("compare").hidden = !rows.length;
  if (!rows.length) return;
  byId("compared").replaceChildren(...rows.map((row, i) => el("span", { class: `key s${i}` },
    rowName(row), i ? "" : " (reference)")));
  if (rows.length < 2) {
    byId("comparison").replaceChildren(el("p", {}, "Tick another row to compare it with this one."));
    return;
  }
  const chosen = state.protocol < 0 ? DATA.protocols.map((_, i) => i) : [state.protocol];
  const parts = chosen.flatMap((protocol) => compareUnder(protocol, rows));
  byId("comparison").replaceChildren(
    ...(parts.length ? parts : [el("p", {}, "No two of these rows have a result under this protocol.")]),
    el("p", { class: "quiet" }, DATA.intervals),
    el("h3", {}, "Settings that differ"), ...compareSettings(rows),
    el("h3", {}, "Costs"), compareCosts(rows),
    el("p", { class: "quiet" }, "The same in Markdown: ",
      code(`kscl compare ${rows.map((row) => row.key).join(" ")} --folders ${DATA.folders}`)));
  for (const place of byId("comparison").querySelectorAll(".compare-classes")) {
    const protocol = Number(place.dataset.protocol);
    const entries = rows.map((row, i) => ({ name: rowName(row), series: i,
      values: resultOf(row, protocol)?.classes || {} }));
    const label = DATA.protocols[protocol].name;
    barChart(place, entries, mostDifferent(entries), `values of each class under ${label}`);
  }
}
