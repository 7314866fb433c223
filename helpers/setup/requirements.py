"""What the course needs, which Python and which packages, and whether the running Python is one and has them.

The packages are the pip: block of environment.yml, the one list: conda reads that file too. Its extras are what a
command brings when it is asked to, such as `lab --torch`; conda reads these lines as comments.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable

from helpers.setup.script import ROOT, Problem, command_line, say

OLDEST = (3, 10)
KNOWN = "known to work are Python 3.10 to 3.13 on Linux (glibc) or macOS, 64 bits"
ROOM = "1.2 GB"  # what a full .venv takes, for messages
LIST = ROOT / "environment.yml"


def read_list(text: str) -> "tuple[str, list[str]]":
    """Name and pip requirements of an environment.yml.

    Reads the subset of YAML that the file is written in: `name:`, and the items under `- pip:`. Comments and
    quotes are taken off; environment markers (`; sys_platform != "darwin"`) stay, pip reads them.

    Raises Problem if there is no name or no pip: block.
    """
    name, requirements, block = "", [], None
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        item = line.strip()
        if not item:
            continue
        indent = len(line) - len(line.lstrip())
        if block is not None and indent > block and item.startswith("- "):
            item = item[2:].strip()
            if item[0] in "'\"" and item[-1] == item[0]:
                item = item[1:-1]
            requirements.append(item)
            continue
        block = indent if re.match(r"-\s+pip:$", item) else None
        if line.startswith("name:"):
            name = line[len("name:") :].strip().strip("'\"")
    if not name or not requirements:
        raise Problem(
            "environment.yml has no {}. It is the list of what the course needs: get it back with "
            "`git checkout environment.yml`.".format("pip: block" if name else "name:")
        )
    return name, requirements


def read_extra(text: str, extra: str) -> "list[str]":
    """The requirements of an extra in an environment.yml: what stands on its lines "# extra NAME: requirement".

    Raises Problem if there is none of that name.
    """
    lines = re.findall(rf"^\s*# extra {re.escape(extra)}: (.+?)(?:\s+#.*)?$", text, re.M)
    if not lines:
        raise Problem(f"environment.yml has no extra {extra!r}. Get the file back with `git checkout environment.yml`.")
    return lines


def without_dependencies(text: str) -> "list[str]":
    """Those requirements of an environment.yml whose comment begins with "no-deps": what they depend on is not needed.

    conda knows no such mark, and installs the dependencies too.
    """
    marked = [line for line in text.splitlines() if re.search(r"\s# no-deps\b", line)]
    return read_list("name: marked\n- pip:\n" + "\n".join(marked))[1] if marked else []


def pip_installs(requirements: "list[str]") -> "list[list[str]]":
    """The arguments of `pip install`, for one call after the other: what is marked "no-deps" has a call of its own."""
    marked = set(without_dependencies(LIST.read_text(encoding="utf-8")))
    usual = [item for item in requirements if item not in marked]
    alone = [item for item in requirements if item in marked]
    return [call for call in (usual, ["--no-deps", *alone] if alone else []) if call]


def the_list(extras: "Iterable[str]" = ()) -> "tuple[str, list[str]]":
    """read_list of the course's own environment.yml, with the requirements of these extras at its end."""
    try:
        text = LIST.read_text(encoding="utf-8")
    except OSError as error:
        raise Problem(
            f"cannot read {LIST} ({error.strerror}). Run course.py from a whole copy of the course."
        ) from None
    name, requirements = read_list(text)
    return name, requirements + [item for extra in extras for item in read_extra(text, extra)]


def fingerprint(requirements: "list[str]") -> str:
    """What the stamp remembers of the list."""
    return hashlib.sha256("\n".join(requirements).encode()).hexdigest()


def canonical(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def need_python() -> None:
    """See that the running Python is new enough.

    Raises Problem if it is not, naming a newer one of this machine.
    """
    if tuple(sys.version_info[:2]) >= OLDEST:
        return
    wanted = "{}.{}".format(*OLDEST)
    text = f"Python {sys.version.split()[0]} ({sys.executable}) is too old, {wanted} or newer is needed."
    for minor in range(20, OLDEST[1] - 1, -1):
        name = f"python3.{minor}"
        # A name on the path may be a shim with nothing behind it: see that it starts.
        if shutil.which(name) and subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            raise Problem(f"{text}\nMend: this machine has {name}. Run: {command_line(name)}")
    raise Problem(
        f"{text}\nMend: install one from python.org, or with conda: conda env create -f environment.yml && "
        f"conda activate {the_list()[0]}"
    )


def is_conda(name: str) -> bool:
    """Whether the running Python is that of the conda environment of this name, and that one is active."""
    prefix = os.environ.get("CONDA_PREFIX", sys.prefix)
    return os.environ.get("CONDA_DEFAULT_ENV") == name and os.path.realpath(prefix) == os.path.realpath(sys.prefix)


def missing_here(requirements: "list[str]") -> "list[str]":
    """The requirements that this Python does not meet, markers and versions taken into account."""
    from importlib import metadata

    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    present = {canonical(package.metadata["Name"] or ""): package.version for package in metadata.distributions()}
    missing = []
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        version = present.get(canonical(wanted.name))
        if version is None and wanted.name.startswith("cupy") and importlib.util.find_spec("cupy"):
            continue  # CuPy built for another CUDA, or conda's own
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            missing.append(text.split(";")[0].strip())
    return missing


def use_this_python(requirements: "list[str]", modules: "list[str]") -> None:
    """Say what is missing in the running Python.

    Raises Problem if the command cannot start without (one of `modules`).
    """
    try:
        missing = missing_here(requirements)
    except ImportError:
        missing = []
        say("this Python has neither packaging nor pip: it is not checked against environment.yml")
    if missing:
        calls = [" ".join(f'"{word}"' if word[0] != "-" else word for word in call) for call in pip_installs(missing)]
        mend = "".join(f"\n    {sys.executable} -m pip install {call}" for call in calls)
        say(f"this Python ({sys.executable}) lacks {', '.join(missing)}{mend}")
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise Problem(f"this command needs {', '.join(absent)}. Install what is missing as said above.")
