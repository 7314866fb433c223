"""Fixtures and hooks for all tests: tables at the end of a run, the engine on a machine with a GPU, hypothesis."""
# ruff: noqa: E402 (NumPy reads its settings when it is imported)

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers.cli.commands import CELL_SECONDS, ONE_THREAD

for _name, _count in ONE_THREAD.items():
    os.environ.setdefault(_name, _count)

# Exercises solved by tests are not the reader's progress; the notebooks' kernels inherit this.
_progress = tempfile.TemporaryDirectory(prefix="course-progress-")  # removed when the tests end
os.environ["COURSE_PROGRESS"] = str(Path(_progress.name) / "progress.json")

import browser
import hypothesis
import pytest
import skips
import two_speeds
import unchanged

from helpers import device, engine
from helpers.attention import forget, kernel
from helpers.engine import nvrtc

# The same examples in every run, so that a failing test always fails. No deadline, because a machine may be busy.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("course")

# A shell starts background jobs with Ctrl-C ignored, and children inherit this: tests of interrupts would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave repetition out: see tests/two_speeds.py")
    left_out = "leave out what has passed as it is, see tests/unchanged.py; --fast does so too, but in CI"
    parser.addoption("--changed-only", action="store_true", help=left_out)
    parser.addoption("--unchanged-too", action="store_true", help="leave none of these out")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", two_speeds.MARK)
    config.pluginmanager.register(_ForNotebooksToo())
    if hasattr(config, "workerinput"):
        config.stash[_unchanged] = [Path(path) for path in config.workerinput["unchanged"]]
    elif unchanged.asked_for(config):
        config.stash[_unchanged] = unchanged.unchanged(whole=not config.getoption("--fast"))
    else:
        config.stash[_unchanged] = []


# ---- notebooks and test files that have passed, see unchanged.py

FOLDER = Path(__file__).resolve().parent
_unchanged = pytest.StashKey[list[Path]]()
_failed: set[str] = set()  # files of tests and notebooks in this run
_passed: set[str] = set()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist is about to start."""
    node.workerinput["unchanged"] = [str(path) for path in node.config.stash[_unchanged]]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    (_failed if report.failed else _passed).add(unchanged.file_of(report.nodeid))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(item, "output_timeout"):  # a notebook cell: the time limit of its output is 5 s otherwise
            item.output_timeout = CELL_SECONDS
    exhaustive, no_run_needs = two_speeds.repetitions(items)
    _exhaustive.update(exhaustive)
    if not any("::" in arg for arg in config.args):
        items[:] = [item for item in items if item not in no_run_needs]
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=[item for item in items if item in _exhaustive])
        items[:] = [item for item in items if item not in _exhaustive]


# ---- what the tests launch, and why some are skipped

_launched: set[str] = set()  # kernel files, see `two_speeds.recorded`: of this process and of ended workers
_exhaustive: set[pytest.Item] = set()  # of the collected tests
_running: list[pytest.Item] = []  # the test that runs, if any
kernel.Kernel.bind = two_speeds.recorded(kernel.Kernel.bind, _launched, lambda: _exhaustive.isdisjoint(_running))
_never_launched = pytest.StashKey[list[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended."""
    _launched.update(getattr(node, "workeroutput", {}).get("launched", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["launched"] = sorted(_launched)
        return
    ended = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    stopped = session.shouldstop or session.shouldfail or two_speeds.chosen(config)
    if ended and not stopped:
        named = {Path(arg).resolve() for arg in config.args}
        passed = {path for path in map(FOLDER.parent.joinpath, _passed - _failed) if {path, path.parent} & named}
        unchanged.keep(passed, whole=not config.getoption("--fast"))
    whole = FOLDER in [Path(arg).resolve() for arg in config.args]
    # On a GPU a planned call is launched by addresses, which these hooks do not see.
    if whole and not two_speeds.chosen(config) and not device.ON_GPU and session.exitstatus == pytest.ExitCode.OK:
        config.stash[_never_launched] = two_speeds.never_launched(_launched, steps=not config.getoption("--fast"))
        if config.stash[_never_launched]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _in_ci(report: Any) -> None:
    """In CI, a skip with an unlisted reason is a failure."""
    if os.environ.get("CI") and report.skipped and isinstance(report.longrepr, tuple):
        reason = skips.reason(report)
        if skips.kind(reason) is None:
            report.outcome = "failed"
            report.longrepr = f"skipped: {reason}\nCI skips nothing for a reason that tests/skips.py does not list."


LONG_RUNS = ("09_drop_in.ipynb",)  # a model is trained there, long enough for -O3


class _ForNotebooksToo:
    """Hooks with effects outside of tests/: as functions of this file they would only apply to tests in its folder."""

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        if collection_path not in config.stash[_unchanged]:
            return None
        named = collection_path in [Path(arg.partition("::")[0]).resolve() for arg in config.args]
        return None if named else True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _running.append(item)
        yield
        _running.remove(item)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """A notebook's process starts with its first cell, and inherits how kernels are compiled."""
        with pytest.MonkeyPatch.context() as patched:
            if item.path.name in LONG_RUNS:
                patched.setenv("COURSE_CPU_OPTIMISATION", "3")
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        outcome = yield
        _in_ci(outcome.get_result())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self) -> Iterator[None]:
        outcome = yield
        _in_ci(outcome.get_result())


def pytest_collection_finish() -> None:
    """Modules and collected tests live until the end, so Python's collector need not scan them again and again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"kernels run on: {device.describe()}"


@pytest.fixture
def record_row(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """record_row(table, column=value, ...): a row of a table that is printed after the tests.

    It travels with the test's report, so that it is printed whatever is captured and whichever worker ran the test.
    """
    return lambda table, **columns: record_property("row", [table, columns])


def _rows(terminalreporter: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name == "row" and report.when == "call":
                    yield value[0], value[1]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = Counter(
        skips.kind(skips.reason(report)) or skips.reason(report)
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if counts:
        terminalreporter.section("skipped, by reason")
        for reason, count in counts.most_common():
            terminalreporter.write_line(f"{count:6}  {reason}")
    if left_out := terminalreporter.config.stash[_unchanged]:
        line = f"{len(left_out)} notebooks and files of tests have passed as they are, here or on main;"
        terminalreporter.write_line(f"{line} not run again (course.py test -- --unchanged-too)")
    for file in terminalreporter.config.stash.get(_never_launched, []):
        terminalreporter.write_line(
            f"FAILED: no test has launched kernels/{file} (a stage: no test of the fast run)", red=True
        )
    tables: dict[str, list[dict[str, Any]]] = {}
    for title, row in _rows(terminalreporter):
        tables.setdefault(title, []).append(row)
    for title, rows in tables.items():
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines = [columns, *([str(row.get(name, "")) for name in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        terminalreporter.section(title)
        for line in lines:
            first, *others = (text.rjust(width) for text, width in zip(line, widths, strict=True))
            terminalreporter.write_line("  ".join([first.strip().ljust(widths[0]), *others]))


@pytest.fixture(autouse=True)
def _the_engine_as_it_ships(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with the options that users get: `course.py test` lowers optimisation for other tests."""
    if request.path.name.startswith(("test_engine", "test_xray")):
        monkeypatch.delenv("COURSE_CPU_OPTIMISATION", raising=False)


@pytest.fixture(autouse=True)
def each_test_makes_first_calls() -> None:
    """Forget what other tests' calls have cached."""
    forget()


@pytest.fixture
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """helpers.engine, with the stages running on it during a test, on a machine with a GPU as well.

    Kernels that were compiled before are not reused, so that a compilation can be timed.
    """
    if device.ON_GPU:
        try:
            engine.compiler.compiler()
        except engine.NoCompilerError as error:
            pytest.skip(str(error))
        from helpers.lesson import shortcuts

        for module in (kernel, device, shortcuts):
            monkeypatch.setattr(module, "cp", engine)
        monkeypatch.setattr(device, "ON_GPU", False)
    with kernel.compiled_anew():
        yield engine


@pytest.fixture
def one_block(cpu_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine, let one block compute all tiles."""
    from helpers.attention.ladder import limits

    monkeypatch.setattr(limits, "multiprocessors", lambda: 1)


@pytest.fixture
def only_launched_built() -> Iterator[None]:
    """Build only what the test launches, not everything that it loads."""
    with kernel.built_when_launched():
        yield


@pytest.fixture
def only_x_rayed() -> Iterator[None]:
    """Make no builds for launches: the test X-rays what it loads, and does not launch it."""
    with kernel.built_when_launched():
        yield


@pytest.fixture(autouse=True)
def _a_gpu_takes_the_same_source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with NVRTC as well what a test for both devices compiles for the CPU engine."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("cp") is not engine:
        return
    compile_for_cpu = engine.RawModule.compile

    def compile_for_both(module: engine.RawModule, log_stream: Any = None) -> None:
        compile_for_cpu(module, log_stream)
        refused = nvrtc.refusal(module.code, module.options, module.name_expressions)
        assert not refused, f"the CPU engine takes this source, but NVRTC does not: {refused}"

    monkeypatch.setattr(engine.RawModule, "compile", compile_for_both)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser, if there is one."""
    started = browser.chromium()
    if started is None:
        pytest.skip("no browser: see tests/browser.py")
    yield started[0]
    started[0].close()
    started[1]()
