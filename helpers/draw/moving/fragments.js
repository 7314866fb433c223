// The elements of the matrices of mma.sync.m16n8k16 that each lane of a warp holds. See fragments.py.
begin("fragments", (root, data, [sentence, svg]) => {
  const cells = svg.querySelector(".cells");
  const cell = data.cell;

  const show = (lane) => {
    cells.replaceChildren(...data.matrices.flatMap(([x, y, , fill, name, count]) =>
      data[name][lane].slice(0, count).flatMap((place, i) => {
        const [left, top] = [x + cell * (place % 16), y + cell * Math.floor(place / 16)];
        const ink = name === "b" ? "black" : "white";
        return [
          shape("rect", { x: left, y: top, width: cell, height: cell, fill }),
          shape("text", { x: left + cell / 2, y: top + 8, "text-anchor": "middle", "font-size": 8, fill: ink }, String(i)),
        ];
      })));
    const rows = [...new Set(data.d[lane].map((place) => Math.floor(place / 16)))].sort((one, other) => one - other);
    const stay = data.a[lane].filter((place, i) => place === data.d[lane][i]).length;
    sentence.textContent =
      `lane ${lane} has rows ${rows.join(" and ")} of S. ` +
      `Of the 8 elements of P that it needs, it holds ${stay} in the right register${stay === 8 ? ": nothing is shuffled" : ""}.`;
  };
  const go = stepper(root, "lane", 31, data.first, (lane) => `lane ${lane} = 4 · ${Math.floor(lane / 4)} + ${lane % 4}`, show);
  go(data.first);

  // A pointer on an element goes to the lane that holds it.
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const [at, down] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    for (const [x, y, columns, , name, count] of data.matrices) {
      const [column, row] = [Math.floor((at - x) / cell), Math.floor((down - y) / cell)];
      if (column < 0 || column >= columns || row < 0 || row >= 16) continue;
      const lane = data[name].findIndex((places) => places.slice(0, count).includes(16 * row + column));
      if (lane >= 0) go(lane);
    }
  };
  svg.onpointermove = svg.onpointerdown = point;
});
