"""Names that the surroundings know: environment variables, the folder of builds, the engine's folders in messages.

The names are the course's where the engine is a part of it, and the package's where it is installed as one.
"""

from __future__ import annotations

import os

PACKAGE = __name__.rpartition(".")[0]
_IS_ALONE = "." not in PACKAGE
CACHE = PACKAGE if _IS_ALONE else "attention-course"  # the folder of builds, in the user's cache folder
FOLDER = PACKAGE.replace(".", "/")


def variable(name: str) -> str:
    """Return the name of an environment variable: of `CPU_TIMEOUT`, COURSE_CPU_TIMEOUT or RAWKERNEL_CPU_TIMEOUT."""
    return f"{PACKAGE.upper() if _IS_ALONE else 'COURSE'}_{name}"


def value(name: str, default: str = "") -> str:
    """Return what an environment variable says."""
    return os.environ.get(variable(name), default)
