// A model's gradients, a row a parameter, over all ranks.

const GRADIENT_COLUMNS = [
  ["name", "parameter", "text"], ["flags", "flags", "flags"], ["shape", "shape", "shape"], ["norm", "norm of gradient (log scale)", "bar"],
  ["max_abs", "largest", "number"], ["parameter_norm", "norm of parameter", "number"], ["ratio", "ratio", "number"],
  ["num_nan", "NaN", "bad"], ["num_inf", "Inf", "bad"], ["zeros", "zeros", "percent"],
];

const MAX_DECADES = 12;

class GradientTable extends FilteredTable {
  constructor(root) {
    const heads = GRADIENT_COLUMNS.map(([key, text, kind]) => make("th",
      { scope: "col", "data-key": key, class: ["number", "bad", "percent"].includes(kind) ? "cmi-number" : null },
      makeButton(text, `sort by ${text}`, () => this.sort(key), { class: "cmi-sort" })));
    super(root, "filter gradients", "filter by name or flag", heads);
    this.heads = heads;
    this.order = null; // [key, descending]
    this.missing = make("div");
    root.append(this.missing);
  }

  show(table) {
    const asRow = (cells) => Object.fromEntries(GRADIENT_COLUMNS.map(([key], at) => [key, cells[at]]));
    this.table = { ...table, rows: table.rows.map(asRow) };
    this.redraw();
  }

  sort(key) {
    const isSame = this.order?.[0] === key;
    const descends = key !== "name" && key !== "shape";
    this.order = isSame ? [key, !this.order[1]] : [key, descends];
    this.redraw();
  }

  redraw() {
    const { table, order } = this;
    let { rows } = table;
    if (order) {
      const [key, descending] = order;
      const rank = (row) => {
        if (key === "name") return row.name;
        const value = key === "flags" ? row.flags.length : key === "shape" ? row.shape.reduce((one, other) => one * other, 1) : toNumber(row[key]);
        return value === null || Number.isNaN(value) ? -Infinity : value;
      };
      const compare = (one, other) => {
        const [left, right] = [rank(one), rank(other)];
        return typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left === right ? 0 : left - right;
      };
      rows = [...rows].sort((one, other) => (descending ? -compare(one, other) : compare(one, other)));
    }
    for (const head of this.heads) {
      head.setAttribute("aria-sort", order?.[0] === head.dataset.key ? (order[1] ? "descending" : "ascending") : "none");
    }
    const norms = table.rows.map((row) => toNumber(row.norm)).filter((norm) => norm > 0 && Number.isFinite(norm));
    this.most = Math.max(...norms);
    this.decades = Math.min(MAX_DECADES, Math.max(1, Math.ceil(Math.log10(this.most / Math.min(...norms)))));
    this.draw(rows, (row) => row.name, "parameter", table.num_left_out ? `; ${table.num_left_out.toLocaleString("en")} more not listed` : "");
    this.missing.replaceChildren(...table.missing.map(({ ranks, text }) => make("div", { class: "cmi-missing" }, `${/^\d+$/.test(ranks) ? "rank" : "ranks"} ${ranks}: ${text}`)));
  }

  // How long a norm's bar is: a decade is as long everywhere, the smallest norm has a short one, zero has none.
  share(norm) {
    if (!(norm > 0 && Number.isFinite(norm))) return 0;
    return Math.max(0.02, 1 + Math.log10(norm / this.most) / this.decades);
  }

  row(row) {
    const cells = GRADIENT_COLUMNS.map(([key, , kind]) => {
      if (kind === "text") return make("th", { scope: "row", class: "cm-mono" }, row[key]);
      if (kind === "shape") return make("td", { class: "cm-mono" }, formatShape(row[key]));
      const value = toNumber(row[key]);
      if (kind === "flags") return make("td", {}, ...drawFlags(row.flags));
      if (kind === "percent") return make("td", { class: "cm-mono cmi-number" }, value === null ? "" : `${formatNumber(value * 100, 3)} %`);
      if (kind === "bad") return make("td", { class: `cm-mono cmi-number${value > 0 ? " cmi-bad" : ""}`, "data-key": key }, value === null ? "" : String(value));
      if (kind === "number" || value === null) return make("td", { class: "cm-mono cmi-number" }, formatNumber(value));
      return make("td", { class: "cmi-bars" },
        make("i", { style: `width:${(this.share(value) * 90).toFixed(1)}px` }), make("span", { class: "cm-mono" }, formatNumber(value)));
    });
    return make("tr", { "data-name": row.name }, ...cells);
  }
}
