// The last cells as a Gantt chart, a row a rank. See timeline.py for what the model holds; times are microseconds.

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
  let unanswered = 0;
  const exportTrace = () => {
    clearTimeout(unanswered);
    unanswered = setTimeout(() => { problem.textContent = "The kernel has not sent the trace yet: it is busy, or has ended."; }, 3000);
    model.send({ action: "trace" });
  };
  const receive = (message, buffers) => {
    if (!unanswered) return; // another view of this widget has asked
    clearTimeout(unanswered);
    unanswered = 0;
    complain();
    download(buffers[0], message.trace);
  };
  const whole = () => chart.show(0, chart.length);
  const bar = make("div", { class: "cm-bar" },
    button("−", "zoom out", () => chart.zoom(2)), button("+", "zoom in", () => chart.zoom(0.5)),
    button("◂", "earlier", () => chart.move(-0.5)), button("▸", "later", () => chart.move(0.5)),
    button("All", "show all of it", whole), range, make("span", { class: "cm-gap" }), ended, update,
    button("Export trace", "download it as a Chrome trace, for chrome://tracing or Perfetto", exportTrace));
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
  const handlers = { "change:about": reload, "change:operations": reload, "change:computing": reload, "change:ended": end, "change:problem": complain, "msg:custom": receive };
  for (const [event, handler] of Object.entries(handlers)) model.on(event, handler);
  const resized = new ResizeObserver(() => chart.redraw());
  resized.observe(root);
  const themed = new MutationObserver(() => chart.redraw());
  themed.observe(document.body, { attributes: true, attributeFilter: ["class", "data-jp-theme-name", "data-vscode-theme-id"] });
  load();
  end();
  complain();
  return () => {
    clearTimeout(unanswered);
    resized.disconnect();
    themed.disconnect();
    for (const [event, handler] of Object.entries(handlers)) model.off(event, handler);
  };
}

export default { render };
