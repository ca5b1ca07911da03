// Draws the lines that ranks log with uPlot: one panel a name. See plot.py for what the model holds.

const MAX_WIDTH = 720, HEIGHT = 200;
const MAX_TOLD = 8; // ranks in the box beside the pointer
// A scale that is shorter, relative to its numbers, has no room for ticks: they would be equal floats.
const LEAST_SHARE = 1e-12;

// The model's lines with their points; a line's steps come first, then its values.
function unpack(model) {
  const raw = model.get("points");
  const bytes = raw.buffer ? raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.byteLength) : raw;
  const numbers = new Float64Array(bytes);
  let at = 0;
  return model.get("lines").map((line) => {
    const steps = [...numbers.subarray(at, at + line.count)];
    const values = [...numbers.subarray(at + line.count, at + 2 * line.count)];
    at += 2 * line.count;
    const isPlaced = (_, index) => Number.isFinite(steps[index]);
    return { ...line, steps: steps.filter(isPlaced), values: values.filter(isPlaced) };
  });
}

// Columns: the steps, and each line's values at these; null where a line has no number, undefined where no point.
function align(lines) {
  const clean = (values) => values.map((value) => (Number.isNaN(value) ? null : value));
  const columns = uPlot.join(lines.map((line) => [line.steps, clean(line.values)]));
  return { steps: columns[0], columns: columns.slice(1) };
}

// The mean of all columns at each step, and the least and the most.
function bandOf({ steps, columns }) {
  const rows = steps.map((_, index) => columns.map((column) => column[index]).filter((value) => value != null));
  const of = (fold) => rows.map((row) => (row.length ? fold(row) : null));
  return {
    steps,
    columns: [
      of((row) => row.reduce((sum, value) => sum + value / row.length, 0)),
      of((row) => row.reduce((one, other) => Math.max(one, other))),
      of((row) => row.reduce((one, other) => Math.min(one, other))),
    ],
  };
}

// Between values and heights. uPlot has no ticks for large numbers, so that heights count in a power of ten.
function makeScale(columns, isLog) {
  if (isLog) {
    return { toHeight: (value) => (value > 0 ? Math.log10(value) : NaN), fromHeight: (height) => 10 ** height };
  }
  let most = 0;
  for (const column of columns) {
    for (const value of column) if (Number.isFinite(value)) most = Math.max(most, Math.abs(value));
  }
  const unit = most ? 10 ** Math.floor(Math.log10(most)) || Number.MIN_VALUE : 1;
  return { toHeight: (value) => value / unit, fromHeight: (height) => height * unit };
}

const heightOf = (value, toHeight) => {
  const height = value == null ? value : toHeight(value);
  return height === undefined || Number.isFinite(height) ? height : null;
};

function widen(low, high, share) {
  if (low === null || low === undefined) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= size * LEAST_SHARE || high === low) return [low - (size / 2 || 0.5), high + (size / 2 || 0.5)];
  return [low - (high - low) * share, high + (high - low) * share];
}

// The lines of one name.
class Panel {
  constructor(name, syncKey, onZoom) {
    this.name = name;
    this.syncKey = syncKey;
    this.onZoom = onZoom;
    this.title = make("div", { class: "cm-title" }, name);
    this.empty = make("div", { class: "cm-weak cm-empty" });
    this.nans = make("div", { class: "cm-nans", role: "status", hidden: "" });
    this.chart = make("div");
    this.tip = make("div", { class: "cm-tip cm-mono", hidden: "" });
    this.root = make("div", { class: "cm-panel", role: "img" }, this.title, this.nans, this.empty, this.chart, this.tip);
  }

  show(lines, nans, { hidden, mean, isLog, zoom }) {
    this.nans.textContent = nans;
    this.nans.hidden = !nans;
    this.lines = lines.filter((line) => line.count && !hidden.includes(line.rank));
    this.mean = mean;
    this.zoom = zoom;
    const aligned = this.lines.length ? align(this.lines) : { steps: [], columns: [] };
    const { steps, columns } = mean ? bandOf(aligned) : aligned;
    this.columns = columns;
    const { toHeight, fromHeight } = makeScale(columns, isLog);
    this.fromHeight = fromHeight;
    const heights = columns.map((column) => column.map((value) => heightOf(value, toHeight)));
    const isEmpty = !heights.some((column) => column.some((height) => height != null));
    this.describe(lines, isEmpty, isLog);

    const data = [steps, ...heights];
    const key = JSON.stringify([mean, isLog, isEmpty, this.lines.map((line) => line.rank)]);
    if (key === this.key) {
      this.plot?.setData(data);
      return;
    }
    this.key = key;
    this.close();
    if (!isEmpty) this.draw(data);
  }

  describe(lines, isEmpty, isLog) {
    const points = this.lines.reduce((sum, line) => sum + line.logged, 0);
    const ranks = this.lines.map((line) => line.rank).join(", ");
    const how = `${this.mean ? ", mean and range" : ""}${isLog ? ", logarithmic" : ""}`;
    this.root.setAttribute("aria-label", `${this.name} by step${how}: ranks ${ranks}; ${points} points`);
    const why = lines.length ? "nothing to draw" : `cellmesh.log(${this.name}=..., step=...) on the ranks draws here`;
    this.empty.textContent = isEmpty ? `${this.name}: ${why}` : "";
    this.title.hidden = isEmpty;
  }

  draw(data) {
    const axis = {
      stroke: () => this.colour("--cm-fg-weak"),
      font: `10px ${getComputedStyle(this.root).fontFamily}`,
      grid: { stroke: () => this.colour("--cm-line"), width: 0.7 },
      ticks: { show: false },
    };
    const stepAxis = { size: 22, space: 80, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => formatNumber(tick)) };
    const heightAxis = { size: 62, values: (_, ticks) => ticks.map((tick) => formatNumber(this.fromHeight(tick))) };
    const shares = (type) => type === "mousemove" || type === "mouseleave";
    const options = {
      width: this.width(), height: HEIGHT, padding: [8, 12, 0, 0], legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => (this.zoom.length ? this.zoom : widen(low, high, 0)) },
        y: { range: (_, low, high) => widen(low, high, 0.05) },
      },
      axes: [{ ...axis, ...stepAxis }, { ...axis, ...heightAxis }],
      series: [{}, ...this.series()],
      bands: this.mean ? [{ series: [2, 3], fill: () => this.colour("--cm-accent", 20) }] : [],
      cursor: { y: false, drag: { setScale: false }, sync: { key: this.syncKey, filters: { pub: shares } } },
      hooks: { setCursor: [(plot) => this.tell(plot)], setSelect: [(plot) => this.zoomTo(plot)] },
    };
    this.plot = new uPlot(options, data, this.chart);
    this.plot.over.addEventListener("dblclick", () => this.onZoom([]));
  }

  series() {
    const points = { show: (_, series, first, last) => first === last };
    if (!this.mean) return this.lines.map((line) => ({ stroke: line.colour, width: 1.5, points }));
    const edge = { stroke: "transparent", width: 1, points: { show: false } };
    return [{ stroke: () => this.colour("--cm-accent"), width: 1.8, points }, edge, edge];
  }

  colour(variable, percent = 100) {
    const colour = getComputedStyle(this.root).getPropertyValue(variable).trim();
    return percent === 100 ? colour : `color-mix(in srgb, ${colour} ${percent}%, transparent)`;
  }

  // The numbers of the step at the pointer, or of the step nearest to it that a line has.
  tell(plot) {
    const { idx, idxs, left } = plot.cursor;
    const step = plot.data[0][idx];
    this.tip.hidden = step === undefined || left < 0;
    if (this.tip.hidden) return;
    const [mean, most, least] = this.columns.map((column, index) => formatNumber(column[idxs[index + 1]] ?? NaN));
    const rows = this.mean
      ? [["var(--cm-accent)", `mean ${mean}, ${least} to ${most}`]]
      : this.lines.map(({ colour, rank }, index) => [
          colour,
          `rank ${rank}: ${formatNumber(this.columns[index][idxs[index + 1]] ?? NaN)}`,
        ]);
    const told = rows
      .slice(0, MAX_TOLD)
      .map(([colour, text]) => make("div", {}, make("i", { style: `background:${colour}` }), text));
    if (rows.length > MAX_TOLD) told.push(make("div", { class: "cm-weak" }, `and ${rows.length - MAX_TOLD} more`));
    this.tip.replaceChildren(make("div", { class: "cm-weak" }, `step ${formatNumber(step)}`), ...told);
    const x = plot.over.offsetLeft + left;
    this.tip.style.left = `${x > plot.width / 2 ? Math.max(0, x - this.tip.offsetWidth - 10) : x + 10}px`;
  }

  zoomTo(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  width() {
    return Math.min(MAX_WIDTH, this.root.clientWidth);
  }

  fit() {
    if (this.plot && this.width() && this.width() !== this.plot.width) {
      this.plot.setSize({ width: this.width(), height: HEIGHT });
    }
  }

  close() {
    this.plot?.destroy();
    this.plot = undefined;
  }
}

function rankButtons(lines, hidden, onToggle) {
  const colours = new Map(lines.map((line) => [line.rank, line.colour]));
  const ranks = [...colours.keys()].sort((one, other) => one - other);
  return ranks.map((rank) => {
    const button = makeButton("", `show or hide rank ${rank}`, () => onToggle(rank), {
      class: "cm-rank", "aria-pressed": String(!hidden.includes(rank)), "aria-label": `rank ${rank}`, "data-rank": rank,
    });
    button.append(make("i", { style: `background:${colours.get(rank)}` }), ranks.length > 8 ? String(rank) : `rank ${rank}`);
    return button;
  });
}

function render({ model, el }) {
  const change = (key, value) => {
    model.set(key, value);
    model.save_changes();
  };
  const makeToggle = (key, text, title) => makeButton(text, title, () => change(key, !model.get(key)), { "aria-label": text });
  const toggles = {
    mean: makeToggle("mean", "mean and range", "the ranks' mean, and a band from least to most"),
    log_scale: makeToggle("log_scale", "log", "a logarithmic scale"),
  };
  const toggleRank = (rank) => {
    const hidden = model.get("hidden");
    change("hidden", hidden.includes(rank) ? hidden.filter((each) => each !== rank) : [...hidden, rank]);
  };
  const ranks = make("div", { class: "cm-ranks" });
  const ended = make("span", { class: "cm-weak" });
  const syncKey = `cellmesh-${Math.random()}`; // all panels point at the same step
  const panels = model.get("names").map((name) => new Panel(name, syncKey, (zoom) => change("zoom", zoom)));
  const bar = make("div", { class: "cm-bar" }, ...Object.values(toggles), ranks, make("span", { class: "cm-gap" }), ended);
  const root = make("div", { class: "cellmesh cm-plots" }, bar, ...panels.map((panel) => panel.root));
  el.append(root);

  const draw = () => {
    const lines = unpack(model);
    const hidden = model.get("hidden");
    const focused = ranks.contains(document.activeElement) ? document.activeElement.dataset.rank : undefined;
    ranks.replaceChildren(...rankButtons(lines, hidden, toggleRank));
    if (focused !== undefined) ranks.querySelector(`[data-rank="${focused}"]`)?.focus();
    for (const [key, toggle] of Object.entries(toggles)) toggle.setAttribute("aria-pressed", String(model.get(key)));
    ended.textContent = model.get("ended");
    const choices = { hidden, mean: model.get("mean"), isLog: model.get("log_scale"), zoom: model.get("zoom") };
    panels.forEach((panel, index) => panel.show(lines.filter((line) => line.name === index), model.get("nans")[index] ?? "", choices));
  };
  let frame = 0;
  const redraw = () => {
    cancelAnimationFrame(frame); // the traits of one update arrive one by one
    frame = requestAnimationFrame(draw);
  };
  const events = ["points", "lines", "nans", "mean", "log_scale", "hidden", "zoom", "ended"].map((name) => `change:${name}`);
  for (const event of events) model.on(event, redraw);
  const sizing = new ResizeObserver(() => panels.forEach((panel) => panel.fit()));
  sizing.observe(root);
  const theme = new MutationObserver(() => panels.forEach((panel) => panel.plot?.redraw(false)));
  theme.observe(document.body, { attributes: true });
  draw();
  return () => {
    for (const event of events) model.off(event, redraw);
    cancelAnimationFrame(frame);
    sizing.disconnect();
    theme.disconnect();
    for (const panel of panels) panel.close();
  };
}

export default { render };
