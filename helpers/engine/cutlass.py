"""CuTe: the headers of NVIDIA's CUTLASS, if a kernel's options name their folder. They are not part of this repository.

The headers in `-I<folder>` are compiled unchanged, except for three things, which are changed in copies that come
before the originals on the compiler's path:

- inline PTX, of which CuTe's atoms are made, becomes calls of the engine, as in a kernel. An unknown instruction fails
  when a thread reaches it, since a kernel uses only a few of the atoms;
- `cuda::std`, under which CuTe declares its tuples to NVRTC, is the host's `std` here;
- a header that NVRTC needs because it has no <cmath>.

The copies are made once for each version of the headers, and kept with the builds.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from . import compiler, libraries, ptx
from .cuda_source.source import blank_comments

_FOLDERS = ("cute", "cutlass")
_INCLUDE = re.compile(r"^\s*#\s*include\s*<((?:cute|cutlass)/[^>]+)>", re.M)
# Architectures whose atoms the headers leave out for compute capability 9.0, and the longest lists of wgmma, which no
# kernel gets without asking for them.
_LEFT_OUT = re.compile(r"(sm100|sm120|sparse|_ext)")


def includes(code: str) -> list[str]:
    """Return the headers of CUTLASS that a source includes, as it writes them."""
    return list(dict.fromkeys(_INCLUDE.findall(blank_comments(code))))


def compiled(flags: Iterable[str]) -> list[str]:
    """Replace each `-I<folder>` of CUTLASS's headers by its changed copies, then by the folder itself.

    Both are system folders: their warnings are not shown, and the preprocessed text of a build does not contain them.
    """
    options: list[str] = []
    for flag in flags:
        folder = Path(flag[2:])
        if flag.startswith("-I") and (folder / "cute" / "config.hpp").is_file():
            options += ["-isystem", str(_copies(folder)), "-isystem", str(folder)]
        else:
            options.append(flag)
    return options


@functools.cache
def _copies(folder: Path) -> Path:
    """Return the folder of changed headers that comes before `folder`."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(libraries.translation_hash().encode())
    files = sorted(p for name in _FOLDERS for p in (folder / name).rglob("*") if p.suffix in (".hpp", ".h", ".inl"))
    digest.update(compiler.name_by_contents(folder).encode())
    target = compiler.cache_dir() / f"cutlass-{digest.hexdigest()[:32]}"
    if not target.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix="building-"))
        try:
            for path in files:
                name = path.relative_to(folder)
                changed = _changed(name.as_posix(), path)
                if changed is not None:
                    (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                    (scratch / name).write_text(f'#line 1 "{name.as_posix()}"\n{changed}')
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _changed(name: str, path: Path) -> str | None:
    """Return the text that replaces a header's; None if the header is unchanged."""
    if name == "cutlass/floating_point_nvrtc.h":
        return "#pragma once\n#include <cmath>\n"
    if _LEFT_OUT.search(name):
        return None
    text = path.read_text()
    if name == "cute/config.hpp":
        text = re.sub(r"(define\s+CUTE_STL_NAMESPACE\s+)cuda::std", r"\1std", text)
        return re.sub(r"^#\s*define\s+CUTE_STL_NAMESPACE_IS_CUDA_STD$", "", text, flags=re.M)
    if "asm" not in text:
        return None
    changed = _without_asm(text)
    return changed if changed != text else None


def _without_asm(code: str) -> str:
    """Return the code with its asm statements as calls of the engine; those in macros stay."""
    clean = blank_comments(code)
    defines = [match.span() for match in re.finditer(r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*", clean, re.M)]
    pieces, end = [], 0
    for number, (begin, opening, closing, is_volatile) in enumerate(ptx.statements(clean)):
        if any(first <= begin < last for first, last in defines):
            continue
        new = libraries.statement(code[opening + 1 : closing], number, is_volatile=is_volatile)
        pieces += [code[end:begin], new, "\n" * code.count("\n", begin, closing)]
        end = closing + 1
    return "".join([*pieces, code[end:]])
