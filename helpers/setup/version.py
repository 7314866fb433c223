"""The course's version: the newest heading of CHANGELOG.md, the only place where it is written.

    python3 -m helpers.setup.version        # prints that version's changes, as a release on GitHub shows them

Standard library only, in syntax that Python 3.6 parses.
"""

import re

from helpers.setup.script import ROOT

FILE = ROOT / "CHANGELOG.md"
_HEADING = re.compile(r"^## (\d+\.\d+\.\d+)\b.*$", re.M)


def version() -> str:
    """Return the version of this copy of the course, such as "1.0.0"; "unknown" without a CHANGELOG.md."""
    heading = _HEADING.search(FILE.read_text(encoding="utf-8")) if FILE.is_file() else None
    return heading.group(1) if heading else "unknown"


def changes() -> str:
    """Return what CHANGELOG.md says of the newest version, without its heading."""
    return _HEADING.split(FILE.read_text(encoding="utf-8"))[2].strip()


if __name__ == "__main__":
    print(changes())
