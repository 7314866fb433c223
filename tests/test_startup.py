"""The set-up configures IPython: %%cuda before a notebook's first cell says what to do."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.setup import startup

ROOT = Path(__file__).resolve().parent.parent


def config(prefix: Path) -> Path:
    return prefix / "etc" / "ipython" / "ipython_config.py"


def test_it_is_written_once_and_brought_up_to_date(tmp_path: Path) -> None:
    startup.write(str(tmp_path))
    assert config(tmp_path).read_text() == startup.CONFIG
    config(tmp_path).write_text(startup.MARK + "\n# an older one")
    startup.write(str(tmp_path))
    assert config(tmp_path).read_text() == startup.CONFIG
    assert [path.name for path in config(tmp_path).parent.iterdir()] == ["ipython_config.py"]


@pytest.mark.parametrize("theirs", [b"c.InteractiveShellApp.exec_lines = []\n", b"", b"\xff"])
def test_a_users_own_file_is_left_alone(tmp_path: Path, theirs: bytes) -> None:
    config(tmp_path).parent.mkdir(parents=True)
    config(tmp_path).write_bytes(theirs)
    startup.write(str(tmp_path))
    assert config(tmp_path).read_bytes() == theirs


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file where a folder should be")
    startup.write(str(tmp_path))
    startup.write(str(tmp_path / "etc"))
    assert stat.S_ISREG((tmp_path / "etc").stat().st_mode)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A kernel as JupyterLab starts it, on a Python whose prefix has the file."""
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("prefix")
    startup.write(str(folder))
    start = f"import sys; sys.prefix = {str(folder)!r}; from ipykernel.kernelapp import launch_new_instance as go; go()"
    spec = {"argv": [sys.executable, "-c", start, "-f", "{connection_file}"], "display_name": "x", "language": "python"}
    kernels = folder / "share" / "jupyter" / "kernels" / "with-startup"
    kernels.mkdir(parents=True)
    (kernels / "kernel.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(kernels.parent.parent))
        patch.setenv("IPYTHONDIR", str(folder / "profile"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        manager, client = jupyter_client.manager.start_new_kernel(kernel_name="with-startup", startup_timeout=600)
        try:
            yield client
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def printed(client: Any, code: str) -> str:
    texts: list[str] = []

    def keep(message: Any) -> None:
        content = message["content"]
        texts.append(content.get("text", "") or "\n".join(content.get("traceback", ())))

    client.execute_interactive(code, output_hook=keep, timeout=600)
    return "".join(texts)


def test_before_the_first_cell_the_magic_says_what_to_do(client: Any) -> None:
    out = printed(client, "%%cuda 01_coalesced_scores\nint x;")
    assert out == ("[FAIL] %%cuda comes with the first code cell of this notebook: run that one, then this one again\n")
    assert printed(client, "print([name for name in dir() if 'cuda' in name], len(In))") == "[] 3\n"


def test_after_it_the_magic_grades(client: Any) -> None:
    assert printed(client, "from helpers.lesson.exercises import exercise") == ""
    assert "[FAIL] %%cuda nothing: no such exercise" in printed(client, "%%cuda nothing\nint x;")
