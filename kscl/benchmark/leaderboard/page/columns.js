// The columns of a view: the name of each, what it sorts by and what it shows.

const HINTS = {
  method: "What was pretrained, and how",
  K: "Key views per image (shots)",
  rho: "Fraction of the eigenvalue mass that a subspace keeps",
  mean_rank: "Mean number of basis vectors kept per image",
  minutes_per_epoch: "Minutes of pretraining per pass over the images",
  views_per_second: "Augmented views through the encoders per second, small ones included",
  n_pretrain: "Pretraining seeds: the replicates of every comparison",
  n_finetune: "Trials of the evaluation, over all pretraining seeds",
};

// `protocol` is an index, or -1 for all protocols side by side.
function columnsOf(data, protocol) {
  const chosen = protocol < 0 ? data.protocols.map((_, i) => i) : [protocol];
  const columns = [];
  if (protocol >= 0) columns.push(rankColumn(protocol));
  columns.push(methodColumn(protocol));
  columns.push(textColumn("backbone", "backbone"));
  columns.push(plainColumn("epochs", "epochs", short));
  columns.push(plainColumn("K", "K", short));
  columns.push(plainColumn("rho", "ρ", percent));
  for (const i of chosen) {
    const { metrics, labels, letter } = data.protocols[i];
    metrics.forEach((metric, j) => {
      const label = protocol < 0 && letter ? `${labels[j]} (${letter})` : labels[j];
      columns.push(metricColumn(data, i, metric, label, protocol >= 0));
    });
    if (protocol >= 0) columns.push(intervalColumn(data, i), ...furtherColumns(data, i));
  }
  for (const [key, label] of Object.entries(data.figures)) {
    const digits = key === "views_per_second" ? 0 : 2;
    columns.push(figureColumn(key, label, digits));
  }
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
      row.tag && el("span", { class: "tag" }, row.tag),
      badges(row, protocol),
    ],
  };
}

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

function figureColumn(key, label, digits) {
  return {
    key, label: label.replace("min/", "min / "), type: "number", hint: HINTS[key], wraps: true,
    aside: true, ascending: key === "minutes_per_epoch",
    value: (row) => row.figures[key] ?? null,
    cell: (row) => {
      if (!isNumber(row.figures[key])) return "";
      const hint = row.metrics ? row.note : row.machine && key !== "mean_rank" && `on ${row.machine}`;
      const words = row.metrics ? short(row.figures[key]) : fixed(row.figures[key], digits);
      return el("span", { title: hint || null }, words);
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
    cell: (row) => metricCell(measureOf(row, protocol, metric), spread, marked),
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
function metricCell(measure, spread, marked) {
  if (!measure) return "";
  const best = measure.verdict === "best";
  const of = measure.verdict === "reported" ? 1 : 2;
  const pad = of === 1 ? el("span", { class: "pad" }, "0") : "";
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
    key: "interval", label: "95 % interval", type: "number",
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
