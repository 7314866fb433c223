"""Typical answers to the exercises of notebook 10: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

from helpers.lesson.exercises import exercise, hints
from helpers.lesson.exercises.trial import EXERCISES

EMPTY, FULL = "parity = (tile / STAGES & 1) ^ 1;", "parity = tile / STAGES & 1;"
PRODUCER_PARITY, ELSEWHERE = "parity of the producer", "arrival elsewhere"
READ = "sum += __half2float(V_smem[stage][r][8 * (column / 8 ^ r % 8) + column % 8]);"
ARRIVE_TOO = f"{{ {READ} mbarrier_arrive(empty + 8 * stage); }}"
ARRIVE = "    mbarrier_arrive(empty + 8 * stage);\n"
WAIT_FULL = "    mbarrier_wait(full + 8 * stage, parity);\n"
STAGE = "stage = tile % STAGES;"
# The skeleton's text for the consumer's stage and parity.
CONSUMER_AS_IT_WAS = (f"    const int {STAGE}\n    const int {FULL}\n", "    const int stage = 0, parity = 0;\n")
AT_FULL = "arrival at full"
FIELDS = "swizzle_128b << 62 | eight_rows << 32 | address / 16"
STEP = "step = i * 16 * 2 / 16"

TABLE = {
    "10_ring": (
        Wrong(
            "the producer waits as the consumer does",
            ((EMPTY, FULL),),
            "first",
            "mbarrier barriers[3]. It expects 64 more arrivals",
            "parity of the producer",
        ),
        Wrong(
            "the consumer waits as the producer does",
            ((FULL, EMPTY),),
            "X-ray",
            "not waited for",
            "parity of the consumer",
        ),
        Wrong("the parity of the tile", ((FULL, "parity = tile & 1;"),), "X-ray", "", "parity of the consumer"),
        Wrong("always the first phase", ((EMPTY, "parity = 1;"),), "X-ray", "", "parity of the producer"),
        Wrong("only the producer is written", (CONSUMER_AS_IT_WAS,), "X-ray", "", "stage of the consumer"),
        Wrong(
            "only the waits are written",
            ((ARRIVE, ""),),
            "first",
            "64 more arrivals",
            "no arrival",
        ),
        Wrong(
            "one thread gives it back",
            ((ARRIVE, "    if (column == 0)" + ARRIVE[3:]),),
            "first",
            "63 more arrivals",
            "few arrivals",
        ),
        Wrong("given back before it is read", ((ARRIVE, ""), (WAIT_FULL, WAIT_FULL + ARRIVE)), "X-ray", "race", "race"),
        Wrong("the producer's parity of the tile", ((EMPTY, "parity = tile & 1 ^ 1;"),), "first", "", PRODUCER_PARITY),
        Wrong(
            "stages for a power of two",
            ((STAGE, "stage = tile & STAGES - 1;"), (STAGE, "stage = tile & STAGES - 1;")),
            "first",
            "",
            "stage of the producer",
        ),
        Wrong("in each turn of the rows", ((ARRIVE, ""), (READ, ARRIVE_TOO)), "X-ray", "", "many arrivals"),
        Wrong(
            "a thread for each warp gives it back",
            ((ARRIVE, "    if (column % 32 == 0)" + ARRIVE[3:]),),
            "first",
            "62 more arrivals",
            "few arrivals",
        ),
        Wrong("the next stage", ((ARRIVE, ARRIVE.replace("stage", "((stage + 1) % STAGES)")),), "limit", "", ELSEWHERE),
        Wrong("mbarriers of one byte", ((ARRIVE, ARRIVE.replace("8 * ", "")),), "first", "", "crash"),
        Wrong("the wrong barrier is arrived at", ((ARRIVE, ARRIVE.replace("empty", "full")),), "first", "", AT_FULL),
        Wrong(
            "one stage for all tiles",
            (
                (STAGE, "stage = 0;"),
                (STAGE, "stage = 0;"),
                (EMPTY, "parity = tile & 1 ^ 1;"),
                (FULL, "parity = tile & 1;"),
            ),
            "limit",
            "copies in flight at first: 1",
            "stage of the producer",
        ),
        Wrong(
            "stages and phases exchanged",
            ((STAGE, "stage = tile / STAGES % STAGES;"), (STAGE, "stage = tile / STAGES % STAGES;")),
            "first",
            "",
            "stage of the producer",
        ),
        Right(
            "no arrival for stages that no tile follows in", ((ARRIVE, "    if (tile + STAGES < tiles)" + ARRIVE[3:]),)
        ),
        Right("in other words", ((EMPTY, "parity = tile / STAGES % 2 == 0;"), (FULL, "parity = tile / STAGES % 2;"))),
        Right("bits", ((FULL, "parity = (tile / STAGES) & 1;"), (EMPTY, "parity = ((tile + STAGES) / STAGES) & 1;"))),
    ),
    "10_descriptor": (
        Wrong("the address in bytes", ((FIELDS, FIELDS.replace(" / 16", "")),), "first", "reaches to byte", "address"),
        Wrong("the distance in bytes", (("8 * 128 / 16", "8 * 128"),), "first", "", "rows"),
        Wrong("the distance of one row", (("8 * 128 / 16", "128 / 16"),), "first", "", "rows"),
        Wrong("the swizzle one bit too far", (("swizzle_128b << 62", "swizzle_128b << 63"),), "first", "", "swizzle"),
        Wrong(
            "the address in words", ((FIELDS, FIELDS.replace("address / 16", "address / 4")),), "first", "", "address"
        ),
        Wrong("a step in bytes", ((STEP, "step = i * 16 * 2"),), "first", "", "step"),
        Wrong("a step of rows", ((STEP, "step = i * 16 * 128 / 16"),), "first", "", "step"),
        Wrong(
            "the header's function in brackets",
            ((FIELDS, "(wgmma_descriptor)(address)"),),
            "limit",
            "wgmma_descriptor: 1",
            "limit",
        ),
        Wrong("no swizzle", (("swizzle_128b << 62 | ", ""),), "first", "", "swizzle"),
        Wrong("the swizzle in another field", (("swizzle_128b << 62", "swizzle_128b << 49"),), "first", "", "base"),
        Wrong(
            "the header's function",
            ((FIELDS, "wgmma_descriptor(address)"),),
            "limit",
            "wgmma_descriptor: 1",
            "limit",
        ),
        Right("a leading offset that is not used", ((FIELDS, FIELDS + " | 1ull << 16"),)),
        Right("sums", ((FIELDS, "(swizzle_128b << 62) + (eight_rows << 32) + (address >> 4)"),)),
        Right("masked as in the manual", ((FIELDS, FIELDS.replace("address", "(address & 0x3ffff)")),)),
        Right("numbers", ((FIELDS, "0x4000004000000000ull | address / 16"), ("i * 16 * 2 / 16", "2 * i"))),
    ),
}

# The hint of each symptom mentions this, and nothing of the others.
SPEAKS_OF = {
    "stage of the producer": "producer's stage",
    "parity of the producer": "producer's parity",
    "stage of the consumer": "consumers' stage",
    "parity of the consumer": "consumers' parity",
    "no arrival": "no thread releases a stage",
    "few arrivals": "too few threads",
    AT_FULL: "the wrong mbarrier",
    "crash": "takes 8 bytes",
    "many arrivals": "more than once",
    "arrival elsewhere": "another stage",
    "race": "still read",
    "address": "The address of the descriptor",
    "rows": "The distance of eight rows",
    "swizzle": "The swizzle is wrong",
    "base": "Bits 49 to 51",
    "step": "The step is not",
    "limit": "without wgmma_descriptor",
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)


def test_first_hints_name_what_is_wrong() -> None:
    """The first hint of a wrong answer names the hole that is wrong, that of a skeleton the first hole."""
    for name, answers in TABLE.items():
        for answer in answers:
            if isinstance(answer, Wrong):
                assert SPEAKS_OF[answer.symptom] in EXERCISES[name].hints[answer.symptom][0], answer
    hints.forget()
    for name, symptom, finding in (
        ("10_ring", "parity of the producer", "end of the phase"),
        ("10_descriptor", "address", "wgmma's descriptor of"),
    ):
        text = exercise.grade(name, exercise.skeleton(name)).text
        assert SPEAKS_OF[symptom] in text and text.count(finding) == 1, "the X-ray's row does not repeat the message"
