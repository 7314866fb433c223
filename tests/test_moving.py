"""Figures that move: they embed what NumPy and the engine compute, and need only their own HTML."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import browser
import numpy as np
import pytest

from helpers import engine
from helpers.attention import check, reference
from helpers.attention.kernel import source, typed
from helpers.attention.ladder.tiles import Tiles
from helpers.bench import plots
from helpers.bench.studies import hopper
from helpers.device import cp
from helpers.draw import moving
from helpers.draw.moving import banks, tiles
from helpers.draw.moving.figure import Moving
from helpers.lesson import show
from helpers.lesson.shortcuts import xray_stage
from helpers.site import notebook_pages
from helpers.xray import Trace, xray

MOST_BYTES = 60_000
SHAPE = (4, 16, 4096, 64)  # the shape that tiles of 04 were measured at

# Each lane records the places of its elements of A, B and D: the numbers of a 16 x 16 matrix, row by row.
FRAGMENTS = r"""
extern "C" __global__ void places(const __half* numbers, const __half* unit, float* A, float* B, float* D) {
  __shared__ __align__(16) __half tile[256], one[256];
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = numbers[i], one[i] = unit[i];
  __syncwarp();
  const unsigned lane = threadIdx.x, row = 2 * (lane % 16 * 16 + lane / 16 * 8);
  unsigned a[4], b[4], id[4];
  ldmatrix_x4(a, smem_address(tile) + row);
  ldmatrix_x4(id, smem_address(one) + row);
  ldmatrix_x4_trans(b, smem_address(tile) + row);
  float d[2][4] = {};
  mma_m16n8k16(__half(), d[0], id, b[0], b[1]);
  mma_m16n8k16(__half(), d[1], id, b[2], b[3]);
  for (int i = 0; i < 8; ++i) {
    A[8 * lane + i] = __half2float(reinterpret_cast<__half*>(a)[i]);
    D[8 * lane + i] = d[i / 4][i % 4];
    if (i < 4) B[4 * lane + i] = __half2float(reinterpret_cast<__half*>(b)[i]);
  }
}"""
READ = r"""
extern "C" __global__ void request(const int* words, float* out) {
  __shared__ __align__(16) float tile[32 * 68 + 4];
  for (int i = threadIdx.x; i < 32 * 68 + 4; i += 32) tile[i] = i;
  __syncwarp();
  const TYPE* place = reinterpret_cast<const TYPE*>(tile + words[threadIdx.x]);
  const TYPE value = *place;  // the request
  out[threadIdx.x] = FIRST;
}"""


@functools.cache
def places() -> tuple[np.ndarray, ...]:
    """Return A, B and D of each lane, from a kernel."""
    kernel = typed(cp.RawModule(code=source("ptx.cuh") + FRAGMENTS, options=("-std=c++17",)), "places")
    out = [cp.full((32, count), cp.nan, dtype=cp.float32) for count in (8, 4, 8)]
    numbers, unit = np.arange(256, dtype=np.float16).reshape(16, 16), np.eye(16, dtype=np.float16)
    kernel((1,), (32,), (cp.asarray(numbers), cp.asarray(unit), *out))
    return tuple(cp.asnumpy(a).astype(int) for a in out)


Rings = dict[str, dict[str, list[tuple[float, float, str]]]]


@functools.cache
def rings() -> Rings:
    """Return the recorded clocks of a block of 10, by the number of stages of its ring."""
    return {name: show.clocks_as_spans(each, 1, len(each["consumers"][0]) - 1) for name, each in hopper.rings().items()}


@functools.cache
def made_up_rings(*stages: int) -> Rings:
    """Make up spans of clocks for 24 key tiles: with more stages, a consumer waits less for K."""
    spans = {}
    for each in stages:
        offsets = [0, 900 // each, *(900 // each + clocks for clocks in (300, 900, 1300, 1350, 1600))]
        steps = [[tile * offsets[-1] + offset for offset in offsets] for tile in range(24)]
        asked = [steps[max(tile - each, 0)][3] for tile in range(24)]
        full = [[clock + 700 + 100 * i for clock in asked] for i in (0, 1)]
        timeline = {"stages": each, "consumers": [steps, steps], "asked": [asked, asked], "full": full}
        spans[f"STAGES = {each}"] = show.clocks_as_spans(timeline, 1, 23)
    return spans


TURNS = r"""
extern "C" __global__ void turns(float* out) {
  __shared__ float s[96];
  for (int i = 0; i < 3; ++i) {
    s[threadIdx.x] = i;
    __syncthreads();
    out[threadIdx.x] = s[95 - threadIdx.x];
    asm volatile("bar.sync 1, 96;" ::: "memory");
  }
}"""


@functools.cache
def traced() -> Trace:
    """A launch of three warps that meet at barriers."""
    kernel = engine.RawModule(code=TURNS).get_function("turns")
    return xray(kernel, (1,), (96,), (engine.empty(96, np.float32),), trace=True).trace


FIGURES: dict[str, Callable[[], Moving]] = {
    "softmax": show.moving_softmax,
    "banks": show.moving_banks,
    "fragments": lambda: show.moving_fragments(*places()),
    "tiles": lambda: show.moving_tiles(SHAPE),
    "spans": lambda: show.moving_spans(rings(), first=6000),
    "rings": lambda: show.moving_spans(made_up_rings(1, 2, 3, 4), first=6000),
    "launch": lambda: traced().stepper(at=20),
}
# What JupyterLab keeps of an output in an untrusted notebook (a part of its list).
KEPT = {"div", "p", "span", "table", "tr", "th", "td", "img", "b", "code"}


@pytest.fixture(scope="module", params=FIGURES)
def figure(request: pytest.FixtureRequest) -> Moving:
    return FIGURES[request.param]()


class Tags(HTMLParser):
    """The tags in a piece of HTML, and the sources of its pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.pictures: list[dict[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "img":
            self.pictures.append({name: value or "" for name, value in attributes})


def embedded(markup: str) -> dict:
    """Return the numbers of a figure, as its script reads them."""
    [numbers] = re.findall(r'<script type="application/json">(.*?)</script>', markup, re.S)
    return json.loads(numbers)


def test_the_markup_is_small_and_complete(figure: Moving) -> None:
    markup = figure._repr_html_()
    assert len(markup.encode()) < MOST_BYTES
    assert embedded(markup) == json.loads(json.dumps(figure.data))
    assert markup.count("<script") == 2 and f'begin("{figure.name}"' in markup
    assert set(re.findall(r"\w+://[\w.]+", unquote(markup))) <= {
        "http://www.w3.org"
    }  # SVG's namespace, which is never fetched
    assert "$" not in figure.frame  # JupyterLab would read it as a formula
    assert len(repr(figure)) > 60


def test_without_its_script_there_is_the_first_frame(figure: Moving) -> None:
    frame = Tags(figure.frame)
    assert frame.tags <= KEPT
    for picture in frame.pictures:
        assert len(picture["alt"]) > 20
        address, _, svg = picture["src"].partition(",")
        assert address == "data:image/svg+xml"
        assert ElementTree.fromstring(unquote(svg)).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_figure_twice_is_the_same_text(name: str) -> None:
    assert FIGURES[name]()._repr_html_() == FIGURES[name]()._repr_html_()


def test_the_softmax_is_that_of_numpy() -> None:
    data = embedded(show.moving_softmax(head=8)._repr_html_())
    q, k, v = check.real_inputs(8)
    scores = q.astype(np.float64) @ k.T.astype(np.float64) / np.sqrt(32)
    assert data["words"] == check.real_tokens() and data["rows"][data["first"]] == 209
    assert [row // 16 for row in data["rows"]] == list(range(17))
    exact = reference.attention(q, k, v)
    for at, row in enumerate(data["rows"]):
        np.testing.assert_allclose(np.array(data["scores"][at]) / 100, scores[row], atol=0.006)
        before = -np.inf
        for tile in range(17):
            s = scores[row, : 16 * (tile + 1)]
            weights = np.exp(s - s.max())
            assert data["m_i"][at][tile] == pytest.approx(s.max(), abs=0.006)
            assert data["l_i"][at][tile] == pytest.approx(weights.sum(), abs=0.006)
            assert data["rescale"][at][tile] == pytest.approx(np.exp(before - s.max()), abs=0.0006)
            so_far = weights @ v[: 16 * (tile + 1)].astype(np.float64) / weights.sum()
            assert data["error"][at][tile] == pytest.approx(np.abs(so_far - exact[row]).mean(), rel=0.06, abs=1e-6)
            before = s.max()


@pytest.mark.parametrize("width", banks.WIDTHS)
def test_the_wavefronts_are_those_that_the_engine_counts(width: str) -> None:
    """The X-ray of a kernel that makes the request, for every allowed pattern."""
    data = embedded(show.moving_banks()._repr_html_())
    names = [choice[1] for choice in data["choices"]]
    assert len(data["patterns"]) == np.prod([len(of_choice) for of_choice in names])
    code = READ.replace("TYPE", width).replace("FIRST", "value" if width == "float" else "value.x")
    kernel = typed(cp.RawModule(code=code, options=("-std=c++17",)), "request")
    line = next(n for n, text in enumerate(code.splitlines(), start=1) if "the request" in text)
    seen = set()
    for at, pattern in enumerate(data["patterns"]):
        if names[1][at // len(names[2]) % len(names[1])] != width:
            continue
        if not pattern["wavefronts"]:
            assert width == "float4" and "16 bytes" in pattern["code"]
            continue
        words = np.array(pattern["words"], dtype=np.int32)
        out = cp.full(32, cp.nan, dtype=cp.float32)
        report = xray(kernel, (1,), (32,), (cp.asarray(words), out))
        [counted] = (row for place, row in report.by_line.items() if place[1] == line)
        assert counted.wavefronts_per_request == pattern["wavefronts"], pattern["code"]
        assert np.array_equal(cp.asnumpy(out), words)
        assert max(pattern["turns"]) + 1 == pattern["wavefronts"]
        seen.add(pattern["wavefronts"])
    assert {1, 4, 8, 32} & seen and len(seen) >= 4


def test_no_class_of_a_figure_is_one_that_the_sites_theme_styles() -> None:
    """The theme's Bootstrap makes a flex box of `.row`, so a word with that class was alone on its line."""
    folder = Path(moving.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.*s"))
    classes = {*re.findall(r"\.(\w+)", " ".join(re.findall(r"^\.moving[^{]*", text, re.M)))}
    classes |= {name for found in re.findall(r'(?:class: |toggle\()"([\w ]+)"', text) for name in found.split()}
    themes: set[str] = set()
    for package in ("pydata_sphinx_theme", "sphinx_book_theme"):
        for sheet in Path(importlib.util.find_spec(package).origin).parent.rglob("*.css"):
            themes |= {*re.findall(r"\.([a-z][\w-]*)", sheet.read_text(encoding="utf-8"))}
    assert "row" in themes and {"moving", "query"} <= classes
    assert not classes & themes


def test_a_bank_delivers_one_word_in_a_wavefront() -> None:
    for pattern in embedded(show.moving_banks()._repr_html_())["patterns"]:
        delivered: dict[tuple[int, int], int] = {}
        each = len(pattern.get("turns", ())) // 32
        for i, turn in enumerate(pattern.get("turns", ())):
            word = pattern["words"][i // each] + i % each
            assert delivered.setdefault((turn, word % 32), word) == word


def test_a_figure_of_fewer_patterns_asks_only_what_can_be_chosen() -> None:
    """With strides 64, 65, 66, 68: 8, 4, 2, 1 wavefronts if four lanes share a row."""
    layouts = ("64 words", "padded: 65", "padded: 66", "padded: 68")
    data = embedded(show.moving_banks(("4 lanes a row",), ("float",), layouts)._repr_html_())
    assert data["choices"] == [["rows are", list(layouts)]]
    assert [pattern["wavefronts"] for pattern in data["patterns"]] == [8, 4, 2, 1]


def test_the_fragments_are_those_of_the_engine() -> None:
    """The figure has the layouts that a kernel recorded, which are the PTX manual's; P needs no shuffle."""
    data = embedded(show.moving_fragments(*places())._repr_html_())
    for lane in range(32):
        g, t = divmod(lane, 4)
        assert data["a"][lane] == [16 * (g + 8 * (i // 2 % 2)) + 2 * t + i % 2 + 8 * (i // 4) for i in range(8)]
        assert data["b"][lane] == [16 * (2 * t + i % 2 + 8 * (i // 2)) + g for i in range(4)]
    assert data["a"] == data["d"]
    assert "0 of 256" in repr(show.moving_fragments(*places()))
    a, b, d = places()
    assert "it holds 0 in the right register." in show.moving_fragments(a[:, ::-1], b, d).frame
    with pytest.raises(ValueError, match=r"b is \(32, 8\): expected 4 places"):
        show.moving_fragments(a, d, d)


def test_the_tiles_cost_what_the_kernel_does() -> None:
    """Registers as counted in the notebook; shared memory and requested bytes as counted by the X-ray."""
    data = embedded(show.moving_tiles(SHAPE)._repr_html_())
    speeds = plots.tile_speeds(SHAPE)
    assert len(data["tiles"]) == len(speeds) == 12
    for tile, numbers in zip(sorted(speeds, key=lambda t: (t.block_m, t.block_n)), data["tiles"], strict=True):
        assert numbers["block"] == [tile.block_m, tile.block_n]
        assert numbers["tflops"] == pytest.approx(speeds[tile], abs=0.06)
        assert f"{tile.shared_bytes(64) / 1024:.0f} of 227 KB" == numbers["costs"][1][1]
    assert data["tiles"][data["first"]]["block"] == [128, 64]
    assert [tiles.registers_by_hand(Tiles(128, n, 128, 8), 64) for n in (64, 128)] == [184, 280]
    tile = Tiles(128, 64, 128, 8)
    report = xray_stage("register_tiles", *check.make_inputs(256, 256, 64), sizes=tile.defines)
    counted = sum(figures.read + figures.written for figures in report.traffic.values())
    assert counted == tiles.requested_bytes(tile, (1, 1, 256, 64))
    assert show.NO_RECORD in str(show.moving_tiles((1, 1, 1, 1)))


@pytest.mark.parametrize("stages", [(), (2,), (2, 3), (1, 2, 3)])
def test_the_spans_are_those_of_the_record(stages: tuple[int, ...]) -> None:
    """Recorded and made-up rings are drawn alike. A row that a ring lacks is empty."""
    record = made_up_rings(*stages) if stages else rings()
    figure = show.moving_spans(record, first=6000)
    data = embedded(figure._repr_html_())
    assert [choice["name"] for choice in data["choices"]] == list(record)
    for choice in data["choices"]:
        spans = {
            name: [(begin, end, data["kinds"][kind][0]) for begin, end, kind in row]
            for name, row in zip(data["rows"], choice["rows"], strict=True)
        }
        assert {name: row for name, row in spans.items() if row} == record[choice["name"]]
        assert choice["last"] == max(end for row in spans.values() for _, end, _ in row)
    assert data["rows"] == list(max(record.values(), key=len)), "the order is that of the longest ring"
    of_first = next(iter(record))
    assert (f"{of_first}, at clock 6,000: K, stage 0: " in figure.frame) == (len(record) > 1)
    assert figure.frame.count("opacity='0.35'") == len(data["rows"]) - len(record[of_first])


def test_rows_of_spans_need_no_name() -> None:
    first = show.moving_spans({"a": [(0, 10, "waits"), (10, 30, "weights")]}, window=30, first=12)
    assert ">at clock 12: a: weights" in first.frame and first.data["choices"][0]["last"] == 30


def test_notebooks_hold_the_scripts_of_today() -> None:
    """Each output of a moving figure has the current style and script of helpers/draw/moving."""
    shown = 0
    for path in notebook_pages.paths():
        for cell in notebook_pages.read(path)["cells"]:
            for output in cell.get("outputs", ()):
                markup = "".join(output.get("data", {}).get("text/html", ""))
                if name := re.search(r'data-moving="(\w+)"', markup):
                    today = Moving(name[1], "", {}, "")._repr_html_()
                    parts = [
                        re.sub(r'<div class="moving".*?\n</div>\n', "", text, flags=re.S) for text in (markup, today)
                    ]
                    assert parts[0] == parts[1], f"{path.name}, cell {cell['id']}: run the notebook again"
                    shown += 1
    assert shown


def test_words_that_end_a_script_do_not_end_it() -> None:
    figure = Moving("softmax", "<p>x</p>", {"words": ["</script>", "é"]}, "x" * 60)
    assert embedded(figure._repr_html_()) == figure.data


def test_every_script_has_its_figure() -> None:
    scripts = {path.stem for path in moving.figure.FOLDER.glob("*.js")} - {"figure"}
    assert scripts == {make().name for make in FIGURES.values()}


# ---- in a browser, if there is one


@pytest.mark.parametrize("theme", browser.THEMES)
@pytest.mark.parametrize("width", browser.SIZES)
def test_every_control_moves_its_figure(chromium: Any, width: int, theme: str) -> None:
    dark = theme == "dark"
    style = f"color-scheme: {theme}; background: {'#111' if dark else '#fff'}; color: {'#eee' if dark else '#222'}"
    figures = "".join(FIGURES[name]()._repr_html_() for name in FIGURES)
    with browser.opened(chromium, width, theme) as page:
        page.set_content(f"<!doctype html><meta charset=utf-8><body style='{style}'>{figures}{figures}")
        shown = page.locator(".moving").all()
        assert len(shown) == 2 * len(FIGURES)
        for figure in shown[: len(FIGURES)]:
            browser.walk(page, figure)


def test_the_script_begins_where_the_first_frame_is(chromium: Any) -> None:
    """Python's picture and the script's first frame are the same, with the same words."""
    for name, make in FIGURES.items():
        figure = make()
        with browser.opened(chromium, 1280, "light") as page:
            page.set_content(f"<!doctype html><meta charset=utf-8><body>{figure.frame}{figure._repr_html_()}")
            page.evaluate("""() => { for (const image of document.querySelectorAll('body > img.part')) {
                const box = document.createElement('div');
                box.innerHTML = decodeURIComponent(image.getAttribute('src').replace(/^[^,]*,/, ''));
                image.replaceWith(box.firstChild);
            } }""")
            shapes = "all => all.map(n => [...n.attributes].filter(a => +a.value == a.value || a.name == 'fill')"
            shapes += ".map(a => a.name + ' ' + (+a.value == a.value ? Number((+a.value).toFixed(1)) : a.value)).sort()"
            shapes += ".join() + (n.tagName == 'text' ? n.textContent : ''))"
            for selector in ("rect", "circle", "text"):
                drawn = page.locator(f"body > svg {selector}").evaluate_all(shapes)
                moved = page.locator(f".moving svg {selector}").evaluate_all(shapes)
                assert drawn == moved, f"{name}: {selector}"
            words = "all => all.map(n => n.innerText.replace(/\\s+/g, ' ').trim())"
            still = page.locator("body > p, body > table").evaluate_all(words)
            assert still == page.locator(".moving > p, .moving > table").evaluate_all(words), name


@pytest.mark.parametrize("theme", browser.THEMES)
@pytest.mark.parametrize("width", browser.SIZES)
def test_the_slider_of_rings_changes_the_rows_and_keeps_the_clock(chromium: Any, width: int, theme: str) -> None:
    markup = "".join(show.moving_spans(made_up_rings(*stages), first=6000)._repr_html_() for stages in ((2,), (2, 3)))
    with browser.opened(chromium, width, theme) as page:
        page.set_content(f"<!doctype html><meta charset=utf-8><body>{markup}")
        one, two = page.locator(".moving").all()
        assert one.locator("input[type=range]").count() == 1, "with one ring there is none to choose"
        ring, clock = two.locator("input[type=range]").all()
        words, third = two.locator("p.part"), two.locator("text.name").nth(2)
        assert third.text_content() == "K, stage 2"
        lasts = [choice["last"] for choice in embedded(show.moving_spans(made_up_rings(2, 3))._repr_html_())["choices"]]
        assert lasts[0] > lasts[1]

        def chosen(key: str) -> tuple[str | None, str]:
            ring.focus()
            page.keyboard.press(key)
            return ring.get_attribute("aria-valuetext"), words.inner_text().partition(": ")[0]

        assert third.get_attribute("opacity") == "0.35"
        assert chosen("ArrowRight") == ("STAGES = 3", "STAGES = 3, at clock 6,000")
        assert third.get_attribute("opacity") == "1"
        assert chosen("Home") == ("STAGES = 2", "STAGES = 2, at clock 6,000")
        clock.focus()
        page.keyboard.press("End")
        last = lasts[1] - 1 - (lasts[1] - 1) % 100  # that of the shorter ring, in steps of 100 clocks
        assert chosen("End") == ("STAGES = 3", f"STAGES = 3, at clock {last:,}")
        two.get_by_role("button", name="back").first.click()
        assert words.inner_text().startswith("STAGES = 2, ")
