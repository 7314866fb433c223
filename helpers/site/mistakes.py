"""The page of usual mistakes: bugs that the tests plant in the kernels, and what one sees of each.

    python3 -m helpers.site.mistakes        # prints the page; `build` has it made in a process of its own

What is said of a mistake is written here; the edit is the one that the tests plant, and the message is what the check
or the X-ray says of the kernel with that edit, at every build of the site. All runs on the CPU engine: some of these
kernels would take a GPU's context down, and others are wrong there only now and then.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from helpers.site.links import ROOT

MOST_LINES = 6  # of a message


@dataclass(frozen=True)
class Mistake:
    """A planted bug that teaches something.

    stage: the stage in whose kernel it is planted. bug: its name in the tests' table. title, why: for the page.
    xray: the X-ray's message is shown, which names the line, and not that of the check.
    """

    stage: str
    bug: str
    title: str
    why: str
    xray: bool = False


# A group's heading -> what is said of it, its mistakes.
GROUPS: dict[str, tuple[str, tuple[Mistake, ...]]] = {
    "Softmax": (
        "The recurrence has three quantities, and each must be right at every step.",
        (
            Mistake(
                "naive",
                "no scale",
                "The scores are not scaled",
                "Without 1/√d the scores spread wider and the softmax is sharper. The output still looks like an "
                "average of V's rows, so only a comparison shows it.",
            ),
            Mistake(
                "online_softmax",
                "no maximum subtracted",
                "The maximum is not subtracted",
                "exp(89) is infinite in float32. With small random inputs nothing happens; with the large scores of a "
                "real model the row becomes inf / inf. A check with large scores is a check of its own.",
            ),
            Mistake(
                "online_softmax",
                "no rescale of acc",
                "The output is not rescaled",
                "When the maximum rises, everything that was summed with the old one is too large by the same factor. "
                "Who rescales the sum and forgets the output gets a wrong average, in the rows where a later tile had "
                "a larger score.",
            ),
            Mistake(
                "online_softmax",
                "rescale the wrong way",
                "Old and new maximum are exchanged",
                "The factor is exp(old − new), at most 1. Turned over, it is at least 1, and at the first tile, where "
                "the old maximum is −∞, it is infinite.",
            ),
            Mistake(
                "online_softmax",
                "m_i is new before the rescale",
                "The maximum is updated one line too early",
                "The difference of the new maximum and itself is 0, the factor is 1, and nothing is ever rescaled. "
                "The order of these lines is the algorithm.",
            ),
            Mistake(
                "register_tiles",
                "exp in place of exp2",
                "One base in the scale, another in the exponential",
                "From notebook 04 on, scores are scaled by log2(e) so that exp2 does the work of exp. Both places "
                "must agree.",
            ),
            Mistake(
                "register_tiles",
                "sum of one thread, not of the row",
                "Each thread divides by its own part of the sum",
                "Several threads share a row, and each has summed the keys of its own columns. They must add their "
                "parts before anyone divides.",
            ),
        ),
    ),
    "Tails and borders": (
        "Sizes that no tile divides are where kernels break. Check with such sizes first.",
        (
            Mistake(
                "naive",
                "one row too many",
                "> in place of >=",
                "The thread behind the last row passes the test, and reads and writes memory behind the arrays. On a "
                "GPU that may go unnoticed, or end the process much later.",
            ),
            Mistake(
                "naive",
                "last key not in acc",
                "A loop ends one key early",
                "Only one of the three loops over the keys. The result is nearly right, because one key of many "
                "weighs little: the tolerance of the check must be tighter than that.",
            ),
            Mistake(
                "tiled",
                "tail's scores are 0, not -inf",
                "Keys that do not exist get the score 0",
                "exp(0 − m) is not 0, so absent keys take weight from the others. The neutral score is −∞.",
            ),
            Mistake(
                "tiled",
                "no test of the tail's loads",
                "The last tile is loaded without a test",
                "The tile is larger than what is left of the array.",
            ),
            Mistake(
                "tiled",
                "same keys in every tile",
                "The tile's offset is forgotten",
                "Every tile holds the first keys. With as many keys as one tile holds, the kernel is right: test "
                "with several tiles.",
            ),
            Mistake(
                "tiled",
                "half of a tile is not loaded",
                "Half of the tile is never written",
                "On a GPU shared memory holds what the block before has left, perhaps even the right numbers. The "
                "engine fills it with NaN, and the X-ray names the element.",
                xray=True,
            ),
        ),
    ),
    "Barriers and copies": (
        "A missing barrier is a matter of luck on a GPU: the result is right as long as the warps happen to keep in "
        "step. The X-ray does not depend on luck, and names both lines.",
        (
            Mistake(
                "online_softmax",
                "no barrier after the loads",
                "Tiles are read before they are complete",
                "Each thread loads a part of the tile and uses all of it. Without the barrier it reads elements that "
                "others have not stored yet.",
                xray=True,
            ),
            Mistake(
                "online_softmax",
                "no barrier before the loads",
                "Tiles are replaced while others still read them",
                "The barrier that is forgotten most often: a fast warp loads the next tile while a slow one still "
                "computes with this one.",
                xray=True,
            ),
            Mistake(
                "register_tiles",
                "no barrier between S and P V",
                "The weights are read before they are stored",
                "The threads of a row exchange P through shared memory, and V arrives there too.",
                xray=True,
            ),
            Mistake(
                "register_tiles",
                "no wait for V",
                "An asynchronous copy is not waited for",
                "cp.async returns at once. A barrier alone does not help: each thread must wait for its own copies, "
                "and then for the other threads.",
                xray=True,
            ),
            Mistake(
                "flash_mma",
                "waits for all but the newest copies",
                "Waiting for one group of copies too few",
                "With double buffering, the group that may stay in flight is the one for the next tile. Here the "
                "newest group is the one that is needed.",
                xray=True,
            ),
        ),
    ),
    "Indices and layouts": (
        "The numbers are all there, in the wrong place. A figure of *which* elements are wrong says more than the "
        "largest error.",
        (
            Mistake(
                "naive",
                "wrong row of O",
                "The index in the block for the index in the grid",
                "threadIdx.x is the row in the first block only. All other blocks write over its rows.",
            ),
            Mistake(
                "register_tiles",
                "P stored for the wrong keys",
                "One side interleaved, the other in a row",
                "A thread's columns are x, x + THREADS_X, …; they are stored as if they were neighbours. Writer and "
                "reader of a tile must share one layout.",
            ),
            Mistake(
                "flash_wmma",
                "K is not transposed",
                "A fragment with the wrong major order",
                "S = Q Kᵀ needs K by columns. In row-major order the same bytes are another matrix.",
            ),
            Mistake(
                "flash_mma",
                "swizzled on the way out alone",
                "Swizzled when read, not when written",
                "A swizzle is a permutation of addresses. It must be the same on both sides.",
            ),
        ),
    ),
    "Heads, masks and lengths": (
        "What models add to the algorithm, and what most bug reports about attention kernels are about.",
        (
            Mistake(
                "heads_and_masks",
                "heads share K and V in the wrong order",
                "Grouped heads, dealt the wrong way",
                "With 4 heads of Q and 2 of K, heads 0 and 1 share the first. By the remainder, 0 and 2 would.",
            ),
            Mistake(
                "heads_and_masks",
                "V with the rows of K",
                "One array is read with the strides of another",
                "K and V usually have the same strides, so tests with fresh arrays pass. Test with views.",
            ),
            Mistake(
                "heads_and_masks",
                "positions begin at the top left",
                "The causal mask begins at the wrong corner",
                "With more keys than queries, as in a chat with a cache, the last query is at the last key.",
            ),
            Mistake(
                "heads_and_masks",
                "the diagonal is hidden",
                "A token does not see itself",
                ">= for >. With as many keys as queries, the first row then sees nothing at all.",
            ),
            Mistake(
                "heads_and_masks",
                "tiles across the diagonal count as full",
                "Tiles on the diagonal are not masked",
                "The fast path without a test is for tiles that every row sees whole.",
            ),
            Mistake(
                "heads_and_masks",
                "a row that saw nothing is divided",
                "0 / 0 in a row without keys",
                "A row that sees no key has the sum 0. Its output is 0 by agreement, not NaN.",
            ),
            Mistake(
                "heads_and_masks",
                "every sequence has the keys of the first",
                "Packed sequences read one another's keys",
                "In a packed batch each sequence begins at its own offset.",
            ),
            Mistake(
                "heads_and_masks",
                "lse in powers of 2",
                "lse in the wrong base",
                "The kernel computes in powers of 2. What it hands to others, as to the backward pass, is a natural "
                "logarithm.",
            ),
        ),
    ),
    "Gradients": (
        "Three outputs, so look which of them is wrong: that says where to look.",
        (
            Mistake(
                "backward",
                "D is left out",
                "The softmax's own gradient is left out",
                "dS = P ∘ (dP − D). Without D, dQ and dK are wrong and dV is right.",
            ),
            Mistake(
                "backward",
                "dK not scaled",
                "One of two gradients is not scaled",
                "The scale belongs to S, so it is in dQ and in dK, and not in dV.",
            ),
            Mistake(
                "backward",
                "dQ is stored, not added",
                "Blocks overwrite one another's sums",
                "Each block has the share of its own keys in dQ. Stored instead of added, the last block wins.",
            ),
        ),
    ),
    "Copies and products that run by themselves": (
        "On Hopper the hardware copies and multiplies while the threads go on. What is forgotten here ends in wrong "
        "numbers on a GPU, or in a kernel that never ends. The X-ray tells which.",
        (
            Mistake(
                "hopper",
                "K is not waited for",
                "Nobody waits for the tile",
                "The products begin while the TMA is still copying.",
                xray=True,
            ),
            Mistake(
                "hopper",
                "one consumer does not give K back",
                "One arrival is missing",
                "The producer waits until both consumers have released the stage, for ever. On a GPU the program "
                "hangs.",
                xray=True,
            ),
            Mistake(
                "hopper",
                "S is read in flight",
                "Registers are read before the product is done",
                "wgmma is asynchronous too: until the wait, its accumulator holds anything.",
                xray=True,
            ),
        ),
    ),
}


def page() -> str:
    """The Markdown of the page.

    Raises:
        LookupError: the tests plant no such bug any more.
        AssertionError: a kernel has changed so that a bug no longer fits, or nothing is wrong with what it makes.
    """
    number = sum(len(mistakes) for _, mistakes in GROUPS.values())
    lines = [
        *("# Usual mistakes", ""),
        f"{number} mistakes that are easy to make, each planted in a kernel of the course, with what one then sees. "
        "They are taken from the tests, which plant several hundred and demand that each is found. The messages "
        "were made by running the kernels when this page was made.",
        *("", "For a class: show the lines of an edit, and let people predict what the check will say.", ""),
    ]
    for heading, (about, mistakes) in GROUPS.items():
        lines += [f"## {heading}", "", about, ""]
        for mistake in mistakes:
            lines += _entry(mistake)
    return "\n".join(lines)


def _entry(mistake: Mistake) -> Iterator[str]:
    from helpers.attention.kernel import source

    file, bug = file_of(mistake), planted(mistake)
    right = (ROOT / "kernels" / file).read_text(encoding="utf-8")
    wrong = bug.plant(source(file))
    diff = list(difflib.unified_diff(right.splitlines(), bug.plant(right).splitlines(), lineterm="", n=1))[2:]
    diff = [line for line in diff if not re.match(r"@@|\+\s*//", line)]  # a comment may be all that is left of a line
    tool = "The X-ray" if mistake.xray else "The run" if _crashes(bug) else "The check"
    yield from (f"### {mistake.title}", "", f"{mistake.why} *In [{file}](/kernels/{file}.md).*", "")
    yield from ("````{code-block} diff", "", *diff, "````", "")
    said = message(mistake, bug, wrong)
    yield from (f"{tool} says:", "", "````{code-block} text", ":class: message", "", *said, "````", "")
    if bug.cpu_only and not mistake.xray:
        yield from ("On a GPU this may pass unnoticed, or end the program.", "")


def file_of(mistake: Mistake) -> str:
    """The kernel file that it is planted in, below kernels/."""
    from helpers.attention.ladder import LADDER

    return LADDER[mistake.stage].file


def planted(mistake: Mistake) -> Any:
    """The bug as the tests plant it."""
    bugs = _tests(mistake.stage).BUGS
    bugs = bugs.get(mistake.stage, ()) if isinstance(bugs, dict) else bugs
    found = [bug for bug in bugs if bug.name == mistake.bug]
    if len(found) != 1:
        raise LookupError(f"the tests plant {len(found)} bugs named {mistake.bug!r} in {mistake.stage}")
    return found[0]


def message(mistake: Mistake, bug: Any, text: str) -> list[str]:
    """What the X-ray, or the check that the tests make, says of a kernel with this text: its first lines."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # of a check that passes before the one that fails
            findings = _look(mistake.stage, text) if mistake.xray else _check(mistake, bug, text)
    except Exception as error:  # what the check raises, or the engine
        said = str(error) or type(error).__name__
    else:
        assert findings, f"{mistake.stage}: nothing is wrong with {mistake.bug!r}"
        said = str(findings[0])
    return [line.rstrip() for line in said.splitlines() if line.strip()][:MOST_LINES]


def _check(mistake: Mistake, bug: Any, text: str) -> list[Any]:
    from helpers.attention.ladder import LADDER

    tests, stage = _tests(mistake.stage), LADDER[mistake.stage]
    checks: dict[str, Callable[[], None]] = {
        "test_planted_bugs": lambda: tests.run_check(stage, text, bug.inputs),
        "test_tensor_cores": lambda: tests.check_with(mistake.stage, text),
        "test_backward": lambda: tests.run_check(stage, text),
    }
    checks[tests.__name__]()
    return []


def _look(stage: str, text: str) -> list[Any]:
    """What the X-ray finds in one small launch: two blocks of rows, several tiles of keys."""
    import numpy as np

    from helpers.attention.check import make_inputs
    from helpers.attention.ladder import LADDER
    from helpers.lesson.shortcuts import look

    half = "float32" not in LADDER[stage].dtypes
    inputs = make_inputs(70, 260, 32)
    sizes = {"BLOCK_N": 48} if stage == "hopper" else None  # more tiles of keys than it has stages
    return look(stage, *(a.astype(np.float16) if half else a for a in inputs), code=text, sizes=sizes).findings


def _crashes(bug: Any) -> bool:
    return bug.error.__name__ == "LaunchError"


def _tests(stage: str) -> Any:
    """The module of the tests that plant bugs in a stage."""
    names = {"flash_wmma": "test_tensor_cores", "flash_mma": "test_tensor_cores", "backward": "test_backward"}
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module({**names, "hopper": "test_hopper"}.get(stage, "test_planted_bugs"))


def made() -> str:
    """The page, made in a process of its own on the CPU engine, whatever device this one has.

    Raises:
        RuntimeError: it was not made; the message is what was wrong.
    """
    # The tests compile with less optimisation, which makes no difference to what is found.
    settings = {"COURSE_DEVICE": "cpu", "COURSE_CPU_OPTIMISATION": "1"}
    command = [sys.executable, "-m", "helpers.site.mistakes"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the page of usual mistakes: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(page())
