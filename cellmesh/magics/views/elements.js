// What the parts of the inspector are made of. Texts become text nodes: nothing from users is read as HTML.

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function makeButton(text, title, onclick, attributes = {}) {
  return make("button", { type: "button", title, "aria-label": title, onclick, ...attributes }, text);
}

// choices: [value, text] each.
function makeSelect(label, choices, value, onchange) {
  const options = choices.map(([key, text]) => make("option", { value: key }, text));
  const select = make("select", { "aria-label": label, onchange: () => onchange(select.value) }, ...options);
  select.value = value;
  return make("label", { class: "cmi-field" }, make("span", { class: "cm-weak" }, label), select);
}

function formatNumber(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const text = value.toPrecision(digits);
  return text.includes("e") ? text.replace(/\.?0+e/, "e") : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

const count = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;

function later(wait) {
  let timer = 0;
  const call = (action) => {
    clearTimeout(timer);
    timer = setTimeout(action, wait);
  };
  call.cancel = () => clearTimeout(timer);
  return call;
}
