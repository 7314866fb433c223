"""Options, settings and markers of pytest for CUDA on a CPU. Everything else is imported when one of them is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

MARKERS = (
    "cuda_sanitize(allow=(), local_variables=False): look at each launch of this test, without --cuda-sanitize "
    "too; allow: kinds of findings that are none here",
    "no_cuda_sanitize: launch this test's kernels plainly, in spite of --cuda-sanitize",
    "gpu_only: leave this test out where the CPU engine is in CuPy's place",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the settings for pytest.ini and pyproject.toml."""
    group = parser.getgroup("rawkernel", "CuPy's kernels without a GPU")
    group.addoption("--cuda-on-cpu", action="store_true", help="`import cupy` is the CPU engine where no GPU answers")
    group.addoption(
        "--cuda-sanitize",
        action="store_true",
        help="on the CPU engine, also where there is a GPU: report races, accesses out of bounds or of unwritten "
        "memory, and barriers that not all threads reach, as failures with the kernel's line",
    )
    parser.addini("cuda_on_cpu", "as --cuda-on-cpu", type="bool", default=False)
    parser.addini("cuda_sanitize", "as --cuda-sanitize", type="bool", default=False)
    parser.addini(
        "cuda_sanitize_allow", "kinds of findings that are none, one a line", type="linelist", default=["never written"]
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[Any]:
    """Put the engine in CuPy's place before any conftest.py is read."""
    given = early_config.known_args_namespace
    sanitize = given.cuda_sanitize or early_config.getini("cuda_sanitize")
    if sanitize or given.cuda_on_cpu or early_config.getini("cuda_on_cpu"):
        from rawkernel import pytest_plugin

        pytest_plugin.begin(early_config, sanitize=sanitize)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
