// What a value holds: the list of its tensors, and one of them in numbers, a row for each group of equal ranks.

const MEMORY_OF_ALL = "memory of all ranks";
const MAX_ROWS = 150; // in the page at a time; the filter finds the others

const FLAGS = { nan: "NaN", inf: "Inf", unequal: "unequal", dead: "dead", none: "no gradient", frozen: "frozen", missing: "missing" };
const drawFlags = (flags) => flags.map((flag) => make("span", { class: `cmi-flag cmi-flag-${flag}` }, FLAGS[flag] ?? flag));

class ItemList {
  constructor(root, choose) {
    this.items = [];
    this.choose = choose;
    this.filter = make("input", {
      type: "search", placeholder: "filter by name, dtype or flag", "aria-label": "filter", oninput: () => this.redraw(),
    });
    this.said = make("span", { class: "cm-weak" });
    this.body = make("tbody");
    const headers = ["name", "flags", "shape or value", "dtype", MEMORY_OF_ALL]
      .map((text) => make("th", { scope: "col", class: text === MEMORY_OF_ALL ? "cmi-number" : null }, text));
    root.replaceChildren(
      make("div", { class: "cmi-bar" }, this.filter, this.said),
      make("div", { class: "cmi-scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...headers)), this.body)));
  }

  show(items, total, chosen) {
    Object.assign(this, { items, total, chosen });
    this.redraw();
  }

  redraw() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const texts = (item) => `${item.path} ${item.dtype} ${item.flags.map((flag) => FLAGS[flag] ?? flag).join(" ")}`.toLowerCase();
    const found = words.length ? this.items.filter((item) => { const text = texts(item); return words.every((word) => text.includes(word)); }) : this.items;
    this.body.replaceChildren(...found.slice(0, MAX_ROWS).map((item) => this.row(item)));
    const more = found.length > MAX_ROWS ? `, the first ${MAX_ROWS} shown` : "";
    const rest = this.total > this.items.length ? `; ${count(this.total - this.items.length, "more tensor")} not listed` : "";
    this.said.textContent = `${words.length ? `${found.length.toLocaleString("en")} of ` : ""}${count(this.items.length, "tensor")}${more}${rest}`;
  }

  row(item) {
    const name = makeButton(item.label, `look at ${item.label}`, () => this.choose(item.path), {
      class: "cmi-link cm-mono", "aria-current": item.path === this.chosen ? "true" : null,
    });
    return make("tr", { class: item.path === this.chosen ? "cmi-chosen" : null },
      make("td", {}, name), make("td", {}, ...drawFlags(item.flags)),
      make("td", { class: "cm-mono cmi-short", title: item.text || null }, item.text || formatShape(item.shape)), make("td", {}, item.dtype),
      make("td", { class: "cmi-number" }, item.num_bytes ? formatBytes(item.num_bytes) : ""));
  }
}

function drawHistogram(counts, label) {
  const [width, height] = [120, 26];
  const most = Math.max(...counts, 1);
  const bars = counts.map((number, index) => {
    const tall = number ? Math.max(1, (number / most) * height) : 0;
    return draw("rect", { x: (index * width) / counts.length, y: height - tall, width: width / counts.length, height: tall });
  });
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "cmi-histogram", role: "img", preserveAspectRatio: "none", "aria-label": label }, ...bars);
}

// What differs most often comes first: in a narrow page, the others are scrolled to.
const FIRST = [
  ["shape", (facts) => formatShape(facts.shape)],
  ["here", (facts) => (String(facts.local_shape) === String(facts.shape) ? "" : formatShape(facts.local_shape))],
  ["dtype", (facts) => facts.dtype],
  ["placements", (facts) => facts.placements],
];
const NUMBERS = [["num_nan", "NaN"], ["num_inf", "Inf"], ["min"], ["max"], ["mean"], ["std"], ["norm"], ["num_zeros", "zeros"]];
const LAST = [
  ["device", (facts) => facts.device],
  ["memory a rank", (facts) => formatBytes(facts.num_bytes)],
  ["strides", (facts) => (facts.strides?.length ? formatShape(facts.strides) : "")],
  ["requires_grad", (facts) => (facts.requires_grad ? "yes" : "")],
];

// What is one value on each rank is said in words, without the numbers of a tensor.
function drawValue(detail) {
  const rows = detail.groups.map(({ ranks, facts }) => make("div", { class: "cmi-row", "data-ranks": ranks },
    make("b", { class: "cm-mono" }, `[${ranks}] `), make("span", { class: "cm-mono" }, facts.text), " ",
    make("span", { class: "cm-weak" }, [facts.dtype, facts.placements, facts.note].filter(Boolean).join(", "))));
  const missing = detail.missing.map(({ ranks, text }) => make("div", { class: "cmi-missing", "data-ranks": ranks }, `[${ranks}] ${text}`));
  return make("div", { class: "cmi-scroll" }, ...rows, ...missing);
}

function drawDetail(root, detail) {
  const kinds = [...new Set(detail.groups.map((group) => group.facts.kind))].join(", ");
  const scale = detail.low !== null && detail.low !== undefined && detail.groups.some((group) => group.counts)
    ? `; histograms from ${formatNumber(toNumber(detail.low))} to ${formatNumber(toNumber(detail.high))}` : "";
  root.replaceChildren(
    make("div", { class: "cmi-heading" }, make("span", { class: "cm-mono" }, detail.label), " ", make("span", { class: "cm-weak" }, kinds)),
    detail.is_scalar ? drawValue(detail) : drawTable(detail),
    make("div", { class: detail.is_bad ? "cmi-bad cmi-said" : "cm-weak cmi-said" }, detail.said + scale));
}

function drawTable(detail) {
  const some = (test) => detail.groups.some((group) => test(group.facts));
  const known = (columns) => columns.filter(([, of]) => some((facts) => facts.shape && of(facts)));
  const [first, last] = [known(FIRST), known(LAST)];
  const numbers = some((facts) => facts.min !== null || facts.num_nan || facts.num_inf) ? NUMBERS : [];
  const hasPictures = detail.groups.some((group) => group.counts);
  const [texts, notes] = [some((facts) => !facts.shape && facts.text), some((facts) => facts.note)];
  const heads = [
    ["ranks"], ...(hasPictures ? [["histogram"]] : []), ...first.map(([name]) => [name]),
    ...numbers.map(([key, name]) => [name ?? key, "cmi-number"]), ...last.map(([name]) => [name]),
    ...(texts ? [["value"]] : []), ...(notes ? [["note"]] : []),
  ];
  const number = (facts, key) => {
    const value = toNumber(facts[key]);
    const isBad = (key === "num_nan" || key === "num_inf") && value > 0;
    return make("td", { class: `cm-mono cmi-number${isBad ? " cmi-bad" : ""}`, "data-key": key }, facts.shape ? formatNumber(value) : "");
  };
  const rows = detail.groups.map(({ ranks, facts, counts }) => {
    const plain = (columns) => columns.map(([, of]) => make("td", { class: "cm-mono" }, facts.shape ? of(facts) : ""));
    return make("tr", { "data-ranks": ranks },
      make("th", { scope: "row", class: "cm-mono" }, ranks),
      hasPictures ? make("td", {}, counts ? drawHistogram(counts, `histogram of ranks ${ranks}`) : "") : null,
      ...plain(first), ...numbers.map(([key]) => number(facts, key)), ...plain(last),
      texts ? make("td", { class: "cm-mono cmi-text" }, facts.shape ? "" : facts.text) : null,
      notes ? make("td", { class: "cm-weak cmi-text" }, facts.note || "") : null);
  });
  const missing = detail.missing.map(({ ranks, text }) =>
    make("tr", { "data-ranks": ranks, class: "cmi-missing" }, make("th", { scope: "row", class: "cm-mono" }, ranks), make("td", { colspan: heads.length - 1, class: "cmi-text" }, text)));
  return make("div", { class: "cmi-scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map(([text, kind]) => make("th", { scope: "col", class: kind }, text)))), make("tbody", {}, ...rows, ...missing)));
}
