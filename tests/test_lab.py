"""The colours of CUDA in JupyterLab: the extension is in JupyterLab's folder and, in a browser, it works."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import commands

ROOT = Path(__file__).resolve().parent.parent
ROOM = ROOT / "helpers" / "cli" / "lab"
EXTENSION = ROOM / "labextensions" / "cuda-cells"


def test_its_files() -> None:
    package = json.loads((EXTENSION / "package.json").read_text())
    build = package["jupyterlab"]["_build"]
    path, _, version = build["load"].partition("?")
    entry = (EXTENSION / path).read_text(encoding="utf-8")
    digest = hashlib.sha256(entry.encode()).hexdigest()[:8]
    assert version == digest, f'in package.json: "load": "{path}?{digest}", else browsers keep an older file'
    assert package["name"] == EXTENSION.name and f'_JUPYTERLAB["{package["name"]}"]' in entry
    assert f'"{build["extension"]}"' in entry, "the module that JupyterLab asks for"


def test_its_code_parses() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    subprocess.run([node, "--check", str(EXTENSION / "static" / "remoteEntry.js")], check=True)


def predictions(cells: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Return the places of each cell that asks for a guess, and of the cell that answers it."""
    sources = ["".join(cell["source"]) if cell["cell_type"] == "code" else "" for cell in cells]
    for at, source in enumerate(sources):
        names = re.findall(r"^(\w+) = predict\(", source, re.M)
        if names:
            yield (
                at,
                next(n for n in range(at + 1, len(cells)) if any(f"{name}.answer(" in sources[n] for name in names)),
            )


def test_the_button_finds_the_answer_whatever_lies_between() -> None:
    """The extension's own function finds the answer to every guess in every notebook."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    entry = (EXTENSION / "static" / "remoteEntry.js").read_text()
    function = entry[entry.index("  function answerOf(") : entry.index("  // A guess's button runs")]
    script = """
const cells = (notebook) => notebook.cells.map((cell) => ({ model: {
  type: cell.cell_type, sharedModel: { getSource: () => [].concat(cell.source).join("") } } }));
const books = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(books.map((book) => cells(book).map((_, at, all) => answerOf(all, at)))));
const two = ["a = predict('a')\\nb = predict('b')", "a.answer(1)", "b.answer(2)"];
const both = cells({ cells: two.map((source) => ({ cell_type: "code", source })) });
console.log(JSON.stringify([answerOf(both, 0, 0), answerOf(both, 0, 1), answerOf(both, 0, 2)]));
"""
    books = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
    apart = [
        "a = predict('a')",
        "b = a",
        "b.answer(3)",
        "c = predict('c')",
        "# a.answer(1)",
        "c.answer(2)",
        "a.answer(1)",
    ]
    books.append({"cells": [{"cell_type": "code", "source": text} for text in apart]})
    argv = [node, "-e", function + script]
    done = subprocess.run(argv, input=json.dumps(books), capture_output=True, text=True, check=True)
    found, of_two = map(json.loads, done.stdout.splitlines())
    assert of_two == [1, 2, 1]
    for book, places in zip(books[:-1], found, strict=False):
        asked = dict(predictions(book["cells"]))
        assert asked and places == [asked.get(at, -1) for at in range(len(places))]
    assert found[-1] == [4, -1, -1, 5, -1, -1, -1], "a comment would do; the notebooks have none"


def test_jupyterlab_finds_it() -> None:
    pytest.importorskip("jupyterlab")
    settings = {**os.environ, "JUPYTER_PATH": commands.with_our_extension("")}
    # `jupyter labextension list`, without a parser of addresses whose import takes over a second.
    code = "import sys; sys.modules['rfc3987_syntax'] = None; from jupyterlab.labextensions import main; main()"
    argv = [sys.executable, "-c", code, "list"]
    listing = subprocess.run(argv, env=settings, capture_output=True, text=True, check=True)
    line = next(line for line in (listing.stdout + listing.stderr).splitlines() if "cuda-cells" in line)
    assert "enabled" in line and "OK" in line


def test_no_question_about_news_covers_the_first_notebook() -> None:
    settings = pytest.importorskip("jupyterlab_server").config.get_page_config([str(ROOM / "labextensions")])
    assert settings["disabledExtensions"] == ["@jupyterlab/apputils-extension:announcements"]


def test_the_label_of_a_folded_cell() -> None:
    """No folded answer shows its own first line, which may be half of the answer; other folded cells have no label."""
    labels = dict(re.findall(r'\[/(.*)/m, "(.*)"\]', (EXTENSION / "static" / "remoteEntry.js").read_text()))
    assert list(labels.values()) == ["the answer", "set-up: run this cell first"]
    answer, set_up = labels
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
        assert [cell["id"] for cell, text in zip(cells, sources, strict=True) if re.search(set_up, text, re.M)] == [
            "setup"
        ]
        answers = [text for text in sources if ".answer(" in text]
        assert answers and all(re.search(answer, text, re.M) for text in answers)


def test_jupyter_path() -> None:
    ours = str(ROOM)
    assert commands.with_our_extension("") == ours
    path = f"/a{os.pathsep}/b"
    assert commands.with_our_extension(path) == f"{path}{os.pathsep}{ours}"
    assert commands.with_our_extension(f"/a{os.pathsep}{ours}{os.pathsep}/b") == f"{path}{os.pathsep}{ours}"


# ---- in a browser: COURSE_BROWSER is Chromium, COURSE_PLAYWRIGHT the folder of playwright-core

SCRIPT = r"""
const [playwright, browser, url] = process.argv.slice(2);
const { chromium } = require(playwright);
(async () => {
  const running = await chromium.launch({ executablePath: browser, args: ["--headless", "--no-sandbox"] });
  const page = await running.newPage();
  page.setDefaultTimeout(20000);
  await page.goto(url + "/lab/tree/cells.ipynb");
  await page.waitForFunction(() => window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length === 3);
  await page.waitForFunction(() => document.querySelector(".cuda-qualifier"));
  const cells = () => page.evaluate(() => jupyterapp.shell.currentWidget.content.widgets.map((w) => w.model.mimeType));
  const told = { opened: await cells() };
  told.words = await page.evaluate(() =>
    [...document.querySelectorAll(".cuda-qualifier, .cuda-variable, .cuda-magic")].map((e) => e.textContent));
  const set = (text) => page.evaluate((text) =>
    jupyterapp.shell.currentWidget.content.widgets[1].model.sharedModel.setSource(text), text);
  await set("%%cuda x\nint a;");
  told.became = await cells();
  await set("a = 1");
  told.back = await cells();
  await page.evaluate(() =>
    Object.assign(jupyterapp.shell.currentWidget.content, { activeCellIndex: 1, mode: "edit" }));
  await page.keyboard.press("Control+a");
  await page.keyboard.type("%%cuda x\n// note\nint f() {\nreturn 1;\n}\nint g;");
  told.typed = await page.evaluate(() =>
    jupyterapp.shell.currentWidget.content.widgets[1].model.sharedModel.getSource());
  await page.goto(url + "/lab/tree/guess.ipynb");
  await page.waitForFunction(() => jupyterapp.shell.currentWidget?.content?.widgets?.length === 5);
  await page.waitForFunction(() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === "idle");
  const run = async (index) => {
    await page.evaluate((index) => (jupyterapp.shell.currentWidget.content.activeCellIndex = index), index);
    await page.evaluate(() => void jupyterapp.commands.execute("notebook:run-cell"));
  };
  await run(0);
  await page.waitForSelector(".course-show-answer");
  told.widths = await page.evaluate(() =>
    [".widget-text input", ".course-show-answer"].map((name) => document.querySelector(name).offsetWidth));
  const output = (index, text) => page.waitForFunction(([index, text]) =>
    jupyterapp.shell.currentWidget.content.widgets[index].node.textContent.includes(text), [index, text]);
  await page.locator(".course-show-answer").first().click();
  await output(2, "first make a guess");
  await page.locator(".widget-text input").first().fill("1,0000");
  await page.keyboard.press("Enter");
  await output(0, "three digits");
  await page.locator(".widget-text input").first().fill("1,000");
  await page.keyboard.press("Enter");
  await output(0, "noted: 1,000 GiB");
  await page.locator(".course-show-answer").first().click();
  await output(2, "Your guess: 1,000 GiB, 62.5× too much.");
  await run(3);
  await page.waitForFunction(() => document.querySelectorAll(".course-show-answer").length === 2);
  await page.evaluate(() =>
    jupyterapp.shell.currentWidget.content.widgets[4].node.querySelector(".jp-Placeholder").click());
  await output(4, "first make a guess");
  told.label = await page.evaluate(() => getComputedStyle(jupyterapp.shell.currentWidget.content.widgets[4].node
    .querySelector(".jp-InputPlaceholder .jp-PlaceholderText"), "::after").content);
  told.folded = await page.evaluate(() => jupyterapp.shell.currentWidget.content.widgets[4].inputHidden);
  await page.goto(url + "/lab/tree/kernel.cu");
  await page.waitForFunction(() => document.querySelector(".jp-FileEditor .cuda-qualifier"));
  console.log(JSON.stringify(told));
  await running.close();
})().catch((error) => { console.error(error); process.exit(1); });
"""
KERNEL = "%%cuda 00_x\n// __global__ in a comment\n__global__ void f(float* a) {\n  a[threadIdx.x] = 1;\n}"

GUESS = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from helpers.lesson.predict import predict
one = predict("words of the scores S, of all heads and all batches", unit="GiB")"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """Return the address of a JupyterLab with a notebook and a kernel file."""
    pytest.importorskip("jupyterlab")
    code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    texts = [KERNEL, "a = 1", "b = '%%cuda'"]
    cells = [{**code, "id": f"cell{number}", "source": text} for number, text in enumerate(texts)]
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    language = {"name": "python", "codemirror_mode": {"name": "ipython", "version": 3}}
    metadata = {"kernelspec": kernelspec, "language_info": language}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    root = tmp_path / "root"
    root.mkdir()
    (root / "cells.ipynb").write_text(json.dumps(notebook))
    texts = [GUESS, "sixteen = 16", "one.answer(sixteen)", "two = predict('B')", "two.answer(1)"]
    ids = ["one-guess", "between", "one-answer", "two-guess", "two-answer"]
    cells = [{**code, "id": name, "source": text} for name, text in zip(ids, texts, strict=True)]
    for cell in cells[2::2]:
        cell["metadata"] = {"jupyter": {"source_hidden": True}}
    (root / "guess.ipynb").write_text(json.dumps({**notebook, "cells": cells}))
    (root / "kernel.cu").write_text("__global__ void f() {}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTERLAB_SETTINGS_DIR", "IPYTHONDIR")}
    settings |= {"COURSE_PROGRESS": str(tmp_path / "progress.json")}
    settings |= {"JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    settings |= {"JUPYTER_PATH": commands.with_our_extension(os.environ.get("JUPYTER_PATH", ""))}
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    argv += [f"--ServerApp.root_dir={root}", "--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True"]
    server = subprocess.Popen(argv, env={**os.environ, **settings}, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api"):
                break
            time.sleep(0.25)
        yield url
    finally:
        server.terminate()
        server.wait()


def test_in_a_browser(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    browser, playwright = os.environ.get("COURSE_BROWSER", ""), os.environ.get("COURSE_PLAYWRIGHT", "")
    node = shutil.which("node")
    if not (node and browser and playwright):
        pytest.skip("set COURSE_BROWSER to Chromium and COURSE_PLAYWRIGHT to the folder of playwright-core")
    url = request.getfixturevalue("lab")
    script = tmp_path / "drive.js"
    script.write_text(SCRIPT)
    argv = [node, str(script), playwright, browser, url]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    seen = json.loads(answer.stdout)
    assert seen["opened"] == ["text/x-cuda", "text/x-ipython", "text/x-ipython"]
    assert seen["words"] == ["%%cuda 00_x", "__global__", "threadIdx"], "and none in the comment"
    assert seen["became"][1] == "text/x-cuda" and seen["back"][1] == "text/x-ipython"
    assert min(seen["widths"]) > 80, "there is room for the number"
    assert seen["label"] == '"the answer"'
    assert seen["folded"], "a click on a folded answer runs it, and its source stays folded"
    assert seen["typed"].splitlines()[1] == "// note", "the magic is no statement that goes on"
    assert seen["typed"].splitlines()[3].strip() == "return 1;" and seen["typed"].splitlines()[-1] == "int g;"
