// A 2-D slice of one rank's part, drawn from pixels that the rank has reduced. What is seen moves at once, by
// stretching the pixels in hand; better ones are asked for when the hand rests.

const MAX_PIXELS = 496; // a side, of 4 bytes each: less than 1 MB a view
const CELL_TEXT = [52, 15]; // pixels that an element must have for its number to be written into it

class Heatmap extends Pane {
  // ask: (message) -> promise of [answer, buffers].
  constructor(root, ask) {
    super(root);
    this.ask = ask;
    this.cut = null; // what is looked at: path, rank, dims, index, reduction
    this.picture = null; // values, height, width, rows, cols, low, high
    this.scaleName = "linear";
    this.wanted = 0;
    this.isBusy = false;
    this.build();
  }

  build() {
    this.controls = make("div", { class: "cmi-bar" });
    this.value = make("div", { class: "cmi-value cm-mono", role: "status", "aria-live": "polite" });
    this.legend = make("div", { class: "cmi-legend" });
    this.notes = make("div", { class: "cm-weak cmi-notes" });
    this.tools = make("div", { class: "cmi-bar" },
      makeSelect("reduce by", [["mean", "mean"], ["absmax", "max. magnitude"]], "mean",
        (value) => { this.cut.reduction = value; this.request(); }),
      makeSelect("scale", [["linear", "linear"], ["symmetric", "symmetric"], ["log", "symmetric log"]], "linear",
        (value) => { this.scaleName = value; this.redraw(); }),
      make("span", { class: "cmi-zoom", role: "group", "aria-label": "zoom" },
        makeButton("−", "Zoom out (-)", () => this.zoom(1.6)),
        makeButton("+", "Zoom in (+)", () => this.zoom(1 / 1.6)),
        makeButton("fit", "Show all of it (0)", () => this.fit())),
    );
    this.root.replaceChildren(this.controls, this.tools, this.canvas, this.value, this.legend, this.notes);
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.root);
  }

  // ---- what is looked at

  // detail: of one tensor (see view_model.py).
  show(detail, rank = null) {
    this.detail = detail;
    this.isDark = isDark(this.root);
    const ranks = this.ranks();
    const before = this.cut;
    const keeps = before && before.path === detail.path && (rank === null || before.rank === rank) && ranks.includes(before.rank);
    const chosen = keeps ? before.rank : ranks.includes(rank) ? rank : ranks[0];
    if (chosen === undefined) return this.say("no rank holds numbers of it that could be drawn");
    const ndim = this.shapeOf(chosen).length;
    const isSame = before && before.path === detail.path && before.dims.every((dim) => dim < ndim) && before.ndim === ndim;
    this.cut = isSame ? { ...before, rank: chosen } : {
      path: detail.path, rank: chosen, ndim,
      dims: ndim < 2 ? [-1, 0] : [ndim - 2, ndim - 1], index: Array(ndim).fill(0), reduction: this.cut?.reduction ?? "mean",
    };
    if (["path", "rank", "dims"].some((key) => String(before?.[key]) !== String(this.cut[key]))) this.forget();
    this.cut.index = this.cut.index.map((at, dim) => clamp(at, 0, Math.max(0, this.shapeOf(chosen)[dim] - 1)));
    this.drawControls();
    if (!this.view || !isSame) return this.fit();
    this.bound();
    this.resize();
    this.request();
  }

  say(text) {
    this.cut = this.picture = this.view = null;
    this.controls.replaceChildren();
    this.legend.replaceChildren();
    this.value.textContent = text;
    this.canvas.hidden = this.tools.hidden = true;
  }

  ranks() {
    return Object.keys(this.detail.parts).map(Number).filter((rank) => this.detail.parts[rank].is_drawable);
  }
  shapeOf(rank) { return this.detail.parts[rank].shape; }
  sizes() {
    const shape = this.shapeOf(this.cut.rank);
    return this.cut.dims.map((dim) => (dim < 0 ? 1 : shape[dim]));
  }

  drawControls() {
    const { cut, detail } = this;
    const again = (changes) => { Object.assign(this.cut, changes); this.forget(); this.show(this.detail); };
    const name = (rank) => [String(rank), `${rank}${detail.parts[rank].coordinate ? ` (${detail.parts[rank].coordinate})` : ""}`];
    const shape = this.shapeOf(cut.rank);
    const fields = [makeSelect("rank", this.ranks().map(name), String(cut.rank), (value) => again({ rank: Number(value) }))];
    if (shape.length > 2) {
      const dims = shape.map((size, dim) => [String(dim), `${dim} (${size})`]);
      const turn = (place) => (value) => {
        const chosen = [...cut.dims];
        if (chosen[1 - place] === Number(value)) chosen[1 - place] = chosen[place];
        chosen[place] = Number(value);
        this.view = null;
        again({ dims: chosen });
      };
      fields.push(makeSelect("rows: dim", dims, String(cut.dims[0]), turn(0)), makeSelect("columns: dim", dims, String(cut.dims[1]), turn(1)));
      shape.forEach((size, dim) => {
        if (cut.dims.includes(dim)) return;
        const input = make("input", {
          type: "number", min: 0, max: size - 1, value: cut.index[dim], "aria-label": `index in dim ${dim}`,
          onchange: () => {
            const index = [...cut.index];
            index[dim] = clamp(Math.round(Number(input.value) || 0), 0, size - 1);
            input.value = index[dim];
            this.cut.index = index;
            this.forget();
            this.request();
          },
        });
        fields.push(make("label", { class: "cmi-field" }, make("span", { class: "cm-weak" }, `dim ${dim}`), input));
      });
    }
    this.controls.replaceChildren(...fields);
    this.canvas.hidden = this.tools.hidden = false;
    this.canvas.setAttribute("aria-label",
      `heatmap of ${detail.label} on rank ${cut.rank}: drag or arrows pan, + and - zoom, 0 shows all, Shift and arrows choose an element`);
  }

  // ---- pictures

  request() {
    if (!this.view || !this.cut) return;
    this.wanted += 1;
    if (!this.isBusy) this.fetch();
  }

  async fetch() {
    const number = this.wanted;
    const rows = [Math.floor(this.view[0]), Math.ceil(this.view[1])];
    const cols = [Math.floor(this.view[2]), Math.ceil(this.view[3])];
    if (rows[1] <= rows[0] || cols[1] <= cols[0]) return;
    const size = (side) => clamp(side, 1, MAX_PIXELS);
    const message = {
      ask: "picture", ...this.cut, rows, cols,
      height: Math.min(rows[1] - rows[0], size(this.canvas.height)),
      width: Math.min(cols[1] - cols[0], size(this.canvas.width)),
    };
    const key = JSON.stringify(this.cut);
    this.isBusy = true;
    const reply = await this.ask(message, () => {
      this.isBusy = false; // it may be asked for again
      this.value.textContent = "no answer yet: the kernel may be busy";
    });
    this.isBusy = false;
    if (key === JSON.stringify(this.cut)) this.take(message, ...reply);
    if (number !== this.wanted) this.fetch();
  }

  take(message, answer, buffers) {
    if (answer.error) {
      if (this.picture && this.isStale()) {
        this.picture = null;
        this.legend.replaceChildren();
        this.notes.replaceChildren();
        this.redraw();
      }
      this.value.textContent = answer.error;
      return;
    }
    const view = buffers[0];
    const raw = view.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : view;
    const { rows, cols, path, rank, ndim, dims, index, reduction } = message;
    this.picture = {
      ...answer, cut: { path, rank, ndim, dims, index, reduction }, rows, cols,
      values: new Float32Array(raw),
    };
    this.canvas.dataset.shown = (Number(this.canvas.dataset.shown) || 0) + 1;
    this.redraw();
    if (this.pointer) this.tell();
  }

  // Whether the picture in hand is of something else than what is to be seen now.
  isStale() {
    const { cut } = this.picture;
    return ["path", "rank", "dims", "index"].some((key) => String(cut[key]) !== String(this.cut[key]));
  }

  forget() {
    this.pointer = null;
    this.value.replaceChildren();
    this.value.dataset.final = "false";
  }

  redraw() {
    const { canvas, picture } = this;
    if (!this.view || !canvas.width) return;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    Object.assign(canvas.dataset, { view: this.view.map((at) => at.toFixed(3)).join(" ") });
    if (!picture) return;
    const isStale = this.isStale();
    canvas.dataset.stale = String(isStale);
    const scale = makeScale(this.scaleName, picture.low, picture.high);
    const table = chooseMap(scale, this.isDark);
    const image = document.createElement("canvas");
    image.width = picture.width;
    image.height = picture.height;
    image.getContext("2d").putImageData(paint(picture.values, picture.height, picture.width, scale, table), 0, 0);
    const [y0, x0] = this.toScreen(picture.rows[0], picture.cols[0]);
    const [y1, x1] = this.toScreen(picture.rows[1], picture.cols[1]);
    context.imageSmoothingEnabled = false;
    context.globalAlpha = isStale ? 0.3 : 1;
    context.drawImage(image, x0, y0, x1 - x0, y1 - y0);
    context.globalAlpha = 1;
    if (!isStale) this.writeNumbers(context, scale, table);
    this.markPointer(context);
    const oddities = { nan: false, inf: false, ninf: false };
    for (const value of picture.values) {
      if (Number.isNaN(value)) oddities.nan = true;
      else if (value === Infinity) oddities.inf = true;
      else if (value === -Infinity) oddities.ninf = true;
    }
    drawLegend(this.legend, scale, table, oddities);
    this.legend.dataset.oddities = Object.keys(oddities).filter((key) => oddities[key]).join(" ");
    this.drawNotes();
  }

  drawNotes() {
    const { picture } = this;
    const [rows, cols] = this.sizes();
    const range = (begin, end) => `${Math.floor(begin)}–${Math.ceil(end) - 1}`;
    const [top, bottom, left, right] = this.view;
    const said = [`rows ${range(top, bottom)} of ${rows.toLocaleString("en")}, columns ${range(left, right)} of ${cols.toLocaleString("en")}`];
    if (this.isStale()) {
      this.notes.textContent = [...said, "waiting for the picture"].join(" · ");
      return;
    }
    const across = [(picture.rows[1] - picture.rows[0]) / picture.height, (picture.cols[1] - picture.cols[0]) / picture.width];
    const way = { mean: "mean", absmax: "largest magnitude" }[picture.cut.reduction];
    said.push(picture.is_exact ? "a pixel an element" : `a pixel is the ${way} of about ${across.map((n) => formatNumber(n, 3)).join(" × ")} elements`);
    if (picture.is_sampled) said.push("of some of them: a NaN may be missed; zoom in for all");
    if (picture.is_torn) said.push("taken while the rank ran: values may be torn");
    said.push(document.activeElement === this.canvas || this.root.contains(document.activeElement) ? "wheel zooms" : "click, then the wheel zooms");
    this.notes.textContent = said.join(" · ");
  }

  writeNumbers(context, scale, table) {
    const { picture, canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const cell = [canvas.width / (this.view[3] - this.view[2]), canvas.height / (this.view[1] - this.view[0])];
    if (!picture.is_exact || cell[0] < CELL_TEXT[0] * ratio || cell[1] < CELL_TEXT[1] * ratio) return;
    context.font = `${11 * ratio}px ui-monospace, monospace`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let row = 0; row < picture.height; row++) {
      for (let col = 0; col < picture.width; col++) {
        const value = picture.values[row * picture.width + col];
        const [y, x] = this.toScreen(picture.rows[0] + row + 0.5, picture.cols[0] + col + 0.5);
        context.fillStyle = isBright(colourOf(value, scale, table)) ? "#000" : "#fff";
        context.fillText(formatNumber(value, 3), x, y);
      }
    }
  }

  markPointer(context) {
    if (!this.pointer) return;
    const [row, col] = this.pointer;
    const [y0, x0] = this.toScreen(row, col);
    const [y1, x1] = this.toScreen(row + 1, col + 1);
    const [height, width] = [Math.max(y1 - y0, 3), Math.max(x1 - x0, 3)];
    // Round the element; at an edge of the picture, where that would be cut off, over it.
    const frame = (gap, edge) => {
      const [top, left] = [Math.max(y0 - gap, edge), Math.max(x0 - gap, edge)];
      const bottom = Math.min(y0 + height + gap, this.canvas.height - edge);
      const right = Math.min(x0 + width + gap, this.canvas.width - edge);
      context.strokeRect(left, top, right - left, bottom - top);
    };
    context.lineWidth = 1;
    context.strokeStyle = "#fff";
    frame(0.5, 1.5);
    context.strokeStyle = "#000";
    frame(1.5, 0.5);
  }

  // ---- the value under the pointer

  point(row, col) {
    const [rows, cols] = this.sizes();
    const next = [clamp(Math.floor(row), 0, rows - 1), clamp(Math.floor(col), 0, cols - 1)];
    if (this.pointer && next[0] === this.pointer[0] && next[1] === this.pointer[1]) return;
    this.pointer = next;
    this.redraw();
    this.tell();
  }

  index() {
    const index = [...this.cut.index];
    this.cut.dims.forEach((dim, place) => { if (dim >= 0) index[dim] = this.pointer[place]; });
    return index;
  }

  tell() {
    const { cut } = this;
    const index = this.index();
    const offset = this.detail.parts[cut.rank].offset;
    const isPart = offset && String(this.shapeOf(cut.rank)) !== String(this.detail.shape);
    const whole = isPart ? index.map((at, dim) => at + offset[dim]) : null;
    const text = this.pixelText();
    this.value.replaceChildren(
      make("span", { class: "cm-weak" }, `rank ${cut.rank} [${index.join(", ")}]${whole ? ` = whole [${whole.join(", ")}]` : ""}  `),
      make("b", {}, text));
    const isFinal = text !== "…";
    Object.assign(this.value.dataset, { index: index.join(","), whole: (whole ?? index).join(","), value: text, final: String(isFinal) });
  }

  pixelText() {
    const { picture, pointer } = this;
    if (!picture || this.isStale()) return "…";
    const { rows, cols, height, width } = picture;
    const row = Math.floor(((pointer[0] + 0.5 - rows[0]) / (rows[1] - rows[0])) * height);
    const col = Math.floor(((pointer[1] + 0.5 - cols[0]) / (cols[1] - cols[0])) * width);
    if (row < 0 || row >= height || col < 0 || col >= width) return "…";
    const value = picture.values[row * width + col];
    let digits = 7; // 9 are enough for any float32
    while (digits < 9 && Math.fround(Number(formatNumber(value, digits))) !== value) digits += 1;
    const text = formatNumber(value, digits);
    return picture.is_exact ? text : `≈ ${text}`;
  }

  close() { this.resizing.disconnect(); }
}
