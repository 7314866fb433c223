"""course.py as a program: where it is, what it prints, and how it starts another program in its place."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "helpers" / "course.py"
CACHE = ROOT / ".cache"


class Problem(Exception):
    """Something that the user can correct. The text says what, and how."""


def say(text: str) -> None:
    """Print one line of course.py's own on stderr, so that stdout belongs to the command."""
    print("course: " + text, file=sys.stderr, flush=True)


def command_line(*words: str) -> str:
    """The command that the user would type, for messages: this script as seen from the folder they are in."""
    try:
        script = os.path.relpath(str(SCRIPT))
    except ValueError:  # Windows: another drive
        script = str(SCRIPT)
    return " ".join((*words, script, *sys.argv[1:]))


def restart(python: str, env: "dict[str, str]") -> None:
    """Run course.py with the same arguments on another Python; does not come back."""
    become([python, str(SCRIPT), *sys.argv[1:]], env)


def become(argv: "list[str]", env: "dict[str, str]") -> None:
    """Replace this process by another, so that exit code and Ctrl-C are that one's; does not come back."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execve(argv[0], argv, env)
    child = subprocess.Popen(argv, env=env)  # on Windows exec returns to the prompt at once
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(child.wait())
