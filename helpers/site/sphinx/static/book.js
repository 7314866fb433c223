// Guesses are noted on the page, and stand beside the answer when it is unfolded; figures grow when they are pressed.
document.addEventListener("DOMContentLoaded", () => {
  // A line to type words into; `keep` gets the test whether a text contains all of them.
  const filter = (hint, keep) => {
    const words = document.createElement("input");
    words.className = "keeps";
    words.placeholder = hint;
    words.setAttribute("aria-label", hint.split(":")[0]);
    words.addEventListener("input", () => {
      const wanted = words.value.toLowerCase().split(/\s+/);
      keep((text) => wanted.every((word) => text.toLowerCase().includes(word)));
    });
    return words;
  };

  const note = (form, guess) => {
    form.querySelector("output").textContent = `noted: ${guess}`;
    const asked = `${form.dataset.name}: `;
    for (const answer of document.querySelectorAll(".cell_output pre")) {
      if (!answer.textContent.startsWith(asked)) continue;
      const mine = answer.querySelector(".my-guess");
      if (mine) mine.textContent = `Your guess: ${guess}.`;
      else answer.innerHTML = answer.innerHTML.replace("No guess yet.", '<span class="my-guess"></span>');
      if (!mine && answer.querySelector(".my-guess")) note(form, guess);
    }
  };
  for (const form of document.querySelectorAll("form.guess")) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const typed = (form.elements.guess?.value ?? "").replace(/[_\s]/g, "");
      const plain = /^[-+]?\d{1,3}(,\d{3})+(\.\d*)?$/.test(typed) ? typed.replaceAll(",", "") : typed; // as `predict` does
      if (plain.includes(","))
        form.querySelector("output").textContent = `a comma must be followed by three digits, as in 1,024; for a decimal write ${plain.replaceAll(",", ".")}`;
      else if (plain !== "" && Number.isFinite(Number(plain))) note(form, form.elements.guess.value.trim());
      else form.querySelector("output").textContent = "a number, please";
    });
    for (const button of form.querySelectorAll('button[type="button"]')) {
      button.addEventListener("click", () => {
        for (const other of form.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
        note(form, button.textContent);
      });
    }
  }

  // What a cell printed wraps unless it has columns.
  for (const block of document.querySelectorAll(".cell_output .output pre"))
    block.classList.toggle("prose", !/\S {2,}\S/.test(block.textContent));

  // A figure is as wide as the page, and as large as it was drawn when it is pressed.
  for (const image of document.querySelectorAll(".bd-article .cell_output img, .bd-article p > img")) {
    if (image.closest(".moving")) continue;
    image.tabIndex = 0;
    const grow = () => image.classList.toggle("whole");
    image.addEventListener("click", (event) => {
      event.preventDefault(); // it is also a link to its file
      grow();
    });
    image.addEventListener("keydown", (event) => event.key === "Enter" && grow());
  }

  // Long tables sort by the column whose name is pressed, and keep the rows that contain all words of the line above.
  const value = (row, i) => row.cells[i]?.textContent.trim() ?? "";
  const number = (text) => Number.parseFloat(text.replaceAll(",", ""));
  for (const table of document.querySelectorAll(".bd-article table")) {
    const rows = [...(table.tBodies[0]?.rows ?? [])];
    if (!table.tHead || rows.length < 8 || table.closest(".cell_output, .moving")) continue;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.className = "sorts";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const compare = (one, other) => {
          const [a, b] = [value(one, i), value(other, i)];
          if (!a || !b) return (a ? 0 : 1) - (b ? 0 : 1); // what has no value comes last
          const order = Number.isNaN(number(a) + number(b)) ? a.localeCompare(b) : number(a) - number(b);
          return down ? -order : order;
        };
        table.tBodies[0].append(...[...rows].sort(compare));
      });
    });
    if (rows.length < 20) continue;
    const text = (row) => [...row.cells].map((cell) => cell.textContent).join(" ");
    const hint = `words, to keep the rows that contain them: ${value(rows[0], 0)} ${value(rows[0], 1)}`;
    table.before(filter(hint, (wanted) => {
      for (const row of rows) row.hidden = !wanted(text(row));
    }));
  }

  // So do the long texts of studies, with their lines.
  for (const block of document.querySelectorAll(".highlight-text pre")) {
    const lines = block.textContent.split("\n");
    if (lines.length < 60) continue;
    block.parentElement.before(filter("words, to keep the lines that contain them", (wanted) => {
      block.textContent = lines.filter(wanted).join("\n");
    }));
  }
});
