"""IPython's configuration in .venv: until a notebook's first cell has run, `%%cuda` tells the user to run it."""

import contextlib
import os
import sys
from pathlib import Path

MARK = "# Written by helpers/course.py; without this line it is left as it is."
# IPython reads it from its Python's folder; settings in the user's own profile take precedence.
CONFIG = (
    MARK
    + '''
c = get_config()
c.InteractiveShellApp.exec_lines.extend(["""
def _cuda(line, cell):
    print("[FAIL] %%cuda comes with the first code cell of this notebook: run that one, then this one again")
get_ipython().register_magic_function(_cuda, magic_kind="cell", magic_name="cuda")
del _cuda
"""])
'''
)


def write(prefix: str = sys.prefix) -> None:
    """Write the file if it is missing or an older version of ours. Failures are ignored."""
    path = Path(prefix) / "etc" / "ipython" / "ipython_config.py"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        current = path.read_text(encoding="utf-8") if path.exists() else MARK
        if current == CONFIG or not current.startswith(MARK):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(CONFIG, encoding="utf-8")
        os.replace(str(draft), str(path))
