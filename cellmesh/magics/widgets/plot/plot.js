// Draws the lines that ranks log. See plots.py for what the model holds.

const WIDTH = 720, HEIGHT = 200, LEFT = 62, RIGHT = 12, TOP = 24, BOTTOM = 24;
// Of larger numbers differences could not be had; a shorter scale has no room for ticks, as floats lie on it.
const MOST = 1e300, LEAST_SHARE = 1e-12, LEAST_SPAN = 1e-290;
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const node = tag === "svg" || attributes.svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key !== "svg") node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
const shape = (tag, attributes, ...children) => make(tag, { ...attributes, svg: true }, ...children);

// The model's lines with their points; a line's steps come first, then its values.
function unpack(model) {
  const raw = model.get("points");
  const bytes = raw.buffer ? raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.byteLength) : raw;
  const numbers = new Float64Array(bytes);
  let at = 0;
  return model.get("lines").map((line) => {
    const steps = numbers.subarray(at, at + line.count);
    const values = numbers.subarray(at + line.count, at + 2 * line.count);
    at += 2 * line.count;
    return { ...line, steps, values };
  });
}

// The mean of lines at each step that any of them has, and the least and the most.
function bandOf(lines) {
  const at = new Map();
  for (const { steps, values } of lines) {
    steps.forEach((step, index) => {
      const value = values[index];
      if (Number.isNaN(value)) return;
      const here = at.get(step) ?? { sum: 0, count: 0, least: Infinity, most: -Infinity };
      here.sum += value;
      here.count += 1;
      here.least = Math.min(here.least, value);
      here.most = Math.max(here.most, value);
      at.set(step, here);
    });
  }
  return [...at.entries()]
    .sort((one, other) => one[0] - other[0])
    .map(([step, { sum, count, least, most }]) => ({ step, mean: sum / count, least, most }));
}

function ticks(low, high, count) {
  let step = 10 ** Math.floor(Math.log10((high - low) / count));
  for (const factor of [1, 2, 5, 10]) {
    if ((high - low) / (step * factor) <= count) {
      step *= factor;
      break;
    }
  }
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

function widen([low, high], share) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= Math.max(size * LEAST_SHARE, LEAST_SPAN)) {
    const half = size > LEAST_SPAN ? size / 2 : 0.5;
    return [low - half, high + half];
  }
  return [low - (high - low) * share, high + (high - low) * share];
}

const bounded = (number) => (Number.isFinite(number) ? Math.max(-MOST, Math.min(number, MOST)) : number);

function extent(numbers) {
  let low = Infinity, high = -Infinity;
  for (const number of numbers) {
    if (!Number.isFinite(number)) continue;
    low = Math.min(low, bounded(number));
    high = Math.max(high, bounded(number));
  }
  return low <= high ? [low, high] : null;
}

const brief = (number) => (Number.isFinite(number) ? String(Number(number.toPrecision(4))) : String(number));

function path(steps, values, xOf, yOf) {
  let text = "", pen = "M";
  for (let index = 0; index < steps.length; index++) {
    const y = yOf(values[index]);
    if (!Number.isFinite(y)) {
      pen = "M"; // a gap
      continue;
    }
    text += `${pen}${xOf(steps[index]).toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  }
  return text.includes("L") ? text : `${text}h.1`;
}

function drawPanel(panel, model, name, lines) {
  panel.replaceChildren();
  const visible = lines.filter((line) => !model.get("hidden").includes(line.rank));
  const isLog = model.get("log_scale");
  const scale = (value) => (isLog ? (value > 0 ? Math.log10(value) : NaN) : value);
  const across = extent(visible.flatMap((line) => [...line.steps]));
  const up = extent(visible.flatMap((line) => [...line.values].map(scale)));
  if (!across || !up) {
    const why = lines.length === 0 ? `cellmesh.log(${name}=..., step=...) on the ranks draws here` : "nothing to draw";
    panel.append(make("div", { class: "cm-weak cm-empty" }, `${name}: ${why}`));
    return;
  }
  const [lowX, highX] = widen(across, 0), [lowY, highY] = widen(up, 0.05);
  const xOf = (step) => LEFT + ((bounded(step) - lowX) / (highX - lowX)) * (WIDTH - LEFT - RIGHT);
  const yOf = (value) => HEIGHT - BOTTOM - ((bounded(scale(value)) - lowY) / (highY - lowY)) * (HEIGHT - TOP - BOTTOM);
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${name} by step` });
  svg.append(shape("text", { class: "cm-title", x: LEFT, y: 14 }, name));
  for (const tick of ticks(lowY, highY, 4)) {
    const y = HEIGHT - BOTTOM - ((tick - lowY) / (highY - lowY)) * (HEIGHT - TOP - BOTTOM);
    svg.append(shape("path", { class: "cm-grid", d: `M${LEFT} ${y.toFixed(1)}H${WIDTH - RIGHT}` }));
    svg.append(shape("text", { x: LEFT - 6, y: y + 3, "text-anchor": "end" }, brief(isLog ? 10 ** tick : tick)));
  }
  for (const tick of ticks(lowX, highX, 6)) {
    svg.append(shape("text", { x: xOf(tick), y: HEIGHT - 8, "text-anchor": "middle" }, brief(tick)));
  }
  const band = model.get("mean") ? bandOf(visible) : null;
  if (band) {
    const colour = "var(--cm-accent)";
    const floor = isLog ? Math.min(...band.filter((one) => one.least > 0).map((one) => one.least)) : -Infinity;
    const points = [
      ...band.map((one) => [one.step, one.most]),
      ...band.map((one) => [one.step, Math.max(one.least, floor)]).reverse(),
    ].filter(([, value]) => Number.isFinite(yOf(value)));
    const outline = points.map(([step, value]) => `${xOf(step).toFixed(1)},${yOf(value).toFixed(1)}`).join(" ");
    svg.append(shape("polygon", { class: "cm-band", points: outline, style: `fill:${colour};fill-opacity:.2` }));
    const d = path(band.map((one) => one.step), band.map((one) => one.mean), xOf, yOf);
    svg.append(shape("path", { class: "cm-mean", d, fill: "none", style: `stroke:${colour};stroke-width:1.8` }));
  } else {
    for (const line of visible) {
      const d = path(line.steps, line.values, xOf, yOf);
      const style = `stroke:${line.colour};stroke-width:1.5;stroke-linejoin:round`;
      svg.append(shape("path", { class: "cm-line", "data-rank": line.rank, "data-points": line.logged, d, fill: "none", style }));
    }
  }
  const cross = shape("path", { class: "cm-cross", d: "" });
  svg.append(cross);
  const tip = make("div", { class: "cm-tip cm-mono", hidden: "" });
  panel.append(svg, tip);
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cross.setAttribute("d", "");
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = lowX + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (highX - lowX);
    showTip(tip, cross, wanted, visible, band, xOf, box, panel);
  });
}

function nearest(steps, wanted) {
  let best = 0;
  for (let index = 1; index < steps.length; index++) {
    if (Math.abs(steps[index] - wanted) < Math.abs(steps[best] - wanted)) best = index;
  }
  return best;
}

function showTip(tip, cross, wanted, visible, band, xOf, box, panel) {
  const rows = [];
  let step;
  if (band) {
    const one = band[nearest(band.map((each) => each.step), wanted)];
    step = one.step;
    rows.push(["var(--cm-accent)", `mean ${brief(one.mean)}, ${brief(one.least)} to ${brief(one.most)}`]);
  } else {
    for (const line of visible.filter((each) => each.count > 0)) {
      const index = nearest(line.steps, wanted);
      step ??= line.steps[index];
      rows.push([line.colour, `rank ${line.rank}: ${brief(line.values[index])}`]);
    }
  }
  if (step === undefined) return;
  const shown = rows.slice(0, 8).map(([colour, text]) => {
    const dot = make("i");
    dot.style.background = colour;
    return make("div", {}, dot, text);
  });
  if (rows.length > 8) shown.push(make("div", { class: "cm-weak" }, `and ${rows.length - 8} more`));
  tip.replaceChildren(make("div", { class: "cm-weak" }, `step ${brief(step)}`), ...shown);
  tip.hidden = false;
  const x = (xOf(step) / WIDTH) * box.width;
  tip.style.left = x > box.width / 2 ? `${Math.max(0, x - tip.offsetWidth - 10)}px` : `${x + 10}px`;
  cross.setAttribute("d", `M${xOf(step).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}`);
}

function toggle(model, key, text, title) {
  const button = make("button", { type: "button", title });
  button.textContent = text;
  const show = () => button.setAttribute("aria-pressed", String(model.get(key)));
  button.addEventListener("click", () => {
    model.set(key, !model.get(key));
    model.save_changes();
  });
  show();
  return [button, show];
}

function rankButtons(model, lines) {
  const byRank = new Map(lines.map((line) => [line.rank, line.colour]));
  return [...byRank.entries()].sort((one, other) => one[0] - other[0]).map(([rank, colour]) => {
    const key = make("i");
    key.style.background = colour;
    const isHidden = model.get("hidden").includes(rank);
    const button = make(
      "button",
      {
        type: "button",
        class: "cm-rank",
        "aria-pressed": String(!isHidden),
        "aria-label": `rank ${rank}`,
        "data-rank": rank,
        title: `show or hide rank ${rank}`,
      },
      key,
      byRank.size > 8 ? String(rank) : `rank ${rank}`,
    );
    button.addEventListener("click", () => {
      const hidden = model.get("hidden");
      model.set("hidden", isHidden ? hidden.filter((each) => each !== rank) : [...hidden, rank]);
      model.save_changes();
    });
    return button;
  });
}

function render({ model, el }) {
  const root = make("div", { class: "cellmesh cm-plots" });
  const [mean, showMean] = toggle(model, "mean", "mean and range", "the ranks' mean, and a band from least to most");
  const [log, showLog] = toggle(model, "log_scale", "log", "a logarithmic scale");
  const ranks = make("div", { class: "cm-ranks" });
  const ended = make("span", { class: "cm-weak" });
  const panels = make("div");
  root.append(make("div", { class: "cm-bar" }, mean, log, ranks, make("span", { class: "cm-gap" }), ended), panels);
  el.append(root);

  let focused; // the button that a redraw must not take the focus from
  const draw = () => {
    const lines = unpack(model);
    focused = ranks.contains(document.activeElement) ? document.activeElement.dataset.rank : undefined;
    ranks.replaceChildren(...rankButtons(model, lines));
    if (focused !== undefined) ranks.querySelector(`[data-rank="${focused}"]`)?.focus();
    const names = model.get("names");
    while (panels.children.length < names.length) panels.append(make("div", { class: "cm-panel" }));
    names.forEach((name, index) => {
      drawPanel(panels.children[index], model, name, lines.filter((line) => line.name === index));
    });
    showMean();
    showLog();
    ended.textContent = model.get("ended");
  };
  const events = ["change:points", "change:lines", "change:mean", "change:log_scale", "change:hidden", "change:ended"];
  let frame = 0;
  const redraw = () => {
    cancelAnimationFrame(frame); // the traits of one update come one by one
    frame = requestAnimationFrame(draw);
  };
  for (const event of events) model.on(event, redraw);
  draw();
  return () => {
    for (const event of events) model.off(event, redraw);
  };
}

export default { render };
