"""Text tables as HTML tables: every cell in its column."""

from __future__ import annotations

import re

from helpers.lesson import show

RIGHT = """\
                            tensor pipe %   shared memory %   a very long head
1  by wgmma and TMA                  42.5              40.9        104,542,000
2  a producer warpgroup                59                          107,974,000"""
LEFT = """\
TFLOP/s                   d = 128                  d = 128, causal
  1  by wgmma and TMA     383                      343
  2  a producer warpgroup 508  1.32× (1.20 to 2)   444  1.30×"""


def rows(text: str) -> list[list[str]]:
    found = re.findall(r"<tr>(.*?)</tr>", show.table(text).markup)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found]


def test_columns_to_the_right() -> None:
    assert rows(RIGHT) == [
        ["", "tensor pipe %", "shared memory %", "a very long head"],
        ["1  by wgmma and TMA", "42.5", "40.9", "104,542,000"],
        ["2  a producer warpgroup", "59", "", "107,974,000"],
    ]


def test_heads_that_are_wider_than_their_columns() -> None:
    text = "      flash_mma  backward_mma SDPA flash backward\nms        0.343          0.98                 1.2"
    assert rows(text) == [["", "flash_mma", "backward_mma", "SDPA flash backward"], ["ms", "0.343", "0.98", "1.2"]]


def test_a_wide_head_does_not_take_the_place_of_another() -> None:
    head = "        registers    a head wider than its column    spills"
    cells, _ = rows(f"{head}\n07            255                              3         0")
    assert cells == ["", "registers", "a head wider than its column", "spills"]


def test_heads_above_several_columns() -> None:
    head, first, second = rows(LEFT.replace("warpgroup 508", "group     508"))
    assert head == ["TFLOP/s", "d = 128", "", "d = 128, causal", ""]
    assert first == ["1  by wgmma and TMA", "383", "", "343", ""]
    assert second == ["2  a producer group", "508", "1.32× (1.20 to 2)", "444", "1.30×"]


def test_sentences_and_further_tables() -> None:
    shown = show.table(f"measured on <one> GPU\n{RIGHT}\n\n{RIGHT}\n\nthe end")
    assert shown.markup.count("<table>") == 2 and "<p>measured on &lt;one&gt; GPU</p>" in shown.markup
    assert shown.markup.endswith("<p>the end</p></div>") and repr(shown).startswith("measured on")
    assert len(shown._repr_html_().split("\n")[0]) <= 90


def test_columns_that_cannot_be_told_stay_as_they_are() -> None:
    text = "a      b      c\n1      2      3\none line that runs  through all of them"
    assert "<table>" not in show.table(text).markup and "1      2      3" in show.table(text).markup
