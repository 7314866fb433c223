"""Write locked/: exact versions and the hashes of all files, for everything that environment.yml lists. Needs uv.

    pip install uv
    python3 -m helpers.setup.make_lock              keeps the versions that still fit
    python3 -m helpers.setup.make_lock --upgrade    takes the newest

One resolution covers Python 3.10 and newer on every system. It is written in parts, one file each: base, the packages
for CUDA 12 and for 13, and the extras without base's packages.

PyTorch has a build for the CPU and one for each CUDA, with hashes of their own, and pip's index decides which of them
is installed. So torch.unhashed.txt has the version without hashes, and is edited by hand, and the packages
that only some builds need are not locked.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.setup.requirements import LIST, LOCKED, OLDEST, canonical, read_extra, the_list, without_dependencies

CUDA_12 = r"-cu(da)?12x?\b"
BY_INDEX = r"(torch|triton|nvidia-.*|cuda-.*)$"
HEAD = "# Written by helpers/setup/make_lock.py from environment.yml.\n"


def parts() -> "dict[str, list[str]]":
    """Return the requirements of each part, except those marked "no-deps"."""
    text = LIST.read_text(encoding="utf-8")
    listed = [item for item in the_list()[1] if item not in without_dependencies(text)]
    extras = sorted(set(re.findall(r"# extra (\w+):", text)))
    return {
        "base": [item for item in listed if not re.search(CUDA_12, item)],
        "cuda12": [item for item in listed if re.search(CUDA_12, item)],
        **{extra: read_extra(text, extra) for extra in extras},
    }


def resolve(requirements: "list[str]", *options: str) -> "list[str]":
    """Lock these requirements with uv: a text for each package, of its requirement, hashes and "# via" comments."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock.txt"
        # uv keeps the versions that are already in the file.
        lock.write_text("".join(path.read_text(encoding="utf-8") for path in sorted(LOCKED.glob("*[!d].txt"))))
        argv = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header", "-o", str(lock)]
        argv += ["--python-version", "{}.{}".format(*OLDEST), *options, "-"]
        subprocess.run(argv, input="\n".join(requirements).encode(), check=True)
        return re.findall(r"^[\w.-]+==.*\n(?:[ \t]+.*\n)*", lock.read_text(encoding="utf-8"), re.M)


def needs(blocks: "list[str]") -> "dict[str, set[str]]":
    """Map each package to its dependencies, from the "# via" comments."""
    brings = {}  # type: dict[str, set[str]]
    for block in blocks:
        for parent in re.findall(r"#(?: +via)? +([\w.-]+)$", block, re.M):
            brings.setdefault(parent, set()).add(name_of(block))
    return brings


def reached(names: "set[str]", brings: "dict[str, set[str]]") -> "set[str]":
    """Return these packages and all of their dependencies."""
    todo, result = set(names), set()  # type: set[str], set[str]
    while todo:
        name = todo.pop()
        result.add(name)
        todo |= brings.get(name, set()) - result
    return result


def name_of(requirement: str) -> str:
    """Return the canonical name of the package in a requirement."""
    return canonical(re.match(r"[\w.-]+", requirement)[0])


def main(options: "list[str]") -> None:
    """Resolve the list, and write a file for each part."""
    if shutil.which("uv") is None:
        print("uv is needed: pip install uv", file=sys.stderr)
        sys.exit(2)
    wanted = parts()
    unhashed = LOCKED / "torch.unhashed.txt"
    blocks = resolve([item for items in wanted.values() for item in items], "-c", str(unhashed), *options)
    brings = needs(blocks)
    alone = resolve(without_dependencies(LIST.read_text(encoding="utf-8")), "--no-deps")
    base = reached({name_of(item) for item in wanted["base"]}, brings)
    for part, items in wanted.items():
        names = reached({name_of(item) for item in items}, brings)
        if part != "base":
            names -= base
        if part == "torch":
            names = {name for name in names if not re.match(BY_INDEX, name)}
        chosen = [block for block in blocks if name_of(block) in names] + (alone if part == "base" else [])
        text = re.sub(r"(?m)^ +#.*\n", "", "".join(chosen))
        (LOCKED / f"{part}.txt").write_text(HEAD + text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
