// What the scripts of moving figures share. Each figure of a page starts once, and its controls are made here.

// start(root, data, parts): parts are the elements of class "part", the picture already an SVG.
const begin = (name, start) => {
  for (const root of document.querySelectorAll(`.moving[data-moving="${name}"]:not([data-runs])`)) {
    root.dataset.runs = "";
    for (const image of root.querySelectorAll("img.part")) {
      const box = make("div", {});
      box.innerHTML = decodeURIComponent(image.getAttribute("src").replace(/^[^,]*,/, ""));
      box.firstChild.classList.add("part");
      image.replaceWith(box.firstChild);
    }
    start(root, JSON.parse(root.querySelector("script").textContent), root.querySelectorAll(".part"));
  }
};

const set = (node, attributes) => {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
};

const make = (tag, attributes, ...inside) => {
  const node = document.createElement(tag);
  set(node, attributes);
  node.dataset.lmSuppressShortcuts = ""; // a control's keys are its own, not JupyterLab's
  node.append(...inside);
  return node;
};

const shape = (tag, attributes, ...inside) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  node.append(...inside);
  return node;
};

// A row of controls above everything else of the figure that is not controls.
const bar = (root, ...controls) => {
  const rows = root.querySelectorAll(":scope > .bar");
  const row = make("div", { class: "bar" }, ...controls);
  rows.length ? rows[rows.length - 1].after(row) : root.prepend(row);
  return row;
};

// One of several: a line of buttons. Returns the function that presses one.
const buttons = (root, label, names, chosen, show) => {
  const all = names.map((name, i) => {
    const button = make("button", { type: "button" }, name);
    button.onclick = () => press(i);
    return button;
  });
  const press = (i) => {
    all.forEach((button, at) => button.setAttribute("aria-pressed", at === i));
    show(i);
  };
  all.forEach((button, at) => button.setAttribute("aria-pressed", at === chosen));
  bar(root, make("span", {}, label), ...all).setAttribute("role", "group");
  return press;
};

// A slider from 0 to last, with a button for a step back, a step on, and where `ms` is given one that plays.
// Returns the function that goes to a step; its `last` changes where the slider ends.
const stepper = (root, label, last, at, words, show, ms) => {
  const range = make("input", { type: "range", min: 0, max: last, value: at, "aria-label": label });
  const text = make("output", {});
  let timer = 0;
  const go = (to) => {
    range.value = Math.max(0, Math.min(last, to));
    text.textContent = words(+range.value);
    range.setAttribute("aria-valuetext", text.textContent);
    show(+range.value);
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    if (ms) set(play, { "aria-pressed": false, "aria-label": "play" });
    if (ms) play.textContent = "▶";
  };
  const by = (step, name) => {
    const button = make("button", { type: "button", "aria-label": name }, step < 0 ? "‹" : "›");
    button.onclick = () => (stop(), go(+range.value + step));
    return button;
  };
  const play = make("button", { type: "button", "aria-label": "play", "aria-pressed": false }, "▶");
  play.onclick = () => {
    if (timer) return stop();
    set(play, { "aria-pressed": true, "aria-label": "stop" });
    play.textContent = "■";
    if (+range.value === last) go(0);
    timer = setInterval(() => (go(+range.value + 1), +range.value === last && stop()), ms);
  };
  range.oninput = () => (stop(), go(+range.value));
  bar(root, by(-1, "back"), make("label", { class: "wide" }, range), by(1, "on"), ...(ms ? [play] : []), text);
  go.last = (to) => (stop(), set(range, { max: (last = to) }));
  return go;
};
