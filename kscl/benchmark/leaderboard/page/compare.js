// Rows side by side: what they differ by, in which classes and settings, and what they cost.

const MAX_COMPARED = 6; // as many as there are colors

const rowOfKey = (key) => DATA.rows.find((row) => row.key === key);

function pickBox(row) {
  const box = el("input", { type: "checkbox", class: "pick", "data-key": row.key,
    "aria-label": `Compare ${rowName(row)}`, title: "Compare this row",
    on: { change: (event) => pick(row, event.target.checked) } });
  box.checked = state.compare.includes(row.key);
  return el("label", { class: "picker" }, box);
}

function pick(row, on) {
  const others = state.compare.filter((key) => key !== row.key);
  const isFull = on && others.length >= MAX_COMPARED;
  if (isFull) say(`At most ${MAX_COMPARED} rows can be compared.`);
  setCompared(on && !isFull ? [...others, row.key] : others);
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
function differenceOf({ pairs }, row, to) {
  const [i, j] = [DATA.rows.indexOf(row), DATA.rows.indexOf(to)];
  const found = pairs[`${j}-${i}`];
  if (!found) return pairs[`${i}-${j}`];
  const turned = (ends) => ends && [-ends[1], -ends[0]];
  return { ...found, mean: -found.mean, welch: turned(found.welch), by_seed: turned(found.by_seed),
    by_image: turned(found.by_image) };
}

const signed = (value) => `${value < 0 ? "−" : "+"}${fixed(Math.abs(value))}`;
const signedEnds = (ends, otherwise) => (ends ? ends.map(signed).join(" to ") : otherwise);

function compareUnder(i, rows) {
  const protocol = DATA.protocols[i];
  const { label } = protocol.metrics[protocol.headline];
  const having = rows.filter((row) => row.results[i]);
  if (having.length < 2) return [];
  const lines = having.map((row, place) => {
    const { mean, values } = headlineOf(row, i);
    const first = [rowName(row), fixed(mean)];
    if (!place) return [...first, "reference", "", "", "", String(values.length)];
    const found = differenceOf(protocol, row, having[0]);
    if (!found) return [...first, "not in this page: use the command below", "", "", "", ""];
    return [...first, signed(found.mean), signedEnds(found.welch, "one seed: none"),
      signedEnds(found.by_seed, "one seed: none"), signedEnds(found.by_image, "not recorded"),
      `${values.length}, ${found.shared} shared`];
  });
  const entries = having.filter((row) => row.results[i].classes).map((row) => ({ name: rowName(row),
    series: rows.indexOf(row), values: row.results[i].classes }));
  return [el("h3", {}, protocol.name),
    smallTable({ id: `differences-${i}` }, ["row", label, `${label} − reference`, "Welch", "by seed",
      "by image", "seeds"], lines),
    ...(entries.length > 1 ? [el("h4", {}, `${label} of each class`),
      plot((place) => classChart(place, entries), "compare-classes")] : [])];
}

// The settings of pretraining that can change a result, where a record says them.
function compareSettings(rows) {
  const settings = rows.map((row) => DATA.pool[row.settings]);
  const known = settings.filter(Boolean);
  const shown = (of, key) => (key in of ? JSON.stringify(of[key]) : "–");
  const differing = [...new Set(known.flatMap(Object.keys))].sort()
    .filter((key) => new Set(known.map((of) => shown(of, key))).size > 1);
  if (!differing.length) {
    return el("p", { class: "quiet" }, known.length > 1 ? "None that can change a result."
      : "Fewer than two of these rows have a pretraining record.");
  }
  return smallTable({ id: "settings" }, ["setting", ...rows.map(rowName)], differing.map((key) => [key,
    ...settings.map((of) => (of ? shown(of, key) : "no pretraining record"))]));
}

function compareCosts(rows) {
  const names = Object.keys(DATA.costs).filter((name) => rows.some((row) => name in row.costs));
  return smallTable({ id: "costs" }, ["cost", ...rows.map(rowName)], names.map((name) => [DATA.costs[name],
    ...rows.map((row) => (name in row.costs ? short(row.costs[name]) : "not recorded"))]));
}

function drawCompare() {
  const rows = state.compare.map(rowOfKey);
  byId("compare").hidden = !rows.length;
  byId("compared").replaceChildren(...rows.map((row, i) => el("span", { class: `key s${i}` },
    rowName(row), !i && " (reference)")));
  if (rows.length < 2) {
    byId("comparison").replaceChildren(el("p", {}, "Tick another row to compare it with this one."));
    return;
  }
  const chosen = state.protocol < 0 ? DATA.protocols.map((_, i) => i) : [state.protocol];
  const parts = chosen.flatMap((i) => compareUnder(i, rows));
  byId("comparison").replaceChildren(
    ...(parts.length ? parts : [el("p", {}, "No two of these rows have a result under this protocol.")]),
    el("p", { class: "quiet" }, DATA.intervals),
    el("h3", {}, "Settings that differ"), compareSettings(rows),
    el("h3", {}, "Costs"), compareCosts(rows),
    el("p", { class: "quiet" }, "The same in Markdown: ",
      code(`kscl compare ${state.compare.join(" ")} --folders ${DATA.folders}`)));
  drawWithin(byId("comparison"));
}
