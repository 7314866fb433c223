"""The site: all pages exist, links work, and pages say what the notebooks and kernels say."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import browser
import pytest

from helpers.attention import kernel
from helpers.attention.ladder import LADDER
from helpers.bench import climb, gpus, reading, study
from helpers.lesson.exercises import exercise
from helpers.lesson.predict import predict
from helpers.site import (
    build,
    climb_page,
    export_pages,
    first_screen,
    guesses,
    kernel_pages,
    listing,
    mistakes,
    notebook_pages,
    readme_pages,
    web_address,
    xrays,
)
from helpers.site.links import ROOT, Links, outside_code, slug

NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton", "latex2mathml")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
of_the_site = pytest.mark.skipif(bool(missing), reason=f"the site is made with {', '.join(missing)}, not installed")


def needs_sphinx(test: Any) -> Any:
    """Building the site takes two minutes of CPU time; a workflow of its own does it for each pull request."""
    return pytest.mark.exhaustive(of_the_site(test))


class Page(HTMLParser):
    """One page: its ids, its links and images, its blocks of code, its words outside and inside folds."""

    WHERE = frozenset(("details", "summary", "pre"))  # tags, and the class "linenos"
    COLOURED = re.compile(r'<span class="\w{1,3}">([^<]*)</span>')  # one word of code: most of a page's tags
    EMPTY = frozenset(("img", "br", "hr", "input", "link", "meta", "source", "wbr", "path", "area", "col"))

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.path = path
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[str] = []  # their alternative texts
        self.blocks: list[str] = []
        self.words = {"open": "", "folded": ""}
        self.folds: list[str] = []  # their summaries
        self._open: list[tuple[str, frozenset[str]]] = []  # with its enclosing tags of WHERE
        self.feed(self.COLOURED.sub(r"\1", path.read_text(encoding="utf-8")))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag == "img":
            self.pictures.append(values.get("alt", ""))
        if tag not in self.EMPTY:
            within = self._open[-1][1] if self._open else frozenset()
            own = {tag} & self.WHERE | {"linenos"} & set(values.get("class", "").split())
            self._open.append((tag, within | own))
        if tag == "pre":
            self.blocks.append("")
        if tag == "summary":
            self.folds.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        within = self._open[-1][1] if self._open else frozenset()
        self.words["folded" if "details" in within and "summary" not in within else "open"] += data
        if "summary" in within:
            self.folds[-1] += data
        if "pre" in within and "linenos" not in within:
            self.blocks[-1] += data


def dead_links(pages: dict[Path, Page]) -> Iterator[str]:
    """Find broken links and images within the site."""
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):  # a listing repeats names
            if re.match(r"[a-z]+:|//", link):
                continue
            file, anchor = urldefrag(unquote(link))
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not target.is_file() or target.stat().st_size == 0:
                yield f"{path.name}: {link} is not there"
            elif anchor and target in pages and anchor not in pages[target].ids:
                yield f"{path.name}: {link} has no such anchor"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """All pages of the site, built once for these tests."""
    first = build.build(tmp_path_factory.mktemp("book")).resolve()
    paths = sorted(path for path in first.parent.rglob("*.html") if "_static" not in path.parts)  # the theme's macros
    return {path: Page(path) for path in paths}


def page_of(site: dict[Path, Page], name: str) -> Page:
    [page] = (page for path, page in site.items() if path.as_posix().endswith(f"/html/{name}"))
    return page


@needs_sphinx
def test_nothing_leads_nowhere(site: dict[Path, Page]) -> None:
    assert len(site) > 100 and not list(dead_links(site))


@needs_sphinx
def test_a_dead_link_would_be_found(site: dict[Path, Page], tmp_path: Path) -> None:
    good = tmp_path / "good.html"
    good.write_text(
        "<h1 id='here'>x</h1><a href='#here'>1</a><a href='good.html#here'>2</a><a href='https://x.org'>3</a>"
    )
    assert not list(dead_links({good: Page(good)}))
    good.write_text("<a href='#gone'>1</a><img src='gone.png'><a href='good.html#x'>2</a><script src='s.js'></script>")
    assert len(list(dead_links({good: Page(good)}))) == 4


@needs_sphinx
def test_every_notebook_is_there_with_the_pictures_that_it_holds(site: dict[Path, Page]) -> None:
    """Nothing is recomputed: each picture's bytes are those in the notebook."""
    assert len(notebook_pages.paths()) >= 11
    [images] = {image for path in site for image in path.parent.glob("_images")}
    shown = {hashlib.sha256(path.read_bytes()).digest() for path in images.iterdir()}
    for path in notebook_pages.paths():
        page = page_of(site, f"notebooks/{path.stem}.html")
        assert notebook_pages.title(notebook_pages.read(path)) in page.words["open"]
        assert all(len(words) > 10 and not words.endswith(".png") for words in page.pictures)
        for output in (out for cell in notebook_pages.read(path)["cells"] for out in cell.get("outputs", ())):
            if picture := output.get("data", {}).get("image/png"):
                assert hashlib.sha256(base64.b64decode("".join(picture))).digest() in shown
            for printed in guesses.with_boxes(output):  # a question becomes a box
                if printed["output_type"] == "stream":
                    line = max("".join(printed["text"]).splitlines(), key=len)
                    assert line in page.words["open"] + page.words["folded"]


def streams(cell: dict[str, Any]) -> list[str]:
    """Return the longest line of each text that a cell printed."""
    outputs = (new for output in cell.get("outputs", ()) for new in guesses.with_boxes(output))
    texts = ("".join(o["text"]) for o in outputs if o["output_type"] == "stream")
    return [max(text.splitlines(), key=len) for text in texts]


@needs_sphinx
def test_answers_and_solutions_are_folded(site: dict[Path, Page]) -> None:
    for path in notebook_pages.paths():
        page, cells = page_of(site, f"notebooks/{path.stem}.html"), notebook_pages.read(path)["cells"]
        seen, hidden = "", []  # the notebook's visible lines, and the collapsed ones
        for cell in cells:
            collapsed = cell["metadata"].get("jupyter", {})
            if collapsed.get("source_hidden"):
                hidden.append(max(cell["source"].splitlines(), key=len))
            else:
                seen += cell["source"]
            if collapsed.get("outputs_hidden"):
                hidden += streams(cell)
            else:
                seen += json.dumps(cell.get("outputs", ()), ensure_ascii=False)
        assert len(hidden) >= 3
        for line in hidden:
            assert line in page.words["folded"] and (line not in page.words["open"] or line in seen)
        folds = [fold.strip() for fold in page.folds]
        assert folds.count("Show a solution") == sum(cell["source"].startswith("%%cuda ") for cell in cells)
        collapsed = sum("jupyter" in cell["metadata"] for cell in cells)
        assert sum(bool(re.match(r"Set-up|Show the (answer|output|code)", fold)) for fold in folds) == collapsed


@needs_sphinx
def test_every_kernel_is_there_to_be_copied(site: dict[Path, Page]) -> None:
    """The last block of a file's page is its exact text, without line numbers."""
    for path in kernel_pages.files():
        name = path.relative_to(ROOT).as_posix()
        assert page_of(site, f"{name}.html").blocks[-1].rstrip("\n") == path.read_text("utf-8").rstrip("\n"), name


@needs_sphinx
def test_every_stage_is_there_as_one_file(site: dict[Path, Page]) -> None:
    """To copy and to download, with the exact text."""
    texts_of = {stage.name: export_pages.files(stage) for stage in LADDER.values()}
    assert sum(bool(texts) for texts in texts_of.values()) >= 10 and "flash_mma.cu" in texts_of["flash_mma"]
    for stage, texts in texts_of.items():
        assert bool(texts) == any(path.name == f"{stage}.html" for path in site)
        if not texts:
            continue
        page = page_of(site, f"exports/{stage}.html")
        assert f"{stage}.py" in texts
        assert [block.rstrip("\n") for block in page.blocks] == [text.rstrip("\n") for text in texts.values()]
        for name, text in texts.items():
            [link] = (link for link in page.links if link.endswith(f"/{name}"))
            assert (page.path.parent / link).read_text(encoding="utf-8") == text


@needs_sphinx
def test_every_record_is_there(site: dict[Path, Page]) -> None:
    """There is a page for each GPU, and the first one's has the record's figures."""
    words = page_of(site, "gpus.html").words["open"]
    for name, record in gpus.records().items():
        assert name in words
        [best] = (
            r for r in reading.measurements((4, 16, 4096, 64), dtype="float32", record=record) if r["name"] == "naive"
        )
        assert f"{best['tflops']:.3g} (" in words
    assert "float32, one head" in words and "bfloat16, causal" in words


@needs_sphinx
def test_the_climb_is_there(site: dict[Path, Page]) -> None:
    """Its tables with the recorded figures, its picture, and the sections on predictions."""
    page = page_of(site, "climb.html")
    gain = climb.between_stages()[0]
    assert gain.idea in page.words["open"] and gain.text in page.words["open"]
    assert all(heading in page.words["open"] for heading, _, _ in climb_page.PROMISES)
    assert page.pictures == ["All stages, TFLOP/s against FLOP per byte"]


@needs_sphinx
def test_texts_and_parts_of_readme_are_pages(site: dict[Path, Page]) -> None:
    for file in (file for files in build.TEXTS.values() for file in files):
        assert page_of(site, file.replace(".md", ".html")).words["open"]
    _, sections = readme_pages.split((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(sections) > 3
    for heading in list(sections)[1:]:
        assert heading in page_of(site, f"about/{slug(heading)}.html").words["open"]
    front = page_of(site, "index.html")
    assert next(iter(sections)) in front.words["open"]
    for path in notebook_pages.paths():
        assert f"notebooks/{path.stem}.html" in front.links


@needs_sphinx
def test_what_one_sees_of_a_usual_mistake(site: dict[Path, Page]) -> None:
    """Each has its edit and a message, and the messages are of many kinds."""
    page = page_of(site, "teachers/mistakes.html")
    every = mistakes.listed()
    assert len(page.blocks) == 2 * len(every) and len(set(every)) == len(every) >= 45
    assert len(re.findall("^### ", mistakes.TEXT.read_text(encoding="utf-8"), re.M)) == len(every)
    for edit, message, mistake in zip(page.blocks[::2], page.blocks[1::2], every, strict=True):
        assert re.search(r"^-.*\S", edit, re.M) or mistakes.planted(mistake).new, mistake
        assert message.strip(), mistake
    messages = "\n".join(page.blocks[1::2])
    for kind in ("[FAIL] ", "race: ", "illegal read of ", "uninitialised: ", "not waited for: ", "deadlock: ", "NaN"):
        assert kind in messages, kind


@needs_sphinx
def test_nothing_is_fetched_from_elsewhere(site: dict[Path, Page]) -> None:
    """No script, font, style or picture, and no link to a repository without a public name."""
    for path, page in site.items():
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe)[^>]* src=\"(?:https?:)?//[^\"]*", text), path.name
        assert not re.findall(r"<link[^>]*rel=\"(?:stylesheet|preload|icon)\"[^>]*href=\"(?:https?:)?//[^\"]*", text)
        assert web_address.is_published() or not any(web_address.address() in link for link in page.links), path.name


@needs_sphinx
def test_only_icons_that_are_shown_are_loaded(site: dict[Path, Page]) -> None:
    front = page_of(site, "index.html").path
    icons = (front.parent / build.ICONS).read_text(encoding="utf-8")
    shown = set(re.findall(r'class="fa-solid fa-([a-z-]+)', front.read_text(encoding="utf-8")))
    assert len(shown) >= 5 and len(icons) < 200_000
    assert shown <= {icon["name"] for icon in build._ICON.finditer(icons)}


@needs_sphinx
def test_formulas_are_set_by_the_browser(site: dict[Path, Page]) -> None:
    """A page has as many MathML formulas as the notebook's text has formulas, and no TeX is left."""
    text = page_of(site, "notebooks/03_online_softmax.html").path.read_text(encoding="utf-8")
    assert text.count("<math") >= 30 and 'display="block"' in text
    assert "\\frac" not in text


@needs_sphinx
def test_a_page_is_shown_with_its_name(site: dict[Path, Page]) -> None:
    front = page_of(site, "index.html")
    text = front.path.read_text(encoding="utf-8")
    assert '<meta property="og:title" content="FlashAttention from scratch, in CuPy"/>' in text
    assert re.search(r'<meta property="og:description" content="Write FlashAttention yourself[^"]{40,}\."/>', text)
    assert 'rel="icon" href="_static/icon.svg"' in text
    assert (front.path.parent / "card.png").read_bytes()[:4] == b"\x89PNG"
    own = page_of(site, "notebooks/03_online_softmax.html").path.read_text(encoding="utf-8")
    assert '<meta property="og:title" content="03 · Online softmax: attention in one pass"/>' in own


@needs_sphinx
def test_the_front_page_says_where_to_start(site: dict[Path, Page]) -> None:
    front = page_of(site, "index.html")
    for link in ("notebooks/00_attention.html", "teachers/mistakes.html", "#the-notebooks"):
        assert link in front.links
    assert 'data-moving="softmax"' in front.path.read_text(encoding="utf-8")
    assert not any(link.endswith(".gif") for link in front.links)


@needs_sphinx
def test_every_prediction_has_its_box(site: dict[Path, Page]) -> None:
    for path in notebook_pages.paths():
        text = page_of(site, f"notebooks/{path.stem}.html").path.read_text(encoding="utf-8")
        asked = [line for cell in notebook_pages.read(path)["cells"] for line in cell["source"].splitlines()]
        assert text.count('<form class="guess"') == sum(bool(re.match(r"\w+ = predict\(", line)) for line in asked)
        assert "for the dots after guess=" not in text


@needs_sphinx
def test_search_knows_the_words(site: dict[Path, Page]) -> None:
    index = (next(path for path in site if path.name == "search.html").parent / "searchindex.js").read_text("utf-8")
    terms = json.loads(index[index.index("{") : index.rindex("}") + 1])["terms"]
    assert {"swizzl", "wavefront", "bfloat16"} <= set(terms)


@needs_sphinx
def test_a_page_with_something_wrong_is_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "sources", lambda folder: (folder / "index.md").write_text("# x\n\n[y](gone.md)\n"))
    with pytest.raises(build.BookFailed, match="gone"):
        build.build(tmp_path)


def test_outputs_keep_their_order() -> None:
    """Text printed in two pieces is one block, unless something was displayed in between."""
    kinds = [("stream", "a\n"), ("stream", "b\n"), ("display_data", ""), ("stream", "c\n")]
    outputs = [{"output_type": kind, "name": "stdout", "text": [text]} for kind, text in kinds]
    joined = notebook_pages._joined(outputs)
    assert ["".join(output["text"]) for output in joined] == ["a\nb\n", "", "c\n"]
    assert outputs[0]["text"] == ["a\n"]


# ---- links


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("01_naive.ipynb", "/notebooks/01_naive.ipynb"),
        ("#What-limits-us-now", "#what-limits-us-now"),
        ("references.md#04_register_tiles", "/notebooks/references.md#04_register_tiles"),
        ("../kernels/steps", "/kernels/steps/index.md"),
        ("../kernels/ptx.cuh", "/kernels/ptx.cuh.md"),
        ("../README.md#x-ray", "/about/x-ray.md"),
        ("../helpers/attention/check.py", ""),
        ("../kernels/exercises", ""),
        ("measured/ladder.png", "/notebooks/measured/ladder.png"),
        ("https://arxiv.org/abs/2205.14135", "https://arxiv.org/abs/2205.14135"),
        ("mailto:a@b.org", "mailto:a@b.org"),
    ],
)
def test_links_of_a_notebook(link: str, becomes: str) -> None:
    names = ("notebooks/01_naive.ipynb", "notebooks/references.md")
    pages = {name: name for name in names} | {"kernels/ptx.cuh": "kernels/ptx.cuh.md"}
    links = Links({**pages, "kernels/steps": "kernels/steps/index.md"}, {"README.md#x-ray": "/about/x-ray.md"})
    assert links.target(link, "notebooks/04_register_tiles.ipynb") == becomes
    assert links.images == ({"notebooks/measured/ladder.png"} if link.endswith(".png") else set())


def test_a_link_to_the_repository_waits_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then only its words remain; this also holds for pictures within links."""
    text = "see [`check`](../helpers/attention/check.py) and [a [b]](../kernels/exercises), ![x](measured/ladder.png)"
    kept = "![x](/notebooks/measured/ladder.png)"
    assert Links({}).rewrite(text, "notebooks/x.md") == f"see `check` and a [b], {kept}"
    assert web_address.link("words", "kernels") == "words"
    monkeypatch.setattr(web_address, "NAME", "Somebody/course")
    address = "https://github.com/Somebody/course"
    assert Links({}).rewrite(text, "notebooks/x.md") == (
        f"see [`check`]({address}/blob/main/helpers/attention/check.py) and "
        f"[a [b]]({address}/tree/main/kernels/exercises), {kept}"
    )
    assert web_address.link("words", "kernels") == f"[words]({address}/tree/main/kernels)"
    assert web_address.site("card.png") == "https://somebody.github.io/course/card.png"


@pytest.mark.parametrize("link", ["gone.md", "../kernels/gone.cu", "../../elsewhere"])
def test_a_link_to_nothing_is_told(link: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"notebooks/x.md links to {link}")):
        Links({}).rewrite(f"see [it]({link})", "notebooks/x.md")


def test_code_is_left_alone() -> None:
    text = "[a](b)\n```python\nx[0](b)\n```\n[c](b)\n~~~\n[d](b)\n~~~\n"
    assert outside_code(text, lambda prose: prose.replace("(b)", "(B)")).count("(B)") == 2
    assert "x[0](b)" in Links({"b": "b.md"}).rewrite(text, "README.md")


def test_readme_falls_into_parts() -> None:
    first, sections = readme_pages.split("# T\n\nwords\n\n## One, two\nx\n```sh\n## no heading\n```\n## Three\ny\n")
    assert first == "# T\n\nwords\n\n" and sections == {"One, two": "x\n```sh\n## no heading\n```\n", "Three": "y\n"}
    assert readme_pages.anchors("## One, two\n## Three\n") == {
        "README.md#one-two": "/index.md",
        "README.md#three": "/about/three.md",
    }


def test_mistakes_are_still_planted() -> None:
    """Each applies to its kernel; this is checked without Sphinx too."""
    for mistake in mistakes.listed():
        bug = mistakes.planted(mistake)
        text = (ROOT / "kernels" / mistakes.file_of(mistake)).read_text(encoding="utf-8")  # or of a header
        assert bug.plant(text) != text
    with pytest.raises(LookupError, match="0 bugs named 'none such' in naive"):
        mistakes.planted(mistakes.Mistake("check", "naive", "none such"))


# ---- guesses


def test_a_guess_is_a_box(capsys: pytest.CaptureFixture[str]) -> None:
    """Every question of `predict` is recognised, whatever is printed around it."""
    print("before")
    predict("a & b: c", unit="GiB", guess=...)
    predict("which", choices=("it's", "other"), guess=...)
    print("after")
    printed = capsys.readouterr().out
    outputs = list(guesses.with_boxes({"output_type": "stream", "name": "stdout", "text": [printed]}))
    assert [output["output_type"] for output in outputs] == ["stream", "display_data", "display_data", "stream"]
    assert [outputs[0]["text"], outputs[-1]["text"]] == ["before\n", "after\n"]
    number, choice = (output["data"]["text/html"] for output in outputs[1:3])
    assert 'data-name="a &amp; b: c"' in number and "GiB</label>" in number and "<input" in number
    assert choice.count("<button") == 2 and "it&#x27;s</button>" in choice and "<input" not in choice
    other = {"output_type": "stream", "name": "stdout", "text": "x: write a number\n"}
    assert list(guesses.with_boxes(other)) == [other]


# ---- in a browser, if there is one


@needs_sphinx
@pytest.mark.parametrize("theme", browser.THEMES)
@pytest.mark.parametrize("width", browser.SIZES)
def test_the_site_moves(chromium: Any, site: dict[Path, Page], width: int, theme: str) -> None:
    """Every moving figure on every page works."""
    pages = [path for path in site if 'class="moving"' in path.read_text(encoding="utf-8")]
    assert {"index.html", "03_online_softmax.html"} <= {path.name for path in pages}
    for path in pages:
        with browser.opened(chromium, width, theme) as page:
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.dataset.theme") == theme
            for figure in page.locator(".moving").all():
                if figure.is_visible():
                    browser.walk(page, figure)


@needs_sphinx
@pytest.mark.parametrize("theme", browser.THEMES)
@pytest.mark.parametrize("width", browser.SIZES)
def test_a_guess_is_noted(chromium: Any, site: dict[Path, Page], width: int, theme: str) -> None:
    """A number, then a choice; the folded answer then shows the guess."""
    with browser.opened(chromium, width, theme) as page:
        page.goto(page_of(site, "notebooks/03_online_softmax.html").path.as_uri())
        form = page.locator("form.guess[data-name='factor at tile 1']")
        line, noted = form.locator("input"), form.locator("output")
        answer = page.locator("details", has_text="factor at tile 1: ")
        assert not answer.locator("pre").last.is_visible()
        comma = "a comma must be followed by three digits, as in 1,024; for a decimal write 3.5"
        more = (("3,5", comma), ("1,024", "noted: 1,024"))
        for typed, said in (("much", "a number, please"), ("16", "noted: 16"), *more, ("0.14", "noted: 0.14")):
            line.fill(typed)
            page.keyboard.press("Enter")
            assert noted.inner_text() == said
        answer.locator("summary").click()
        assert "0.135. Your guess: 0.14." in answer.locator("pre").last.inner_text()
        choice = page.locator("form.guess", has=page.get_by_role("button", name="shuffled"))
        choice.get_by_role("button", name="shuffled").click()
        assert choice.locator("output").inner_text() == "noted: shuffled"
        assert line.evaluate(browser.CONTRAST) >= 4.5


@needs_sphinx
@pytest.mark.parametrize("width", browser.SIZES)
def test_no_figure_is_wider_than_the_page(chromium: Any, site: dict[Path, Page], width: int) -> None:
    """Until it is clicked. On a phone it keeps the width at which its labels are legible, and its own box scrolls."""
    for path in (path for path in site if path.parent.name == "notebooks"):
        with browser.opened(chromium, width, "light") as page:
            page.goto(path.as_uri())
            widths = page.locator(".bd-article img").evaluate_all("all => all.map(image => image.clientWidth)")
            assert max(widths, default=0) <= max(width, 608), path.name
    with browser.opened(chromium, 390, "light") as page:
        page.goto(page_of(site, "notebooks/03_online_softmax.html").path.as_uri())
        image = page.locator(".bd-article .cell_output img:not(.part)").locator("visible=true").first
        before = image.bounding_box()["width"]
        image.focus()
        page.keyboard.press("Enter")
        assert image.bounding_box()["width"] > before


@needs_sphinx
def test_no_code_is_cut_off_on_a_laptop(chromium: Any, site: dict[Path, Page]) -> None:
    """At 1280 pixels each block shows whole lines; a button opens the page's contents."""
    names = ("notebooks/14_decoding", "kernels/14_split_kv.cu", "index", "about/the-ladder", "architectures")
    for name in (f"{name}.html" for name in (*names, "measured/study-tf32", "measured/study-decoding")):
        with browser.opened(chromium, 1280, "light") as page:
            page.goto(page_of(site, name).path.as_uri())
            cut = "all => all.filter(block => block.scrollWidth > block.clientWidth + 1).length"
            assert page.locator(".bd-article :is(pre, table)").evaluate_all(cut) == 0, name
    with browser.opened(chromium, 1280, "light") as page:
        page.goto(page_of(site, "notebooks/14_decoding.html").path.as_uri())
        contents = page.locator("#pst-page-toc-nav")
        assert not contents.is_visible()
        page.locator(".secondary-toggle").click()
        contents.wait_for(state="visible")


@needs_sphinx
def test_tables_sort_and_keep_rows(chromium: Any, site: dict[Path, Page]) -> None:
    name = next(path.name for path in site if path.parent.name == "measured" and path.name.startswith("nvidia"))
    with browser.opened(chromium, 1280, "light") as page:
        page.goto(page_of(site, f"measured/{name}").path.as_uri())
        table = page.locator(".bd-article table").first
        heads = table.locator("th").all_inner_texts()
        cells = f"rows => rows.filter(r => !r.hidden).map(r => r.cells[{heads.index('ms')}].textContent)"
        for turn in (1, -1):
            table.get_by_role("button", name="ms", exact=True).click()
            times = [float(text) for text in table.locator("tbody tr").evaluate_all(cells)]
            assert times == sorted(times)[::turn] and len(times) > 20
        page.locator("input.keeps").first.fill("naive 4096")
        kept = table.locator("tbody tr").locator("visible=true").all_inner_texts()
        assert 0 < len(kept) < len(times) and all("naive" in row and "4096" in row for row in kept)


@needs_sphinx
def test_an_x_ray_stands_beside_the_lines(site: dict[Path, Page]) -> None:
    text = page_of(site, "kernels/03_online_softmax.cu.html").path.read_text(encoding="utf-8")
    assert text.count('class="linenos xray" title=') > 5 and "no finding" in text
    assert "xray" not in page_of(site, "kernels/ptx.cuh.html").path.read_text(encoding="utf-8")


@needs_sphinx
def test_every_measurement_is_there(site: dict[Path, Page]) -> None:
    for name, record in gpus.records().items():
        page = page_of(site, f"measured/{gpus.slug(name)}.html")
        assert page.path.read_text(encoding="utf-8").count("<tr") >= len(record["results"])
    for name in study.STUDIES:
        [shown] = page_of(site, f"measured/study-{name.replace('_', '-')}.html").blocks
        assert shown.strip() == str(study.module_of(name).table()).strip()


@needs_sphinx
def test_a_notebook_can_be_downloaded(site: dict[Path, Page]) -> None:
    for path in notebook_pages.paths():
        page = page_of(site, f"notebooks/{path.stem}.html")
        assert path.name in page.links and (page.path.parent / path.name).read_bytes() == path.read_bytes()


# ---- kernels as HTML


def test_names_lead_to_their_definitions() -> None:
    text = listing.code("07_mma.cu")
    line = listing.definitions("ptx.cuh")["mma_m16n8k16"]
    assert "mma_m16n8k16" in listing.text_of("ptx.cuh").splitlines()[line - 1]
    assert f'<a href="ptx.cuh.html#L{line}"><span class="n">mma_m16n8k16</span></a>' in text
    assert '<a href="block.cuh.html"><span class="cpf">' in text
    plain = re.sub(r'<a class="linenos".*?</a>|<[^>]+>', "", text)
    assert html.unescape(plain).rstrip("\n") == listing.text_of("07_mma.cu").rstrip("\n")
    assert '<a href="../ptx.cuh.html#L' in listing.code("steps/07_16_lazy_rescale.cu")


def test_every_definition_is_on_its_line() -> None:
    for path in kernel_pages.files():
        name = path.relative_to(kernel.KERNELS).as_posix()
        lines = listing.text_of(name).splitlines()
        assert all(re.search(rf"\b{word}\b", lines[line - 1]) for word, line in listing.definitions(name).items()), name


def test_an_x_ray_counts_what_the_kernel_does() -> None:
    """01 reads K once per row of Q; next to the lines are bytes and the cost of bank conflicts."""
    xray = xrays.on_cpu(["01_naive.cu"])["01_naive.cu"]
    assert xray["arrays"]["K"][0] == 4 * xrays.ROWS * xrays.KEYS * xrays.HEAD_DIM and not xray["findings"]
    counts = {"tile": [4096, 0, 0, 0, 8, 32, 24], "K": [0, 512, 4, 16, 0, 0, 0]}
    beside = listing.figures(counts, ["tile"])
    assert "<i>   512</i><b>    4K</b><em>×4   </em>" in beside
    assert "tile: 4,096 bytes read, 4 wavefronts a request, 24 by bank conflicts; K: 512 written, 4 sectors" in beside
    assert [listing.size(count) for count in (0, 640, 12800, 8 << 20, 5 << 30)] == ["", "640", "12.5K", "8M", "5120M"]


def test_readme_says_how_many_exercises_and_hours() -> None:
    """In its table of parts: the hours to read the notebooks and do their exercises, to half an hour."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f" {len(exercise.GRADERS)} exercises" in text
    linked = []
    for part in ("The algorithm", "Speed", "Training", "Workshops"):
        (row,) = (line for line in text.splitlines() if line.startswith(f"| **{part}**"))
        paths = [ROOT / target for target in re.findall(r"\]\((notebooks/\w+\.ipynb)\)", row)]
        linked += paths
        hours = [sum(first_screen.minutes(path, notebook_pages.read(path))) / 60 for path in paths]
        said = row.rstrip(" |").rpartition("| ")[2]
        if part == "Workshops":
            assert said == "½ to 2½ each" and min(hours) > 0.4 and max(hours) < 2.6
        else:
            assert float(said) == round(2 * sum(hours)) / 2, part
    assert sorted(linked) == notebook_pages.paths(), "each notebook is in one part"
