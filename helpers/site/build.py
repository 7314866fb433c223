"""Write the sources of the site's pages, and run Sphinx over them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.site import (
    architectures_page,
    card,
    climb_page,
    export_pages,
    gpu_page,
    kernel_pages,
    measured_pages,
    mistakes,
    notebook_pages,
    readme_pages,
    xrays,
)
from helpers.site.links import ROOT, Links

SETTINGS = Path(__file__).resolve().parent / "sphinx"
FOLDER = ROOT / "book"
EXTRA = "extra"  # in the folder of the sources: what the site has besides its pages
# Texts of the repository that become pages unchanged, by their heading in the sidebar.
TEXTS = {
    "The course": ["notebooks/glossary.md", "notebooks/references.md"],
    "For teachers": ["teachers/README.md"],
    "About": ["CHANGELOG.md", "CONTRIBUTING.md", "helpers/README.md", "helpers/engine/README.md"],
}


ICONS = "_static/scripts/fontawesome.js"  # the theme's 2,000 icons, a third of a first visit's download
_ICON = re.compile(r"""(?P<quote>"?)(?P<name>[\w-]+)(?P=quote):\[\d+,\d+,\[[^\]]*\],"\w+",(?:"[^"]*"|\[[^\]]*\])\],?""")


class BookFailed(RuntimeError):
    """Sphinx found an error in the pages; the message is Sphinx's."""


def sources(folder: Path) -> None:
    """Write the source of every page into an empty folder.

    Raises:
        ValueError: a link in a text is broken.
    """
    readme = (ROOT / readme_pages.FILE).read_text(encoding="utf-8")
    texts = {name: [file for file in files if (ROOT / file).is_file()] for name, files in TEXTS.items()}
    books = [path.relative_to(ROOT).as_posix() for path in notebook_pages.paths()]
    listed = [path.relative_to(ROOT).as_posix() for path in kernel_pages.files()]
    pages = {file: f"{file}.md" for file in listed}
    pages |= {file: file for file in [*books, *(file for files in texts.values() for file in files)]}
    pages |= {"README.md": "index.md", "notebooks": "index.md", "kernels": "kernels/index.md"}
    pages |= {f"kernels/{group}": f"kernels/{group}/index.md" for group in kernel_pages.GROUPS if group}
    links = Links(pages, readme_pages.anchors(readme))

    written = readme_pages.sections(readme, links)
    about = list(written)
    for path, file in zip(notebook_pages.paths(), books, strict=True):
        written[file] = json.dumps(notebook_pages.page(path, links), ensure_ascii=False)
    for file in (file for files in texts.values() for file in files):
        written[file] = links.rewrite((ROOT / file).read_text(encoding="utf-8"), file)
    ideas, before, recorded = kernel_pages.ideas(), kernel_pages.before(), xrays.on_cpu()
    for path, file in zip(kernel_pages.files(), listed, strict=True):
        name = file.removeprefix("kernels/")
        written[f"{file}.md"] = kernel_pages.page(path, ideas, before, recorded.get(name))
    written["kernels/index.md"] = kernel_pages.index()
    written |= {f"kernels/{group}/index.md": kernel_pages.group_index(group) for group in kernel_pages.GROUPS if group}
    written["teachers/mistakes.md"] = mistakes.page_on_cpu()
    climb, roofline = climb_page.page()
    written |= (
        export_pages.pages()
        | measured_pages.pages()
        | {
            "climb.md": climb,
            "gpus.md": gpu_page.page(),
            "architectures.md": architectures_page.page(),
        }
    )
    trees = [
        readme_pages.toctree([*books, *texts["The course"]], "The course"),
        readme_pages.toctree(["kernels/index.md", "exports/index.md"], "Kernels"),
        readme_pages.toctree(["climb.md", "gpus.md", "architectures.md", "measured/index.md"], "Measured"),
        readme_pages.toctree([*texts["For teachers"], "teachers/mistakes.md"], "For teachers"),
        readme_pages.toctree([*about, *texts["About"]], "About"),
    ]
    written["index.md"] = readme_pages.front(readme, links) + "\n" + "\n".join(trees)

    for file, text in written.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    if roofline:
        (folder / climb_page.PICTURE).write_bytes(roofline)
    extra = folder / EXTRA
    extra.mkdir()
    (extra / "card.png").write_bytes(card.png(*readme_pages.summary(readme)))
    (extra / "notebooks").mkdir()
    for path in notebook_pages.paths():
        shutil.copyfile(path, extra / "notebooks" / path.name)
    for image in links.images:
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / image, folder / image)


def build(folder: Path = FOLDER, words: Sequence[str] = ()) -> Path:
    """Make the site: folder/source, then folder/html. Returns the path of its first page.

    Args:
        words: further options for Sphinx.

    Raises:
        BookFailed: Sphinx warned about a page, such as about a broken link within the site; or is not installed.
        RuntimeError: a usual mistake is no longer planted, or passes; a kernel could not be launched for its X-ray.
        ValueError: a link in a text is broken.
    """
    source, html = folder / "source", folder / "html"
    for old in (source, html):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir(parents=True)
    sources(source)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", SETTINGS, "-d", folder / "doctrees", "-q", "-W"]
    command += ["-D", f"html_extra_path={source / EXTRA}"]
    done = subprocess.run([*command, "--keep-going", *words, source, html], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BookFailed((done.stdout + done.stderr).strip())
    _lighten(html)
    return html / "index.html"


def _lighten(html: Path) -> None:
    """Remove from the site what no page uses: the theme's icons, and its scripts' source maps."""
    for file in html.joinpath("_static").rglob("*.map"):
        file.unlink()
    icons = html / ICONS
    if not icons.is_file():
        return
    texts = [*html.rglob("*.html"), *(file for file in html.joinpath("_static").rglob("*.js") if file != icons)]
    used = {name for file in texts for name in re.findall(r"\bfa-([a-z0-9-]+)", file.read_text(encoding="utf-8"))}
    text = icons.read_text(encoding="utf-8")
    icons.write_text(_ICON.sub(lambda icon: icon[0] if icon["name"] in used else "", text), encoding="utf-8")
