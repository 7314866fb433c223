"""Edits of a kernel's text: exactly the pattern, whatever the comments say, or an error that helps."""

from __future__ import annotations

import pytest

from helpers.engine.cuda_source.edit import edit

CODE = """\
// a barrier: __syncthreads();
for (int i = 0; i < n; ++i) {
  __syncthreads();  // hazard: read too early
  // the sum
  sum += tile[i];
  __syncthreads();  /* hazard:
                       overwritten */
}
asm volatile("cp.async // %0;");
"""


def test_changes_follow_one_another() -> None:
    assert edit("a b", ("a", "b"), ("b b", "c")) == "c"
    assert edit("a b a", ("a", "x"), count=2) == "x b x"
    assert edit("a b a", ("a", "x"), count=2, only=1) == "a b x"
    assert edit("aaaa", ("aa", "b"), count=2) == "bb"
    assert edit("unchanged") == "unchanged"


def test_comments_are_neither_found_nor_in_the_way() -> None:
    """The barrier in the first line does not count; a pattern ignores comments between its lines."""
    assert edit(CODE, ("__syncthreads();", "wait();"), count=2).splitlines()[:3] == [
        *CODE.splitlines()[:2],
        "  wait();  // hazard: read too early",
    ]
    got = edit(CODE, ("  __syncthreads();\n  sum", "  sum"))
    assert got.splitlines()[2] == "  sum += tile[i];" and "too early" not in got
    assert edit(CODE, ("sum += tile[i];\n  __syncthreads();\n}", "}")).count("overwritten") == 0
    assert edit(CODE, ('asm volatile("cp.async', 'asm("cp.async')).endswith('asm("cp.async // %0;");\n')


@pytest.mark.parametrize("old", ["sum;  // the sum", "/* hazard", "", "\n "])
def test_a_pattern_is_code(old: str) -> None:
    with pytest.raises(ValueError, match="a pattern is code, without a comment"):
        edit(CODE, (old, ""))


def test_another_text_is_refused_with_its_nearest_line() -> None:
    with pytest.raises(ValueError, match=r"'sum \+= tile\[j\];' is not there; the nearest line: 'sum \+= tile\[i\];'"):
        edit(CODE, ("sum += tile[j];", ""))
    with pytest.raises(ValueError, match="is there 2 times, and not once"):
        edit(CODE, ("__syncthreads();", ""))
    with pytest.raises(ValueError, match="is there 2 times, and not 3 times"):
        edit(CODE, ("__syncthreads();", ""), count=3)
    # For a pattern of several lines, the message names the one that has changed.
    with pytest.raises(ValueError, match=r"nearest line: 'sum \+= tile\[i\];'"):
        edit(CODE, ("  __syncthreads();\n  sum += tile[2 * i];", ""))
