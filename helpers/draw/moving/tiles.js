// The register tiles of register_tiles: what each BLOCK_M and BLOCK_N costs, and its recorded speed. See tiles.py.
begin("tiles", (root, data, [table, words, svg]) => {
  const [width] = data.bar;
  const cells = [...table.querySelectorAll("td")].filter((cell) => cell.textContent);
  const said = words.textContent;
  const all = cells.map((cell, i) => {
    const button = make("button", { type: "button" }, cell.textContent);
    button.setAttribute("aria-label", `BLOCK_M ${data.tiles[i].block[0]}, BLOCK_N ${data.tiles[i].block[1]}: ${cell.textContent} TFLOP/s`);
    button.onclick = () => show(i);
    cell.replaceChildren(button);
    return button;
  });
  const show = (chosen) => {
    all.forEach((button, i) => button.setAttribute("aria-pressed", i === chosen));
    words.textContent = said.replace(/\d+ × \d+$/, data.tiles[chosen].block.join(" × "));
    data.tiles[chosen].costs.forEach(([what, value, share], i) => {
      svg.querySelectorAll(".what")[i].textContent = what;
      svg.querySelectorAll(".value")[i].textContent = value;
      set(svg.querySelectorAll(".bar")[i], { width: (width * Math.min(share, 1)).toFixed(1), fill: data.colours[+(share > 1)] });
    });
  };
  show(data.first);
});
