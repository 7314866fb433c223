"""Run the commands of course.py, a function each, once everything is installed. Each returns the exit code."""

import contextlib
import os
import subprocess
import sys
import time
from urllib.parse import quote

from helpers.cli import work_copy
from helpers.setup import host_compiler
from helpers.setup.progress import Progress, follow
from helpers.setup.script import ROOT, Problem, become, say


def lab(words: "list[str]", originals: bool = False) -> int:
    """Start JupyterLab in the repository's root, at the learner's copy of the first notebook. Does not return.

    originals: open notebooks/ itself, which is under version control; copies are neither made nor updated.
    """
    words, named = absolute(words)
    argv = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        argv.append("--allow-root")  # a container: Jupyter would refuse, though it serves this machine only
    first = first_page(originals)
    if first and not named and not any("default_url" in word for word in words):
        # Jupyter's `default_url`, not a file to open, so that the address that JupyterLab prints for other browsers
        # leads there too.
        argv.append(f"--LabApp.default_url=/lab/tree/{quote(first)}")
    say("starting JupyterLab; Ctrl-C twice ends it")
    os.chdir(str(ROOT))
    become(argv + words, {**os.environ, "JUPYTER_PATH": with_our_extension(os.environ.get("JUPYTER_PATH", ""))})
    return 0


def need_engine() -> None:
    """Compile the CPU engine unless that is done, so that the first kernel of a notebook starts at once.

    An error is not reported here: the first kernel reports it.
    """
    if os.name != "nt" and subprocess.call([sys.executable, "-c", host_compiler.LOOK], stderr=subprocess.DEVNULL) == 3:
        with contextlib.suppress(Problem, OSError):
            title = "compiling the CPU engine (half a minute, once on this machine)"
            follow([sys.executable, "-c", host_compiler.WARM_UP], title)


def first_page(originals: bool) -> str:
    """Return the path, from the root, of the page that JupyterLab opens: notebook 00, else README, else "".

    Updates the learner's copies on the way, and prints what has changed.
    """
    folder = "notebooks"
    if not originals:
        try:
            for sentence in work_copy.refresh(ROOT):
                say(sentence)
            folder = work_copy.FOLDER
        except OSError as error:
            say(f"{work_copy.FOLDER}/ was not brought up to date ({error}): these are the originals")
    pages = [*sorted(ROOT.glob(f"{folder}/00*.ipynb")), ROOT / "README.md"]
    return next((page.relative_to(ROOT).as_posix() for page in pages if page.is_file()), "")


def with_our_extension(jupyter_path: str) -> str:
    """Append to JUPYTER_PATH the folder from which JupyterLab loads CUDA's colours (helpers/cli/lab/labextensions)."""
    ours = str(ROOT / "helpers" / "cli" / "lab")
    return os.pathsep.join([*(part for part in jupyter_path.split(os.pathsep) if part not in ("", ours)), ours])


def progress() -> int:
    """Print what is solved, what comes next and how long it takes (helpers.lesson.road)."""
    from helpers.lesson import road

    print(road.text())
    return 0


@contextlib.contextmanager
def variables_refused():
    """Raise Problem if an environment variable, such as COURSE_DEVICE, has an invalid value."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not str(error).startswith("COURSE_"):
            raise
        raise Problem(str(error)) from None


def ladder(words: "list[str]") -> int:
    """Check and time each stage on this machine's device (helpers.bench.command)."""
    with variables_refused():
        from helpers.bench import command

        return command.ladder(words)


# NumPy's threads spin on their cores for a while after each product, and other tests could use these cores. The tests
# of the masks of 06 and 07 took 29 s on two cores with a second thread, and 13 s without it.
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "MKL")}

# The tests compile over a thousand kernels, most of them for one launch. A build at -Og takes two thirds of the time of
# one at -O1, and the launches of the fast run take no longer. The run of all tests, whose launches are longer, was not
# measured at -Og. Tests of the engine itself use the usual options: see tests/conftest.py.
LEVEL, LEVEL_OF_ALL = "g", "1"


# Limits a notebook's start and each cell, to end one that hangs. The longest cell, in which 09 trains a model, takes
# half a minute of CPU time, and the machine may be slow or busy.
CELL_SECONDS = 3600


def checks() -> "dict[str, list[str]]":
    """Return the command lines of the linters, by name. Each takes seconds."""
    sources = [path for folder in ("kernels", "helpers/engine") for path in sorted((ROOT / folder).rglob("*.*"))]
    # Exercises are also cells of notebooks, word for word, and keep the line lengths that their holes need.
    sources = [str(p) for p in sources if p.suffix in (".cu", ".cuh", ".h", ".cpp") and p.parent.name != "exercises"]
    clang_format = ["-c", "import clang_format; clang_format.clang_format()", "--dry-run", "--Werror", *sources]
    programs = {
        "ruff": ["-m", "ruff", "check", "."],
        "ruff format": ["-m", "ruff", "format", "--check", "."],
        "clang-format": clang_format if sources else [],
        "mypy": ["-m", "mypy"],
    }
    return {name: [sys.executable, *words] for name, words in programs.items() if words}


def test(words: "list[str]", every: bool) -> int:
    """Run the linters, then pytest over tests and notebooks. Returns 0 if all pass.

    Leaves out exhaustive tests (tests/two_speeds.py), and notebooks and tests that are unchanged since they passed
    (tests/unchanged.py). every: run exhaustive tests too; in CI, all. Files named in `words` are run whole.
    """
    begin = time.monotonic()
    linters = checks()
    verdicts = dict.fromkeys(linters, 0)
    # The linter that takes as long as a file of tests runs in parallel with the rest; its output comes last.
    with beside(linters.pop("mypy")) as mypy:
        for name, check in linters.items():
            verdicts[name] = run(check)
            if verdicts[name] == 130:
                return 130
        verdicts["pytest"] = run_pytest(words, every)
        print(mypy.communicate()[0], end="", flush=True)
    verdicts["mypy"] = mypy.returncode
    minutes, seconds = divmod(round(time.monotonic() - begin), 60)
    words_of = {0: "passed", 130: "stopped"}
    parts = ", ".join(f"{name} {words_of.get(code, 'FAILED')}" for name, code in verdicts.items())
    print(f"course: {parts} in {minutes} min {seconds} s{cpu_seconds()}", flush=True)
    return next(filter(None, [verdicts["pytest"], *verdicts.values()]), 0)


def run_pytest(words: "list[str]", every: bool) -> int:
    """Run pytest over tests and notebooks, or over what the words name. Returns its exit code."""
    words, named = absolute(words)
    options = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout", str(CELL_SECONDS)]
    options += ["--nbval-kernel-startup-timeout", str(CELL_SECONDS)]
    if (ROOT / "tests" / "sanitize.cfg").is_file():
        options += ["--nbval-sanitize-with", "tests/sanitize.cfg"]
    folders = [folder for folder in ("tests", "notebooks") if (ROOT / folder).is_dir()]
    processes = workers()
    argv = [sys.executable, "-m", "pytest"]
    if not named:
        argv += [*folders, *(["--fast"] if not every else [] if os.environ.get("CI") else ["--changed-only"])]
        files = [path for folder in folders for path in (ROOT / folder).glob("*") if path.suffix in (".py", ".ipynb")]
        processes = max(1, min(processes, len(files)))  # starting a worker takes seconds
    # All tests of a file run in one worker: the cells of a notebook depend on one another.
    options += ["-p", "helpers.cli.quick_pytest", "-n", str(processes), "--dist", "loadfile", *words]
    builds = {"COURSE_CPU_OPTIMISATION": LEVEL_OF_ALL if every else LEVEL}
    return run([*argv, *options], {**ONE_THREAD, **builds, **os.environ})


@contextlib.contextmanager
def beside(argv: "list[str]"):
    """Run a program in the repository's root in the background, and end it when the block is left.

    Its output is collected in a pipe.
    """
    child = subprocess.Popen(argv, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def cpu_seconds() -> str:
    """Format the CPU time of all child processes that have ended; "" if the system does not count it."""
    try:
        import resource
    except ImportError:
        return ""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return f" ({used.ru_utime + used.ru_stime:.0f} s of CPU)"


WORKER_BYTES = 3 << 29  # a pytest worker, its notebook kernel and its compiler: 1.5 GB


def workers() -> int:
    """Return how many processes to test with: one for each usable core, if memory suffices; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _numbers("/sys/fs/cgroup/cpu.max")  # the container's CPU quota: microseconds of CPU time per period
    if len(quota) == 2:
        cores = min(cores, -(-quota[0] // quota[1]))
    return max(1, min(cores, memory() // WORKER_BYTES))


def memory() -> int:
    """Return how many bytes this process and its children may use: the machine's memory, or a container's limit."""
    limits = _numbers("/sys/fs/cgroup/memory.max") + _numbers("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not every system has these names
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits) if limits else 1 << 62


def _numbers(path: str) -> "list[int]":
    """Read the whole numbers in a system file; an empty list if the file does not exist or says "max"."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return [int(word) for word in file.read().split()]
    return []


def bench(words: "list[str]") -> int:
    """Time the ladder and its peers on a GPU (helpers.bench.command)."""
    with variables_refused():
        from helpers.bench import command

        return command.bench(words)


def export(words: "list[str]") -> int:
    """Write a stage as one file (helpers.attention.export.command)."""
    with variables_refused():
        from helpers.attention.export import command

        return command.main(words)


def book(words: "list[str]") -> int:
    """Build the site from the notebooks as they are (helpers.site.build). Returns 0 if no page has an error."""
    from helpers.site import build

    try:
        with Progress("making the site: minutes, at the first time a quarter of an hour or more") as shown:
            shown.state = "pages, then Sphinx"
            page = build.build(words=words)
    except (RuntimeError, ValueError) as error:
        say(f"the site was not made: {error}")
        return 1
    say(f"the site is made; its first page is {page}")
    return 0


def absolute(words: "list[str]") -> "tuple[list[str], bool]":
    """Make the paths among the words absolute. Returns whether there are any, too."""
    result, any_path = [], False
    for word in words:
        path, colons, rest = word.partition("::")
        if path and not path.startswith("-") and os.path.exists(path) and (os.sep in path or "." in path):
            word, any_path = os.path.abspath(path) + colons + rest, True
        result.append(word)
    return result, any_path


def run(argv: "list[str]", environment: "dict[str, str] | None" = None) -> int:
    """Run a program in the repository's root. Returns its exit code, or 130 after Ctrl-C."""
    child = subprocess.Popen(argv, cwd=str(ROOT), env=environment)
    try:
        return child.wait()
    except KeyboardInterrupt:  # the child gets the signal too: let it clean up
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(20)
            return 130
        child.kill()
        child.wait()
        return 130
