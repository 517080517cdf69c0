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
  view.columns = columnsOf(DATA, state.protocol).filter((column) => column.key === "method"
    || rows.some((row) => column.value(row) !== null && column.value(row) !== ""));
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

// The board's own order within a protocol: by the mean that ranks, highest first.
function ordered(rows) {
  if (state.protocol < 0) return rows;
  const { headline } = DATA.protocols[state.protocol];
  const value = (row) => measureOf(row, state.protocol, headline)?.mean ?? -Infinity;
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
const wordsOf = (row) => `${rowName(row)} ${row.source || ""} ${row.note || ""}`.toLowerCase();

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
