// Draws the mesh dashboard. The messages that it takes and sends are listed in dashboard.py.

const HEARTBEAT_MS = 2000;
const STALE_MS = 6000; // the kernel tells something each second
const UNHEARD_MS = 3000;
const SPAN_S = 60;
const BREAK_S = 4; // a longer time between two looks is a gap in the lines
const SVG = "http://www.w3.org/2000/svg";

// State -> what stands before it, so that it is not told by colour alone.
const SIGNS = {
  idle: "○", runs: "●", waits: "◐", asks: "?", heals: "+", new: "◇", starts: "…", silent: "!", dead: "✕",
};
const SERIES = [
  { key: "cpu", name: "CPU", format: (value) => `${value.toFixed(0)} %`, top: (most) => Math.max(100, most) },
  { key: "rss", name: "RSS", format: formatBytes, top: (most) => most * 1.15 },
  { key: "gpu", name: "GPU", format: (value) => `${value.toFixed(0)} %`, top: () => 100 },
  { key: "gpu_memory", name: "VRAM", format: formatBytes, top: (most) => most * 1.15 },
];
// How much a rank's card shows, and how wide it may be, in pixels.
const SIZES = [
  { name: "full", least: 148, most: 230 },
  { name: "compact", least: 66, most: 104 },
  { name: "small", least: 42, most: 65 },
  { name: "mini", least: 24, most: 34 },
];
const MANY = 16; // more ranks than these are never shown in full
const GAP = 4;
const LABEL = 46;

function formatBytes(number) {
  for (const unit of ["B", "kB", "MB"]) {
    if (number < 1000) return `${number.toFixed(unit === "MB" && number < 100 ? 1 : 0)} ${unit}`;
    number /= 1000;
  }
  return `${number.toFixed(1)} GB`;
}

function formatSeconds(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

// Only what differs is touched: a page with 64 ranks is drawn once a second.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Row-major, as torch's DeviceMesh numbers its ranks.
function coordinateOf(rank, dims) {
  const indices = new Array(dims.length);
  for (let at = dims.length - 1; at >= 0; at--) {
    indices[at] = rank % dims[at][1];
    rank = Math.floor(rank / dims[at][1]);
  }
  return indices;
}

function describePlace(rank, dims) {
  return coordinateOf(rank, dims).map((index, at) => `${dims[at][0]}=${index}`).join(" ");
}

function describeCell(row) {
  return [row.cell ? `In[${row.cell}]` : "", row.line ? `line ${row.line}` : ""].filter(Boolean).join(" ");
}

function describeDoing(row) {
  switch (row.doing) {
    case "waits": return row.collective;
    case "runs": return row.where;
    case "asks": return "waits for your answer";
    case "heals": return "rebuilds its process groups";
    case "new": return "new and empty";
    case "starts": return "starts";
    case "silent": return "does not answer";
    case "dead": return row.note;
    default: return row.is_broken ? "its groups are to be healed" : "";
  }
}

// For how long it has waited, where that is long enough to be told.
function describeTime(row) {
  return row.doing === "waits" && row.waited_s >= 1 ? ` ${formatSeconds(row.waited_s)}` : "";
}

class Card {
  constructor(rank, onOpen) {
    this.root = make("button", "cmd-card");
    this.root.type = "button";
    this.root.dataset.rank = rank;
    this.root.setAttribute("aria-expanded", "false");
    this.root.addEventListener("click", () => onOpen(rank));
    const head = make("span", "cmd-head");
    this.state = make("span", "cmd-state");
    this.sign = make("span", "cmd-sign");
    this.sign.setAttribute("aria-hidden", "true");
    this.word = make("span", "cmd-word");
    this.state.append(this.sign, this.word);
    head.append(make("span", "cmd-rank", String(rank)), this.state);
    this.cell = make("span", "cmd-cell");
    this.doing = make("span", "cmd-doing cm-mono");
    this.what = make("span", "cmd-what");
    this.time = make("span", "cmd-time");
    this.doing.append(this.what, this.time);
    this.series = make("span", "cmd-series");
    this.lines = new Map();
    this.root.append(head, this.cell, this.doing, this.series);
  }

  show(row, dims) {
    const cell = describeCell(row);
    const doing = describeDoing(row);
    setAttribute(this.root, "data-doing", row.doing);
    setText(this.sign, SIGNS[row.doing] ?? "");
    setText(this.word, row.doing);
    setText(this.cell, cell);
    setText(this.what, doing);
    setText(this.time, describeTime(row));
    const place = `rank ${row.rank}, ${describePlace(row.rank, dims)}: ${row.doing}`;
    const told = [place, cell, `${doing}${describeTime(row)}`].filter(Boolean);
    setAttribute(this.root, "aria-label", told.join(", "));
    setAttribute(this.root, "title", told.join("\n"));
  }

  draw(key, value, path) {
    let line = this.lines.get(key);
    if (!line) {
      line = this.addLine(SERIES.find((series) => series.key === key));
      this.lines.set(key, line);
    }
    setAttribute(line.path, "d", path);
    setText(line.value, value);
  }

  addLine({ key, name }) {
    const root = make("span", "cmd-line");
    root.dataset.series = key;
    root.style.order = SERIES.findIndex((series) => series.key === key);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 60 12");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS(SVG, "path");
    svg.append(path);
    const value = make("span", "cmd-value");
    root.append(make("span", "cmd-name", name), svg, value);
    this.series.append(root);
    return { path, value };
  }
}

// The cards of a mesh in the order of its dims: what wraps, rows by columns, or blocks of these.
class Grid {
  constructor(dims, numRanks, cards) {
    this.dims = dims;
    this.numRanks = numRanks;
    this.cards = cards;
    this.root = make("div", "cmd-grid");
    this.layout = "";
  }

  fit(width) {
    const [columns, size, cardWidth] = this.choose(width);
    const layout = `${columns} ${size} ${cardWidth}`;
    if (layout === this.layout || width < 1) return;
    this.layout = layout;
    this.root.dataset.size = size;
    this.root.style.setProperty("--cmd-width", `${cardWidth}px`);
    const focused = this.root.contains(document.activeElement) ? document.activeElement : null;
    this.root.replaceChildren(this.block(0, 0, columns));
    focused?.focus();
  }

  // Whether there are columns, what cards show, and how wide they are.
  choose(width) {
    const sizes = this.numRanks > MANY ? SIZES.slice(1) : SIZES;
    const depth = Math.max(0, this.dims.length - 2);
    if (this.dims.length > 1) {
      const numColumns = this.dims.at(-1)[1];
      const roomOf = (numBeside) => {
        const block = (width - depth * 16 - (numBeside - 1) * 22) / numBeside;
        return (block - LABEL) / numColumns - GAP;
      };
      // Two blocks stand beside each other where that leaves cards their words.
      if (depth && this.numRanks > MANY && roomOf(2) >= sizes[0].least) {
        return [true, sizes[0].name, Math.floor(Math.min(roomOf(2), sizes[0].most))];
      }
      for (const { name, least, most } of sizes) {
        if (roomOf(1) >= least) return [true, name, Math.floor(Math.min(roomOf(1), most))];
      }
    }
    const [{ name, least, most }] = sizes;
    const fitting = Math.max(1, Math.floor((width - depth * 16) / (least + GAP)));
    return [false, name, Math.floor(Math.min(most, (width - depth * 16) / fitting - GAP))];
  }

  block(depth, first, columns) {
    const left = this.dims.length - depth;
    const stride = this.dims.slice(depth + 1).reduce((product, [, size]) => product * size, 1);
    const [name, size] = this.dims[depth] ?? ["rank", this.numRanks];
    if (left <= 1) return this.wrapped(name, first, size);
    if (left === 2 && columns) return this.table(depth, first);
    const root = make("div", left === 2 ? "cmd-rows" : "cmd-blocks");
    for (let index = 0; index < size; index++) {
      const part = make("div", "cmd-block");
      part.setAttribute("role", "group");
      part.setAttribute("aria-label", `${name}=${index}`);
      part.append(make("div", "cmd-title", `${name}=${index}`), this.block(depth + 1, first + index * stride, columns));
      root.append(part);
    }
    return root;
  }

  wrapped(name, first, size) {
    const root = make("div", "cmd-wrapped");
    for (let index = 0; index < size; index++) root.append(this.cards[first + index].root);
    if (this.dims.length > 1) return root;
    const block = make("div");
    block.append(make("div", "cmd-title", size > 1 ? `${name}=0…${size - 1}` : `${name}=0`), root);
    return block;
  }

  table(depth, first) {
    const [[rowName, numRows], [columnName, numColumns]] = this.dims.slice(depth);
    const root = make("div", "cmd-table");
    root.style.gridTemplateColumns = `auto repeat(${numColumns}, var(--cmd-width))`;
    root.append(make("span"));
    for (let column = 0; column < numColumns; column++) {
      // Where there is little room the dim is named once.
      const label = make("span", "cmd-label cmd-column");
      label.append(make("span", column ? "cmd-again" : "", `${columnName}=`), String(column));
      root.append(label);
    }
    for (let row = 0; row < numRows; row++) {
      root.append(make("span", "cmd-label cmd-row", `${rowName}=${row}`));
      for (let column = 0; column < numColumns; column++) {
        root.append(this.cards[first + row * numColumns + column].root);
      }
    }
    return root;
  }
}

// The samples of the last minute, and the lines that they make.
class History {
  constructor(samples) {
    this.samples = samples;
  }

  add(sample) {
    if (this.samples.length && sample.at_s < this.samples.at(-1).at_s) this.samples = [];
    this.samples.push(sample);
    this.samples = this.samples.filter(({ at_s }) => at_s > sample.at_s - SPAN_S);
  }

  draw(cards) {
    const last = this.samples.at(-1);
    if (!last) return;
    for (const { key, format, top } of SERIES) {
      const having = this.samples.filter((sample) => sample[key]);
      if (!having.length) continue;
      const most = top(Math.max(...having.flatMap((sample) => sample[key].map((value) => value ?? 0))));
      cards.forEach((card, rank) => {
        const value = last[key]?.[rank];
        card.draw(key, value == null ? "–" : format(value), this.path(having, key, rank, last.at_s, most || 1));
      });
    }
  }

  path(samples, key, rank, now, most) {
    let path = "";
    let before = null;
    for (const sample of samples) {
      const value = sample[key][rank];
      if (value == null) {
        before = null;
        continue;
      }
      const x = (SPAN_S - (now - sample.at_s)).toFixed(1);
      const y = (11.4 - (10.8 * value) / most).toFixed(1);
      path += `${before !== null && sample.at_s - before < BREAK_S ? "L" : "M"}${x} ${y}`;
      before = sample.at_s;
    }
    return path;
  }
}

class Bar {
  constructor(onDo) {
    this.onDo = onDo;
    this.isOver = false;
    this.root = make("div", "cmd-bar");
    this.title = make("span", "cmd-mesh");
    const buttons = make("span", "cmd-buttons");
    buttons.setAttribute("role", "group");
    buttons.setAttribute("aria-label", "the mesh");
    this.buttons = {};
    for (const [action, title, question] of [
      ["interrupt", "Interrupt what the ranks run", ""],
      ["heal", "Replace dead ranks, rebuild process groups", ""],
      ["restart", "Replace every rank", "Replace every rank by a new one? What they hold is lost."],
      ["stop", "End the mesh", "End the mesh? What its ranks hold is lost."],
    ]) {
      const button = make("button", "", action);
      button.type = "button";
      button.title = title;
      button.dataset.action = action;
      button.addEventListener("click", () => (question ? this.ask(action, question) : onDo(action)));
      this.buttons[action] = button;
      buttons.append(button);
    }
    this.question = make("div", "cmd-question");
    this.question.setAttribute("role", "alertdialog");
    this.question.hidden = true;
    this.told = make("div", "cmd-told");
    this.told.setAttribute("role", "status");
    this.root.append(this.title, buttons);
  }

  ask(action, text) {
    const label = make("span", "", text);
    const yes = make("button", "cmd-yes", action);
    const no = make("button", "", "cancel");
    yes.type = no.type = "button";
    const close = () => {
      this.question.hidden = true;
      this.question.replaceChildren();
      this.buttons[action].focus();
    };
    yes.addEventListener("click", () => {
      close();
      this.onDo(action);
    });
    no.addEventListener("click", close);
    this.question.onkeydown = (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    };
    this.question.setAttribute("aria-label", text);
    this.question.replaceChildren(label, yes, no);
    this.question.hidden = false;
    no.focus();
  }

  tell({ action = "", text = "", failed = false, is_busy: isBusy = false }) {
    const own = action && action !== "look" ? `${action}: ` : "";
    setText(this.told, text && `${own}${text}`);
    this.told.classList.toggle("cmd-failed", failed);
    for (const [name, button] of Object.entries(this.buttons)) {
      button.disabled = this.isOver || (isBusy && name !== "interrupt");
    }
  }

  end(why) {
    this.isOver = true;
    this.question.hidden = true;
    this.tell({ text: why });
  }
}

class Panel {
  constructor(onClose) {
    this.root = make("section", "cmd-panel");
    this.root.hidden = true;
    const head = make("div", "cmd-panelhead");
    this.title = make("strong");
    this.facts = make("span", "cm-weak cmd-facts");
    const close = make("button", "cmd-close", "close");
    close.type = "button";
    close.addEventListener("click", onClose);
    this.root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      onClose();
    });
    head.append(this.title, this.facts, close);
    this.stack = make("pre", "cmd-stack cm-mono");
    this.log = make("pre", "cmd-log cm-mono");
    for (const [element, name] of [[this.stack, "stack"], [this.log, "end of the log"]]) {
      element.tabIndex = 0;
      element.setAttribute("aria-label", name);
    }
    this.root.append(head, make("div", "cmd-title", "stack"), this.stack, make("div", "cmd-title", "end of the log"), this.log);
    this.rank = null;
  }

  open(rank) {
    this.rank = rank;
    this.root.hidden = rank === null;
    setText(this.stack, "…");
    setText(this.log, "…");
  }

  describe(row, dims) {
    setText(this.title, `rank ${row.rank}`);
    const memory = row.rss == null ? "" : formatBytes(row.rss);
    const doing = `${describeDoing(row)}${describeTime(row)}`;
    const facts = [describePlace(row.rank, dims), row.doing, describeCell(row), doing, row.device, row.host];
    setText(this.facts, [...facts, row.pid ? `pid ${row.pid}` : "", memory].filter(Boolean).join(" · "));
    setAttribute(this.root, "aria-label", `rank ${row.rank}`);
  }

  show({ stack, log }) {
    setText(this.stack, stack || "–");
    if (this.log.textContent === log) return;
    setText(this.log, log || "nothing has been printed");
    this.log.scrollTop = this.log.scrollHeight;
  }
}

class Dashboard {
  constructor(model, el) {
    this.model = model;
    this.id = crypto.randomUUID?.() ?? String(Math.random());
    this.dims = [];
    this.rows = [];
    this.cards = [];
    this.history = new History([]);
    this.isSeen = false;
    this.heardAt = Date.now();
    this.bar = new Bar((action) => this.act(action));
    this.place = make("div", "cmd-place");
    this.notes = make("div", "cmd-notes");
    this.panel = new Panel(() => this.open(null));
    this.root = make("div", "cellmesh cmd-root");
    this.root.append(this.bar.root, this.bar.question, this.bar.told, this.place, this.notes, this.panel.root);
    el.append(this.root);

    this.onMessage = (message) => this.hear(message);
    this.onEnded = () => this.end();
    model.on("msg:custom", this.onMessage);
    model.on("change:ended", this.onEnded);
    this.onVisibility = () => this.look();
    document.addEventListener("visibilitychange", this.onVisibility);
    this.seeing = new IntersectionObserver((entries) => {
      this.isSeen = entries.at(-1).isIntersecting;
      this.look();
    });
    this.seeing.observe(this.root);
    this.sizing = new ResizeObserver(() => this.grid?.fit(this.place.clientWidth));
    this.sizing.observe(this.place);
    this.timer = setInterval(() => this.look(true), HEARTBEAT_MS);
    this.end();
  }

  close() {
    clearInterval(this.timer);
    clearTimeout(this.unheard);
    this.seeing.disconnect();
    this.sizing.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.model.off("msg:custom", this.onMessage);
    this.model.off("change:ended", this.onEnded);
    if (this.looked) this.send({ kind: "look", view: this.id, looks: false });
  }

  send(message) {
    try {
      this.model.send(message);
    } catch (error) {
      this.bar.tell({ text: `the kernel cannot be reached: ${error.message}`, failed: true });
    }
  }

  // Tell the kernel whether somebody looks: at once when that changes, and again and again while it is so.
  look(isHeartbeat = false) {
    const looks = this.isSeen && document.visibilityState === "visible";
    if (looks && !this.looked) this.heardAt = Date.now();
    if (looks ? isHeartbeat || !this.looked : this.looked) {
      this.send({ kind: "look", view: this.id, looks });
    }
    this.looked = looks;
    const silentMs = Date.now() - this.heardAt;
    const hasEnded = Boolean(this.model.get("ended"));
    const isStale = looks && silentMs > STALE_MS && !hasEnded;
    this.root.classList.toggle("cmd-stale", isStale || hasEnded);
    this.describeMesh(isStale ? `no news for ${Math.floor(silentMs / 1000)} s` : "");
  }

  hear(message) {
    this.heardAt = Date.now();
    if (message.kind === "told") {
      clearTimeout(this.unheard);
      this.bar.tell(message);
    } else if (message.kind === "panel") {
      if (message.rank === this.panel.rank) this.panel.show(message);
    } else if (message.kind === "all") {
      this.name = message.name;
      this.rows = [];
      this.history = new History(message.history);
      this.bar.tell(message.told);
      this.end();
      this.show(message, message.num_ranks);
    } else if (message.kind === "look" && this.name) {
      this.history.add(message.sample);
      this.show(message, this.cards.length);
    }
  }

  show({ state, dims, rows }, numRanks) {
    for (const changes of rows) this.rows[changes.rank] = { ...this.rows[changes.rank], ...changes };
    this.state = state;
    this.arrange(dims, numRanks);
    for (const row of this.rows) if (row) this.cards[row.rank].show(row, dims);
    this.history.draw(this.cards);
    this.describeMesh();
    this.note();
    if (this.panel.rank !== null && this.rows[this.panel.rank]) this.panel.describe(this.rows[this.panel.rank], dims);
  }

  arrange(dims, numRanks) {
    const layout = JSON.stringify([dims, numRanks]);
    if (layout === this.layout) return;
    this.layout = layout;
    this.dims = dims;
    if (this.cards.length !== numRanks) {
      this.cards = Array.from({ length: numRanks }, (_, rank) => new Card(rank, (opened) => this.open(opened)));
    }
    this.grid = new Grid(dims, numRanks, this.cards);
    this.place.replaceChildren(this.grid.root);
    this.grid.fit(this.place.clientWidth);
  }

  describeMesh(remark = "") {
    if (!this.name) return;
    const shape = this.dims.map(([name, size]) => `${name}=${size}`).join(" ");
    const parts = [this.name, `${this.cards.length} ranks`, shape, this.state, remark];
    setText(this.bar.title, parts.filter(Boolean).join(" · "));
  }

  // How those ended that are dead, or that others have replaced; alike ones in one line.
  note() {
    const texts = new Map();
    for (const { rank, doing, note, last_output: output } of this.rows.filter((row) => row?.note)) {
      const isDead = doing === "dead";
      const text = isDead ? note : `new and empty: the predecessor ${note}`;
      const key = `${text}\n${output}`;
      if (!texts.has(key)) texts.set(key, { text, output, isDead, ranks: [] });
      texts.get(key).ranks.push(rank);
    }
    const key = JSON.stringify([...texts.values()]);
    if (key === this.noted) return;
    this.noted = key;
    this.notes.replaceChildren(
      ...[...texts.values()].map(({ text, output, isDead, ranks }) => {
        const note = make("div", isDead ? "cmd-note cmd-failed" : "cmd-note");
        note.append(make("span", "", `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")} ${isDead ? "" : "is "}${text}`));
        if (output) note.append(make("pre", "cm-mono", output.split("\n").slice(-5).join("\n")));
        return note;
      }),
    );
  }

  open(rank) {
    const before = this.panel.rank;
    const opened = rank === before ? null : rank;
    if (before !== null) this.cards[before]?.root.setAttribute("aria-expanded", "false");
    this.panel.open(opened);
    this.send({ kind: "open", rank: opened });
    if (opened === null) {
      this.cards[before]?.root.focus();
      return;
    }
    this.cards[opened].root.setAttribute("aria-expanded", "true");
    if (this.rows[opened]) this.panel.describe(this.rows[opened], this.dims);
  }

  act(action) {
    this.bar.tell({ action, text: "…" });
    clearTimeout(this.unheard);
    this.unheard = setTimeout(() => {
      const text = "the kernel is busy and takes this up after its cell; the notebook's stop button works at once";
      this.bar.tell({ action, text });
    }, UNHEARD_MS);
    this.send({ kind: "do", action });
  }

  end() {
    const why = this.model.get("ended");
    if (!why) return;
    this.root.classList.add("cmd-stale");
    this.bar.end(why);
  }
}

export default {
  render({ model, el }) {
    const dashboard = new Dashboard(model, el);
    return () => dashboard.close();
  },
};
