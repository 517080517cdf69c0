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
  const isAlone = DATA.protocols.length === 1 && !wanted;
  const protocol = isAlone ? 0 : DATA.protocols.findIndex((it) => protocolName(it) === wanted);
  state.methods = new Set(words.getAll("method").filter((name) => DATA.rows.some((row) => row.method === name)));
  state.search = (words.get("find") || "").toLowerCase();
  state.reported = words.get("reported") !== "no";
  const column = columnsOf(protocol).find(({ key }) => columnName(key) === words.get("sort"));
  state.key = column ? column.key : null;
  state.up = words.get("order") === "up";
  state.compare = [...new Set((words.get("compare") || "").split(" "))].filter(rowOfKey).slice(0, MAX_COMPARED);
  byId("search").value = state.search;
  byId("reported").checked = state.reported;
  byId("protocol").value = String(protocol);
  chooseProtocol(protocol);
}

// The page: what is built once, and what happens when a control changes.

const MAX_CHIPS = 16;
const THEMES = ["auto", "light", "dark"];

function buildControls() {
  const options = DATA.protocols.map((protocol, i) => el("option", { value: i }, protocol.name));
  byId("protocol").append(el("option", { value: -1 }, "All protocols, side by side"), ...options);
  byId("protocol").addEventListener("change", (event) => chooseProtocol(Number(event.target.value)));
  byId("methods").append(...methodChips());
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
  byId("theme").addEventListener("click", (event) => {
    const { dataset } = document.documentElement;
    dataset.theme = THEMES[(THEMES.indexOf(dataset.theme) + 1) % THEMES.length];
    event.currentTarget.textContent = `Theme: ${dataset.theme}`;
  });
  byId("clear").addEventListener("click", () => setCompared([]));
  for (const id of ["rows", "reported-rows"]) byId(id).addEventListener("keydown", onRowKey);
}

// The methods with the most rows, by name; too many buttons are of no use.
function methodChips() {
  const counts = Map.groupBy(DATA.rows, (row) => row.method);
  const size = (name) => counts.get(name).length;
  const names = [...counts.keys()].sort((a, b) => size(b) - size(a) || (a < b ? -1 : 1));
  const chips = names.slice(0, MAX_CHIPS).sort().map((method) => el("button", { type: "button", class: "chip",
    on: { click: () => toggleMethod(method) } }, method));
  const rest = names.length - chips.length;
  return rest ? [...chips, el("span", { class: "quiet more" }, `and ${rest} more: use Find`)] : chips;
}

function toggleMethod(method) {
  if (!state.methods.delete(method)) state.methods.add(method);
  filter();
}

// A name in a list is cut if it is long; this one is whole.
const fullName = ({ id, hash, name }) => `${id} · ${hash}${name.split(hash)[1] || ""}`;

function chooseProtocol(protocol) {
  state.protocol = protocol;
  const chosen = DATA.protocols[protocol];
  byId("protocol-note").textContent = chosen
    ? `${fullName(chosen)} · ranked by ${chosen.metrics[chosen.headline].label}` : "";
  byId("reported").closest("label").hidden = !chosen?.reported.length;
  if (chosen) byId("metric").value = `${protocol}/${chosen.headline}`;
  buildTable();
  filter();
  drawCompare();
}

let waiting = 0;

function filter() {
  for (const chip of byId("methods").querySelectorAll(".chip")) {
    chip.setAttribute("aria-pressed", String(state.methods.has(chip.textContent)));
  }
  render();
  const [shown, all] = [view.shown.length, counted(view.rows.length, "row")];
  say(shown === view.rows.length ? all : `${shown.toLocaleString("en")} of ${all}`);
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawPlots);
}

function buildMeanRanks() {
  if (!DATA.mean_ranks.length) return;
  const lines = DATA.mean_ranks.map(({ row, mean_rank: mean, interval, protocols }) => [rowName(DATA.rows[row]),
    fixed(mean), interval ? range(interval) : "one seed: none", String(protocols)]);
  byId("ranks").append(smallTable({ id: "mean-ranks" }, ["row", "mean rank", "95% interval", "protocols"], lines));
}

buildControls();
buildPlots();
buildMeanRanks();
window.addEventListener("beforeprint", () => placeMore(view.shown.length));
window.addEventListener("hashchange", readAddress);
readAddress();
