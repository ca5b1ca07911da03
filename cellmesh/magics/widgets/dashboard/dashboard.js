// Draws the mesh dashboard. The messages that it takes and sends are listed in dashboard.py.

const HEARTBEAT_MS = 2000;
const STALE_MS = 6000; // the kernel tells something each second
const UNHEARD_MS = 3000;

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
