"""Find the sentence of a text that answers a question.

    from helpers.attention.models.search import best_answers, chapter, sentences_of

    sentences = sentences_of(chapter())
    best_answers("Why are there more flowers where there are more cats?", sentences, MiniLM())

The text is chapter III, "Struggle for Existence", of Charles Darwin's "On the Origin of Species", first edition, John
Murray, London 1859, pages 60 to 79, without its title and its summary in key words; in the public domain. The wording
is that of Project Gutenberg's eBook 1228.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers import device
from helpers.attention.models.minilm import MiniLM
from helpers.attention.scalars import whole_number

CHAPTER = Path(__file__).resolve().parents[2] / "data" / "darwin_chapter_3.txt"


class Answer(NamedTuple):
    """A sentence, its number, and its score: the cosine of the angle between its vector and the question's."""

    score: float
    number: int
    sentence: str


def chapter() -> str:
    """Return chapter III of "On the Origin of Species", 1859: one paragraph a line, an empty line between two."""
    return CHAPTER.read_text(encoding="utf-8")


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences: after . ! ? and before a capital, except after initials and short titles."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a str; got {type(text).__name__}")
    sentences = []
    for paragraph in text.split("\n"):
        begin = 0
        for match in re.finditer(r"[.!?][”’\"]?\s+(?=[“‘\"]?[A-Z])", paragraph):
            before = paragraph[begin : match.end()].rstrip()
            if not re.search(r"(^|\W)([A-Z]|Mr|Mrs|Dr|St)\.$", before):
                sentences.append(before)
                begin = match.end()
        sentences += [paragraph[begin:].strip()] if paragraph[begin:].strip() else []
    return sentences


def best_answers(
    question: str, sentences: Sequence[str], model: MiniLM, *, vectors: Any = None, count: int = 3
) -> list[Answer]:
    """Find the sentences whose meaning is nearest to the question's, the best first.

    Args:
        vectors: model.encode(sentences), if it was computed before: a second question then costs one sentence.
        count: how many answers.

    Returns:
        `count` answers, or as many as there are sentences.

    Raises:
        TypeError, ValueError: not a text, not a list of texts; count is below 0; vectors of other sentences.
    """
    if not isinstance(question, str) or isinstance(sentences, str):
        raise TypeError("question must be a str, and sentences a list of them: [text] is a list of one")
    count = whole_number("count", count, least=0)
    vectors = model.encode(sentences) if vectors is None else vectors
    if vectors.ndim != 2 or len(vectors) != len(sentences):
        raise ValueError(f"vectors has shape {vectors.shape}; a row for each of {len(sentences)} sentences is needed")
    scores = vectors @ model.encode([question])[0]
    scores = device.cp.asnumpy(scores) if device.ON_GPU else scores
    best = scores.argsort(kind="stable")[::-1][:count]
    return [Answer(float(scores[number]), int(number), sentences[number]) for number in best]
