"""The page of usual mistakes: bugs that the tests plant in the kernels, and how each of them shows.

    python3 -m helpers.site.mistakes        # prints the page; `build` runs it in a separate process

mistakes.md has the text, with a marker for each mistake: `<!-- check of STAGE: BUG -->`, or `X-ray` to show the X-ray's
message, which names the line. Each build of the site plants that bug as the tests do, and replaces the marker by the
edit and the message of the check or the X-ray. Everything runs on the CPU engine: on a GPU some of these kernels would
end the context, and others are wrong only now and then.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from helpers.site import listing
from helpers.site.links import ROOT, run_on_cpu

TEXT = Path(__file__).with_suffix(".md")
MOST_LINES = 6  # shown of a message
_MARK = re.compile(r"^<!-- (X-ray|check) of (\w+): (.+) -->$", re.M)


class Mistake(NamedTuple):
    """A planted bug that teaches something: what finds it, the stage whose kernel has it, its name in the tests."""

    finder: str  # "X-ray" or "check"
    stage: str
    bug: str


def listed() -> list[Mistake]:
    """List the page's mistakes in order."""
    return [Mistake(*mark) for mark in _MARK.findall(TEXT.read_text(encoding="utf-8"))]


def page() -> str:
    """Write the page in Markdown.

    Raises:
        LookupError: the tests no longer plant such a bug.
        AssertionError: a kernel has changed so that a bug no longer applies, or no longer fails.
    """
    words = TEXT.read_text(encoding="utf-8").replace("{count}", str(len(listed())))
    return _MARK.sub(lambda mark: _entry(Mistake(*mark.groups())), words)


def _entry(mistake: Mistake) -> str:
    from helpers.attention.kernel import source

    file, bug = file_of(mistake), planted(mistake)
    right = (ROOT / "kernels" / file).read_text(encoding="utf-8")
    wrong = bug.plant(source(kernel_of(mistake)))
    diff = list(difflib.unified_diff(right.splitlines(), bug.plant(right).splitlines(), lineterm="", n=1))[2:]
    diff = [line for line in diff if not re.match(r"@@|\+\s*//", line)]  # only a comment may be left of a line
    crashes = bug.error.__name__ == "LaunchError"
    tool = "run" if crashes and mistake.finder == "check" else mistake.finder
    lines = [f"*In [{file}](/kernels/{file}.md):*", "", "````{code-block} diff", "", *diff, "````", ""]
    lines += [f"The {tool} says:", "", "````{code-block} text", ":class: message", ""]
    lines += [*message(mistake, bug, wrong), "````"]
    if bug.cpu_only and mistake.finder == "check":
        lines += ["", "On a GPU this may pass unnoticed, or end the program."]
    return "\n".join(lines)


# Kernels outside the ladder, below the names in their markers, and the modules that plant bugs in them.
OTHERS = {"split_kv": "14_split_kv.cu", "merge": "17_merge.cu"}
TESTS = {
    **{name: "test_tensor_cores" for name in ("flash_wmma", "flash_mma")},
    **{"backward": "test_backward", "backward_mma": "test_backward_mma", "hopper": "test_hopper"},
    **{"split_kv": "test_decoding", "merge": "test_ring", "fp8": "test_fp8_bugs"},
}


def kernel_of(mistake: Mistake) -> str:
    """Return the file, below kernels/, of the kernel that is launched with the bug."""
    from helpers.attention.ladder import LADDER

    return OTHERS.get(mistake.stage) or LADDER[mistake.stage].file


def file_of(mistake: Mistake) -> str:
    """Return the file, below kernels/, that the bug is planted in: the kernel's own file, or a header.

    Raises:
        AssertionError: the kernel has changed, and the bug applies to none of its files.
    """
    bug = planted(mistake)
    for file in listing.with_includes(kernel_of(mistake)):
        with contextlib.suppress(AssertionError):
            bug.plant(listing.text_of(file))
            return file
    raise AssertionError(f"{mistake.bug!r} fits neither {kernel_of(mistake)} nor what it includes")


def planted(mistake: Mistake) -> Any:
    """Return the bug that the tests of the mistake's stage plant under the name `mistake.bug`."""
    tests = _tests(mistake.stage)
    bugs = tests.BUGS if hasattr(tests, "BUGS") else (*tests.WRONG, *tests.RACES, *tests.RACES_IN_SHARED_MEMORY)
    bugs = bugs.get(mistake.stage, ()) if isinstance(bugs, dict) else bugs
    matches = [bug for bug in bugs if bug.name == mistake.bug]
    if len(matches) != 1:
        raise LookupError(f"the tests plant {len(matches)} bugs named {mistake.bug!r} in {mistake.stage}")
    return matches[0]


def message(mistake: Mistake, bug: Any, text: str) -> list[str]:
    """Return the first lines of what the X-ray, or the tests' check, reports about a kernel with this text."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # hides checks that pass before the one that fails
            findings = _xray_findings(mistake.stage, text) if mistake.finder == "X-ray" else _check(mistake, bug, text)
    except Exception as error:  # anything that the check or the engine raises
        words = str(error) or type(error).__name__
    else:
        assert findings, f"{mistake.stage}: nothing is wrong with {mistake.bug!r}"
        words = str(findings[0])
    return [line.rstrip() for line in words.splitlines() if line.strip()][:MOST_LINES]


def _check(mistake: Mistake, bug: Any, text: str) -> list[Any]:
    from helpers.attention.ladder import LADDER

    tests = _tests(mistake.stage)
    if mistake.stage == "split_kv":
        tests.run(tests.CASES_OF_BUGS[bug.inputs], text)
        return []
    if mistake.stage == "merge":
        from helpers.attention import ring

        right, ring.MERGE = ring.MERGE, text
        try:
            tests.merged("all" if bug.inputs == "unit-normal" else bug.inputs)
        finally:
            ring.MERGE = right
        return []
    if mistake.stage == "backward_mma":
        given = tests.inputs((1, 2, 200, 64), 140, 1, "bfloat16", grow=4.0)
        tests.check(bug.name, tests.REGISTERS, given, code=text, window=(-1, 0))
        return []
    stage = LADDER[mistake.stage]
    if tests.__name__ == "test_tensor_cores":
        tests.check_with(mistake.stage, text)
    else:
        tests.run_check(stage, text, *([bug.inputs] if tests.__name__ == "test_planted_bugs" else []))
    return []


def _xray_findings(stage: str, text: str) -> list[Any]:
    """X-ray one small launch: two blocks of rows, several tiles of keys."""
    import numpy as np

    from helpers.attention.check import make_inputs
    from helpers.attention.ladder import LADDER
    from helpers.lesson.shortcuts import xray_gradients, xray_stage

    tests = _tests(stage)
    if stage == "split_kv":
        return tests.findings(tests.x_rayed(tests.CASES_OF_BUGS["in X-ray"], text)[0])
    if stage == "backward_mma":
        given = tests.inputs((1, 1, 200, 64), 140, 1, "bfloat16")
        reports = xray_gradients(stage, *(a[0] for a in given), code=text, sizes=tests.REGISTERS)
        return [finding for report in reports.values() for finding in report.findings]
    half = "float32" not in LADDER[stage].dtypes
    inputs = make_inputs(70, 260, 32)
    sizes = {"BLOCK_N": 48} if stage == "hopper" else None  # more tiles of keys than stages
    return xray_stage(stage, *(a.astype(np.float16) if half else a for a in inputs), code=text, sizes=sizes).findings


def _tests(stage: str) -> Any:
    """Return the test module that plants bugs in a stage."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(TESTS.get(stage, "test_planted_bugs"))


def page_on_cpu() -> str:
    """Write the page with `run_on_cpu`."""
    return run_on_cpu("mistakes", "the page of usual mistakes")


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(page())
