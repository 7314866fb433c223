"""Show in JupyterLab that the set-up cell has run, and a question in place of an answer without a guess.

The set-up cell also builds the engine ahead of time. Its source is collapsed and its output ships with the notebook, so
without this report nobody could see that it ran. If a name is missing later, a line says that a folded cell may not
have run: arrow keys skip those.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from helpers.engine import first_build

_began: float = sys.modules["helpers"].BEGAN
_watched: list[Any] = []  # the shell, once it is watched
_instead: list[str] = []  # lines that replace the output of the cell that runs


def watch() -> None:
    """Have the set-up cell report in JupyterLab that it is done, and how long it took."""
    if _watched or not first_build.in_jupyterlab():
        return
    shell = sys.modules["IPython"].get_ipython()
    _watched.append(shell)
    shell.events.register("pre_run_cell", _before)
    shell.events.register("post_run_cell", _after)
    first_build.begin()


def show_instead(line: str) -> None:
    """Show this line in place of everything that the running cell shows, its pictures included, if it succeeds."""
    _instead.append(line)


def _before(info: Any) -> None:
    global _began
    _began = time.monotonic()
    _instead.clear()


def _after(result: Any) -> None:
    if isinstance(result.error_in_exec, NameError):
        print("Has every cell above run? Arrow keys jump over folded cells; Shift+Enter does not.")
    if _instead and result.success:
        sys.modules["IPython.display"].clear_output()
        print("\n".join(_instead))
    if "\n    import helpers\n" in result.info.raw_cell and result.success:
        print(f"Ready after {time.monotonic() - _began:.1f} s, at {time.strftime('%H:%M:%S')}.")
