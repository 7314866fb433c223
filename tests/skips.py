"""The reasons why a test may be skipped in CI, which has no GPU: no other reason passes there.

A package that pip can install is not a reason: `.ci/run` installs it. Outside CI any reason is allowed. Every run ends
with a list of skips and reasons.
"""

from __future__ import annotations

import re
from typing import Any

ALLOWED = {
    "needs a GPU": "|".join(
        [
            r"needs a GPU( that CuPy and PyTorch both see| of compute capability 9\.0)?",
            r"needs a GPU, CuPy and PyTorch: there, each file runs alone",
            r"needs a GPU and CuPy: there, each file runs alone, in a folder of its own",
            r"no GPU that torch can use",
            r"two GPUs are needed",
            r"the GPU's own clock",
            r"plain attention is PyTorch's, on a GPU",
            r"there is no GPU to compare with",
            r"the CPU engine has no graphs",
            r"the CPU engine launches on no stream",
        ]
    ),
    "needs a browser, which pip alone cannot install": (
        r"no browser: see tests/browser\.py|set COURSE_BROWSER to Chromium and COURSE_PLAYWRIGHT to the folder of .*"
    ),
    "needs nvcc: the list has its headers alone": r"nvcc is not installed",
    "needs a Python that is too old for the course": r"this machine has no python3\.[6-9]",
    "needs a user who is not root": r"root may write everywhere",
    "needs other random numbers, or another BLAS": "NumPy's random numbers are others here",
    "nothing to compare: SDPA's window counts holes": r"a window counts tokens, as FlashAttention's integration has .*",
}


def reason(report: Any) -> str:
    """Read the reason from the report of a skipped test, or of a file that was skipped as a whole."""
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def kind(text: str) -> str | None:
    """Return which entry of ALLOWED a reason matches; None if it is not listed."""
    return next((words for words, pattern in ALLOWED.items() if re.fullmatch(pattern, text)), None)
