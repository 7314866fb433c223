"""A long step of the set-up: a line of progress while it runs and, if it fails, the likely reason and what to do.

The step's output goes to .cache/setup.log. Only its progress is shown and, after a failure, its last lines.
"""

import collections
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time

from helpers.setup.requirements import KNOWN, ROOM, the_list
from helpers.setup.script import CACHE, ROOT, Problem, command_line, say

LOG = CACHE / "setup.log"
DISK = r"No space left on device|Errno 28|not enough space on the disk|Disk quota exceeded"
CERTIFICATE = r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError"
NETWORK = (
    r"NewConnectionError|NameResolutionError|name resolution|Name or service not known|getaddrinfo failed|"
    r"nodename nor servname|Network is unreachable|No route to host|Connection refused|Connection reset|"
    r"ConnectTimeout|ReadTimeout|Max retries exceeded|ProxyError|RemoteDisconnected|IncompleteRead"
)


def follow(argv: "list[str]", title: str, env: "dict[str, str] | None" = None, *more: "list[str]") -> None:
    """Run a step of the set-up with a line of progress. more: programs that run in parallel.

    Raises Problem, with the last lines of what the step printed, if it fails.
    """
    failed = []  # type: list[collections.deque[str]]
    with Progress(title) as progress, contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):  # a full disk must not hide the message that the disk is full
            file = stack.enter_context(open(str(LOG), "w", encoding="utf-8"))
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        children = [subprocess.Popen(each, env=env, cwd=str(ROOT), **pipe) for each in (argv, *more)]

        def read(child: "subprocess.Popen") -> None:
            log = collections.deque(maxlen=2000)  # type: collections.deque[str]
            for raw in child.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                log.append(line)
                progress.follow(line)
                if file:
                    with contextlib.suppress(OSError):
                        print(line, file=file, flush=True)
            if child.wait():
                failed.append(log)

        readers = [threading.Thread(target=read, args=(child,), daemon=True) for child in children]
        try:
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        except BaseException:
            for child in children:
                child.terminate()
            for child in children:
                child.wait()
            raise
    if failed:
        raise explain(title, list(failed[0]))


class Progress:
    """The progress of a long step: a line that is rewritten in a terminal, or repeated now and then in a log."""

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
        """Update the state from a line of pip's output."""
        match = re.match(r"\s*(Collecting|Downloading|Using cached|Building|Installing collected)\s*(.*)", line)
        if match:
            what, name = match.groups()
            name = re.sub(r"^(\S+?)-\d\S*", r"\1", name)  # reduce a file's name to its package
            self.state = "writing the files" if what.startswith("Installing") else f"{what.lower()} {name}"


def explain(doing: str, log: "list[str]") -> Problem:
    """Explain from its output why a step of the set-up failed."""
    text = "\n".join(log)
    version = "{}.{}".format(*sys.version_info[:2])
    if re.search(DISK, text, re.I):
        folders = [str(ROOT), os.environ.get("TMPDIR", "/tmp")]
        free = [f"{path} has {shutil.disk_usage(path).free / 1e9:.1f} GB" for path in folders if os.path.isdir(path)]
        why = f"the disk is full. {ROOM} are needed here, and 1 GB for temporary files ({', '.join(free)})."
        fix = "free some space, or set TMPDIR to a folder that has some."
    elif re.search(CERTIFICATE, text):
        why = "the certificate of the package index was refused. Proxies often substitute their own."
        fix = "set PIP_CERT to the file of your network's certificate."
    elif re.search(NETWORK, text):
        why = "there is no network, or the package index does not answer. Only the set-up needs it."
        fix = "connect, or set HTTPS_PROXY or PIP_INDEX_URL as your network requires."
    elif "DO NOT MATCH THE HASHES" in text:
        why = "the package index has another file of this version than the lock in helpers/setup/locked."
        fix = "let PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS name indexes with the published files."
    elif re.search(r"from versions: |No matching distribution", text):
        why = f"the package index has no such file for Python {version} on this system, or does not answer."
        fix = f"check the network, or use another system: {KNOWN}."
    else:
        why = f"its last lines are above; {KNOWN}."
        fix = "follow the lines above, or delete .venv to start over."
    tail = "\n".join("    " + line[:150] for line in [line for line in log if line.strip()][-8:])
    where = f"\n    (all of it: {LOG})" if LOG.is_file() else ""
    again = f"Then run the same command again: {command_line('python3')}"
    return Problem(f"{doing} failed:\n{tail}{where}\n{why}\nFix: {fix}\n{again}")


def no_venv_text() -> str:
    """Say what to do about a Python without venv or ensurepip, as Debian and Ubuntu ship it."""
    version = "{}.{}".format(*sys.version_info[:2])
    return (
        f"this Python ({sys.executable}) cannot make a .venv: its module venv or ensurepip is missing.\n"
        f"Fix on Debian or Ubuntu: sudo apt install python3-venv   (or python{version}-venv)\n"
        f"Without root rights: conda env create -f environment.yml && conda activate {the_list()[0]}\n"
        f"Then run the same command again: {command_line('python3')}"
    )
