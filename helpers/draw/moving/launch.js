// A launch step by step: its mbarriers, its warps and the lines where they stand, from an X-ray's trace. See launch.py.
begin("launch", (root, data, [sentence]) => {
  const cells = root.querySelectorAll(".cell");
  let steps = data.walks[0][1];
  let at = data.first;

  const show = (step) => {
    at = step;
    const now = new Array(cells.length).fill(0);
    for (const changed of data.steps.slice(0, step + 1))
      for (let i = 0; i < changed.length; i += 2) now[changed[i]] = changed[i + 1];
    cells.forEach((cell, i) => {
      const [text, colour] = data.texts[now[i]];
      cell.textContent = text;
      cell.style.background = data.colours[colour];
    });
    sentence.textContent = data.texts[data.sentences[step]][0];
  };
  // A warp's walk goes on at its last step up to the one that is shown.
  const walk = (i) => {
    const shown = at;
    steps = data.walks[i][1];
    go.last(steps.length - 1);
    go(steps.filter((step) => step <= shown).length - 1);
  };
  const words = (i) => `step ${steps[i] + data.from} of ${data.from + data.steps.length - 1}`;
  buttons(root, "steps of", data.walks.map(([name]) => name), 0, walk);
  const go = stepper(root, "step", steps.length - 1, at, words, (i) => show(steps[i]), 600);
  go(at);
});
