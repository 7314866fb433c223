// A warp's request for shared memory: an address pattern, the banks that it goes to, and its wavefronts. See banks.py.
begin("banks", (root, data, [caption, svg]) => {
  const [left, top, cell, row] = data.place;
  const [now, later, before] = data.colours;
  const cells = svg.querySelector(".cells");
  const chosen = data.choices.map(() => 0);
  let pattern, go;

  const draw = (turn) => {
    const each = (pattern.turns || []).length / 32;
    cells.replaceChildren(...(pattern.turns || []).map((at, i) => {
      const lane = Math.floor(i / each);
      const word = pattern.words[lane] + (i % each);
      const fill = at === turn ? now : at < turn ? before : later;
      const title = shape("title", {}, `lane ${lane}, word ${word}, bank ${word % 32}, wavefront ${at + 1}`);
      return shape("rect", { x: left + cell * (word % 32), y: top + row * lane, width: cell - 1, height: row - 1, fill }, title);
    }));
  };
  const choose = () => {
    pattern = data.patterns[chosen.reduce((at, i, which) => at * data.choices[which][1].length + i, 0)];
    const count = pattern.wavefronts;
    const words = count ? `: ${count} wavefront${count > 1 ? "s" : ""}` : "";
    caption.replaceChildren(count ? "word " : "", make(count ? "code" : "span", {}, pattern.code), make("b", {}, words));
    go.last(Math.max(count - 1, 0));
    go(0);
  };
  data.choices.forEach(([label, names], which) => buttons(root, label, names, 0, (i) => ((chosen[which] = i), choose())));
  const words = (at) => (pattern && pattern.wavefronts ? `wavefront ${at + 1} of ${pattern.wavefronts}` : "");
  go = stepper(root, "wavefront", 0, 0, words, (at) => pattern && draw(at), 500);
  choose();
});
