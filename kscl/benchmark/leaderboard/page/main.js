// The address holds what is shown, so that a link shows what its sender saw.

const protocolName = ({ kind, id, hash }) => `${kind}/${id}/${hash}`;

// A column of a metric is known by its protocol's hash: indices change as a board grows.
const columnName = (key) => key.replace(/^\d+(?=\/)/, (i) => DATA.protocols[i].hash);

function writeAddress() {
  const words = new URLSearchParams();
  if (state.protocol >= 0) words.set("protocol", protocolName(DATA.protocols[state.protocol]));
  for (const method of state.methods) words.append("method", method);
  if (state.search) words.set("find", state.search);
  if (!state.reported) words.set("reported", "no");
  if (state.key) {
    words.set("sort", columnName(state.key));
    words.set("order", state.up ? "up" : "down");
  }
  if (state.compare.length) words.set("compare", state.compare.join(" "));
  const shown = words.toString();
  if (shown !== location.hash.slice(1)) history.replaceState(null, "", `#${shown}`);
}

// Whatever the address says that this page does not have is left out.
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const wanted = words.get("protocol");
  const found = DATA.protocols.findIndex((protocol) => protocolName(protocol) === wanted);
  const alone = DATA.protocols.length === 1 && !wanted ? 0 : -1;
  const protocol = found >= 0 ? found : alone;
  const methods = new Set(DATA.rows.map((row) => row.method));
  state.methods = new Set(words.getAll("method").filter((method) => methods.has(method)));
  state.search = (words.get("find") || "").toLowerCase();
  state.reported = words.get("reported") !== "no";
  const column = columnsOf(DATA, protocol).find(({ key }) => columnName(key) === words.get("sort"));
  state.key = column ? column.key : null;
  state.up = words.get("order") === "up";
  state.compare = [...new Set((words.get("compare") || "").split(" "))].filter(rowOfKey).slice(0, MAX_COMPARED);
  byId("search").value = state.search;
  byId("reported").checked = state.reported;
  for (const chip of byId("methods").querySelectorAll(".chip")) {
    chip.setAttribute("aria-pressed", String(state.methods.has(chip.textContent)));
  }
  byId("protocol").value = String(protocol);
  chooseProtocol(protocol);
  drawCompare();
}

// The page: what is built once, and what happens when a control changes.

const DATA = JSON.parse(byId("data").textContent);
const MAX_CHIPS = 16;
const THEMES = ["auto", "light", "dark"];

function buildHead() {
  byId("title").textContent = DATA.title;
  byId("summary").textContent = [counted(DATA.rows.length, "row"), counted(DATA.records, "record"),
    counted(DATA.protocols.length, "protocol")].join(" · ");
  byId("legend").textContent =
    "± is the standard deviation over pretraining seeds (° over trials on one backbone). "
    + "≈ not distinguishable from the best of its column. † test sampling only. "
    + "Every metric column has one protocol.";
}

function buildControls() {
  const options = DATA.protocols.map((protocol, i) => el("option", { value: String(i) }, protocol.name));
  byId("protocol").append(el("option", { value: "-1" }, "All protocols, side by side"), ...options);
  byId("protocol").addEventListener("change", (event) => chooseProtocol(Number(event.target.value)));
  const { chips, rest } = commonMethods();
  byId("methods").append(...chips.map((method) => el("button", { type: "button", class: "chip",
    "aria-pressed": "false", on: { click: (event) => toggleMethod(event.currentTarget, method) } }, method)),
  rest ? el("span", { class: "quiet more" }, `and ${rest} more: use Find`) : "");
  byId("search").addEventListener("input", (event) => {
    state.search = event.target.value.trim().toLowerCase();
    filter();
  });
  byId("reported").addEventListener("change", (event) => {
    state.reported = event.target.checked;
    filter();
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      byId("search").focus();
    }
  });
}

// The methods with the most rows, by name; too many buttons are of no use.
function commonMethods() {
  const counts = new Map();
  for (const { method } of DATA.rows) counts.set(method, (counts.get(method) || 0) + 1);
  const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || (a < b ? -1 : 1));
  return { chips: names.slice(0, MAX_CHIPS).sort(), rest: Math.max(0, names.length - MAX_CHIPS) };
}

function toggleMethod(chip, method) {
  const on = !state.methods.has(method);
  if (on) state.methods.add(method);
  else state.methods.delete(method);
  chip.setAttribute("aria-pressed", String(on));
  filter();
}

// A name in a list is cut if it is long; this one is whole.
const fullName = ({ id, hash, name }) => `${id} · ${hash}${name.split(hash)[1] || ""}`;

function chooseProtocol(protocol) {
  state.protocol = protocol;
  const chosen = DATA.protocols[protocol];
  byId("protocol-note").textContent = chosen
    ? `${fullName(chosen)} · ranked by ${chosen.labels[chosen.metrics.indexOf(chosen.headline)]}` : "";
  byId("reported").closest("label").hidden = !chosen?.reported.length;
  if (chosen) byId("metric").value = `${protocol}/${chosen.headline}`;
  buildTable();
  filter();
  drawCompare();
}

let waiting = 0;

function filter() {
  render();
  sayCount();
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawPlots);
}

function buildNotes() {
  const parts = [];
  if (DATA.summary.rows.length) {
    const lines = DATA.summary.rows.map(({ row, mean_rank: mean, interval, protocols: n }) => [rowName(DATA.rows[row]),
      fixed(mean, 2), interval ? `${fixed(interval[0], 2)} to ${fixed(interval[1], 2)}` : "one seed: none",
      String(n)]);
    parts.push(el("h2", {}, "Summary over protocols"), el("p", {}, DATA.summary.words),
      smallTable("mean-ranks", ["row", "mean rank", "95% interval", "protocols"], lines));
  }
  parts.push(el("h2", {}, "The test"), el("p", {}, DATA.test));
  if (DATA.problems.length) {
    parts.push(el("h2", { id: "problems" }, "Files that were not counted"),
      el("ul", { class: "problems" }, DATA.problems.map((problem) => el("li", {}, problem))));
  }
  byId("notes").append(...parts);
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  byId("theme").dataset.theme = theme;
}

setTheme("auto");
byId("theme").addEventListener("click", (event) => {
  const next = (THEMES.indexOf(event.currentTarget.dataset.theme) + 1) % THEMES.length;
  setTheme(THEMES[next]);
});
buildHead();
buildControls();
buildPlots();
buildNotes();
window.addEventListener("beforeprint", () => placeMore(view.shown.length));
// A panel is as wide as the visible part of the table, however wide the table is.
new ResizeObserver(([{ target }]) => {
  target.style.setProperty("--frame-width", `${target.clientWidth}px`);
}).observe(byId("frame"));
byId("clear").addEventListener("click", () => setCompared([]));
window.addEventListener("hashchange", readAddress);
readAddress();
