"""A kernel file as HTML: an anchor for each line, its names as links, and an X-ray's counts next to each line."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer

from helpers.attention.kernel import KERNELS
from helpers.engine.cuda_source.source import blank_comments

Counts = Mapping[str, Sequence[int]]  # by array: `xrays.COUNTS`
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include "([^"]+)"', re.M)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)
_TYPE = re.compile(
    r"\b(?:struct|class|union|enum|enum class)\s+(?:(?:alignas|__align__)\s*\([^)]*\)\s*)?(\w+)[^;{}()]*\{"
)
_USING = re.compile(r"\busing\s+(\w+)\s*=")
_CONSTANT = re.compile(r"\b(?:constexpr|const)\b[^;{}()=]*?\b(\w+)\s*(?:\[[^\]]*\]\s*)?[={]")
_FUNCTION = re.compile(r"\b([A-Za-z_]\w*)\s*\((?:[^;{}()]|\([^;{}()]*\))*\)\s*(?:const\s*)?\{")
_NO_FUNCTION = {"if", "for", "while", "switch", "__launch_bounds__", "alignas", "__align__", "decltype", "sizeof"}
_NAME = re.compile(r'<span class="(?:n|nf|nc|nb|fm)">(\w+)</span>')
_INCLUDED = re.compile(r'<span class="cpf">(?:&quot;|")([^&"]+)(?:&quot;|")</span>')


@functools.cache
def text_of(file: str) -> str:
    """Read a file below kernels/."""
    return (KERNELS / file).read_text(encoding="utf-8")


@functools.cache
def includes(file: str) -> tuple[str, ...]:
    """List the kernel files that a file includes directly, in order."""
    return tuple(name for name in _INCLUDE.findall(text_of(file)) if (KERNELS / name).is_file())


@functools.cache
def definitions(file: str) -> Mapping[str, int]:
    """Map the names that a file defines at namespace scope to the lines of their first definitions."""
    code = blank_comments(text_of(file))
    top = _outermost(re.sub(r"^[ \t]*#(?:\\\n|.)*", lambda match: re.sub(r"[^\n]", " ", match[0]), code, flags=re.M))
    places: dict[str, int] = {}
    for pattern, where in ((_MACRO, code), (_TYPE, top), (_USING, top), (_CONSTANT, top), (_FUNCTION, top)):
        for match in pattern.finditer(where):
            if match[1] not in _NO_FUNCTION:
                line = where.count("\n", 0, match.start(1)) + 1
                places[match[1]] = min(line, places.get(match[1], line))
    return places


def _outermost(code: str) -> str:
    """Blank out everything within braces, but not the braces themselves."""
    depth, kept = 0, []
    for letter in code:
        depth -= letter == "}"
        kept.append(letter if depth == 0 or letter == "\n" else " ")
        depth += letter == "{"
    return "".join(kept)


@functools.cache
def visible(file: str) -> Mapping[str, tuple[str, int]]:
    """Map each name visible in a file to its definition: in the file itself, or in what it includes."""
    places: dict[str, tuple[str, int]] = {}
    for name in with_includes(file):
        for word, line in definitions(name).items():
            places.setdefault(word, (name, line))
    return places


def with_includes(file: str) -> list[str]:
    """List a file and all that it includes, directly or indirectly, in order."""
    every, waiting = [], [file]
    while waiting:
        name = waiting.pop(0)
        if name not in every:
            every.append(name)
            waiting += includes(name)
    return every


def _is_local(word: str, code: str) -> bool:
    """Return True if a text declares the word as a variable or parameter, which then hides a header's name."""
    declared = rf"\b(?!return\b|else\b|case\b)[A-Za-z_]\w*(?:<[^<>;]*>)?[ ]?[&*]*[ ]{word}\b[ ]*(?=[=;,)\[{{:])"
    return re.search(declared, code) is not None


def code(file: str, xray: Mapping[str, Counts] | None = None, shared: Sequence[str] = ()) -> str:
    """Write a file below kernels/ as HTML, line by line; `L12` is the anchor of line 12.

    Args:
        xray: by line; without it the lines have no figures. shared: the arrays in shared memory.
    """
    lines = highlight(text_of(file), CppLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")
    blanked = blank_comments(text_of(file))
    words = set(re.findall(r"\w+", blanked))
    places = {
        word: place
        for word, place in visible(file).items()
        if word in words and (place[0] == file or not _is_local(word, blanked))
    }
    up = "../" * file.count("/")
    rows = []
    for number, line in enumerate(lines, 1):

        def link(match: re.Match[str], number: int = number) -> str:
            place = places.get(match[1])
            if not place or place == (file, number):
                return match[0]
            page = "" if place[0] == file else f"{up}{place[0]}.html"
            return f'<a href="{page}#L{place[1]}">{match[0]}</a>'

        line = _NAME.sub(link, line)
        line = _INCLUDED.sub(
            lambda m: f'<a href="{up}{m[1]}.html">{m[0]}</a>' if (KERNELS / m[1]).is_file() else m[0], line
        )
        beside = figures(xray.get(str(number), {}), shared) if xray is not None else ""
        rows.append(
            f'<span class="kernel-line" id="L{number}"><a class="linenos" href="#L{number}">{number:4}</a>'
            f"{beside}{line}\n</span>"
        )
    return f'<div class="highlight-c++ notranslate"><div class="highlight"><pre>{"".join(rows)}</pre></div></div>'


def figures(of_line: Counts, shared: Sequence[str]) -> str:
    """Write the figures of one line: bytes of global memory, bytes of shared memory, and its bank conflicts."""
    sums = [[0] * 7, [0] * 7]
    for name, counts in of_line.items():
        for i, count in enumerate(counts):
            sums[name in shared][i] += count
    outer, inner = (size(counts[0] + counts[1]) for counts in sums)
    waves, extra = sums[1][5], sums[1][6]
    slow = f"×{waves / (waves - extra):.3g}" if extra else ""
    title = html.escape("; ".join(_sentence(name, counts) for name, counts in of_line.items()), quote=True)
    hint = f' title="{title}"' if title else ""
    return f'<span class="linenos xray"{hint}><i>{outer:>6}</i><b>{inner:>6}</b><em>{slow:<5}</em></span>'


def _sentence(name: str, counts: Sequence[int]) -> str:
    read, written, requests, sectors, of_shared, waves, extra = counts
    parts = [f"{read:,} bytes read"] * bool(read) + [f"{written:,} written"] * bool(written)
    if requests and sectors:
        parts.append(f"{sectors / requests:.3g} sectors a request")
    if of_shared:
        parts.append(
            f"{waves / of_shared:.3g} wavefronts a request" + (f", {extra:,} by bank conflicts" if extra else "")
        )
    return f"{name}: {', '.join(parts)}"


def size(count: int) -> str:
    """Format a number of bytes in at most five characters: 640, 12.5K, 8.00M; "" for zero."""
    if not count:
        return ""
    for unit, whole in (("", 1), ("K", 1024), ("M", 1024**2)):
        if count < 1000 * whole or unit == "M":
            return f"{count / whole:.3g}{unit}" if count % whole else f"{count // whole}{unit}"
    raise AssertionError


def lines_table(by_line: Mapping[str, Counts]) -> list[str]:
    """Write an X-ray's table: each line and each array that it touches."""
    heads = "line", "array", "bytes read", "bytes written", "sectors a request"
    rows = [
        (
            f"<a href='#L{line}'>{line}</a>",
            html.escape(array),
            f"{read:,}" if read else "",
            f"{written:,}" if written else "",
            f"{sectors / requests:.3g}" if requests and sectors else "",
            f"{waves / of_shared:.3g}" if of_shared else "",
            f"{extra / of_shared:.3g}" if extra else "",
        )
        for line, arrays in sorted(by_line.items(), key=lambda item: int(item[0]))
        for array, (read, written, requests, sectors, of_shared, waves, extra) in arrays.items()
    ]
    return table((*heads, "wavefronts a request", "of them conflicts"), rows, left=("array",))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> list[str]:
    """Write a long table as HTML, in lines of Markdown: Sphinx takes half a millisecond for each cell in Markdown.

    rows: HTML. left: the heads of columns of text; numbers are aligned to the right.
    """
    starts = ["" if head in left else ' class="text-right"' for head in heads]

    def row(tag: str, cells: Sequence[str]) -> str:
        parts = (f"<{tag}{start}>{cell}</{tag}>" for start, cell in zip(starts, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    text = f'<table class="table"><thead>{row("th", heads)}</thead>\n<tbody>{body}</tbody></table>'
    return ["````{raw} html", text, "````"]
