// What a value holds: the list of its tensors, and one of them in numbers, a row for each group of equal ranks.

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
    const headers = ["name", "shape", "dtype", "memory", ""]
      .map((text) => make("th", { scope: "col", class: text === "memory" ? "cmi-number" : null }, text));
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
      make("td", {}, name), make("td", { class: "cm-mono" }, formatShape(item.shape)), make("td", {}, item.dtype),
      make("td", { class: "cmi-number" }, formatBytes(item.num_bytes)), make("td", {}, ...drawFlags(item.flags)));
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

const COLUMNS = [
  ["shape", (facts) => formatShape(facts.shape)],
  ["here", (facts) => (String(facts.local_shape) === String(facts.shape) ? "" : formatShape(facts.local_shape))],
  ["dtype", (facts) => facts.dtype],
  ["device", (facts) => facts.device],
  ["strides", (facts) => (facts.strides?.length ? formatShape(facts.strides) : "")],
  ["memory", (facts) => formatBytes(facts.num_bytes)],
  ["placements", (facts) => facts.placements],
  ["grad", (facts) => (facts.requires_grad ? "yes" : "")],
];
const NUMBERS = [["min"], ["max"], ["mean"], ["std"], ["norm"], ["num_nan", "NaN"], ["num_inf", "Inf"], ["num_zeros", "zeros"]];

function drawDetail(root, detail) {
  const texts = detail.groups.some((group) => group.facts.shape === null);
  const kept = COLUMNS.filter(([, of]) => detail.groups.some((group) => group.facts.shape && of(group.facts)));
  const hasNumbers = detail.groups.some((group) => group.facts.min !== null || group.facts.num_nan || group.facts.num_inf);
  const notes = detail.groups.some((group) => group.facts.note);
  const numbers = hasNumbers ? NUMBERS : [];
  const heads = ["ranks", ...kept.map(([name]) => name), ...numbers.map(([key, name]) => name ?? key)];
  if (texts) heads.push("value");
  if (hasNumbers) heads.push("histogram");
  if (notes) heads.push("");
  const rows = detail.groups.map(({ ranks, facts, counts }) => {
    const cells = kept.map(([, of]) => make("td", { class: "cm-mono" }, facts.shape ? of(facts) : ""));
    for (const [key] of numbers) {
      const value = toNumber(facts[key]);
      const isBad = (key === "num_nan" || key === "num_inf") && value > 0;
      cells.push(make("td", { class: `cm-mono cmi-number${isBad ? " cmi-bad" : ""}`, "data-key": key }, facts.shape ? formatNumber(value) : ""));
    }
    if (texts) cells.push(make("td", { class: "cm-mono cmi-text" }, facts.shape ? "" : facts.text));
    if (hasNumbers) cells.push(make("td", {}, counts ? drawHistogram(counts, `histogram of ranks ${ranks}`) : null));
    if (notes) cells.push(make("td", { class: "cm-weak cmi-text" }, facts.note || ""));
    return make("tr", { "data-ranks": ranks }, make("th", { scope: "row", class: "cm-mono" }, ranks), ...cells);
  });
  const missing = detail.missing.map(({ ranks, text }) =>
    make("tr", { "data-ranks": ranks, class: "cmi-missing" }, make("th", { scope: "row", class: "cm-mono" }, ranks), make("td", { colspan: heads.length - 1, class: "cmi-text" }, text)));
  const kinds = [...new Set(detail.groups.map((group) => group.facts.kind))].join(", ");
  const scale = detail.low !== null && detail.low !== undefined && detail.groups.some((group) => group.counts)
    ? `; histograms from ${formatNumber(toNumber(detail.low))} to ${formatNumber(toNumber(detail.high))}` : "";
  root.replaceChildren(
    make("div", { class: "cmi-heading" }, make("span", { class: "cm-mono" }, detail.label), " ", make("span", { class: "cm-weak" }, kinds)),
    make("div", { class: "cmi-scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...heads.map((text, at) => make("th", { scope: "col", class: at > kept.length && at <= kept.length + numbers.length ? "cmi-number" : null }, text)))), make("tbody", {}, ...rows, ...missing))),
    make("div", { class: detail.is_unequal ? "cmi-bad cmi-said" : "cm-weak cmi-said" }, detail.said + scale));
}
