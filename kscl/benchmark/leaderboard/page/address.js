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
