"""A browser for the tests: Chromium through Playwright, if both are installed. The course requires neither.

pip install playwright && playwright install chromium        # or the system's chromium, or COURSE_BROWSER
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

SIZES = (1280, 390)
THEMES = ("light", "dark")

# The contrast of an element's text with its background, as WCAG 2 defines it.
CONTRAST = """node => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  let behind = node;
  while (behind && (numbers(getComputedStyle(behind).backgroundColor)[3] ?? 1) < 1) behind = behind.parentElement;
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const bright = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const page = behind ? numbers(getComputedStyle(behind).backgroundColor) : [255, 255, 255];
  const [low, high] = [bright(page), bright(numbers(getComputedStyle(node).color))].sort((one, other) => one - other);
  return (high + 0.05) / (low + 0.05);
}"""


def chromium() -> Any:
    """Return a started browser, and a function that stops it; None if there is no browser."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return None
    playwright = sync_playwright().start()
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    own = os.environ.get("COURSE_BROWSER") or next(filter(None, map(shutil.which, names)), None)
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # root cannot use the sandbox
    for path in (None, own):
        with contextlib.suppress(Error):
            return playwright.chromium.launch(executable_path=path, args=sandbox), playwright.stop
    playwright.stop()
    return None


@contextlib.contextmanager
def opened(browser: Any, width: int, theme: str) -> Iterator[Any]:
    """Open a page with this width and theme. Errors of its scripts, and requests to other hosts, fail the test."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=theme)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda r: wrong.append(r.url) if not r.url.startswith(("file:", "data:", "about:", "blob:")) else None,
    )
    yield page
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    page.close()
    assert not wrong
    assert overflow <= 0, f"the page is {overflow} pixels wider than {width}"


def walk(page: Any, figure: Any) -> None:
    """Use every control of a moving figure, by keyboard and by mouse; each must change the figure."""
    assert figure.get_attribute("data-runs") == ""
    assert not figure.locator("img.part").count(), "the first frame is still an image"
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]

    def seen() -> str:
        """Return the figure's content, without its controls."""
        return "".join(figure.locator(".part").evaluate_all("all => all.map((node) => node.outerHTML)"))

    changed = 0
    for slider in figure.locator("input[type=range]").all():
        before = seen()
        slider.focus()
        assert slider.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
        middle = int(slider.get_attribute("max")) // 2
        for key in ("End", "Home", *["ArrowRight"] * min(middle, 6)):
            page.keyboard.press(key)
        assert slider.input_value() == str(min(middle, 6))
        changed += seen() != before
    for select in figure.locator("select").all():
        before = seen()
        select.select_option(index=2)
        changed += seen() != before
    for button in figure.locator("button").all():
        before = seen()
        button.focus()
        page.keyboard.press("Enter")
        size = button.bounding_box()
        assert size["height"] >= 30 and size["width"] >= 24, "too small for a finger"
        changed += seen() != before
    if figure.get_attribute("data-moving") == "fragments":
        before = seen()
        place = figure.locator("svg").bounding_box()
        page.mouse.move(place["x"] + place["width"] * 0.3, place["y"] + place["height"] * 0.2)
        changed += seen() != before
    assert changed >= 3
    words = figure.locator("p.part, table.part").first
    assert words.evaluate(CONTRAST) >= 4.5
