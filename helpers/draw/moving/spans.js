begin("spans", (root, data, [svg, sentence]) => {
  const [left, width, high] = data.place;
  const box = svg.querySelector(".spans");
  const scale = (width - left) / data.window;
  const rows = Object.entries(data.rows);

  const show = (step) => {
    const now = Math.min(step * data.step, data.last);
    const begin = now - Math.floor(data.window / 3);
    const doing = [];
    const within = (at) => Math.min(Math.max((at - begin) * scale, 0), width - left);
    box.replaceChildren(...rows.flatMap(([name, row], y) => {
      const under = row.filter(([start, end]) => start <= now && now < end);
      if (under.length) doing.push(`${name}: ${data.kinds[under[under.length - 1][2]][0]}`);
      return row.filter(([start, end]) => within(end) > within(start)).map(([start, end, kind]) => shape("rect", {
        x: (left + within(start)).toFixed(1), y: high * y + 2, width: (within(end) - within(start)).toFixed(1),
        height: high - 4, fill: data.kinds[kind][1], stroke: "currentColor", "stroke-width": 0.3,
      }));
    }));
    sentence.textContent = `at ${data.unit} ${now.toLocaleString("en")}: ${doing.join("; ")}`;
  };
  const last = Math.ceil(data.last / data.step) - 1;
  const first = Math.round(data.first / data.step);
  stepper(root, data.unit, last, first, (step) => `${data.unit} ${Math.min(step * data.step, data.last).toLocaleString("en")}`, show, 120)(first);
});
