"""The .venv next to environment.yml: check its state; make, fill, repair and enter it.

A stamp in it records what the last complete set-up installed, so that a later start needs no network. An interrupted
set-up, a moved folder and a changed list are each detected, and only the necessary steps are run. Extras stay: later
commands need not ask for them again.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from helpers.setup.progress import follow, no_venv_text
from helpers.setup.requirements import OLDEST, ROOM, canonical, cuda_version, fingerprint, locked_names, pip_installs
from helpers.setup.script import CACHE, ROOT, Problem, command_line, restart, say

VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "course.json"
READY = "COURSE_READY"  # set for one start only: the parent has just checked .venv


def enter(extras: "list[str]", first: "Callable[[], None]" = lambda: None) -> None:
    """Continue in .venv, repaired if necessary: restart course.py on its Python, unless that is running already.

    extras: those of environment.yml to install as well; the stamp records them.
    first: called before packages are installed, if any are.

    Raises Problem, which says what the user can do, if the set-up fails.
    """
    if os.environ.pop(READY, None) != str(VENV):
        try:
            set_up(extras, first)
        except OSError as error:
            raise Problem(
                f"the set-up stopped: {error}\nFix: check that you may write to {ROOT} and that the disk "
                f"has room, or copy the course elsewhere. Then run: {command_line('python3')}"
            ) from None
    if not inside_venv():
        restart(str(VENV_PYTHON), dict(os.environ, **{READY: str(VENV)}))


def set_up(extras: "list[str]", first: "Callable[[], None]" = lambda: None) -> None:
    """Repair .venv, if it needs it; `first` is called before packages are installed.

    Raises Problem, which says what the user can do, if that fails.
    """
    need, why = venv_needs(extras)
    if need == "ready":
        return
    with only_one():
        need, why = venv_needs(extras)  # check again: another course.py may have finished it meanwhile
        if need == "move" and os.name == "nt":
            need = "make"  # its launchers are binaries that contain the old path
        if need == "move":
            say(f"{why}: repairing its scripts")
            move_venv(read_stamp()["home"])
            need, why = venv_needs(extras)
        if need == "ready":
            return
        if need == "make":
            leave_venv()
            make_venv(why)
        else:
            say(why)
        parts = parts_of(extras)
        with contextlib.suppress(FileNotFoundError):
            STAMP.unlink()  # .venv is incomplete from here on, until the new stamp
        first()
        begin = time.monotonic()
        room = f"{ROOM} and {' and '.join(extras)}" if extras else ROOM
        install(parts, f"installing the list of environment.yml ({room}, once)")
        write_stamp(new_stamp(parts, extras))
        say(f"installed in {time.monotonic() - begin:.0f} s")


def parts_of(extras: "list[str]") -> "list[str]":
    """List the parts of the lock for .venv with these extras. CUDA's version is chosen once: the stamp keeps it."""
    return ["base", read_stamp().get("cuda") or f"cuda{cuda_version()}", *extras]


def venv_needs(extras: "list[str]") -> "tuple[str, str]":
    """Find what .venv needs, and why: "ready" (nothing), "install" (the list), "move" (its scripts) or "make" (all)."""
    if not os.path.lexists(str(VENV)):
        return "make", "first run"
    if not VENV_PYTHON.exists() or not (VENV / "pyvenv.cfg").is_file():
        gone = VENV_PYTHON.is_symlink() and not VENV_PYTHON.exists()
        cause = "the Python it was made from is gone" if gone else "an earlier set-up was stopped"
        return "make", f".venv does not work ({cause})"
    answer = probe()
    if answer is None:
        return "make", ".venv does not work (its Python does not start)"
    version, folder = answer
    if tuple(int(part) for part in version.split(".")) < OLDEST:
        return "make", f".venv was made with Python {version}, which is too old"
    stamp = read_stamp()
    if stamp and stamp.get("python") != version:
        return "make", f".venv was made with Python {stamp.get('python')}, which is {version} now"
    names, torn = installed(folder)
    if torn or "pip" not in names:
        return "make", ".venv holds a half-written package (an earlier set-up was stopped)"
    if not stamp:
        return "install", ".venv is half made (an earlier set-up was stopped, or it was made by hand)"
    if stamp.get("home") != str(VENV.resolve()):
        return "move", f".venv was moved here from {stamp.get('home')}"
    if stamp.get("list") != fingerprint(parts_of(extras)):
        return "install", "the list in environment.yml has changed, or an extra is asked for"
    lost = sorted(set(stamp.get("packages", [])) - names)
    if lost:
        return "install", f".venv has lost {', '.join(lost[:3])}{' and more' if len(lost) > 3 else ''}"
    return "ready", ""


def probe() -> "tuple[str, Path] | None":
    """Ask the Python in .venv for its version ("3.12") and site-packages; None if it cannot start."""
    code = "import sys, sysconfig as s; print('%d.%d' % sys.version_info[:2]); print(s.get_paths()['purelib'])"
    try:
        answer = subprocess.run(
            [str(VENV_PYTHON), "-I", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=600,  # for a Python that hangs: on a busy machine its start takes seconds
            check=True,
        )
        version, folder = answer.stdout.decode().splitlines()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return version, Path(folder)


def installed(folder: Path) -> "tuple[set[str], bool]":
    """List the distributions in site-packages, and check whether one of them is half written.

    pip writes RECORD last, and renames what it is replacing to ~name; either leftover means it was killed.
    """
    names, torn = set(), False
    with contextlib.suppress(OSError):
        for entry in os.listdir(str(folder)):
            if entry.endswith(".dist-info"):
                names.add(canonical(entry.split("-")[0]))
                torn = torn or not (folder / entry / "RECORD").is_file()
            torn = torn or entry.startswith("~")
    return names, torn


def read_stamp() -> dict:
    """Read the stamp of the last complete set-up; {} if there is none."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def kept_extras() -> "list[str]":
    """Return the extras of environment.yml that the last complete set-up installed."""
    return read_stamp().get("extras", [])


def new_stamp(parts: "list[str]", extras: "list[str]") -> dict:
    """Make the stamp of a .venv whose set-up has just completed.

    Raises:
        Problem: its Python does not start.
    """
    answer = probe()
    if answer is None:
        raise Problem(f"the Python in {VENV} does not start. Delete that folder and run this again.")
    return {
        "list": fingerprint(parts),
        "cuda": parts[1],
        "python": answer[0],
        "home": str(VENV.resolve()),
        "packages": sorted(installed(answer[1])[0]),
        "extras": extras,
    }


def write_stamp(stamp: dict) -> None:
    """Write the stamp of a complete set-up, atomically."""
    draft = STAMP.with_suffix(".tmp")
    draft.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    os.replace(str(draft), str(STAMP))


def only_one():
    """Hold the lock of the set-up: a context."""
    CACHE.mkdir(exist_ok=True)
    waiting = "another course.py is setting up .venv: waiting for it (Ctrl-C stops waiting)"
    return locked(CACHE / "course.lock", lambda: say(waiting))


@contextlib.contextmanager
def locked(path: Path, tell: "Callable[[], None]"):
    """Hold a lock between processes. The system frees it when the process ends, however it ends.

    path: a file in an existing folder. tell: called once before waiting, if another process holds the lock.
    """
    with open(str(path), "a") as lock:
        if sys.platform == "win32":
            import msvcrt

            said = False
            while True:
                try:
                    msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
                    break
                except OSError:
                    if not said:
                        tell()
                    said = True
                    time.sleep(1)
        else:
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell()
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # a network file system without locks: continue without
        yield


def make_venv(why: str) -> None:
    """Make .venv without the packages, replacing what is there.

    Raises Problem if this Python has no venv, or if the disk is full or read-only.
    """
    if VENV.exists() and not VENV.is_dir():
        raise Problem(f"{VENV} is a file, but a folder is needed. Move it away and run the same command again.")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise Problem(no_venv_text())
    title = f"{why}: making .venv with Python {sys.version.split()[0]}"
    follow([sys.executable, "-m", "venv", "--clear", str(VENV)], title, pip_variables())


def install(parts: "list[str]", title: str) -> None:
    """Install these parts of the lock into .venv with pip.

    Raises Problem if pip fails.
    """
    env = dict(pip_variables(), PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONUNBUFFERED="1")
    pip = [str(VENV_PYTHON), "-m", "pip"]  # no -I, with which pip would ignore the PIP_ variables set here
    other = {"cuda12": "cuda13", "cuda13": "cuda12"}
    replaced = {name for part in parts if part in other for name in locked_names(other[part]) - locked_names(part)}
    folder = probe()
    stale = sorted(replaced & installed(folder[1])[0]) if folder else []
    if stale:  # two builds of CuPy would overwrite each other's files
        follow([*pip, "uninstall", "--yes", *stale], f"removing {', '.join(stale)}", env)
    for calls in pip_installs(parts, CACHE):
        # Compiling every module would double the time; Python compiles what is imported.
        first, *others = ([*pip, "install", "--no-compile", *words] for words in calls)
        follow(first, title, env, *others)


def pip_variables() -> "dict[str, str]":
    """Return the environment variables for a set-up, without settings that would install packages elsewhere."""
    stray = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN")
    return {key: value for key, value in os.environ.items() if key not in stray}


def move_venv(old: str) -> None:
    """Replace the old path of .venv in its scripts by the new one."""
    new = str(VENV.resolve())
    for path in [VENV / "pyvenv.cfg", *VENV_PYTHON.parent.iterdir()]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
            continue
        text = path.read_bytes()
        if old.encode() in text and b"\0" not in text:
            path.write_bytes(text.replace(old.encode(), new.encode()))
    write_stamp(dict(read_stamp(), home=new))


def inside_venv() -> bool:
    """Check whether this process runs on the Python of .venv."""
    return os.path.realpath(sys.prefix) == str(VENV.resolve())


def leave_venv() -> None:
    """Restart on the Python that .venv was made from, if this process runs on a .venv that is about to be replaced."""
    if not inside_venv():
        return
    # Before Python 3.11, sys._base_executable is .venv's own link; Windows has no link to follow.
    base = getattr(sys, "_base_executable", "") if os.name == "nt" else os.path.realpath(sys.executable)
    if not base or os.path.realpath(os.path.dirname(base)) == str(VENV_PYTHON.parent.resolve()):
        raise Problem(f".venv has to be replaced, which its own Python cannot do. Run: {command_line('python3')}")
    restart(base, dict(os.environ))


def put_first(name: str, entry: str, others: str) -> None:
    """Set a path-like environment variable to `entry` followed by the others."""
    rest = [other for other in others.split(os.pathsep) if other and other != entry]
    os.environ[name] = os.pathsep.join([entry, *rest])


def set_variables(python_is_ours: bool) -> None:
    """Set the environment so that child processes (workers, notebook kernels) find `helpers` and prefer this Python."""
    # The user's PYTHONPATH was not made for .venv.
    put_first("PYTHONPATH", str(ROOT), "" if python_is_ours else os.environ.get("PYTHONPATH", ""))
    kernels = os.path.join(sys.prefix, "share", "jupyter")  # before a python3 kernel that the user has installed
    put_first("JUPYTER_PATH", kernels, os.environ.get("JUPYTER_PATH", ""))
    # Some container images set it. Then each notebook, and each of the hundreds of programs that tests start, would
    # recompile the modules of the course and of .venv.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if python_is_ours:
        os.environ.pop("PYTHONHOME", None)
        os.environ["VIRTUAL_ENV"] = str(VENV)
        put_first("PATH", str(VENV_PYTHON.parent), os.environ.get("PATH", os.defpath))
