"""Set up a notebook that was opened alone, as on Colab: its first cell fetches the course, then calls this.

    set_up(least=80)      # the notebook's kernels need compute capability 8.0

It installs the few packages that are missing, makes the course's notebooks/ the current folder, as links and files in
cells expect, and prints what runs the kernels here. If this machine's GPU cannot run the notebook's kernels, the CPU
engine does. It runs before anything else of the course is imported, and imports nothing that looks for a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.setup.requirements import the_list

ROOT = Path(__file__).resolve().parents[2]
# What notebooks import, and its module's name. The rest of the list is for JupyterLab, tests and the site. CuPy comes
# with machines that have a GPU, and is useless on others.
NEEDED = {
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
    "matplotlib": "matplotlib",
    "pillow": "PIL",
    "ipywidgets": "ipywidgets",
    "pyelftools": "elftools",
}
COMPILERS = ("g++", "c++", "clang++")


def missing() -> list[str]:
    """List the needed packages that are not installed, as requirements of environment.yml."""
    absent = [name for name, module in NEEDED.items() if importlib.util.find_spec(module) is None]
    listed = {re.split(r"[<>=!;\s]", line)[0]: line for line in the_list()[1]}
    return [listed[name] for name in absent]


def gpu() -> tuple[str, int] | None:
    """Return the name and compute capability (75 for 7.5) of the GPU that CuPy finds; None without a GPU or CuPy."""
    try:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        return properties["name"].decode(), 10 * properties["major"] + properties["minor"]
    except Exception:  # a broken installation of CuPy can raise anything
        return None


def set_up(least: int = 0, *, only: bool = False) -> None:
    """Prepare this process for the notebook, and print what its kernels will run on.

    Args:
        least: the lowest compute capability that the notebook's kernels run on, 80 for 8.0; 0 for any.
        only: they run on no other compute capability.
    """
    wanted = missing()
    if wanted:
        _install(wanted)
    sys.path.insert(0, str(ROOT))  # the cell added a relative path, which is right in the current folder only
    os.chdir(ROOT / "notebooks")
    print(_device(least, only))
    if _has_compiler():
        print(_engine_built_ahead())


class PackagesMissing(ImportError):
    """Packages that the notebook needs could not be installed. IPython shows the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def _install(wanted: list[str]) -> None:
    print(f"installing {', '.join(wanted)}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise PackagesMissing(
            f"This notebook needs {', '.join(wanted)}, which pip could not install ({said}). It needs the internet "
            "(on Kaggle: Settings, Turn on internet). Then run this cell again."
        )
    importlib.invalidate_caches()


def _device(least: int, only: bool) -> str:
    """Describe what runs the kernels; switch to the engine if the GPU cannot run them."""
    device = gpu()
    if device is None:
        os.environ.setdefault("COURSE_DEVICE", "cpu")
        if not _has_compiler():
            return "no GPU, and no C++ compiler for the CPU engine: install g++ (apt install g++), then run this again"
        return "no GPU: the kernels run on the CPU engine, where results are real and times are not a GPU's"
    name, capability = device
    if capability < least or (only and capability != least):
        os.environ["COURSE_DEVICE"] = "cpu"
        needs = f"{least / 10}{' and no other' if only else ' or newer'}"
        return (
            f"{name} has compute capability {capability / 10}; the kernels of this notebook need {needs}, so the CPU "
            f"engine runs them. Measured times are an H200's, and recorded"
        )
    return f"{name} (compute capability {capability / 10}) runs the kernels of this notebook"


def _has_compiler() -> bool:
    return "CXX" in os.environ or any(map(shutil.which, COMPILERS))


def _engine_built_ahead() -> str:
    """Start compiling the CPU engine, which X-rays need even with a GPU. Returns a message about it."""
    from helpers.engine import compiler, first_build

    try:
        if compiler.engine_is_built():
            return "ready"
    except RuntimeError as error:
        return str(error)
    first_build.begin()
    return (
        "ready; the CPU engine is being compiled: the first kernel on it waits up to a minute, the others start at once"
    )
