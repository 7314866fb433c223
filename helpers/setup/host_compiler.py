"""The C++ compiler that kernels need without a GPU: the machine's own, else ziglang in .venv.

The CPU engine is compiled once, which takes half a minute: `lab` does it while packages are installed.
"""

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys

from helpers.setup.environment import install, only_one
from helpers.setup.progress import follow
from helpers.setup.script import CACHE, ROOT, Problem, say

COMPILER_FIX = "Fix: sudo apt install g++, or sudo dnf install gcc-c++, or on macOS xcode-select --install."
WARM_UP = "from helpers.engine import compiler; compiler.engine_library()"
# Exits with 3 if the engine is not compiled yet.
LOOK = "import sys; from helpers.engine import compiler; sys.exit(0 if compiler.engine_is_built() else 3)"
# WARM_UP for a Python without NumPy: without the package's __init__, which the compiler does not need.
WITHOUT_PACKAGES = (
    "import sys, types; engine = types.ModuleType('helpers.engine'); engine.__path__ = ['helpers/engine']; "
    "sys.modules['helpers.engine'] = engine; " + WARM_UP
)


def need_compiler(may_install: bool) -> None:
    """Make sure that kernels can be compiled for the CPU: without a compiler, install ziglang, which includes one.

    A failure is printed, not raised: with a GPU the notebooks need no compiler.
    """
    if os.name == "nt":
        say("on Windows kernels run on an NVIDIA GPU only. To run them on the CPU, use WSL:")
        say("wsl --install, then the same command in its window")
        return
    if compiler() or importlib.util.find_spec("ziglang"):
        return
    if not may_install:
        say(f"no C++ compiler found: kernels run on a GPU only. {COMPILER_FIX} Or: pip install ziglang")
        return
    try:
        with only_one():
            importlib.invalidate_caches()
            if importlib.util.find_spec("ziglang"):  # another course.py has installed it meanwhile
                return
            install(["compiler"], "no C++ compiler found: installing one into .venv (ziglang, 100 MB, once)")
            # The first compilation builds zig's own C++ library: done here, with a message.
            follow([sys.executable, "-c", WARM_UP], "compiling the CPU engine with it (a minute or two, once)")
            importlib.invalidate_caches()
    except (Problem, OSError) as problem:
        say(str(problem))
        say(f"going on without a C++ compiler: kernels run on a GPU only. {COMPILER_FIX}")


def before_the_packages() -> None:
    """Start compiling the engine, in parallel with pip; report at once if there is no compiler."""
    if os.name == "nt":
        return
    if not compiler():
        say("no C++ compiler found: kernels run on a CPU only with one. One of 100 MB (ziglang) is installed")
        say(f"after the packages. Or stop here with Ctrl-C and take your system's. {COMPILER_FIX}")
        return
    with contextlib.suppress(OSError), open(str(CACHE / "engine.log"), "w") as log:
        env = dict(os.environ, PYTHONPATH=str(ROOT))
        subprocess.Popen([sys.executable, "-c", WITHOUT_PACKAGES], cwd=str(ROOT), env=env, stdout=log, stderr=log)


def compiler() -> "str | None":
    """Return the C++ compiler that the CPU engine will find, or None."""
    for name in (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path and sys.platform == "darwin" and path.startswith("/usr/bin/"):
            # On macOS these always exist, and open a window that offers the developer tools.
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            if subprocess.call(["/usr/bin/xcode-select", "-p"], **quiet):
                path = None
        if path:
            return path
    return None
