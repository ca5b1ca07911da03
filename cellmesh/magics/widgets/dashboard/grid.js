// Where the cards of the dashboard stand: by the dims of the mesh, as wide as there is room.

// How much a rank's card shows, and how wide it may be, in pixels.
const SIZES = [
  { name: "full", least: 148, most: 230 },
  { name: "compact", least: 66, most: 104 },
  { name: "small", least: 42, most: 65 },
  { name: "mini", least: 24, most: 34 },
];
const MANY = 16; // more ranks than these are never shown in full
const GAP = 4;
const LABEL = 46;

const makeTitle = (text) => make("div", { class: "cmd-title" }, text);

// The cards of a mesh in the order of its dims: what wraps, rows by columns, or blocks of these.
class Grid {
  constructor(dims, numRanks, cards) {
    this.dims = dims;
    this.numRanks = numRanks;
    this.cards = cards;
    this.root = make("div", { class: "cmd-grid" });
    this.layout = "";
  }

  fit(width) {
    const [columns, size, cardWidth] = this.choose(width);
    const layout = `${columns} ${size} ${cardWidth}`;
    if (layout === this.layout || width < 1) return;
    this.layout = layout;
    this.root.dataset.size = size;
    this.root.style.setProperty("--cmd-width", `${cardWidth}px`);
    const focused = this.root.contains(document.activeElement) ? document.activeElement : null;
    this.root.replaceChildren(this.block(0, 0, columns));
    focused?.focus();
  }

  // Whether there are columns, what cards show, and how wide they are.
  choose(width) {
    const sizes = this.numRanks > MANY ? SIZES.slice(1) : SIZES;
    const depth = Math.max(0, this.dims.length - 2);
    if (this.dims.length > 1) {
      const numColumns = this.dims.at(-1)[1];
      const roomOf = (numBeside) => {
        const block = (width - depth * 16 - (numBeside - 1) * 22) / numBeside;
        return (block - LABEL) / numColumns - GAP;
      };
      // Two blocks stand beside each other where that leaves cards their words.
      if (depth && this.numRanks > MANY && roomOf(2) >= sizes[0].least) {
        return [true, sizes[0].name, Math.floor(Math.min(roomOf(2), sizes[0].most))];
      }
      for (const { name, least, most } of sizes) {
        if (roomOf(1) >= least) return [true, name, Math.floor(Math.min(roomOf(1), most))];
      }
    }
    const [{ name, least, most }] = sizes;
    const fitting = Math.max(1, Math.floor((width - depth * 16) / (least + GAP)));
    return [false, name, Math.floor(Math.min(most, (width - depth * 16) / fitting - GAP))];
  }

  block(depth, first, columns) {
    const left = this.dims.length - depth;
    const stride = this.dims.slice(depth + 1).reduce((product, [, size]) => product * size, 1);
    const [name, size] = this.dims[depth] ?? ["rank", this.numRanks];
    if (left <= 1) return this.wrapped(name, first, size);
    if (left === 2 && columns) return this.table(depth, first);
    const blocks = Array.from({ length: size }, (_, index) => {
      const title = `${name}=${index}`;
      const inner = this.block(depth + 1, first + index * stride, columns);
      return make("div", { class: "cmd-block", role: "group", "aria-label": title }, makeTitle(title), inner);
    });
    return make("div", { class: left === 2 ? "cmd-rows" : "cmd-blocks" }, ...blocks);
  }

  wrapped(name, first, size) {
    const root = make("div", { class: "cmd-wrapped" }, ...this.cards.slice(first, first + size).map((card) => card.root));
    if (this.dims.length > 1) return root;
    return make("div", {}, makeTitle(size > 1 ? `${name}=0…${size - 1}` : `${name}=0`), root);
  }

  table(depth, first) {
    const [[rowName, numRows], [columnName, numColumns]] = this.dims.slice(depth);
    const root = make("div", { class: "cmd-table" }, make("span"));
    root.style.gridTemplateColumns = `auto repeat(${numColumns}, var(--cmd-width))`;
    for (let column = 0; column < numColumns; column++) {
      // Where there is little room the dim is named once.
      const name = make("span", { class: column ? "cmd-again" : "" }, `${columnName}=`);
      root.append(make("span", { class: "cmd-label cmd-column" }, name, String(column)));
    }
    for (let row = 0; row < numRows; row++) {
      root.append(make("span", { class: "cmd-label cmd-row" }, `${rowName}=${row}`));
      for (let column = 0; column < numColumns; column++) {
        root.append(this.cards[first + row * numColumns + column].root);
      }
    }
    return root;
  }
}
