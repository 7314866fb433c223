"""course.py as a program: its paths and messages, and how it is replaced by another program."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "helpers" / "course.py"
CACHE = ROOT / ".cache"


class Problem(Exception):
    """An error that the user can correct. The text says what is wrong, and how to correct it."""


def say(text: str) -> None:
    """Print a message of course.py's own on stderr, so that stdout belongs to the command."""
    print("course: " + text, file=sys.stderr, flush=True)


def command_line(*words: str) -> str:
    """Write the command as the user would type it in the current folder, for messages."""
    try:
        script = os.path.relpath(str(SCRIPT))
    except ValueError:  # Windows: another drive
        script = str(SCRIPT)
    return " ".join((*words, script, *sys.argv[1:]))


def restart(python: str, env: "dict[str, str]") -> None:
    """Run course.py with the same arguments on another Python. Does not return."""
    become([python, str(SCRIPT), *sys.argv[1:]], env)


def become(argv: "list[str]", env: "dict[str, str]") -> None:
    """Replace this process with another, which then receives Ctrl-C and sets the exit code. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execve(argv[0], argv, env)
    child = subprocess.Popen(argv, env=env)  # on Windows exec would return to the prompt at once
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(child.wait())
