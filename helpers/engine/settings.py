"""Names visible outside: environment variables, the folder of builds, the engine's folders in messages.

In the course these are the course's names; in the installed package they are the package's.
"""

from __future__ import annotations

import os

PACKAGE = __name__.rpartition(".")[0]
_IS_ALONE = "." not in PACKAGE
CACHE = PACKAGE if _IS_ALONE else "attention-course"  # the folder of builds, in the user's cache folder
FOLDER = PACKAGE.replace(".", "/")


def variable(name: str) -> str:
    """Return an environment variable's name: for `CPU_TIMEOUT`, COURSE_CPU_TIMEOUT or RAWKERNEL_CPU_TIMEOUT."""
    return f"{PACKAGE.upper() if _IS_ALONE else 'COURSE'}_{name}"


def value(name: str, default: str = "") -> str:
    """Return an environment variable's value."""
    return os.environ.get(variable(name), default)
