#!/usr/bin/env python3
"""The command of the course: lab, ladder, test, bench.

    python3 helpers/course.py lab        open the course in JupyterLab
    python3 helpers/course.py --help     everything else

On the first run it makes .venv beside environment.yml, installs the pip: block of that file into it, and
starts itself again there. Later runs see from a stamp in .venv that all is in place, and need no network.

Only the standard library is used here, and only syntax that Python 3.6 can parse: a Python that is too old
must still be able to read this file and say so.
"""

import argparse
import collections
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

OLDEST = (3, 10)
ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "environment.yml"
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "course.json"
CACHE = ROOT / ".cache"
LOG = CACHE / "setup.log"
ROOM = "1.1 GB"  # what a full .venv takes, for messages
READY = "COURSE_READY"  # set for one start only: the parent has just checked .venv


class Problem(Exception):
    """Something that the user can mend. The text says what, and how."""


def say(text: str) -> None:
    """Print one line of course.py's own on stderr, so that stdout belongs to the command."""
    print("course: " + text, file=sys.stderr, flush=True)


def command_line(*words: str) -> str:
    """The command that the user would type, for messages: this script as seen from the folder they are in."""
    try:
        script = os.path.relpath(str(ROOT / "helpers" / "course.py"))
    except ValueError:  # Windows: another drive
        script = str(ROOT / "helpers" / "course.py")
    return " ".join((*words, script, *sys.argv[1:]))


# ---------------------------------------------------------------------------------------------- the list


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


def the_list() -> "tuple[str, list[str]]":
    """read_list of the course's own environment.yml."""
    try:
        return read_list(LIST.read_text(encoding="utf-8"))
    except OSError as error:
        raise Problem(
            f"cannot read {LIST} ({error.strerror}). Run course.py from a whole copy of the course."
        ) from None


def fingerprint(requirements: "list[str]") -> str:
    """What the stamp remembers of the list."""
    return hashlib.sha256("\n".join(requirements).encode()).hexdigest()


# ------------------------------------------------------------------------------------- the state of .venv


def canonical(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def probe() -> "tuple[str, Path] | None":
    """("3.12", site-packages) of the Python in .venv, or None if it does not start."""
    code = (
        "import sys, sysconfig as s; print('%d.%d' % sys.version_info[:2]); print(s.get_paths()['purelib'])"
    )
    try:
        answer = subprocess.run(
            [str(VENV_PYTHON), "-I", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )
        version, folder = answer.stdout.decode().splitlines()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return version, Path(folder)


def installed(folder: Path) -> "tuple[set[str], bool]":
    """Names of the distributions in site-packages, and whether one of them was left half written.

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
    """What the last complete set-up wrote, or {}."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(requirements: "list[str]") -> None:
    """Mark the set-up as complete."""
    found = probe()
    if found is None:
        raise Problem(f"the Python in {VENV} does not start. Delete that folder and run this again.")
    stamp = {
        "list": fingerprint(requirements),
        "python": found[0],
        "home": str(VENV.resolve()),
        "packages": sorted(installed(found[1])[0]),
    }
    draft = STAMP.with_suffix(".tmp")
    draft.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    os.replace(str(draft), str(STAMP))


def venv_needs(requirements: "list[str]") -> "tuple[str, str]":
    """What has to be done to .venv, and why: ready, install (the list), move (its scripts) or make (all)."""
    if not os.path.lexists(str(VENV)):
        return "make", "first run"
    if not VENV_PYTHON.exists() or not (VENV / "pyvenv.cfg").is_file():
        gone = VENV_PYTHON.is_symlink() and not VENV_PYTHON.exists()
        cause = "the Python it was made from is gone" if gone else "an earlier set-up was stopped"
        return "make", f".venv does not work ({cause})"
    found = probe()
    if found is None:
        return "make", ".venv does not work (its Python does not start)"
    version, folder = found
    if tuple(int(part) for part in version.split(".")) < OLDEST:
        return "make", f".venv was made with Python {version}, which is too old"
    stamp = read_stamp()
    if stamp and stamp.get("python") != version:
        return "make", f".venv was made with Python {stamp.get('python')}, which is {version} now"
    names, torn = installed(folder)
    if torn:
        return "make", ".venv holds a half-written package (an earlier set-up was stopped)"
    if not stamp:
        return "install", ".venv is half made (an earlier set-up was stopped, or it was made by hand)"
    if stamp.get("home") != str(VENV.resolve()):
        return "move", f".venv was moved here from {stamp.get('home')}"
    if stamp.get("list") != fingerprint(requirements):
        return "install", "the list in environment.yml has changed"
    lost = sorted(set(stamp.get("packages", [])) - names)
    if lost:
        return "install", f".venv has lost {', '.join(lost[:3])}{' and more' if len(lost) > 3 else ''}"
    return "ready", ""


# ------------------------------------------------------------------------------------------------- set-up


@contextlib.contextmanager
def only_one():
    """Hold the lock of the set-up. The system frees it when the process ends, however it ends."""
    CACHE.mkdir(exist_ok=True)
    with open(str(CACHE / "course.lock"), "a") as lock:
        waiting = "another course.py is setting up .venv: waiting for it (Ctrl-C stops waiting)"
        if os.name == "nt":
            import msvcrt

            said = False
            while True:
                try:
                    msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
                    break
                except OSError:
                    if not said:
                        say(waiting)
                    said = True
                    time.sleep(1)
        else:
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(waiting)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # a network file system without locks: go on without
        yield


DISK = r"No space left on device|Errno 28|not enough space on the disk|Disk quota exceeded"
CERTIFICATE = r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError"
NETWORK = (
    r"NewConnectionError|NameResolutionError|name resolution|Name or service not known|getaddrinfo failed|"
    r"nodename nor servname|Network is unreachable|No route to host|Connection refused|Connection reset|"
    r"ConnectTimeout|ReadTimeout|Max retries exceeded|ProxyError|RemoteDisconnected|IncompleteRead"
)
KNOWN = "known to work are Python 3.10 to 3.13 on Linux (glibc) or macOS, 64 bits"
ENSUREPIP = r"ensurepip is not available|No module named '?(ensurepip|venv)"


def explain(doing: str, log: "list[str]") -> Problem:
    """The message for a step of the set-up that failed, from what it printed."""
    text = "\n".join(log)
    version = "{}.{}".format(*sys.version_info[:2])
    if re.search(ENSUREPIP, text):
        return Problem(no_venv_text())
    if re.search(DISK, text, re.I):
        folders = [str(ROOT), os.environ.get("TMPDIR", "/tmp")]
        free = [
            f"{path} has {shutil.disk_usage(path).free / 1e9:.1f} GB"
            for path in folders
            if os.path.isdir(path)
        ]
        why = f"the disk is full. {ROOM} are needed here, and 1 GB for temporary files ({', '.join(free)})."
        mend = "free some space, or set TMPDIR to a folder that has it."
    elif re.search(CERTIFICATE, text):
        why = "the certificate of the package index was refused. A proxy often puts its own in place."
        mend = "set PIP_CERT to the file of your network's certificate."
    elif re.search(NETWORK, text):
        why = "there is no network, or the package index does not answer. Only the set-up needs it."
        mend = "connect, or set HTTPS_PROXY or PIP_INDEX_URL as your network wants it."
    elif re.search(r"from versions: |No matching distribution", text):
        why = f"the package index has no such file for Python {version} on this system, or does not answer."
        mend = f"see that the network works; or change system: {KNOWN}."
    else:
        why = f"its last lines are above; {KNOWN}."
        mend = "do as the lines say, or delete .venv to start over."
    tail = "\n".join("    " + line[:150] for line in [line for line in log if line.strip()][-8:])
    where = f"\n    (all of it: {LOG})" if LOG.is_file() else ""
    again = f"Then run the same command again: {command_line('python3')}"
    return Problem(f"{doing} failed:\n{tail}{where}\n{why}\nMend: {mend}\n{again}")


def no_venv_text() -> str:
    """What to do about a Python without venv or ensurepip, as Debian and Ubuntu ship it."""
    version = "{}.{}".format(*sys.version_info[:2])
    return (
        f"this Python ({sys.executable}) cannot make a .venv: its module venv or ensurepip is missing.\n"
        f"Mend on Debian or Ubuntu: sudo apt install python3-venv   (or python{version}-venv)\n"
        f"Without root rights: conda env create -f environment.yml && conda activate {the_list()[0]}\n"
        f"Then run the same command again: {command_line('python3')}"
    )


class Progress:
    """What a long step does: one line that rewrites itself in a terminal, a line now and then in a log."""

    def __init__(self, title: str) -> None:
        self.title, self.state = title, "working"
        self.begin = time.monotonic()
        self.done = threading.Event()
        self.terminal = sys.stderr.isatty()
        self.thread = threading.Thread(target=self._show, daemon=True)

    def _show(self) -> None:
        while not self.done.wait(0.5 if self.terminal else 15):
            seconds = time.monotonic() - self.begin
            text = f"course: {seconds:4.0f} s  {self.state}"
            if self.terminal:
                width = shutil.get_terminal_size().columns - 1
                print("\r" + text[:width].ljust(width), end="", file=sys.stderr, flush=True)
            else:
                print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        say(self.title)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        if self.terminal:
            blank = " " * (shutil.get_terminal_size().columns - 1)
            print("\r" + blank, end="\r", file=sys.stderr, flush=True)

    def follow(self, line: str) -> None:
        """Take the news out of a line of pip's."""
        match = re.match(
            r"\s*(Collecting|Downloading|Using cached|Building|Installing collected)\s*(.*)", line
        )
        if match:
            what, name = match.groups()
            name = re.sub(r"^(\S+?)-\d\S*", r"\1", name)  # a file's name down to its package
            self.state = "writing the files" if what.startswith("Installing") else f"{what.lower()} {name}"


def follow(argv: "list[str]", title: str, env: "dict[str, str] | None" = None) -> None:
    """Run a step of the set-up with a line of progress.

    Raises Problem, with the last lines of what the step printed, if it fails.
    """
    log = collections.deque(maxlen=2000)  # type: collections.deque[str]
    with Progress(title) as progress, contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):  # a full disk must not hide the message about the full disk
            file = stack.enter_context(open(str(LOG), "w", encoding="utf-8"))
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(argv, env=env, cwd=str(ROOT), **pipe)
        try:
            for raw in child.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                log.append(line)
                progress.follow(line)
                if file:
                    with contextlib.suppress(OSError):
                        print(line, file=file, flush=True)
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if code:
        raise explain(title, list(log))


def make_venv(why: str) -> None:
    """Make .venv, without the packages; what is there goes.

    Raises Problem if this Python cannot, or if the disk does not let it.
    """
    if VENV.exists() and not VENV.is_dir():
        raise Problem(f"{VENV} is a file, a folder is wanted. Move it away and run the same command again.")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise Problem(no_venv_text())
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH")}
    title = f"{why}: making .venv with Python {sys.version.split()[0]}"
    follow([sys.executable, "-m", "venv", "--clear", str(VENV)], title, env)


def install(requirements: "list[str]", title: str) -> None:
    """pip install into .venv.

    Raises Problem if pip fails.
    """
    # Settings of the user's that would send the packages elsewhere do not apply here.
    stray = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN")
    env = {key: value for key, value in os.environ.items() if key not in stray}
    env.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONUNBUFFERED="1")
    env.setdefault("PIP_RETRIES", "3")
    folder = probe()
    if folder is not None and "pip" not in installed(folder[1])[0]:
        follow([str(VENV_PYTHON), "-I", "-m", "ensurepip", "--default-pip"], "putting pip into .venv", env)
    # Plain `-m pip`: under -I, pip would not read the PIP_ variables set here.
    follow([str(VENV_PYTHON), "-m", "pip", "install", "--prefer-binary", *requirements], title, env)


def move_venv(old: str) -> None:
    """Write the new place of .venv into its scripts, which name the Python of the old one."""
    new = str(VENV.resolve())
    for path in [VENV / "pyvenv.cfg", *VENV_PYTHON.parent.iterdir()]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
            continue
        text = path.read_bytes()
        if old.encode() in text and b"\0" not in text:
            path.write_bytes(text.replace(old.encode(), new.encode()))
    stamp = dict(read_stamp(), home=new)
    STAMP.write_text(json.dumps(stamp, indent=1), encoding="utf-8")


def set_up(requirements: "list[str]") -> None:
    """Bring .venv in order, if it is not.

    Raises Problem with what the user can do if that fails.
    """
    need, why = venv_needs(requirements)
    if need == "ready":
        return
    with only_one():
        need, why = venv_needs(requirements)  # again: another course.py may just have finished it
        if need == "move" and os.name == "nt":
            need = "make"  # its launchers are binaries with the old place inside
        if need == "move":
            say(f"{why}: mending its scripts")
            move_venv(read_stamp()["home"])
            need, why = venv_needs(requirements)
        if need == "ready":
            return
        if need == "make":
            leave_venv()
            make_venv(why)
        else:
            say(why)
        with contextlib.suppress(FileNotFoundError):
            STAMP.unlink()  # from here on .venv is half made, until the new stamp
        begin = time.monotonic()
        install(requirements, f"installing the list of environment.yml ({ROOM}, once)")
        write_stamp(requirements)
        say(f"installed in {time.monotonic() - begin:.0f} s")


def inside_venv() -> bool:
    """Whether this process runs on the Python of .venv."""
    return os.path.realpath(sys.prefix) == str(VENV.resolve())


def leave_venv() -> None:
    """Before .venv is made anew: if this very process runs on it, start again on the Python it came from."""
    if not inside_venv():
        return
    # Before Python 3.11, sys._base_executable is .venv's own link; on Windows there is no link to follow.
    base = getattr(sys, "_base_executable", "") if os.name == "nt" else os.path.realpath(sys.executable)
    if not base or os.path.realpath(os.path.dirname(base)) == str(VENV_PYTHON.parent.resolve()):
        raise Problem(f".venv must be made anew and cannot do it itself. Run: {command_line('python3')}")
    restart(base, dict(os.environ))


def restart(python: str, env: "dict[str, str]") -> None:
    """Run this script with the same arguments on another Python; does not come back."""
    become([python, str(Path(__file__).resolve()), *sys.argv[1:]], env)


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


# ---------------------------------------------------------------------------------------- the C++ compiler


def compiler() -> "str | None":
    """The C++ compiler that the CPU engine will find, or None."""
    for name in (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path and sys.platform == "darwin" and path.startswith("/usr/bin/"):
            # On macOS these are always there and ask for the developer tools in a window.
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            if subprocess.call(["/usr/bin/xcode-select", "-p"], **quiet):
                path = None
        if path:
            return path
    return None


COMPILER_MEND = "Mend: sudo apt install g++, or sudo dnf install gcc-c++, or on macOS xcode-select --install."
WARM_UP = "from helpers.cpu import compiler; compiler.engine_library()"


def need_compiler(may_install: bool) -> None:
    """See that kernels can be compiled for the CPU: with no compiler, install ziglang, which brings one.

    A failure is said and not raised: with a GPU the notebooks run without.
    """
    if os.name == "nt":
        say("on Windows kernels run on an NVIDIA GPU only. To run them on the CPU, use WSL:")
        say("wsl --install, then the same command in its window")
        return
    if compiler() or importlib.util.find_spec("ziglang"):
        return
    if not may_install:
        say(f"no C++ compiler found: kernels run on a GPU only. {COMPILER_MEND} Or: pip install ziglang")
        return
    try:
        with only_one():
            importlib.invalidate_caches()
            if importlib.util.find_spec("ziglang"):  # another course.py has just installed it
                return
            install(["ziglang"], "no C++ compiler found: installing one into .venv (ziglang, 100 MB, once)")
            # The first compilation builds zig's own C++ library: done here, where a line says so.
            follow([sys.executable, "-c", WARM_UP], "compiling the CPU engine with it (a minute or two, once)")
            importlib.invalidate_caches()
    except (Problem, OSError) as problem:
        say(str(problem))
        say(f"going on without a C++ compiler: kernels run on a GPU only. {COMPILER_MEND}")


# ------------------------------------------------------------------------------------------ your own Python


def missing_here(requirements: "list[str]") -> "list[str]":
    """The requirements that this Python does not meet, markers and versions taken into account."""
    from importlib import metadata

    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    present = {canonical(found.metadata["Name"] or ""): found.version for found in metadata.distributions()}
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
    mend = "{} -m pip install {}".format(sys.executable, " ".join(f'"{item}"' for item in missing))
    if missing:
        say(f"this Python ({sys.executable}) lacks {', '.join(missing)}\n    {mend}")
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise Problem(f"this command needs {', '.join(absent)}. Install what is missing with the line above.")


# --------------------------------------------------------------------------------------------- the commands


def run(argv: "list[str]") -> int:
    """Run a program in the repository's root; its exit code, or 130 after Ctrl-C."""
    child = subprocess.Popen(argv, cwd=str(ROOT))
    try:
        return child.wait()
    except KeyboardInterrupt:  # a terminal tells the child as well: let it clean up
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(20)
            return 130
        child.kill()
        child.wait()
        return 130


def absolute(words: "list[str]") -> "tuple[list[str], bool]":
    """The words, paths in them made absolute (they are typed in the user's folder); whether there are any."""
    result, any_path = [], False
    for word in words:
        path, colons, rest = word.partition("::")
        if path and not path.startswith("-") and os.path.exists(path) and (os.sep in path or "." in path):
            word, any_path = os.path.abspath(path) + colons + rest, True
        result.append(word)
    return result, any_path


def in_use(port: int) -> bool:
    """Whether something on this machine listens at the port."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe_socket:
            probe_socket.settimeout(0.5)
            if probe_socket.connect_ex((host, port)) == 0:
                return True
    return False


def lab(words: "list[str]") -> int:
    """Start JupyterLab in the root of the repository, at the first notebook. Does not come back."""
    words, named = absolute(words)
    argv = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    if not any(re.match(r"--(port|\w+\.port)\b", word) for word in words):
        wanted = os.environ.get("JUPYTER_PORT", "")
        wanted = int(wanted) if wanted.isdigit() else 8888
        port = next((port for port in range(wanted, min(wanted + 100, 65536)) if not in_use(port)), wanted)
        if port != wanted:
            say(f"port {wanted} is in use: JupyterLab takes {port} (its address is in the lines below)")
            argv.append(f"--ServerApp.port={port}")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        argv.append("--allow-root")  # a container: Jupyter would refuse, though it serves this machine only
    argv += words
    if not named:
        pages = [*sorted(ROOT.glob("notebooks/00*.ipynb")), ROOT / "README.md"]
        argv += [str(page) for page in pages if page.is_file()][:1]
    say("starting JupyterLab; Ctrl-C twice ends it")
    os.chdir(str(ROOT))
    become(argv, dict(os.environ))
    return 0


def test(words: "list[str]", quick: bool) -> int:
    """ruff, then pytest over tests and notebooks. 0 if both pass."""
    begin = time.monotonic()
    ruff = run([sys.executable, "-m", "ruff", "check", "."])
    if ruff == 130:
        return 130
    words, named = absolute(words)
    argv = [sys.executable, "-m", "pytest"]
    folders = ["tests"] if quick else ["tests", "notebooks"]
    argv += [] if named else [folder for folder in folders if (ROOT / folder).is_dir()]
    if not quick:
        argv += ["--nbval", "--nbval-current-env", "--nbval-cell-timeout", "120"]
        if (ROOT / "tests" / "sanitize.cfg").is_file():
            argv += ["--nbval-sanitize-with", "tests/sanitize.cfg"]
    # A file's tests share a worker: the cells of a notebook need one another.
    pytest = run([*argv, "-n", "2", "--dist", "loadfile", *words])
    minutes, seconds = divmod(round(time.monotonic() - begin), 60)
    verdict = {0: "passed", 130: "stopped"}
    parts = f"ruff {verdict.get(ruff, 'FAILED')}, pytest {verdict.get(pytest, 'FAILED')}"
    print(f"course: {parts} in {minutes} min {seconds} s", flush=True)
    return pytest or ruff


def ladder(words: "list[str]") -> int:
    """helpers.bench.ladder: each stage on this machine's device."""
    from helpers import bench

    return bench.ladder(words) or 0


def bench(words: "list[str]") -> int:
    """helpers.bench.bench: the ladder with peers, on a GPU."""
    from helpers import bench

    return bench.bench(words) or 0


# ---------------------------------------------------------------------------------------------- the entry

LAB = "open the course in JupyterLab, at the first notebook"
LADDER = "run each stage on this machine's device: check, max error, time, TFLOP/s, in a table"
TEST = "run every test and every notebook"
BENCH = "on a GPU: the ladder with named peers, measured in the same run"

EPILOG = f"""\
The first run makes .venv in the course's folder and installs the list in environment.yml into it ({ROOM},
a few minutes). Later runs start at once and need no network. Delete .venv to start over.

examples:
  python3 helpers/course.py lab
  python3 helpers/course.py lab -- --no-browser --port 9000     what follows -- goes to JupyterLab
  python3 helpers/course.py ladder
  python3 helpers/course.py test --quick                        without the notebooks
  python3 helpers/course.py test -- tests/test_course.py -x     what follows -- goes to pytest
"""


def parser() -> argparse.ArgumentParser:
    """The command line, as --help shows it."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--this-python",
        action="store_true",
        default=argparse.SUPPRESS,
        help="use the Python that runs this, as it is, and install nothing (a conda environment made from "
        "environment.yml is used by itself)",
    )
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="course.py",
        description="FlashAttention from scratch, in CuPy: the command of the course.",
        epilog=EPILOG,
        formatter_class=raw,
        parents=[own],
    )
    commands = top.add_subparsers(dest="command", metavar="{lab,ladder,test,bench}", title="commands")
    more = "What follows -- goes to {}."
    commands.add_parser("lab", help=LAB, parents=[own], description=f"{LAB}. {more.format('JupyterLab')}")
    text = f"{LADDER}. Other arguments go to helpers/bench.py, whose --help is shown here once .venv exists."
    commands.add_parser("ladder", help=LADDER, parents=[own], description=text)
    text = f"{TEST}. {more.format('pytest')}"
    tests = commands.add_parser("test", help=TEST, parents=[own], description=text)
    tests.add_argument("--quick", action="store_true", help="leave the notebooks out")
    text = f"{BENCH}. Other arguments go to helpers/bench.py, whose --help is shown here once .venv exists."
    commands.add_parser("bench", help=BENCH, parents=[own], description=text)
    return top


def old_python() -> "str | None":
    """The message for a Python that is too old, naming a newer one of this machine; None if it is not."""
    if tuple(sys.version_info[:2]) >= OLDEST:
        return None
    wanted = "{}.{}".format(*OLDEST)
    text = f"Python {sys.version.split()[0]} ({sys.executable}) is too old, {wanted} or newer is needed."
    for minor in range(20, OLDEST[1] - 1, -1):
        name = f"python3.{minor}"
        # A name on the path may be a shim with nothing behind it: see that it starts.
        if shutil.which(name) and subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return f"{text}\nMend: this machine has {name}. Run: {command_line(name)}"
    return (
        f"{text}\nMend: install one from python.org, or with conda: conda env create -f environment.yml && "
        f"conda activate {the_list()[0]}"
    )


def put_first(name: str, entry: str, others: str) -> None:
    """Set a path-like environment variable to `entry`, then the others without it."""
    rest = [other for other in others.split(os.pathsep) if other and other != entry]
    os.environ[name] = os.pathsep.join([entry, *rest])


def use_environment(python_is_ours: bool) -> None:
    """Let all that is started from here (workers, notebook kernels) find `helpers`, and this Python first."""
    # Python has put the script's folder in front, but its modules are not top-level ones.
    here = (str(ROOT / "helpers"), str(ROOT))
    sys.path[:] = [str(ROOT), *[entry for entry in sys.path if os.path.realpath(entry or ".") not in here]]
    # What a PYTHONPATH of the user's holds was not made for .venv.
    put_first("PYTHONPATH", str(ROOT), "" if python_is_ours else os.environ.get("PYTHONPATH", ""))
    kernels = os.path.join(sys.prefix, "share", "jupyter")  # before a python3 kernel installed for the user
    put_first("JUPYTER_PATH", kernels, os.environ.get("JUPYTER_PATH", ""))
    if python_is_ours:
        os.environ.pop("PYTHONHOME", None)
        os.environ["VIRTUAL_ENV"] = str(VENV)
        put_first("PATH", str(VENV_PYTHON.parent), os.environ.get("PATH", os.defpath))


def work(arguments: "list[str]") -> int:
    """Set up, then run the command. The exit code.

    Raises Problem with what the user can mend.
    """
    text = old_python()
    if text:
        raise Problem(text)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, words = arguments[:cut], arguments[cut + 1 :]
    name, requirements = the_list()
    # The help of ladder and bench is that of helpers/bench.py, if it can run without a set-up.
    passed_on = len(own) > 1 and own[0] in ("ladder", "bench") and {"-h", "--help"} & set(own)
    if passed_on and venv_needs(requirements)[0] == "ready":
        own, words = [word for word in own if word not in ("-h", "--help")], ["--help", *words]
    top = parser()
    options, rest = top.parse_known_args(own)
    if options.command in ("lab", "test") and rest:
        receiver = "JupyterLab" if options.command == "lab" else "pytest"
        top.error(f"unknown: {' '.join(rest)}. Arguments for {receiver} come after a --")
    if options.command is None:
        if rest or words:
            top.error(f"which command? lab, ladder, test or bench; got {' '.join(rest + words)}")
        top.print_help()
        return 2
    words = rest + words

    prefix = os.environ.get("CONDA_PREFIX", sys.prefix)
    conda = os.environ.get("CONDA_DEFAULT_ENV") == name and os.path.realpath(prefix) == os.path.realpath(
        sys.prefix
    )
    theirs = conda or getattr(options, "this_python", False)
    if theirs:
        modules = {"lab": ["jupyterlab", "ipykernel"], "test": ["ruff", "pytest", "nbval", "xdist"]}
        use_this_python(requirements, modules.get(options.command, ["numpy"]))
    else:
        if os.environ.pop(READY, None) != str(VENV):
            try:
                set_up(requirements)
            except OSError as error:
                raise Problem(
                    f"the set-up stopped: {error}\nMend: see that {ROOT} is yours to write in and that the disk "
                    f"has room, or copy the course elsewhere. Then run: {command_line('python3')}"
                ) from None
        if not inside_venv():
            restart(str(VENV_PYTHON), dict(os.environ, **{READY: str(VENV)}))
    use_environment(python_is_ours=not theirs)
    need_compiler(may_install=not theirs)
    if options.command == "lab":
        return lab(words)
    if options.command == "test":
        return test(words, options.quick)
    return ladder(words) if options.command == "ladder" else bench(words)


def main() -> int:
    """work(), with every error that a user may meet as a message."""
    try:
        return work(sys.argv[1:])
    except Problem as problem:
        say(str(problem))
        return 1
    except KeyboardInterrupt:
        say("stopped. Run the same command again: it goes on from where it was")
        return 130


if __name__ == "__main__":
    sys.exit(main())
