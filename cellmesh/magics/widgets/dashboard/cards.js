// A rank of the dashboard: what its card says, and the lines of the last minute.

const SPAN_S = 60;
const BREAK_S = 4; // a longer time between two looks is a gap in the lines

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

function formatSeconds(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
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
    case "runs": return row.where ?? "";
    case "asks": return "waits for your answer";
    case "heals": return "rebuilds its process groups";
    case "new": return "new and empty";
    case "starts": return "starts";
    case "silent": return "does not answer";
    case "dead": return row.note ?? "";
    default: return row.is_broken ? "its groups are to be healed" : "";
  }
}

// For how long it has waited, where that is long enough to be told.
function describeTime(row) {
  return row.doing === "waits" && row.waited_s >= 1 ? ` ${formatSeconds(row.waited_s)}` : "";
}

class Card {
  constructor(rank, onOpen) {
    const span = (name, ...children) => make("span", { class: `cmd-${name}` }, ...children);
    this.sign = make("span", { class: "cmd-sign", "aria-hidden": "true" });
    this.word = span("word");
    this.cell = span("cell");
    this.what = span("what");
    this.time = span("time");
    this.series = span("series");
    this.lines = new Map();
    this.root = make(
      "button",
      { type: "button", class: "cmd-card", "data-rank": rank, "aria-expanded": "false", onclick: () => onOpen(rank) },
      span("head", span("rank", String(rank)), span("state", this.sign, this.word)),
      this.cell,
      make("span", { class: "cmd-doing cm-mono" }, this.what, this.time),
      this.series,
    );
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

  draw(key, value, d) {
    if (!this.lines.has(key)) this.lines.set(key, this.addLine(key));
    const line = this.lines.get(key);
    setAttribute(line.path, "d", d);
    setText(line.value, value);
  }

  addLine(key) {
    const order = SERIES.findIndex((series) => series.key === key);
    const path = draw("path");
    const value = make("span", { class: "cmd-value" });
    const svg = draw("svg", { viewBox: "0 0 60 12", preserveAspectRatio: "none", "aria-hidden": "true" }, path);
    const name = make("span", { class: "cmd-name" }, SERIES[order].name);
    this.series.append(make("span", { class: "cmd-line", "data-series": key, style: `order:${order}` }, name, svg, value));
    return { path, value };
  }
}

// The samples of the last minute, and the lines through them.
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
