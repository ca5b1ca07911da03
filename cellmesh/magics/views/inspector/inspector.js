// The tensor inspector: an overview, a heatmap and shards of one value on all ranks.
// See inspector.py for what the model holds and what it can be asked.

const TABS = [["overview", "Overview"], ["heatmap", "Heatmap"], ["shards", "Shards"]];
const TRAITS = ["summary", "detail", "watch", "outdated", "ended"];
const HELLO_MS = 5000; // without an answer, there may be no kernel
const ANSWER_MS = 30000;

// Questions to the kernel, and the answers to them: each has a number. An answer may be late: front ends without
// subshells are heard when the cell that runs has ended.
class Questions {
  constructor(model, onHeard) {
    this.model = model;
    this.waiting = new Map();
    this.view = Math.random().toString(36).slice(2);
    this.number = 0;
    this.hear = (content, buffers) => {
      onHeard();
      if (content?.view !== this.view) return;
      this.waiting.get(content.id)?.([content, buffers]);
      this.waiting.delete(content.id);
    };
    model.on("msg:custom", this.hear);
  }

  tell(content) { this.model.send({ ...content, view: this.view }); }

  // late: called if there is no answer for long; it is waited for all the same.
  ask(content, late = () => {}, wait = ANSWER_MS) {
    const id = ++this.number;
    return new Promise((resolve) => {
      const timer = setTimeout(late, wait);
      this.waiting.set(id, (reply) => { clearTimeout(timer); resolve(reply); });
      this.model.send({ ...content, id, view: this.view });
    });
  }

  close() { this.model.off("msg:custom", this.hear); }
}

class Inspector {
  constructor(model, el) {
    this.model = model;
    this.questions = new Questions(model, () => this.setLive(true));
    this.isLive = null; // not known yet
    this.changed = () => (this.isLive ? this.refresh() : this.setLive(true)); // only a kernel changes these
    el.classList.add("cellmesh", "cmi");
    this.el = el;
    this.build();
    for (const key of TRAITS) model.on(`change:${key}`, this.changed);
    this.open("overview");
    this.refresh();
    this.questions.ask({ ask: "hello" }, () => this.setLive(false), HELLO_MS);
    this.watchSight();
  }

  build() {
    this.panels = Object.fromEntries(TABS.map(([key]) => [key, make("div", { class: "cmi-panel", role: "tabpanel", "data-tab": key, hidden: "" })]));
    this.tabs = Object.fromEntries(TABS.map(([key, text]) => [key, makeButton(text, text, () => this.open(key), {
      class: "cmi-tab", role: "tab", "data-tab": key, onkeydown: (event) => this.turn(event) })]));
    this.watch = makeButton("watch", "Look again after each cell", () => this.toggleWatch(), { "aria-pressed": "false" });
    this.again = makeButton("refresh", "Look again now", () => this.questions.tell({ ask: "refresh" }));
    this.title = make("span", { class: "cm-mono cmi-title" });
    this.odd = make("span", { class: "cmi-bad cmi-odd" });
    this.when = make("span", { class: "cm-weak cmi-when" });
    this.notice = make("div", { class: "cmi-notice", role: "status", hidden: "" });
    const lists = [make("div"), make("div")];
    this.panels.overview.append(...lists);
    this.list = new ItemList(lists[0], (path) => this.choose(path));
    this.listRoot = lists[0];
    this.detailRoot = lists[1];
    this.heatmap = new Heatmap(this.panels.heatmap, (message, late) => this.questions.ask(message, late));
    this.el.replaceChildren(
      make("div", { class: "cmi-head" }, this.title, this.odd, this.when, make("span", { class: "cmi-live" }, this.watch, this.again)),
      this.notice,
      make("div", { class: "cmi-tabs", role: "tablist", "aria-label": "views" }, ...Object.values(this.tabs)),
      ...Object.values(this.panels));
  }

  open(tab, rank = null) {
    this.tab = tab;
    for (const [key] of TABS) {
      this.tabs[key].setAttribute("aria-selected", String(key === tab));
      this.tabs[key].tabIndex = key === tab ? 0 : -1;
      this.panels[key].hidden = key !== tab;
    }
    if (tab === "heatmap" && this.detail?.path !== undefined) this.heatmap.show(this.detail, rank);
  }

  turn(event) {
    const shown = TABS.map(([key]) => key).filter((key) => !this.tabs[key].hidden);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = shown[(shown.indexOf(this.tab) + step + shown.length) % shown.length];
    this.open(next);
    this.tabs[next].focus();
    event.preventDefault();
    event.stopPropagation();
  }

  refresh() {
    const { model } = this;
    const [summary, detail] = [model.get("summary"), model.get("detail")];
    this.title.textContent = summary.expression;
    this.odd.textContent = summary.odd;
    this.when.textContent = [summary.said, summary.at].filter(Boolean).join(" · ");
    this.watch.setAttribute("aria-pressed", String(model.get("watch")));
    this.lookAgain();
    const notices = [model.get("ended"), ...summary.notices].filter(Boolean);
    if (this.isLive === false) notices.unshift("no kernel answers: this is what was seen last");
    this.notice.hidden = notices.length === 0;
    this.notice.replaceChildren(...notices.map((text) => make("div", {}, text)));
    this.listRoot.hidden = summary.num_items < 2;
    const isFull = this.items?.stamp === summary.stamp;
    if (summary.num_items > 1) this.list.show(isFull ? this.items.rows : summary.items, summary.num_items, detail.path, summary.headers);
    if (this.isLive && !isFull && summary.num_items > summary.items.length) this.fetchItems(summary.stamp);
    this.detail = detail;
    this.tabs.heatmap.hidden = this.tabs.shards.hidden = true;
    if (detail.path !== undefined) {
      this.tabs.heatmap.hidden = !Object.values(detail.parts).some((part) => part.is_drawable);
      drawDetail(this.detailRoot, detail);
      drawShards(this.panels.shards, detail, (rank) => this.open("heatmap", rank));
      this.tabs.shards.hidden = !detail.shards.blocks.length;
      if (this.tab === "heatmap") this.heatmap.show(detail);
    } else this.detailRoot.replaceChildren(...summary.texts.map(({ ranks, text }) =>
      make("div", { class: "cmi-row" }, make("b", { class: "cm-mono" }, `[${ranks}] `), make("span", { class: "cm-mono" }, text))));
  }

  // ---- the kernel

  // A kernel has been heard, or not for so long that there may be none.
  setLive(isLive) {
    if (this.isLive === isLive || this.isLive) return;
    this.isLive = isLive;
    this.el.dataset.live = String(isLive);
    for (const control of [this.watch, this.again]) control.disabled = !isLive;
    this.refresh();
  }

  async fetchItems(stamp) {
    if (this.fetching === stamp) return;
    this.fetching = stamp;
    const [{ stamp: seen, rows }] = await this.questions.ask({ ask: "items" });
    this.items = { stamp: seen, rows };
    this.refresh();
  }

  choose(path) { this.questions.tell({ ask: "choose", path }); }

  toggleWatch() { this.questions.tell({ ask: "watch", watch: !this.model.get("watch") }); }

  // ---- whether anybody looks

  watchSight() {
    this.inSight = true;
    this.sight = new IntersectionObserver((entries) => { this.inSight = entries.at(-1).isIntersecting; this.lookAgain(); });
    this.sight.observe(this.el);
    this.turned = () => this.lookAgain();
    document.addEventListener("visibilitychange", this.turned);
  }

  // A cell has ended since the value was seen last: it is looked at again as soon as the inspector is in sight.
  lookAgain() {
    const isVisible = this.inSight && document.visibilityState === "visible";
    if (this.isLive && isVisible && this.model.get("outdated")) this.questions.tell({ ask: "seen" });
  }

  close() {
    this.sight.disconnect();
    document.removeEventListener("visibilitychange", this.turned);
    for (const key of TRAITS) this.model.off(`change:${key}`, this.changed);
    this.questions.close();
    this.heatmap.close();
  }
}

export default {
  render({ model, el }) {
    const inspector = new Inspector(model, el);
    return () => inspector.close();
  },
};
