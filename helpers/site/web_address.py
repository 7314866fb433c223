"""The course's address: the only place that contains the repository's name."""

from __future__ import annotations

NAME = "OWNER/attention-course"
BRANCH = "main"


def address(path: str = "") -> str:
    """Return the web address of a file or folder of the repository, by its path from the root."""
    kind = "blob" if "." in path.rpartition("/")[2] else "tree"
    return f"https://github.com/{NAME}" + (f"/{kind}/{BRANCH}/{path}" if path else "")


def link(text: str, path: str = "") -> str:
    """Write a Markdown link to a file or folder of the repository; the text alone while NAME is the placeholder."""
    return f"[{text}]({address(path)})" if is_published() else text


def site(path: str = "") -> str:
    """Return the web address of a page or file of the site, as GitHub publishes it."""
    owner, _, name = NAME.partition("/")
    return f"https://{owner.lower()}.github.io/{name}/{path}"


def is_published() -> bool:
    """Check that NAME is not the placeholder: nothing may be fetched from somebody else's address."""
    return not NAME.startswith("OWNER/")


def open_in(notebook: str) -> dict[str, str]:
    """Map each service that opens a notebook with one click to its address. notebook: such as "01_naive.ipynb"."""
    return {
        "Colab": f"https://colab.research.google.com/github/{NAME}/blob/{BRANCH}/notebooks/{notebook}",
        "Binder": f"https://mybinder.org/v2/gh/{NAME}/{BRANCH}?urlpath=lab/tree/notebooks/{notebook}",
        "Codespaces": f"https://codespaces.new/{NAME}",
    }
