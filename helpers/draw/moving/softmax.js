// The kernel online_softmax reads a paragraph, one tile of keys after the other. See softmax.py.
begin("softmax", (root, data, [numbers, svg, words]) => {
  const cells = numbers.querySelectorAll("td");
  const spans = data.words.map((word) => make("span", {}, word.replace("##", "")));
  words.replaceChildren(...spans.flatMap((span, key) => (data.words[key].startsWith("##") ? [span] : [" ", span])));
  const bars = svg.querySelectorAll(".rescale");
  const dots = svg.querySelectorAll(".error");
  const now = svg.querySelector(".now");
  let row = data.first;
  let tile = 0;

  const show = () => {
    const m = data.m_i[row][tile];
    spans.forEach((span, key) => {
      const read = Math.floor(key / data.block_n);
      span.className = read > tile ? "unread" : read === tile ? "tile" : "";
      span.classList.toggle("query", key === data.rows[row]);
      const weight = read > tile ? 0 : Math.exp(data.scores[row][key] / 100 - m);
      span.style.background = weight > 0.001 ? `rgba(0, 114, 178, ${(0.7 * Math.sqrt(Math.min(weight, 1))).toFixed(3)})` : "";
    });
    [m, data.l_i[row][tile], data.rescale[row][tile], data.error[row][tile]].forEach((value, i) => {
      cells[i].textContent = i === 3 && value < 0.001 ? value.toExponential(1) : i < 2 ? value.toFixed(2) : String(value);
    });
    set(now, { x: data.x[tile] });
    bars.forEach((bar, at) => {
      const height = data.high * data.rescale[row][at];
      set(bar, { y: (data.top[0] + data.high - height).toFixed(1), height: height.toFixed(1), opacity: at > tile ? 0.4 : 1 });
    });
    dots.forEach((dot, at) => {
      const down = -Math.log10(data.error[row][at]) / data.decades;
      set(dot, { cy: (data.top[1] + data.high * Math.min(1, down)).toFixed(1), opacity: at > tile ? 0.4 : 1 });
    });
  };

  const query = make("select", { "aria-label": "query" });
  query.append(...data.rows.map((at, i) => make("option", { value: i }, `${at}, ${data.words[at]}`)));
  query.value = row;
  query.onchange = () => ((row = +query.value), show());
  bar(root, make("label", {}, "row", query));
  stepper(root, "tiles read", data.x.length - 1, tile, (at) => `tile ${at} (0 to ${data.x.length - 1})`, (at) => ((tile = at), show()), 900)(tile);
});
