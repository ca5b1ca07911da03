// Draws the mesh dashboard. The messages that it takes and sends are listed in dashboard.py.

const HEARTBEAT_MS = 2000;
const STALE_MS = 6000; // the kernel tells something each second
const UNHEARD_MS = 3000;

// What a button does, and what is asked before it.
const ACTIONS = [
  ["interrupt", "Interrupt what the ranks run", ""],
  ["heal", "Replace dead ranks, rebuild process groups", ""],
  ["restart", "Replace every rank", "Replace every rank by a new one? What they hold is lost."],
  ["stop", "End the mesh", "End the mesh? What its ranks hold is lost."],
];

// The mesh in a line, its buttons, and what they did.
class Bar {
  constructor(onDo) {
    this.onDo = onDo;
    this.isOver = false;
    this.title = make("span", { class: "cmd-mesh" });
    this.buttons = {};
    for (const [action, title, question] of ACTIONS) {
      const onclick = () => (question ? this.ask(action, question) : onDo(action));
      this.buttons[action] = make("button", { type: "button", title, "data-action": action, onclick }, action);
    }
    const attributes = { class: "cmd-buttons", role: "group", "aria-label": "the mesh" };
    const buttons = make("span", attributes, ...Object.values(this.buttons));
    this.question = make("div", { class: "cmd-question", role: "alertdialog", hidden: "" });
    this.told = make("div", { class: "cmd-told", role: "status" });
    this.root = make("div", {}, make("div", { class: "cmd-bar" }, this.title, buttons), this.question, this.told);
  }

  ask(action, text) {
    const close = () => {
      this.question.hidden = true;
      this.question.replaceChildren();
      this.buttons[action].focus();
    };
    const confirm = () => {
      close();
      this.onDo(action);
    };
    const yes = make("button", { type: "button", class: "cmd-yes", onclick: confirm }, action);
    const no = make("button", { type: "button", onclick: close }, "cancel");
    this.question.onkeydown = onEscape(close);
    this.question.setAttribute("aria-label", text);
    this.question.replaceChildren(make("span", {}, text), yes, no);
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

const onEscape = (action) => (event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  action();
};

// One rank's stack and the end of its log.
class Panel {
  constructor(onClose) {
    this.title = make("strong");
    this.facts = make("span", { class: "cm-weak cmd-facts" });
    this.stack = make("pre", { class: "cmd-stack cm-mono", tabindex: 0, "aria-label": "stack" });
    this.log = make("pre", { class: "cmd-log cm-mono", tabindex: 0, "aria-label": "end of the log" });
    const close = make("button", { type: "button", class: "cmd-close", onclick: onClose }, "close");
    this.root = make(
      "section",
      { class: "cmd-panel", hidden: "", onkeydown: onEscape(onClose) },
      make("div", { class: "cmd-panelhead" }, this.title, this.facts, close),
      makeTitle("stack"),
      this.stack,
      makeTitle("end of the log"),
      this.log,
    );
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
    this.verdict = make("div", { class: "cmd-verdict cmd-failed", role: "alert", hidden: "" });
    this.place = make("div", { class: "cmd-place" });
    this.notes = make("div", { class: "cmd-notes" });
    this.panel = new Panel(() => this.open(null));
    const parts = [this.verdict, this.bar.root, this.place, this.notes, this.panel.root];
    this.root = make("div", { class: "cellmesh cmd-root" }, ...parts);
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
      this.history = new History(message.history);
      this.bar.tell(message.told);
      this.end();
      this.show(message);
    } else if (message.kind === "look") {
      this.history.add(message.sample);
      this.show(message);
    }
  }

  show({ name, state, dims, rows, verdict = "" }) {
    setText(this.verdict, verdict);
    this.verdict.hidden = !verdict;
    Object.assign(this, { name, state, rows });
    this.arrange(dims, rows.length);
    for (const row of rows) this.cards[row.rank].show(row, dims);
    this.history.draw(this.cards);
    this.describeMesh();
    this.note();
    if (this.rows[this.panel.rank]) this.panel.describe(this.rows[this.panel.rank], dims);
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
    for (const { rank, doing, note, last_output: output = "" } of this.rows.filter((row) => row.note)) {
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
        const who = `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")} ${isDead ? "" : "is "}`;
        const last = output && make("pre", { class: "cm-mono" }, output.split("\n").slice(-5).join("\n"));
        return make("div", { class: `cmd-note ${isDead ? "cmd-failed" : ""}` }, make("span", {}, `${who}${text}`), last || null);
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
