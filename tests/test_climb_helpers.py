"""Notebooks show a climb by diffs, shared memory per 1000 multiply-adds, SASS, tiles and lanes."""

from __future__ import annotations

import pytest

from helpers.attention.ladder.steps import CLIMBS, by_number
from helpers.bench.sass import compiled
from helpers.draw import sources
from helpers.lesson.shortcuts import step_diff

SHAPE = (4, 16, 4096, 64)


def test_a_step_is_shown_against_the_one_before() -> None:
    whole, folded = step_diff("register_tiles", 8), step_diff("register_tiles", 8, folded=True)
    assert "04_07_eight_by_eight.cu → steps/04_08_padded_rows.cu" in str(whole)
    assert whole.text == folded.text
    summary, inside = folded.markup.removeprefix("<details><summary>").split("</summary>")
    assert summary.startswith("Step 8, padded rows: ") and f"<p>{summary}</p>{inside}" == f"{whole.markup}</details>"
    last = step_diff("register_tiles", max(by_number("register_tiles")), folded=True)
    assert last.markup.startswith("<details><summary>Step 15, tiles copied ahead</summary><p><b>")
    with pytest.raises(ValueError, match="no step 2 to register_tiles; there are: 1, 4, 7"):
        step_diff("register_tiles", 2)


def test_a_step_is_shown_with_what_it_says_of_itself() -> None:
    markup = step_diff("hopper", 11).markup
    idea, since = (
        markup.index("<p>Step 11, O through shared memory by stmatrix: rows"),
        markup.index("<p>Since step 10: "),
    )
    assert idea < since < markup.index("10_10_table_of_tiles.cu → ")
    assert "128 bytes side by side.</p>" in markup, "lines of the comment are joined"
    assert "Launch" not in markup[: markup.index(" → ")]
    last = max(by_number("register_tiles"))
    assert step_diff("register_tiles", last).markup.startswith("<p><b>"), "the stage's comment is about all steps"


@pytest.mark.parametrize("name", CLIMBS)
def test_each_step_says_what_it_is(name: str) -> None:
    before = 0
    for number, step in list(by_number(name).items())[:-1]:
        idea, *since = sources.about(step.file)
        assert idea.startswith(f"Step {number}, "), idea
        assert all(words.startswith(f"Since step {before}: ") for words in since), since
        before = number


def test_the_first_step_of_a_climb_that_begins_anew_is_shown_whole() -> None:
    whole = step_diff("flash_wmma", 1)
    assert whole.markup.startswith("<p>Step 1, a row per lane: ")
    assert whole.text.startswith("steps/06_01_row_per_lane.cu: ") and whole.text.endswith(" lines")
    assert "template &lt;typename T&gt;" in whole.markup and "// 06, step 1" not in whole.markup


def test_sass_is_read_by_kernel_and_options() -> None:
    assert compiled("exp2f")["instructions"] == ["MUFU.EX2 R5, R0"]
    assert len(compiled("exp2f", "-ftz=false")["instructions"]) == 4
    with pytest.raises(KeyError, match="exp2f"):
        compiled("exp3f")
