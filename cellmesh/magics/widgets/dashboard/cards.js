// A rank of the dashboard: what its card says, and the lines of the last minute.

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
