"""Figures that move: what they embed is what NumPy and the engine say, and they need nothing but their own HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest

from helpers.attention import check, reference
from helpers.draw import moving
from helpers.draw.moving.figure import Moving
from helpers.lesson import show

MOST_BYTES = 60_000
FIGURES: dict[str, Callable[[], Moving]] = {"softmax": show.moving_softmax}
# What JupyterLab leaves of an output in a notebook that it does not trust (a part of its list).
KEPT = {"div", "p", "span", "table", "tr", "th", "td", "img", "b", "code"}


@pytest.fixture(scope="module", params=FIGURES)
def figure(request: pytest.FixtureRequest) -> Moving:
    return FIGURES[request.param]()


class Tags(HTMLParser):
    """The tags of a piece of HTML, and where its pictures come from."""

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
    """The numbers of a figure, as its script reads them."""
    [numbers] = re.findall(r'<script type="application/json">(.*?)</script>', markup, re.S)
    return json.loads(numbers)


def test_the_markup_is_small_and_complete(figure: Moving) -> None:
    markup = figure._repr_html_()
    assert len(markup.encode()) < MOST_BYTES
    assert embedded(markup) == json.loads(json.dumps(figure.data))
    assert markup.count("<script") == 2 and f'begin("{figure.name}"' in markup
    assert set(re.findall(r"\w+://[\w.]+", unquote(markup))) <= {
        "http://www.w3.org"
    }  # SVG's name, which nobody fetches
    assert "$" not in figure.frame  # JupyterLab would read a formula
    assert len(repr(figure)) > 60


def test_without_its_script_there_is_the_first_frame(figure: Moving) -> None:
    frame = Tags(figure.frame)
    assert frame.tags <= KEPT
    for picture in frame.pictures:
        assert len(picture["alt"]) > 20
        address, _, svg = picture["src"].partition(",")
        assert address == "data:image/svg+xml"
        assert ElementTree.fromstring(unquote(svg)).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_figure_twice_is_the_same_text(figure: Moving) -> None:
    assert FIGURES[figure.name]()._repr_html_() == figure._repr_html_()


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


def test_words_that_end_a_script_do_not_end_it() -> None:
    figure = Moving("softmax", "<p>x</p>", {"words": ["</script>", "é"]}, "x" * 60)
    assert embedded(figure._repr_html_()) == figure.data


def test_every_script_has_its_figure() -> None:
    scripts = {path.stem for path in moving.figure.FOLDER.glob("*.js")} - {"figure"}
    assert scripts == set(FIGURES)
