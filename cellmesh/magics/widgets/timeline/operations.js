// What the timeline holds: numbers of each rank, unpacked; times as texts; downloads.

const OPERATION = 10, COMPUTING = 4; // numbers of each

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const button = (text, title, onclick, attributes = {}) =>
  make("button", { type: "button", title, "aria-label": title, onclick, ...attributes }, text);

function floats(raw) {
  if (!raw || !raw.byteLength) return new Float64Array();
  const bytes = raw.buffer ? raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.byteLength) : raw;
  return new Float64Array(bytes);
}

function formatTime(us, digits = 3) {
  if (us === 0) return "0";
  const size = Math.abs(us);
  const [scaled, unit] = size >= 1e6 ? [us / 1e6, "s"] : size >= 1e3 ? [us / 1e3, "ms"] : size >= 1 ? [us, "µs"] : [us * 1e3, "ns"];
  return `${Number(scaled.toPrecision(digits))} ${unit}`;
}

// Round times in [from, to], about `count` of them.
function ticksIn(from, to, count) {
  let step = 10 ** Math.floor(Math.log10((to - from) / count));
  for (const factor of [1, 2, 5, 10]) {
    if ((to - from) / (step * factor) <= count) {
      step *= factor;
      break;
    }
  }
  const found = [];
  for (let index = Math.ceil(from / step - 1e-9); index * step <= to; index++) found.push(index * step);
  return [found, step];
}

// What the model holds, by row: operations and times of computing in the order of their begins.
function unpack(model) {
  const about = model.get("about");
  const rows = about.ranks.map((rank) => ({ rank, operations: [], computing: [], longest: 0 }));
  const numbers = floats(model.get("operations"));
  for (let at = 0; at < numbers.length; at += OPERATION) {
    const [row, kind, cell, begin, end, waited, last, wait, isOpen, lane] = numbers.subarray(at, at + OPERATION);
    const { name, group, ranks } = about.kinds[kind];
    const one = { name, group, ranks, cell, begin, end, waited, last, wait, isOpen: isOpen === 1, lane };
    rows[row].operations.push(one);
    rows[row].longest = Math.max(rows[row].longest, end - begin);
  }
  const computing = floats(model.get("computing"));
  for (let at = 0; at < computing.length; at += COMPUTING) {
    const [row, cell, begin, end] = computing.subarray(at, at + COMPUTING);
    rows[row].computing.push({ cell, begin, end });
  }
  return { about, rows, colours: new Map(about.names.map(({ name, colour }) => [name, colour])) };
}

// The first of `spans`, which are in the order of their begins, that begins at or after `time`.
function firstFrom(spans, time) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].begin < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function download(content, name) {
  const url = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  const link = make("a", { href: url, download: name });
  document.body.append(link); // Firefox follows no link that is not in the page
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
