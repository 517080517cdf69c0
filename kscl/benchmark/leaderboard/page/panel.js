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
        el("thead", {}, el("tr", {}, ["metric", "mean ± std", "95 % interval", "each pretraining seed", "test"].map((name) =>
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
