"""Say which Python and packages the course needs, and whether the running Python has them.

The packages are listed in one place, the pip: block of environment.yml, which conda reads too. Its extras are installed
on request, for example by `lab --torch`; for conda these lines are comments. The folder locked/ has the exact versions,
with hashes, that .venv gets; make_lock.py writes them from the list.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from helpers.setup.script import ROOT, Problem, command_line, say

OLDEST = (3, 10)
KNOWN = "known to work are Python 3.10 to 3.14 on Linux (glibc) or macOS, 64 bits"
ROOM = "1.2 GB"  # the size of a complete .venv, for messages
LIST = ROOT / "environment.yml"
LOCKED = ROOT / "helpers" / "setup" / "locked"


def read_list(text: str) -> "tuple[str, list[str]]":
    """Read the name and the pip requirements of an environment.yml.

    Reads the subset of YAML that the file is written in: `name:`, and the items under `- pip:`. Comments and quotes are
    removed; environment markers (`; sys_platform != "darwin"`) stay for pip.

    Raises Problem if the name or the pip: block is missing.
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
            "environment.yml has no {}. It lists what the course needs: restore it with "
            "`git checkout environment.yml`.".format("pip: block" if name else "name:")
        )
    return name, requirements


def read_extra(text: str, extra: str) -> "list[str]":
    """Read the requirements of an extra in an environment.yml, from its lines "# extra NAME: requirement".

    Raises Problem if there is no such extra.
    """
    lines = re.findall(rf"^\s*# extra {re.escape(extra)}: (.+?)(?:[ \t]+#.*)?$", text, re.M)
    if not lines:
        raise Problem(f"environment.yml has no extra {extra!r}. Restore the file with `git checkout environment.yml`.")
    return lines


def without_dependencies(text: str) -> "list[str]":
    """List the requirements of an environment.yml marked "# no-deps": the course does not need their dependencies.

    conda knows no such mark, and installs the dependencies too.
    """
    marked = [line for line in text.splitlines() if re.search(r"\s# no-deps\b", line)]
    return read_list("name: marked\n- pip:\n" + "\n".join(marked))[1] if marked else []


def cuda_version() -> int:
    """Choose CuPy's major version of CUDA for this machine: 13 if its GPUs and driver support it, else 12.

    PyTorch's usual build brings CUDA 13, so both then use the same libraries.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.check_output(query, stderr=subprocess.DEVNULL, timeout=60).decode()
    except (OSError, subprocess.SubprocessError):
        return 12
    gpus = re.findall(r"^(\d+)[\d.]*, (\d+)\.(\d+)$", answer, re.M)
    # CUDA 13 needs driver 580 and compute capability 7.5.
    new = [int(driver) >= 580 and (int(major), int(minor)) >= (7, 5) for driver, major, minor in gpus]
    return 13 if new and all(new) else 12


def lock_files(parts: "Iterable[str]") -> "tuple[list[Path], list[Path]]":
    """List these parts' files in locked/: those with hashes first, then those whose build the index chooses.

    Raises Problem if a part has none.
    """
    hashed = [LOCKED / f"{part}.txt" for part in parts]
    missing = [str(path) for path in hashed if not path.is_file()]
    if missing:
        raise Problem(f"{', '.join(missing)} is missing. Run course.py from a whole copy of the course.")
    return hashed, [path for path in (file.with_suffix(".unhashed.txt") for file in hashed) if path.is_file()]


def pip_installs(parts: "Iterable[str]", folder: Path) -> "list[list[list[str]]]":
    """Return the arguments of `pip install` commands that install these parts of the lock.

    They come in rounds; those of one round may run in parallel. folder: for the files that they read.
    """
    hashed, unhashed = lock_files(parts)
    text = "".join(path.read_text(encoding="utf-8") for path in hashed)
    locked = {}  # type: dict[str, str]
    for entry, name in re.findall(r"^(([\w.-]+)==.*\n(?:[ \t]+.*\n)*)", text, re.M):
        locked[name] = locked.get(name, "") + entry  # other versions of Python may have their own entry
    halves = [folder / f"packages-{half}.txt" for half in (1, 2)]
    for half, path in enumerate(halves):
        path.write_text("".join(list(locked.values())[half::2]), encoding="utf-8")
    # The lock is complete, so pip need not resolve dependencies, and its halves are disjoint.
    first = [["--no-deps", "--require-hashes", "-r", str(path)] for path in halves if path.stat().st_size]
    return [first, *([["-r", str(path)]] for path in unhashed)]


def the_list(extras: "Iterable[str]" = ()) -> "tuple[str, list[str]]":
    """Read the course's environment.yml, and append the requirements of these extras."""
    try:
        text = LIST.read_text(encoding="utf-8")
    except OSError as error:
        raise Problem(
            f"cannot read {LIST} ({error.strerror}). Run course.py from a whole copy of the course."
        ) from None
    name, requirements = read_list(text)
    return name, requirements + [item for extra in extras for item in read_extra(text, extra)]


def locked_names(part: str) -> "set[str]":
    """List the canonical names of the packages in a part of the lock."""
    return set(re.findall(r"^([\w.-]+)==", (LOCKED / f"{part}.txt").read_text(encoding="utf-8"), re.M))


def fingerprint(parts: "Iterable[str]") -> str:
    """Hash these parts of the lock, for the stamp."""
    files = [path for paths in lock_files(parts) for path in paths]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def canonical(name: str) -> str:
    """Normalise a distribution's name as pip does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def need_python() -> None:
    """Check that the running Python is new enough.

    Raises Problem if it is not, and names a newer one on this machine.
    """
    if tuple(sys.version_info[:2]) >= OLDEST:
        return
    wanted = "{}.{}".format(*OLDEST)
    text = f"Python {sys.version.split()[0]} ({sys.executable}) is too old, {wanted} or newer is needed."
    for minor in range(20, OLDEST[1] - 1, -1):
        name = f"python3.{minor}"
        # A name on PATH may be a shim without a program: check that it starts.
        if shutil.which(name) and subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            raise Problem(f"{text}\nFix: this machine has {name}. Run: {command_line(name)}")
    raise Problem(
        f"{text}\nFix: install one from python.org, or with conda: conda env create -f environment.yml && "
        f"conda activate {the_list()[0]}"
    )


def is_conda(name: str) -> bool:
    """Check whether the running Python is that of this active conda environment."""
    prefix = os.environ.get("CONDA_PREFIX", sys.prefix)
    return os.environ.get("CONDA_DEFAULT_ENV") == name and os.path.realpath(prefix) == os.path.realpath(sys.prefix)


def missing_here(requirements: "list[str]") -> "list[str]":
    """List the requirements that this Python does not meet, considering markers and versions."""
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
            continue  # CuPy built for another CUDA, or from conda
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            missing.append(text.split(";")[0].strip())
    return missing


def use_this_python(requirements: "list[str]", modules: "list[str]") -> None:
    """Print the packages that the running Python lacks.

    Raises Problem if the command cannot start without (one of `modules`).
    """
    try:
        missing = missing_here(requirements)
    except ImportError:
        missing = []
        say("this Python has neither packaging nor pip: it is not checked against environment.yml")
    if missing:
        marked = without_dependencies(LIST.read_text(encoding="utf-8"))
        calls = {"": [item for item in missing if item not in marked]}
        calls["--no-deps "] = [item for item in missing if item in marked]
        quoted = {option: " ".join(f'"{item}"' for item in items) for option, items in calls.items() if items}
        commands = "".join(f"\n    {sys.executable} -m pip install {option}{items}" for option, items in quoted.items())
        say(f"this Python ({sys.executable}) lacks {', '.join(missing)}{commands}")
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise Problem(f"this command needs {', '.join(absent)}. Install what is missing as said above.")
