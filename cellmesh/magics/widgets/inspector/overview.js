// What a value holds: the list of its tensors, and one of them in numbers, a row for each group of equal ranks.

const MAX_ROWS = 150; // in the page at a time; the filter finds the others

const FLAGS = { nan: "NaN", inf: "Inf", unequal: "unequal", dead: "dead", none: "no gradient", frozen: "frozen", missing: "missing" };
const drawFlags = (flags) => flags.map((flag) => make("span", { class: `cmi-flag cmi-flag-${flag}` }, FLAGS[flag] ?? flag));

// A table of things that are found by their words and flags. Who extends it has redraw() and row(thing).
class FilteredTable {
  constructor(root, label, placeholder, heads) {
    this.filter = make("input", { type: "search", placeholder, "aria-label": label, oninput: () => this.redraw() });
    this.said = make("span", { class: "cm-weak" });
    this.body = make("tbody");
    root.replaceChildren(
      make("div", { class: "cmi-bar" }, this.filter, this.said),
      make("div", { class: "cmi-scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), this.body)));
  }

  // noun: what the things are. rest: how many more there are, in words.
  draw(things, textOf, noun, rest) {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = things.filter((thing) => {
      const text = [textOf(thing), ...thing.flags.map((flag) => FLAGS[flag] ?? flag)].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.body.replaceChildren(...found.slice(0, MAX_ROWS).map((thing) => this.row(thing)));
    const more = found.length > MAX_ROWS ? `, the first ${MAX_ROWS} shown` : "";
    this.said.textContent = `${words.length ? `${found.length.toLocaleString("en")} of ` : ""}${count(things.length, noun)}${more}${rest}`;
  }
}

class ItemList extends FilteredTable {
  constructor(root, choose) {
    super(root, "filter", "filter by name, dtype or flag", []);
    this.choose = choose;
    this.head = root.querySelector("thead tr");
  }

  show(items, total, chosen, headers) {
    Object.assign(this, { items, total, chosen, headers });
    const numbers = this.isNumber = headers.map((text) => NUMBERS.has(text) || text.startsWith("memory"));
    this.head.replaceChildren(...["name", "flags", ...headers].map((text, at) =>
      make("th", { scope: "col", class: numbers[at - 2] ? "cmi-number" : null }, text)));
    this.redraw();
  }

  redraw() {
    const left = this.total - this.items.length;
    this.draw(this.items, (item) => `${item.path} ${item.cells[1]}`, "tensor", left > 0 ? `; ${count(left, "more tensor")} not listed` : "");
  }

  row(item) {
    const name = makeButton(item.label, `look at ${item.label}`, () => this.choose(item.path), {
      class: "cmi-link cm-mono", "aria-current": item.path === this.chosen ? "true" : null,
    });
    return make("tr", { class: item.path === this.chosen ? "cmi-chosen" : null },
      make("td", {}, name), make("td", {}, ...drawFlags(item.flags)),
      ...item.cells.map((text, at) => make("td", { class: this.isNumber[at] ? "cmi-number" : "cm-mono cmi-short", title: text }, text)));
  }
}

const NUMBERS = new Set(["min", "max", "mean", "std", "norm", "NaN", "Inf", "zeros"]);

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
