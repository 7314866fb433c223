#!/usr/bin/env python3
"""The command of the course: lab, progress, ladder, test, bench, export, book.

    python3 helpers/course.py lab        open the course in JupyterLab
    python3 helpers/course.py --help     everything else

On the first run it makes .venv next to environment.yml, installs what that file lists into it, and restarts itself
there. A stamp in .venv tells later runs that everything is installed, so they need no network.

This file reads the command line. Other modules do the work: script (messages, starting another program),
requirements (which Python and packages are needed), environment (.venv), progress (one step of its set-up),
host_compiler and commands. In these modules and here only the standard library is used, and only syntax that
Python 3.6 can parse: a Python that is too old must still be able to read them and say so.
"""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # Python put this script's folder first on sys.path, but its modules are not top-level ones
    here = Path(__file__).resolve().parent
    ours = (str(here), str(here.parent))
    sys.path[:] = [ours[1], *[entry for entry in sys.path if os.path.realpath(entry or ".") not in ours]]

from helpers.cli import commands
from helpers.setup import environment, host_compiler, startup
from helpers.setup.requirements import ROOM, is_conda, need_python, the_list, use_this_python
from helpers.setup.script import Problem, say
from helpers.setup.version import version

LAB = "open the course in JupyterLab: your own copies of the notebooks, in work/"
PROGRESS = "what you have solved and guessed in each notebook, what comes next, and how long it takes"
LADDER = "run each stage on this machine's device: check, max error, time, TFLOP/s, in a table"
TEST = "run the tests and every notebook, without what repeats other tests; --all runs the rest as well"
TORCH = (
    "with PyTorch and transformers, for notebook 09 and the tests of both; once installed, they stay. The usual build "
    "for Linux brings CUDA, several GB: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has one for the CPU"
)
BENCH = "on a GPU: the ladder with named peers, measured in the same run"
EXPORT = "write a stage as one file that runs without the course: Python with CuPy, or a .cu for nvcc"
BOOK = "make the site of the course from the notebooks as they are, in book/html"
EPILOG = f"""\
The first run makes .venv in the course's folder and installs the list in environment.yml into it ({ROOM},
a few minutes). Later runs start at once and need no network. Delete .venv to start over.

examples:
  python3 helpers/course.py lab
  python3 helpers/course.py lab -- --no-browser --port 9000     what follows -- goes to JupyterLab
  python3 helpers/course.py lab --originals                     for contributors: notebooks/ itself
  python3 helpers/course.py lab --torch                         with PyTorch, which notebook 09 plugs the kernels into
  python3 helpers/course.py progress
  python3 helpers/course.py ladder
  python3 helpers/course.py export flash_mma -o flash.py        a kernel to take with you; export --help says the rest
  python3 helpers/course.py test --torch --all                  exhaustive tests too
  python3 helpers/course.py test -- tests/test_course.py -x     what follows -- goes to pytest
"""


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--this-python",
        action="store_true",
        default=argparse.SUPPRESS,
        help="use the current Python and install nothing (a conda environment made from "
        "environment.yml is used by itself)",
    )
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="course.py",
        description="FlashAttention from scratch, in CuPy: the command of the course.",
        epilog=EPILOG,
        formatter_class=raw,
        parents=[own],
    )
    top.add_argument("--version", action="version", version="course.py " + version())
    entries = top.add_subparsers(
        dest="command", metavar="{lab,progress,ladder,test,bench,export,book}", title="commands"
    )
    more = "What follows -- goes to {}."
    other = "Other arguments go to helpers/bench/command.py, whose --help is shown here once .venv exists."
    labs = entries.add_parser("lab", help=LAB, parents=[own], description=f"{LAB}. {more.format('JupyterLab')}")
    labs.add_argument("--originals", action="store_true", help="open notebooks/ itself: for contributors")
    entries.add_parser("progress", help=PROGRESS, parents=[own], description=PROGRESS)
    entries.add_parser("ladder", help=LADDER, parents=[own], description=f"{LADDER}. {other}")
    tests = entries.add_parser("test", help=TEST, parents=[own], description=f"{TEST}. {more.format('pytest')}")
    tests.add_argument("--all", action="store_true", help="then those that repeat others")
    for entry in (labs, tests):
        entry.add_argument("--torch", dest="extras", action="append_const", const="torch", help=TORCH)
    extra = "with what environment.yml lists for it as this extra"
    tests.add_argument("--extra", dest="extras", action="append", metavar="NAME", help=extra)
    entries.add_parser("bench", help=BENCH, parents=[own], description=f"{BENCH}. {other}")
    entries.add_parser(
        "export", help=EXPORT, parents=[own], description=f"{EXPORT}. {other.replace('bench', 'attention/export')}"
    )
    entries.add_parser("book", help=BOOK, parents=[own], description=f"{BOOK}. {more.format('Sphinx')}")
    return top


def work(arguments: "list[str]") -> int:
    """Set up, then run the command. Returns the exit code.

    Raises Problem with what the user can correct.
    """
    need_python()
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, words = arguments[:cut], arguments[cut + 1 :]
    name, _ = the_list()
    # ladder, bench and export take their help from their own modules, if these can run without a set-up.
    passed_on = len(own) > 1 and own[0] in ("ladder", "bench", "export") and {"-h", "--help"} & set(own)
    if passed_on and environment.venv_needs(environment.kept_extras())[0] == "ready":
        own, words = [word for word in own if word not in ("-h", "--help")], ["--help", *words]
    top = parser()
    options, rest = top.parse_known_args(own)
    receiver = {"lab": "JupyterLab", "test": "pytest", "book": "Sphinx"}.get(options.command)
    if options.command == "progress" and rest + words:
        top.error(f"progress takes no arguments, got {' '.join(rest + words)}")
    if receiver and rest:
        top.error(f"unknown: {' '.join(rest)}. Arguments for {receiver} come after a --")
    if options.command is None:
        if rest or words:
            top.error(
                f"which command? lab, progress, ladder, test, bench, export or book; got {' '.join(rest + words)}"
            )
        top.print_help()
        return 2
    words = rest + words

    theirs = is_conda(name) or getattr(options, "this_python", False)
    extras = set(getattr(options, "extras", None) or ())
    if not theirs:
        extras.update(environment.kept_extras())
    _, requirements = the_list(sorted(extras))
    if theirs:
        modules = {
            "lab": ["jupyterlab", "ipykernel"],
            "test": ["ruff", "clang_format", "mypy", "pytest", "nbval", "xdist"],
            "book": ["sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton"],
            "ladder": ["matplotlib"],
            "bench": ["matplotlib"],
            "export": ["jinja2"],
        }
        needed = ["numpy", "ml_dtypes", *modules.get(options.command, []), *["torch"] * ("torch" in extras)]
        use_this_python(requirements, needed)
    else:
        environment.enter(sorted(extras), host_compiler.before_the_packages)
    environment.set_variables(python_is_ours=not theirs)
    if not getattr(options, "this_python", False):
        startup.write()
    if options.command in ("export", "progress"):  # they compile nothing
        return commands.export(words) if options.command == "export" else commands.progress()
    host_compiler.need_compiler(may_install=not theirs)
    if options.command == "lab":
        commands.need_engine()
        return commands.lab(words, options.originals)
    if options.command == "test":
        return commands.test(words, options.all)
    if options.command == "book":
        return commands.book(words)
    return commands.ladder(words) if options.command == "ladder" else commands.bench(words)


def main() -> int:
    """Run work(), and print errors that a user may meet as messages."""
    try:
        return work(sys.argv[1:])
    except Problem as problem:
        say(str(problem))
        return 1
    except KeyboardInterrupt:
        say("stopped. Run the same command again: it goes on from where it was")
        return 130


if __name__ == "__main__":
    sys.exit(main())
