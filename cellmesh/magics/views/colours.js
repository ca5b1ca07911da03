// From numbers to colours: scales, colour maps, and the legend.

const MAPS = {
  cividis: "00224e 123570 3b496c 575d6d 707173 8a8678 a59c74 c3b369 e1cc55 fee838",
  diverging: "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f",
  // Zero is dark, so that small values are quiet on a dark page, too.
  divergingDark: "9bd6ff 56a8e2 2c76ae 194b73 102b41 161616 43210f 7a3a17 b85c22 ea8a45 ffc692",
};
// Of neither map: what is no number.
const ODD = { nan: [255, 0, 220], inf: [0, 224, 64], ninf: [0, 120, 40] };
const THRESHOLD = 1e-4; // of the largest magnitude: below it the logarithmic scale is linear

const parts = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));

function makeTable(name) {
  const stops = MAPS[name].split(" ").map(parts);
  return Array.from({ length: 256 }, (_, index) => {
    const at = (index / 255) * (stops.length - 1);
    const below = Math.min(Math.floor(at), stops.length - 2);
    return stops[below].map((one, part) => Math.round(one + (stops[below + 1][part] - one) * (at - below)));
  });
}

// Whether what lies behind an element is dark.
function isDark(element) {
  for (let node = element; node; node = node.parentElement) {
    const found = getComputedStyle(node).backgroundColor.match(/[\d.]+/g)?.map(Number);
    if (found && found.length >= 3 && found[3] !== 0) return found[0] + found[1] + found[2] < 384;
  }
  return false;
}

// kind: linear, symmetric or log. Gives toUnit (value -> [0, 1]) and fromUnit.
function makeScale(kind, low, high) {
  if (!(high >= low)) [low, high] = [0, 1];
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const bend = (value) => Math.sign(value) * Math.log1p(Math.abs(value) / (most * THRESHOLD));
  const unbend = (value) => Math.sign(value) * Math.expm1(Math.abs(value)) * most * THRESHOLD;
  const [to, from] = kind === "log" ? [bend, unbend] : [(value) => value, (value) => value];
  const isDiverging = kind === "symmetric" || (kind === "log" && low < 0 && high > 0);
  let [begin, end] = isDiverging ? [-to(most), to(most)] : [to(low), to(high)];
  if (end <= begin) [begin, end] = [begin - 0.5, begin + 0.5];
  return {
    isDiverging,
    toUnit: (value) => Math.min(1, Math.max(0, (to(value) - begin) / (end - begin))),
    fromUnit: (unit) => from(begin + unit * (end - begin)),
  };
}

const chooseMap = (scale, dark) => makeTable(!scale.isDiverging ? "cividis" : dark ? "divergingDark" : "diverging");

const colourOf = (value, scale, table) =>
  Number.isNaN(value) ? ODD.nan
  : value === Infinity ? ODD.inf
  : value === -Infinity ? ODD.ninf
  : table[Math.round(scale.toUnit(value) * 255)];

function paint(values, height, width, scale, table) {
  const image = new ImageData(width, height);
  for (let index = 0; index < values.length; index++) {
    const colour = colourOf(values[index], scale, table);
    image.data[4 * index] = colour[0];
    image.data[4 * index + 1] = colour[1];
    image.data[4 * index + 2] = colour[2];
    image.data[4 * index + 3] = 255;
  }
  return image;
}

const css = (colour) => `rgb(${colour.join(",")})`;
const isBright = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue > 140;

function drawLegend(root, scale, table, oddities) {
  const stops = Array.from({ length: 33 }, (_, index) => css(table[Math.round((index / 32) * 255)]));
  const bar = make("div", { class: "cmi-legend-bar", style: `background:linear-gradient(to right,${stops.join(",")})` });
  const most = Math.max(Math.abs(scale.fromUnit(0)), Math.abs(scale.fromUnit(1)));
  const values = [0, 0.25, 0.5, 0.75, 1].map(scale.fromUnit).map((value) => (Math.abs(value) < most * 1e-9 ? 0 : value));
  let digits = 3; // as many as tell the numbers apart
  const texts = () => values.map((value) => formatNumber(value, digits));
  while (digits < 8 && new Set(texts()).size < values.length) digits += 1;
  const ticks = texts().map((text) => make("span", {}, text));
  const swatches = [["nan", "NaN"], ["inf", "Inf"], ["ninf", "-Inf"]]
    .filter(([key]) => oddities[key])
    .map(([key, text]) => make("span", { class: "cmi-swatch" }, make("i", { style: `background:${css(ODD[key])}` }), text));
  root.replaceChildren(
    make("div", { class: "cmi-legend-scale" }, bar, make("div", { class: "cmi-legend-ticks cm-mono" }, ...ticks)),
    ...swatches,
  );
}
