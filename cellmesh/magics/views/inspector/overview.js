// What a value holds: the list of its tensors, and one of them in numbers, a row for each group of equal ranks.

const MAX_ROWS = 150; // in the page at a time; the filter finds the others

const FLAGS = { nan: "NaN", inf: "Inf" };
const drawFlags = (flags) => flags.map((flag) => make("span", { class: `cmi-flag cmi-flag-${flag}` }, FLAGS[flag] ?? flag));

// The list of a value's tensors, which are found by their words and flags, and sorted by any column.
class ItemList {
  constructor(root, choose) {
    this.choose = choose;
    this.order = [null, false]; // a column, and whether it descends
    this.filter = make("input", { type: "search", placeholder: "filter by name, dtype or flag", "aria-label": "filter", oninput: () => this.redraw() });
    this.said = make("span", { class: "cm-weak" });
    this.head = make("tr");
    this.body = make("tbody");
    root.replaceChildren(
      make("div", { class: "cmi-bar" }, this.filter, this.said),
      make("div", { class: "cmi-scroll" }, make("table", {}, make("thead", {}, this.head), this.body)));
  }

  show(items, total, chosen, headers) {
    Object.assign(this, { items, total, chosen, headers });
    this.redraw();
  }

  sort(at) {
    this.order = [at, this.order[0] === at ? !this.order[1] : at > 0];
    this.redraw();
  }

  redraw() {
    const [by, descends] = this.order;
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.items.filter((item) => {
      const text = [item.path, item.cells[1], ...item.flags.map((flag) => FLAGS[flag] ?? flag)].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (by !== null) {
      const textOf = (item) => [item.label, item.flags.join(" "), ...item.cells][by];
      const numberOf = (text) => parseFloat(text) * ({ kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }[text.split(" ")[1]] ?? 1) || -1;
      const compare = (one, other) => (NUMBERS.has(this.headers[by - 2])
        ? numberOf(textOf(one)) - numberOf(textOf(other)) || 0 : textOf(one).localeCompare(textOf(other), "en", { numeric: true }));
      found.sort((one, other) => (descends ? compare(other, one) : compare(one, other)));
    }
    this.head.replaceChildren(...["name", "flags", ...this.headers].map((text, at) => make("th",
      { scope: "col", class: NUMBERS.has(text) ? "cmi-number" : null, "aria-sort": at === by ? (descends ? "descending" : "ascending") : "none" },
      makeButton(text, `sort by ${text}`, () => this.sort(at), { class: "cmi-sort" }))));
    this.body.replaceChildren(...found.slice(0, MAX_ROWS).map((item) => this.row(item)));
    const [more, left] = [found.length > MAX_ROWS ? `, the first ${MAX_ROWS} shown` : "", this.total - this.items.length];
    const rest = left > 0 ? `; ${count(left, "more tensor")} not listed` : "";
    this.said.textContent = `${words.length ? `${found.length.toLocaleString("en")} of ` : ""}${count(this.items.length, "tensor")}${more}${rest}`;
  }

  row(item) {
    const name = makeButton(item.label, `look at ${item.label}`, () => this.choose(item.path), {
      class: "cmi-link cm-mono", "aria-current": item.path === this.chosen ? "true" : null,
    });
    return make("tr", { class: item.path === this.chosen ? "cmi-chosen" : null, "data-name": item.path },
      make("td", {}, name), make("td", {}, ...drawFlags(item.flags)),
      ...item.cells.map((text, at) => make("td", { class: NUMBERS.has(this.headers[at]) ? "cmi-number" : "cm-mono cmi-short", title: text }, text)));
  }
}

const NUMBERS = new Set(["min", "max", "mean", "std", "norm", "NaN", "Inf", "zeros", "memory of all ranks"]);

function classOf(header, text = "") {
  if (!NUMBERS.has(header)) return header === "value" ? "cm-mono cmi-text" : header === "histogram" ? "cm-mono cmi-histogram" : "cm-mono";
  return `cm-mono cmi-number${(header === "NaN" || header === "Inf") && Number(text) > 0 ? " cmi-bad" : ""}`;
}

function drawDetail(root, detail) {
  const { headers, rows, notes, missing } = detail;
  const drawRow = ([ranks, ...cells]) => make("tr", { "data-ranks": ranks },
    make("th", { scope: "row", class: "cm-mono" }, ranks),
    ...cells.map((text, at) => make("td", { class: classOf(headers[at + 1], text), "data-key": headers[at + 1] }, text)));
  const drawMissing = ({ ranks, text }) => make("tr", { "data-ranks": ranks, class: "cmi-missing" },
    make("th", { scope: "row", class: "cm-mono" }, ranks), make("td", { colspan: Math.max(headers.length - 1, 1), class: "cmi-text" }, text));
  root.replaceChildren(
    make("div", { class: "cmi-heading cm-mono" }, detail.label),
    make("div", { class: "cmi-scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...headers.map((text) => make("th", { scope: "col", class: NUMBERS.has(text) ? "cmi-number" : null }, text)))),
      make("tbody", {}, ...rows.map(drawRow), ...missing.map(drawMissing)))),
    make("div", { class: detail.is_bad ? "cmi-bad cmi-said" : "cm-weak cmi-said" }, detail.said),
    ...notes.map((text) => make("div", { class: "cm-weak cmi-said" }, text)));
}
