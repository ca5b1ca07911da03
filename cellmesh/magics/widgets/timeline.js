// The last cells as a Gantt chart, a row a rank. See timeline.py for what the model holds; times are microseconds.

const OPERATION = 10, COMPUTING = 4; // numbers of each
const AXIS_HEIGHT = 34, NARROWEST = 0.5;
const HINT = "wheel (with Ctrl, or after a click): zoom; drag or arrows: move; + - 0: zoom; up, down: rank; n, p: next, previous operation";

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const button = (text, title, onclick, attributes = {}) =>
  make("button", { type: "button", title, "aria-label": title, onclick, ...attributes }, text);

function floats(raw) {
  if (!raw || !raw.byteLength) return new Float64Array();
  const bytes = raw.buffer ? raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.byteLength) : raw;
  return new Float64Array(bytes);
}

function formatTime(us, digits = 3) {
  if (us === 0) return "0";
  const size = Math.abs(us);
  const [scaled, unit] = size >= 1e6 ? [us / 1e6, "s"] : size >= 1e3 ? [us / 1e3, "ms"] : size >= 1 ? [us, "µs"] : [us * 1e3, "ns"];
  return `${Number(scaled.toPrecision(digits))} ${unit}`;
}

// Round times in [from, to], about `count` of them.
function ticksIn(from, to, count) {
  let step = 10 ** Math.floor(Math.log10((to - from) / count));
  for (const factor of [1, 2, 5, 10]) {
    if ((to - from) / (step * factor) <= count) {
      step *= factor;
      break;
    }
  }
  const found = [];
  for (let index = Math.ceil(from / step - 1e-9); index * step <= to; index++) found.push(index * step);
  return [found, step];
}

// What the model holds, by row: operations and times of computing in the order of their begins.
function unpack(model) {
  const about = model.get("about");
  const rows = about.ranks.map((rank) => ({ rank, operations: [], computing: [], longest: 0 }));
  const numbers = floats(model.get("operations"));
  for (let at = 0; at < numbers.length; at += OPERATION) {
    const [row, kind, cell, begin, end, waited, last, wait, isOpen, lane] = numbers.subarray(at, at + OPERATION);
    const { name, group, members, ranks } = about.kinds[kind];
    const one = { name, group, members, ranks, cell, begin, end, waited, last, wait, isOpen: isOpen === 1, lane };
    rows[row].operations.push(one);
    rows[row].longest = Math.max(rows[row].longest, end - begin);
  }
  const computing = floats(model.get("computing"));
  for (let at = 0; at < computing.length; at += COMPUTING) {
    const [row, cell, begin, end] = computing.subarray(at, at + COMPUTING);
    rows[row].computing.push({ cell, begin, end });
  }
  return { about, rows, colours: new Map(about.names.map(({ name, colour }) => [name, colour])) };
}

// The first of `spans`, which are in the order of their begins, that begins at or after `time`.
function firstFrom(spans, time) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].begin < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ---- the trace

const nameRow = (pid, tid, name, args) => ({ ph: "M", name, pid, tid, ts: 0, args });

function traceOf({ about, rows }) {
  const events = [];
  for (const { rank, operations, computing } of rows) {
    const lanes = operations.reduce((most, one) => Math.max(most, one.lane + 1), 1);
    const threads = ["cells", "compute", "collectives", ...Array(lanes - 1).fill("collectives, overlapping")];
    events.push(nameRow(rank, 0, "process_name", { name: `rank ${rank}` }), nameRow(rank, 0, "process_sort_index", { sort_index: rank }));
    threads.forEach((name, tid) => {
      events.push(nameRow(rank, tid, "thread_name", { name }), nameRow(rank, tid, "thread_sort_index", { sort_index: tid }));
    });
    const add = (tid, name, cat, begin, end, cell, args = {}) => {
      const ts = begin + cell.shift; // what lay between cells is in it again
      events.push({ ph: "X", name, cat, pid: rank, tid, ts, dur: end - begin, args: { cell: cell.title, ...args } });
    };
    for (const cell of about.cells) {
      const own = cell.by_rank.find(([other]) => other === rank);
      if (own) add(0, cell.title, "cell", own[1] - cell.shift, own[2] - cell.shift, cell);
    }
    for (const { cell, begin, end } of computing) add(1, "compute", "compute", begin, end, about.cells[cell]);
    for (const one of operations) {
      const cell = about.cells[one.cell], isMessage = one.name === "send" || one.name === "recv";
      const args = { group: one.group, ranks: one.members.length ? one.members : "all", waited_us: one.waited };
      add(2 + one.lane, one.name, isMessage ? "message" : "collective", one.begin, one.end, cell, args);
      if (one.waited > 0) add(2 + one.lane, `waits for rank ${one.last}`, "wait", one.begin, one.begin + one.waited, cell);
    }
  }
  return JSON.stringify({ schemaVersion: 1, displayTimeUnit: "ms", traceEvents: events });
}

function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = make("a", { href: url, download: name });
  document.body.append(link); // Firefox follows no link that is not in the page
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// ---- the drawing

const heightOf = (count) => (count <= 8 ? 30 : count <= 16 ? 24 : count <= 32 ? 15 : 12);

class Chart {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.chosen = { row: -1, index: -1 };
    this.highlighted = "";
    this.axis = make("canvas", { "aria-hidden": "true" });
    this.canvas = make("canvas", { tabindex: "0", role: "img", title: HINT, "aria-label": `timeline of ranks; ${HINT}` });
    this.labels = make("div");
    this.tip = make("div", { class: "cm-tip", role: "status", hidden: "" });
    const rows = make("div", { class: "cm-rows" }, this.labels, this.canvas);
    this.scroll = make("div", { class: "cm-scroll" }, make("div", { class: "cm-axis" }, make("div"), this.axis), rows);
    this.frame = make("div", { class: "cm-frame" }, this.scroll, this.tip);
    this.listen();
  }

  load(keepsView) {
    this.data = unpack(this.model);
    this.length = Math.max(this.data.about.length, 1);
    this.rowHeight = heightOf(this.data.rows.length);
    this.chosen = { row: -1, index: -1 };
    this.tip.hidden = true;
    this.labels.replaceChildren(...this.data.rows.map(({ rank }) => this.label(rank)));
    this.frame.hidden = !this.data.about.cells.length;
    if (keepsView) this.show(this.from, this.to);
    else this.show(0, this.length);
    const late = this.labels.querySelector('[data-straggler="true"]');
    if (late && !keepsView) requestAnimationFrame(() => {
      this.scroll.scrollTop = Math.max(0, late.offsetTop - this.scroll.clientHeight / 2);
    });
  }

  label(rank) {
    const isLate = rank === this.data.about.straggler;
    const size = this.rowHeight < 15 ? "font-size:9px" : "";
    const note = isLate && this.rowHeight >= 24 ? make("small", {}, "straggler") : null;
    const text = isLate && !note ? `▸ rank ${rank}` : `rank ${rank}`;
    const title = isLate ? `rank ${rank}: the straggler` : `rank ${rank}`;
    const style = `height:${this.rowHeight}px;${size}`;
    return make("div", { class: "cm-label", "data-rank": rank, "data-straggler": isLate, style, title }, text, note);
  }

  show(from, to) {
    const width = Math.min(Math.max(to - from, NARROWEST), this.length);
    this.from = Math.min(Math.max(from, 0), this.length - width);
    this.to = this.from + width;
    this.root.dataset.from = this.from;
    this.root.dataset.to = this.to;
    this.onshow?.();
    this.redraw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(share) {
    const by = (this.to - this.from) * share;
    this.show(this.from + by, this.to + by);
  }

  redraw() {
    cancelAnimationFrame(this.due);
    this.due = requestAnimationFrame(() => this.draw());
  }

  size(canvas, height) {
    const scale = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth - 84;
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    return [context, width];
  }

  draw() {
    if (!this.root.isConnected || this.frame.hidden) return;
    const style = getComputedStyle(this.root);
    const ink = style.color, weak = style.getPropertyValue("--cm-fg-weak"), line = style.getPropertyValue("--cm-line");
    const [context, width] = this.size(this.canvas, this.rowHeight * this.data.rows.length);
    this.width = width;
    const perPixel = (this.to - this.from) / width;
    const xOf = (time) => (time - this.from) / perPixel;
    this.drawAxis(xOf, style, ink, weak, line);
    for (const at of this.ticks) {
      context.fillStyle = line;
      context.globalAlpha = 0.5;
      context.fillRect(Math.round(xOf(at)), 0, 1, this.canvas.height);
    }
    context.globalAlpha = 1;
    const hatch = makeHatch(context, style.getPropertyValue("--cm-bg") || "#ffffff");
    this.data.rows.forEach((row, index) => this.drawRow(context, row, index, xOf, perPixel, { ink, weak, line, hatch }));
    for (const cell of this.data.about.cells) {
      context.fillStyle = weak;
      context.fillRect(Math.round(xOf(cell.begin)), 0, 1, this.canvas.height);
    }
  }

  drawAxis(xOf, style, ink, weak, line) {
    const [context, width] = this.size(this.axis, AXIS_HEIGHT);
    context.font = `11px ${style.fontFamily}`;
    context.textBaseline = "middle";
    const [ticks, step] = ticksIn(this.from, this.to, Math.max(2, Math.floor(width / 110)));
    this.ticks = ticks;
    const digits = Math.max(3, Math.ceil(Math.log10(Math.max(1, this.to / step))) + 1);
    for (const at of ticks) {
      const text = formatTime(at, digits), half = context.measureText(text).width / 2;
      context.fillStyle = weak;
      context.fillText(text, Math.min(Math.max(xOf(at) - half, 1), width - 2 * half - 1), 25);
      context.fillStyle = line;
      context.fillRect(Math.round(xOf(at)), 31, 1, 3);
    }
    context.fillStyle = ink;
    let free = 0;
    this.data.about.cells.forEach((cell, index) => {
      const next = this.data.about.cells[index + 1];
      const left = Math.max(xOf(cell.begin), 0), right = Math.min(next ? xOf(next.begin) : width, width);
      const text = shorten(context, cell.title, right - Math.max(left, free) - 8);
      if (xOf(cell.begin) >= 0 && xOf(cell.begin) <= width) context.fillRect(Math.round(left), 2, 1, 14);
      if (!text || right <= 0) return;
      context.fillText(text, Math.max(left, free) + 4, 9);
      free = Math.max(left, free) + 8 + context.measureText(text).width;
    });
  }

  drawRow(context, row, index, xOf, perPixel, colours) {
    const top = index * this.rowHeight, pad = this.rowHeight > 15 ? 3 : 1, height = this.rowHeight - 2 * pad;
    context.fillStyle = colours.line;
    context.fillRect(0, top + this.rowHeight - 1, this.canvas.width, this.rowHeight > 12 ? 1 : 0.5);
    const bar = (begin, end, y, tall) => {
      const left = Math.max(xOf(begin), -2), right = Math.min(xOf(end), this.width + 2);
      if (right > left - 1 && right >= -1 && left <= this.width + 1) context.fillRect(left, y, Math.max(right - left, 0.7), tall);
    };
    context.fillStyle = colours.ink;
    let reached = -Infinity;
    context.globalAlpha = this.highlighted ? 0.12 : 0.27;
    for (const { begin, end } of row.computing) {
      if (end < this.from || begin > this.to || end < reached) continue;
      bar(begin, end, top + pad, height);
      reached = Math.max(end, begin + perPixel * 0.3); // what is below a pixel is drawn once
    }
    reached = -Infinity;
    for (let at = firstFrom(row.operations, this.from - row.longest); at < row.operations.length; at++) {
      const one = row.operations[at];
      if (one.begin > this.to) break;
      if (one.end < this.from) continue;
      const isQuiet = this.highlighted && this.highlighted !== one.name;
      if (one.end - one.begin < perPixel && one.begin < reached && isQuiet === this.wasQuiet) continue;
      reached = Math.max(one.begin, reached) + perPixel * 0.5;
      this.wasQuiet = isQuiet;
      this.drawOperation(context, one, bar, top + pad, height, isQuiet ? 0.15 : 1, xOf, colours);
      if (this.chosen.row === index && this.chosen.index === at) {
        context.strokeStyle = colours.ink;
        context.globalAlpha = 1;
        context.lineWidth = 1.5;
        const left = Math.max(xOf(one.begin), -3);
        context.strokeRect(left, top + 1, Math.max(Math.min(xOf(one.end), this.width + 3) - left, 2), this.rowHeight - 2);
      }
    }
    context.globalAlpha = 1;
  }

  // While the main thread does not wait for it, what it computes shows above.
  drawOperation(context, one, bar, top, height, alpha, xOf, colours) {
    const low = top + height * 0.55, blocked = one.wait < 0 ? one.end : Math.min(Math.max(one.wait, one.begin), one.end);
    const arrived = Math.min(one.begin + one.waited, one.end);
    const pieces = [[one.begin, blocked, low, height * 0.45], [blocked, one.end, top, height]];
    for (const [begin, end, y, tall] of pieces) {
      if (end <= begin && !(begin === one.begin && one.end === one.begin)) continue;
      const middle = Math.min(Math.max(arrived, begin), end);
      context.fillStyle = this.data.colours.get(one.name);
      if (middle > begin) {
        context.globalAlpha = alpha * 0.5;
        bar(begin, middle, y, tall);
        if (xOf(middle) - xOf(begin) > 5) {
          context.globalAlpha = alpha;
          context.fillStyle = colours.hatch;
          bar(begin, middle, y, tall);
          context.fillStyle = this.data.colours.get(one.name);
        }
      }
      context.globalAlpha = alpha;
      if (end > middle || middle === begin) bar(middle, end, y, tall);
    }
  }

  // ---- what is there

  find(x, y) {
    const row = this.data.rows[Math.floor(y / this.rowHeight)];
    if (!row) return null;
    const perPixel = (this.to - this.from) / this.width, time = this.from + x * perPixel, near = 1.5 * perPixel;
    let best = -1;
    for (let at = firstFrom(row.operations, time + near) - 1; at >= 0; at--) {
      const one = row.operations[at];
      if (one.begin < time - near - row.longest) break;
      if (one.end < time - near) continue;
      if (best < 0 || one.end - one.begin < row.operations[best].end - row.operations[best].begin) best = at;
    }
    const computing = row.computing.find(({ begin, end }) => begin <= time && time <= end);
    return { row, operation: row.operations[best], computing };
  }

  lines({ row, operation, computing }) {
    const cells = this.data.about.cells;
    if (operation) {
      const took = formatTime(operation.end - operation.begin);
      return [
        `${operation.name}, ${operation.isOpen ? `goes on for ${took}` : took}`,
        ...(operation.waited > 0
          ? [operation.last === row.rank ? `waited ${formatTime(operation.waited)}` : `waited ${formatTime(operation.waited)} of it for rank ${operation.last}`]
          : operation.last === row.rank ? ["came last"] : []),
        `rank ${row.rank}, group ${operation.group} (${operation.ranks}), ${cells[operation.cell].title}`,
      ];
    }
    return computing
      ? [`compute, ${formatTime(computing.end - computing.begin)}`, `rank ${row.rank}, ${cells[computing.cell].title}`]
      : null;
  }

  showTip(found, x, y) {
    const lines = found && this.lines(found);
    this.tip.hidden = !lines;
    if (!lines) return;
    this.tip.replaceChildren(...lines.map((text, at) => make("div", at ? { class: "cm-weak" } : {}, text)));
    const frame = this.frame.getBoundingClientRect(), box = this.canvas.getBoundingClientRect();
    const left = box.left - frame.left + x, top = box.top - frame.top + y;
    const isRight = left + this.tip.offsetWidth + 16 > frame.width;
    this.tip.style.left = `${Math.max(2, isRight ? left - this.tip.offsetWidth - 12 : left + 12)}px`;
    this.tip.style.top = `${Math.max(2, top + this.tip.offsetHeight + 16 > frame.height ? top - this.tip.offsetHeight - 8 : top + 12)}px`;
  }

  choose(row, index) {
    const rows = this.data.rows;
    row = Math.min(Math.max(row, 0), rows.length - 1);
    if (row < 0) return;
    const { operations } = rows[row];
    if (index === null) index = Math.min(firstFrom(operations, this.from), operations.length - 1);
    index = Math.min(Math.max(index, 0), operations.length - 1);
    this.chosen = { row, index };
    [...this.labels.children].forEach((label, at) => { label.dataset.chosen = at === row; });
    const one = operations[index];
    if (one && (one.end < this.from || one.begin > this.to)) {
      const half = (this.to - this.from) / 2, middle = (one.begin + one.end) / 2;
      this.show(middle - half, middle + half);
    } else this.redraw();
    const perPixel = (this.to - this.from) / this.width;
    const x = one ? Math.min(Math.max((one.begin - this.from) / perPixel, 0), this.width) : 0;
    this.showTip({ row: rows[row], operation: one }, x, (row + 0.5) * this.rowHeight);
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    const timeAt = (event) => this.from + ((event.clientX - canvas.getBoundingClientRect().left) / this.width) * (this.to - this.from);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return; // the page scrolls
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / this.width);
      else this.zoom(1.0015 ** event.deltaY, timeAt(event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.focus({ preventScroll: true });
      canvas.setPointerCapture(event.pointerId);
      drag = { x: event.clientX, from: this.from, to: this.to };
    });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      if (!drag) return this.showTip(this.find(event.clientX - box.left, event.clientY - box.top), event.clientX - box.left, event.clientY - box.top);
      const by = ((drag.x - event.clientX) / this.width) * (drag.to - drag.from);
      this.tip.hidden = true;
      this.show(drag.from + by, drag.to + by);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.5, timeAt(event)));
    const keys = {
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6),
      0: () => this.show(0, this.length), Home: () => this.show(0, this.length),
      ArrowUp: () => this.choose(this.chosen.row - 1, null), ArrowDown: () => this.choose(this.chosen.row + 1, null),
      n: () => this.choose(Math.max(this.chosen.row, 0), this.chosen.row < 0 ? null : this.chosen.index + 1),
      p: () => this.choose(Math.max(this.chosen.row, 0), this.chosen.row < 0 ? null : this.chosen.index - 1),
      Escape: () => { this.tip.hidden = true; canvas.blur(); },
    };
    canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      keys[event.key]();
    });
  }
}

function shorten(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  for (let end = text.length - 1; end > 1; end--) {
    const short = `${text.slice(0, end)}…`;
    if (context.measureText(short).width <= room) return short;
  }
  return "";
}

function makeHatch(context, ground) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = ground;
  pen.lineWidth = 1.6;
  pen.beginPath();
  for (const by of [-6, 0, 6]) {
    pen.moveTo(by, 6);
    pen.lineTo(by + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

// ---- what stands round it

function drawTable([headers, ...rows], firstCell) {
  const body = rows.map((cells, index) =>
    make("tr", { "data-row": index }, ...cells.map((text, at) => make("td", { "data-column": headers[at] }, at || !firstCell ? text : firstCell(text, index)))));
  const head = make("tr", {}, ...headers.map((text) => make("th", {}, text)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

function drawLegend(chart) {
  const entry = (kind, text) => make("span", { class: "cm-weak" }, make("i", { class: kind }), text);
  const names = chart.data.about.names.map(({ name, colour, total }) => {
    const swatch = make("i", { style: `background:${colour}` });
    const title = `${name}: ${formatTime(total)} in all, on all ranks; press to see it alone`;
    const node = make("button", { type: "button", title, "data-name": name, "aria-pressed": String(chart.highlighted === name) }, swatch, name);
    node.addEventListener("click", () => {
      chart.highlighted = chart.highlighted === name ? "" : name;
      for (const other of node.parentElement.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other.dataset.name === chart.highlighted));
      chart.root.dataset.highlighted = chart.highlighted;
      chart.redraw();
    });
    return node;
  });
  return [entry("cm-computes", "compute"), ...names, names.length ? entry("cm-waits", "waits for another rank") : null,
    chart.data.rows.some(({ operations }) => operations.some((one) => one.wait < 0 || one.wait > one.begin)) ? entry("cm-behind", "low: in the background") : null].filter(Boolean);
}

function render({ model, el }) {
  const root = make("div", { class: "cellmesh cm-timeline", "data-lm-suppress-shortcuts": "true" });
  const chart = new Chart(model, root);
  const range = make("span", { class: "cm-range cm-weak", "aria-live": "polite" });
  const legend = make("div", { class: "cm-legend" }), words = make("div"), tables = make("div", { class: "cm-tables" });
  const ended = make("span", { class: "cm-weak cm-ended" }), problem = make("div", { class: "cm-problem", role: "alert" });
  const update = button("Update", "ask the ranks what they have done since", () => {
    update.disabled = true;
    model.send({ action: "update" });
    setTimeout(() => { update.disabled = Boolean(model.get("ended")); }, 1000);
  });
  const whole = () => chart.show(0, chart.length);
  const bar = make("div", { class: "cm-bar" },
    button("−", "zoom out", () => chart.zoom(2)), button("+", "zoom in", () => chart.zoom(0.5)),
    button("◂", "earlier", () => chart.move(-0.5)), button("▸", "later", () => chart.move(0.5)),
    button("All", "show all of it", whole), range, make("span", { class: "cm-gap" }), ended, update,
    button("Export trace", "download it as a Chrome trace, for chrome://tracing or Perfetto", () => download(traceOf(chart.data), "timeline.json")));
  root.append(bar, legend, chart.frame, problem, words, tables);
  el.append(root);

  chart.onshow = () => {
    range.textContent = `${formatTime(chart.from, 4)} – ${formatTime(chart.to, 4)} of ${formatTime(chart.length, 4)}`;
  };
  let isFirst = true;
  const load = () => {
    chart.load(!isFirst && chart.to - chart.from < 0.98 * chart.length);
    isFirst = false;
    const { about } = chart.data;
    for (const node of [legend, range, ...bar.querySelectorAll("button")]) if (node !== update) node.hidden = !about.cells.length;
    legend.replaceChildren(...drawLegend(chart));
    root.dataset.straggler = about.straggler;
    const notes = about.notes.map((text) => make("div", { class: "cm-weak cm-note" }, text));
    words.replaceChildren(...(about.sentence ? [make("div", { class: "cm-sentence" }, about.sentence)] : []), ...notes);
    const toCell = (text, index) => {
      const { begin, end } = about.cells[index], margin = 0.005 * (end - begin);
      return button(text, `show ${text} alone`, () => chart.show(begin - margin, end + margin));
    };
    const isOpen = tables.querySelector("details")?.open;
    const byRank = make("details", {}, make("summary", {}, "by rank"), drawTable(about.rank_table));
    byRank.classList.add("cm-by-rank");
    byRank.open = Boolean(isOpen);
    const note = make("div", { class: "cm-weak" }, about.caption);
    tables.replaceChildren(...(about.cells.length ? [drawTable(about.cell_table, toCell), note, byRank] : []));
  };
  const end = () => {
    ended.textContent = model.get("ended");
    update.disabled = Boolean(model.get("ended"));
  };
  const complain = () => { problem.textContent = model.get("problem"); };
  let due = 0;
  const reload = () => {
    cancelAnimationFrame(due); // the traits of one update come one by one
    due = requestAnimationFrame(load);
  };
  const handlers = { "change:about": reload, "change:operations": reload, "change:computing": reload, "change:ended": end, "change:problem": complain };
  for (const [event, handler] of Object.entries(handlers)) model.on(event, handler);
  const resized = new ResizeObserver(() => chart.redraw());
  resized.observe(root);
  const themed = new MutationObserver(() => chart.redraw());
  themed.observe(document.body, { attributes: true, attributeFilter: ["class", "data-jp-theme-name", "data-vscode-theme-id"] });
  load();
  end();
  complain();
  return () => {
    resized.disconnect();
    themed.disconnect();
    for (const [event, handler] of Object.entries(handlers)) model.off(event, handler);
  };
}

export default { render };
