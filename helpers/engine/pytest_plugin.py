"""The code behind pytest's options --cuda-on-cpu and --cuda-sanitize, which plugin/pytest_rawkernel.py declares."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from . import compiler, first_build, nvrtc, settings
from .xray import sanitize

THEIRS = ("cupy", "cupyx", "cupy_backends")


def gpu_answers() -> bool:
    """Return True if CuPy is installed and the driver has a GPU. CuPy is not imported."""
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def take_cupys_place() -> None:
    """Make `import cupy` return the engine from now on, even if CuPy has been imported."""
    engine = sys.modules[settings.PACKAGE]
    if sys.modules.get("cupy") is not engine:
        nvrtc.version()  # query the real CuPy first
        for name in [name for name in sys.modules if name.partition(".")[0] in THEIRS]:
            del sys.modules[name]
        sys.modules["cupy"] = engine


def begin(config: pytest.Config, *, sanitize: bool) -> None:
    """Choose what runs the kernels, and register the hooks that follow from it.

    Raises:
        pytest.UsageError: there is no compiler, or cuda_sanitize_allow names a finding that does not exist.
    """
    if not sanitize and gpu_answers():
        return
    try:
        compiler.compiler()
    except compiler.NoCompilerError as error:
        raise pytest.UsageError(str(error)) from None
    take_cupys_place()
    config.pluginmanager.register(OnCpu(config, sanitize), "rawkernel-on-cpu")


class OnCpu:
    """Hooks for tests whose kernels the engine runs."""

    def __init__(self, config: pytest.Config, looks: bool) -> None:
        self.looks = looks
        self.allow = frozenset(config.getini("cuda_sanitize_allow"))
        self.looked = sanitize.Looked()
        self._session = contextlib.ExitStack()

    def pytest_report_header(self) -> str:
        """Report what runs the kernels, and where builds are kept."""
        try:
            version = importlib.metadata.version(settings.PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        how = "each launch is looked at" if self.looks else "plain launches"
        return (
            f"rawkernel: {version}, CUDA on the CPU by {compiler.compiler()[1]}; {how}; "
            f"builds in {compiler.cache_dir()} ({settings.variable('CACHE')})"
        )

    def pytest_sessionstart(self) -> None:
        """Check launches outside of tests too: in modules, and in fixtures of the session."""
        try:
            self._session.enter_context(self._context(self.looks))
        except ValueError as error:
            raise pytest.UsageError(f"cuda_sanitize_allow: {error}") from None

    def pytest_collection(self) -> None:
        """Start building the engine, if it is not built: the first kernel compiles meanwhile."""
        first_build.begin()

    def pytest_sessionfinish(self) -> None:
        """Stop checking launches."""
        self._session.close()

    def _context(self, looks: bool, **how: Any) -> contextlib.AbstractContextManager[Any]:
        if not looks:
            return sanitize.no_launch()
        return sanitize.every_launch(**({"allow": self.allow, "looked": self.looked} | how))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip tests that need a GPU."""
        if item.get_closest_marker("gpu_only"):
            pytest.skip("needs a GPU: the CPU engine is in CuPy's place")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Check the launches of a test, including its fixtures, if the options and its markers say so."""
        mark = item.get_closest_marker("cuda_sanitize")
        looks = not item.get_closest_marker("no_cuda_sanitize") and (self.looks or mark is not None)
        how = dict(mark.kwargs) if mark else {}
        if "allow" in how:
            allowed = (how["allow"],) if isinstance(how["allow"], str) else how["allow"]
            how["allow"] = self.allow | set(allowed)
        with self._context(looks, **how):
            return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Report how much was checked."""
        if self.looked.launches:
            count = self.looked
            terminalreporter.write_line(
                f"rawkernel: looked at {count.launches} launches of {len(count.kernels)} kernels, "
                f"{count.findings} finding{'' if count.findings == 1 else 's'}"
            )
