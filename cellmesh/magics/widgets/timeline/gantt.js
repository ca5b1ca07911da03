// The drawing of the timeline: a row a rank, zoomed and moved by wheel, pointer and keys.

const HINT = "wheel (with Ctrl, or after a click): zoom; drag or arrows: move; + - 0: zoom; up, down: rank; n, p: next, previous operation";
const AXIS_HEIGHT = 34, NARROWEST = 0.5;

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
          : operation.last === row.rank ? ["was last"] : []),
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
