// A DTensor drawn whole, each rank's block in its place; ranks that hold the same block share it.

function drawShards(root, { label, shards }, open) {
  const percent = (share) => `${(share * 100).toFixed(4)}%`;
  const blocks = shards.blocks.map(({ place, colour, rank, ranks, coordinate, shape, title }) => {
    const [top, left, height, width] = place.map(percent);
    const button = makeButton("", [title, shape, coordinate, "opens the heatmap"].filter(Boolean).join(", "), () => open(rank), {
      class: "cmi-block", "data-ranks": ranks, style: `top:${top};left:${left};height:${height};width:${width};--cmi-colour:${colour}`,
    });
    button.append(make("b", {}, ranks), " ", make("span", { class: "cm-mono" }, shape), " ", coordinate);
    return button;
  });
  root.replaceChildren(
    make("div", { class: "cm-weak cmi-said" }, shards.said),
    make("div", { class: "cmi-board", style: `height:${shards.height}px`, role: "group", "aria-label": `shards of ${label}` }, ...blocks));
}
