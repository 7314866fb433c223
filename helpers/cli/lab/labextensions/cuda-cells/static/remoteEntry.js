// CUDA C++ in JupyterLab 4: the cells that begin with %%cuda, and .cu and .cuh files.
//
// JupyterLab takes an extension as a webpack "container": an object with init(shared modules) and get(module name).
// Webpack would write the same two functions around the plugin below; written by hand, the extension needs no build.
(() => {
  "use strict";

  const MIME = "text/x-cuda";
  const MAGIC = /^%%cuda(\s|$)/;
  const QUALIFIERS =
    "global|device|host|shared|constant|managed|launch_bounds|grid_constant|forceinline|noinline|restrict|align";
  const WORDS = new RegExp(`\\b(?:(__(?:${QUALIFIERS})__)|threadIdx|blockIdx|blockDim|gridDim|warpSize)\\b`, "g");

  let shared; // JupyterLab's modules: name -> version -> {get, loaded}

  // A module of JupyterLab itself: the version that runs already, else the newest.
  async function module(name) {
    const versions = Object.entries(shared[name] ?? {});
    if (!versions.length) throw new Error(`cuda-cells: this JupyterLab does not share ${name}`);
    const newest = (a, b) => b[0].localeCompare(a[0], undefined, { numeric: true });
    const [, entry] = versions.find(([, one]) => one.loaded) ?? versions.sort(newest)[0];
    return (await entry.get())();
  }

  // The words that CUDA adds to C++, and the line of the magic, as decorations over the colours of C++.
  function cudaWords({ Decoration, EditorView, ViewPlugin }, { syntaxTree }) {
    const qualifier = Decoration.mark({ class: "cuda-qualifier" });
    const variable = Decoration.mark({ class: "cuda-variable" });
    const magic = Decoration.mark({ class: "cuda-magic" });

    function decorations(view) {
      const { doc } = view.state;
      const tree = syntaxTree(view.state);
      const found = [];
      for (const { from, to } of view.visibleRanges) {
        if (from === 0 && MAGIC.test(doc.line(1).text)) found.push(magic.range(0, doc.line(1).to));
        for (const word of doc.sliceString(from, to).matchAll(WORDS)) {
          const at = from + word.index;
          if (/Comment|String/.test(tree.resolveInner(at, 1).name)) continue;
          found.push((word[1] ? qualifier : variable).range(at, at + word[0].length));
        }
      }
      return Decoration.set(found, true);
    }

    class Words {
      constructor(view) {
        this.decorations = decorations(view);
      }
      update(update) {
        const parsed = syntaxTree(update.startState) !== syntaxTree(update.state);
        if (update.docChanged || update.viewportChanged || parsed) this.decorations = decorations(update.view);
      }
    }
    const colour = (name) => ({ color: `var(--jp-mirror-editor-${name}-color) !important` });
    return [
      ViewPlugin.fromClass(Words, { decorations: (words) => words.decorations }),
      EditorView.baseTheme({
        ".cuda-qualifier, .cuda-qualifier span": { ...colour("keyword"), fontWeight: "bold" },
        ".cuda-variable, .cuda-variable span": colour("builtin"),
        ".cuda-magic, .cuda-magic span": { ...colour("meta"), fontWeight: "normal" },
      }),
    ];
  }

  // C++'s parser from the second line on where the first is the magic's: read as C++, the magic would be the beginning
  // of a statement, and the editor would indent what follows as its rest.
  function withoutMagic(cpp, { Tree }) {
    const wrap = (parse, input, fragments, ranges) => {
      const first = input.read(0, Math.min(input.length, 200)).split("\n", 1)[0];
      if (!MAGIC.test(first) || ranges.length !== 1 || ranges[0].from !== 0) return parse;
      const from = first.length;
      const rest = cpp.parser.startParse(input, fragments, [{ from, to: input.length }]);
      return {
        get parsedPos() {
          return rest.parsedPos;
        },
        get stoppedAt() {
          return rest.stoppedAt;
        },
        stopAt: (pos) => rest.stopAt(pos),
        advance: () => {
          const tree = rest.advance();
          if (!tree) return null;
          const positions = tree.positions.map((position) => position + from);
          return new Tree(tree.type, tree.children, positions, tree.length + from);
        },
      };
    };
    return cpp.configure({ wrap });
  }

  function addLanguage(languages, view, language, common) {
    languages.addLanguage({
      name: "CUDA",
      displayName: "CUDA C++",
      alias: ["cuda", "cu"],
      mime: MIME,
      extensions: ["cu", "cuh"],
      load: async () => {
        const cpp = await languages.getLanguage("C++");
        const cuda = withoutMagic(cpp.support.language, common);
        return new language.LanguageSupport(cuda, [cpp.support.support, cudaWords(view, language)]);
      },
    });
  }

  // Keeps the language of a code cell: CUDA while its first line begins with %%cuda, the notebook's own otherwise.
  // The notebook sets its own on all of its cells whenever a kernel starts; that must not last on a CUDA cell.
  function followMagic(model) {
    let own = model.mimeType;
    const follow = () => {
      if (model.mimeType !== MIME) own = model.mimeType;
      model.mimeType = MAGIC.test(model.sharedModel.getSource()) ? MIME : own;
    };
    model.mimeTypeChanged.connect(follow);
    model.contentChanged.connect(follow);
    follow();
  }

  // What stands for a folded source. JupyterLab shows its first line, which may be half of the answer.
  const LABELS = [
    [/^ *\w+\.answer\(/m, "the answer"],
    [/^ +import helpers$/m, "set-up: run this cell first"],
  ];

  function labelFolded({ model, node }) {
    const source = model.sharedModel.getSource();
    const label = model.type === "code" && LABELS.find(([pattern]) => pattern.test(source));
    node.classList.toggle("course-folded", Boolean(label));
    node.style.setProperty("--course-label", label ? `"${label[1]}"` : null);
  }

  function followNotebook(panel) {
    const known = new WeakSet();
    const all = () => {
      panel.content.widgets.forEach(labelFolded);
      for (const cell of panel.content.model?.cells ?? []) {
        if (cell.type !== "code" || known.has(cell)) continue;
        known.add(cell);
        followMagic(cell);
      }
    };
    const watch = () => {
      panel.content.model?.cells.changed.connect(all);
      all();
    };
    panel.content.modelChanged.connect(watch);
    watch();
  }

  // The cell that answers a guess: it calls .answer() of a name that the guess's cell has given, and lies below it.
  // Several cells may lie between. which: the number of the guess in its cell, all of them where it has no such number.
  // -1 where there is none.
  function answerOf(cells, index, which) {
    const source = (cell) => (cell.model.type === "code" ? cell.model.sharedModel.getSource() : "");
    const all = [...source(cells[index]).matchAll(/^(\w+) = predict\(/gm)].map((found) => found[1]);
    const names = which in all ? [all[which]] : all;
    const answers = new RegExp(`\\b(?:${names.join("|")})\\.answer\\(`);
    return names.length ? cells.findIndex((cell, at) => at > index && answers.test(source(cell))) : -1;
  }

  // A guess's button runs the cell with its answer, and before it what lies between and may compute it. A click on a
  // cell that stands for its label runs it, where it would otherwise show its source.
  async function showAnswer(app, tracker, event) {
    const cells = tracker.currentWidget?.content;
    const index = cells?.widgets.findIndex((cell) => cell.node.contains(event.target)) ?? -1;
    if (index < 0) return;
    const byButton = event.target.closest(".course-show-answer");
    if (!byButton && !event.target.closest(".course-folded .jp-InputPlaceholder")) return;
    event.preventDefault();
    event.stopPropagation();
    const buttons = [...cells.widgets[index].node.querySelectorAll(".course-show-answer")];
    const answer = byButton ? answerOf(cells.widgets, index, buttons.indexOf(byButton)) : index;
    if (answer < 0) return;
    for (let at = byButton ? index + 1 : index; at <= answer; ++at) {
      if (cells.widgets[at].model.type !== "code") continue;
      cells.activeCellIndex = at;
      await app.commands.execute("notebook:run-cell");
    }
  }

  // What JupyterLab's own style lacks. Words are broken between words, and kernels, which are wider than a narrow
  // window, scroll and keep their indentation; with an editor's font and no margin, their 100 columns have room in a
  // window of 1280 pixels. The first line of a folded output is cut where the notebook ends. Figures
  // are drawn for a white page: in a dark theme light and dark change places, and colours stay what they are called.
  const STYLE = `
    .course-show-answer { display: inline-block !important; width: auto; }
    .jp-OutputArea-output pre { word-break: normal !important; overflow-wrap: anywhere !important; }
    .jp-OutputArea-output.jp-RenderedHTMLCommon pre, .jp-OutputArea-output.jp-RenderedHTMLCommon pre code {
      white-space: pre !important; overflow-wrap: normal !important; overflow-x: auto;
      font-size: var(--jp-code-font-size); line-height: var(--jp-code-line-height); margin: 0;
    }
    .course-folded .jp-InputPlaceholder .jp-PlaceholderText { font-size: 0; }
    .course-folded .jp-InputPlaceholder .jp-PlaceholderText::after {
      content: var(--course-label); font-size: var(--jp-ui-font-size1);
    }
    .jp-PlaceholderText { display: inline-block; max-width: min(40rem, 60vw); overflow: hidden; text-overflow: ellipsis; }
    body[data-jp-theme-light="false"] .jp-RenderedImage img[src^="data:image/png"] {
      filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; background: none;
    }`;

  async function plugins() {
    const [{ IEditorLanguageRegistry }, { INotebookTracker }, view, language, common] = await Promise.all(
      [
        "@jupyterlab/codemirror",
        "@jupyterlab/notebook",
        "@codemirror/view",
        "@codemirror/language",
        "@lezer/common",
      ].map(module),
    );
    return [
      {
        id: "cuda-cells:language",
        description: "CUDA C++ for .cu and .cuh files, by JupyterLab's C++ mode",
        autoStart: true,
        requires: [IEditorLanguageRegistry],
        activate: (app, languages) => addLanguage(languages, view, language, common),
      },
      {
        id: "cuda-cells:cells",
        description: "Colours code cells that begin with %%cuda as CUDA C++",
        autoStart: true,
        requires: [INotebookTracker],
        activate: (app, tracker) => {
          tracker.forEach(followNotebook);
          tracker.widgetAdded.connect((_, panel) => followNotebook(panel));
        },
      },
      {
        id: "cuda-cells:answers",
        description: "Runs the cell that answers a guess, by the button beside it or a click on the cell; the style",
        autoStart: true,
        requires: [INotebookTracker],
        activate: (app, tracker) => {
          document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
          document.addEventListener("click", (event) => showAnswer(app, tracker, event), true);
        },
      },
    ];
  }

  globalThis._JUPYTERLAB = globalThis._JUPYTERLAB ?? {};
  globalThis._JUPYTERLAB["cuda-cells"] = {
    init: (scope) => {
      shared = scope;
    },
    get: async (name) => {
      if (name !== "./extension") throw new Error(`cuda-cells has no module ${name}`);
      const made = { __esModule: true, default: await plugins() };
      return () => made;
    },
  };
})();
