// A DTensor drawn whole, each rank's block in its place; ranks that hold the same block share it.

// Which two dims of the whole are drawn: those that are cut, else the last ones.
function chooseDims(shape, blocks) {
  const cut = shape.map((_, dim) => dim).filter((dim) => blocks.some((block) => block.size[dim] !== shape[dim]));
  const others = shape.map((_, dim) => dim).filter((dim) => !cut.includes(dim)).reverse();
  return [...cut.slice(0, 2), ...others].slice(0, 2).sort((one, other) => one - other);
}

function drawShards(root, detail, open) {
  const { shape, blocks } = detail;
  if (!blocks.length) {
    const why = shape ? "each rank holds a tensor of its own: only a DTensor is cut into blocks" : "no tensor";
    return root.replaceChildren(make("div", { class: "cm-weak cmi-said" }, why));
  }
  const dims = shape.length > 1 ? chooseDims(shape, blocks) : [-1, 0];
  const along = (list, place, none) => (dims[place] === undefined || dims[place] < 0 ? none : list[dims[place]]);
  const sizes = [along(shape, 0, 1), along(shape, 1, 1)].map((size) => Math.max(size, 1));
  const filled = blocks.filter((block) => block.size.every((size) => size > 0));
  const places = new Map(); // blocks that differ only in dims that are not drawn lie upon each other
  for (const block of filled) {
    const key = String([along(block.offset, 0, 0), along(block.offset, 1, 0), along(block.size, 0, 1), along(block.size, 1, 1)]);
    places.set(key, [...(places.get(key) ?? []), block]);
  }
  const height = Math.min(Math.max((560 * sizes[0]) / sizes[1], 26 * new Set(filled.map((block) => along(block.offset, 0, 0))).size, 48), 420);
  const board = make("div", { class: "cmi-board", style: `height:${Math.round(height)}px`, role: "group", "aria-label": `shards of ${detail.label}` });
  for (const shared of places.values()) {
    shared.forEach((block, layer) => {
      const top = along(block.offset, 0, 0) / sizes[0];
      const left = along(block.offset, 1, 0) / sizes[1];
      const tall = along(block.size, 0, 1) / sizes[0] / shared.length;
      const wide = along(block.size, 1, 1) / sizes[1];
      const range = block.offset.map((at, dim) => `${at}:${at + block.size[dim]}`).join(", ");
      const title = `ranks ${block.ranks_text}: [${range}], ${formatShape(block.size)}${block.coordinate ? `, ${block.coordinate}` : ""}`;
      const percent = (share) => `${(share * 100).toFixed(4)}%`;
      board.append(makeButton("", `${title}; opens the heatmap`, () => open(block.ranks[0]), {
        class: "cmi-block", "data-ranks": block.ranks_text, "data-offset": block.offset.join(","), "data-size": block.size.join(","),
        style: `top:${percent(top + layer * tall)};left:${percent(left)};height:${percent(tall)};width:${percent(wide)};--cmi-hue:${hueOf(block.ranks[0], detail.num_ranks)}`,
      }));
      board.lastChild.append(
        make("b", {}, block.ranks_text), " ", make("span", { class: "cm-mono" }, formatShape(block.size)),
        ...(block.coordinate ? [" ", make("span", {}, block.coordinate)] : []));
    });
  }
  const said = [`${formatShape(shape)}, ${detail.placements}`];
  if (shape.length > 2) said.push(`drawn: dim ${dims[0]} downwards, dim ${dims[1]} across`);
  const empty = blocks.filter((block) => block.size.some((size) => size === 0)).map((block) => block.ranks_text);
  if (empty.length) said.push(`empty on ranks ${empty.join(", ")}`);
  if (detail.is_partial) said.push("partial: the ranks' values are still to be summed");
  root.replaceChildren(
    make("div", { class: "cm-weak cmi-said" }, said.join(" · ")),
    make("div", { class: "cmi-axes" }, make("span", { class: "cm-mono cm-weak" }, "0"), make("span", { class: "cm-mono cm-weak" }, String(along(shape, 1, 1)))),
    board);
}

const hueOf = (rank, numRanks) => Math.round((205 + (rank * 360) / Math.max(numRanks, 1)) % 360);
