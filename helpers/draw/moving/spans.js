// Draw when each part of a block does what, on a timeline with a moving cursor. See spans.py.
begin("spans", (root, data, [svg, sentence]) => {
  const [left, width, high] = data.place;
  const box = svg.querySelector(".spans");
  const names = svg.querySelectorAll(".name");
  const scale = (width - left) / data.window;
  const several = data.choices.length > 1;
  const ends = (choice) => Math.ceil(choice.last / data.step) - 1;
  let choice = data.choices[0];
  let at = Math.round(data.first / data.step);

  const clock = (step) => Math.min(step * data.step, choice.last);
  const show = (step) => {
    at = step;
    const now = clock(step);
    const begin = now - Math.floor(data.window / 3);
    const doing = [];
    const within = (at) => Math.min(Math.max((at - begin) * scale, 0), width - left);
    box.replaceChildren(...choice.rows.flatMap((row, y) => {
      const under = row.filter(([start, end]) => start <= now && now < end);
      if (under.length) doing.push(`${data.rows[y]}: ${data.kinds[under[under.length - 1][2]][0]}`);
      return row.filter(([start, end]) => within(end) > within(start)).map(([start, end, kind]) => shape("rect", {
        x: (left + within(start)).toFixed(1), y: high * y + 2, width: (within(end) - within(start)).toFixed(1),
        height: high - 4, fill: data.kinds[kind][1], stroke: "currentColor", "stroke-width": 0.3,
      }));
    }));
    names.forEach((name, y) => set(name, { opacity: choice.rows[y].length ? 1 : data.absent }));
    sentence.textContent = `${several ? choice.name + ", " : ""}at ${data.unit} ${now.toLocaleString("en")}: ${doing.join("; ")}`;
  };
  // The slider of choices is above that of clocks, which keeps its place when another is chosen.
  let go;
  const choose = (i) => {
    choice = data.choices[i];
    if (go) go.last(ends(choice)), go(at);
  };
  if (several) stepper(root, "choice", data.choices.length - 1, 0, (i) => data.choices[i].name, choose)(0);
  go = stepper(root, data.unit, ends(choice), at, (step) => `${data.unit} ${clock(step).toLocaleString("en")}`, show, 120);
  go(at);
});
