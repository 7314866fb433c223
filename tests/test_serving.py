"""The server of the small GPT: the texts of many requests are those of each alone, whatever the pages."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention.ladder import limits
from helpers.attention.models.char_gpt import CharGPT, Config, PlainAttention, to_host, xp
from helpers.attention.models.serving import Pages, Request, Server

pytestmark = pytest.mark.skipif(limits.compute_capability() < 80, reason="needs compute capability 8.0")
LETTERS = " abcdefghijklmnop"
CONTEXT = 60
TEMPERATURE = 4.0  # so that texts follow from more than the last letter


def model() -> CharGPT:
    return CharGPT(LETTERS, Config(context=CONTEXT, layers=2, heads=2, width=128), PlainAttention(), seed=3)


def requests(count: int = 7) -> list[Request]:
    """Of any lengths, some of which come later."""
    rng = np.random.default_rng(5)
    return [
        Request("".join(rng.choice(list(LETTERS), rng.integers(1, 20))), int(rng.integers(1, 40)), int(arrives))
        for arrives in rng.integers(0, 12, count)
    ]


def texts_one_by_one(seed: int = 0) -> list[str]:
    """Each by the model alone, with all its tokens computed again for each character."""
    gpt, texts = model(), []
    for number, request in enumerate(requests()):
        tokens = gpt.encode(request.prompt).tolist()
        for _ in range(request.length):
            row = to_host(gpt.forward(xp.asarray(np.array([tokens])))[0][0, -1]).astype(np.float64) / TEMPERATURE
            p = np.exp(row - row.max())
            tokens.append(int(np.random.default_rng((seed, number, len(tokens))).choice(len(p), p=p / p.sum())))
        texts.append("".join(LETTERS[token] for token in tokens))
    return texts


@pytest.mark.parametrize("pages, page_size", [(40, 16), (8, 8), (60, 1), (1, 64)], ids=lambda n: str(n))
def test_texts_are_those_of_each_request_alone(pages: int, page_size: int) -> None:
    server = Server(model(), pages=pages, page_size=page_size)
    assert server.serve(requests(), temperature=TEMPERATURE) == texts_one_by_one()
    assert sorted(server.pages.free) == list(range(pages)) and not server.pages.of
    assert (server.evicted > 0) == (pages in (8, 60))
    for step in server.history:
        taken = sum(owner >= 0 for owner in step.owners)
        assert step.tokens <= taken * page_size < step.tokens + step.running * page_size
        assert len({owner for owner in step.owners if owner >= 0}) == step.running


def test_a_server_serves_again_and_gives_the_model_back() -> None:
    gpt = model()
    attention, server = gpt.attention, Server(gpt, pages=12)
    texts = [server.serve(requests(), seed=seed, temperature=TEMPERATURE) for seed in (1, 1, 2)]
    assert gpt.attention is attention
    assert texts[0] == texts[1] != texts[2]


def test_half_types() -> None:
    server = Server(model(), pages=12, dtype="bfloat16")
    assert list(map(len, server.serve(requests()))) == list(map(len, texts_one_by_one()))


def test_pages_are_of_one_request_each() -> None:
    pages, one, other = Pages(5, 4), Request("", 0, tokens=[0] * 9), Request("", 0, tokens=[0] * 8)
    assert pages.reserve(one) and pages.reserve(other) and not pages.free
    assert pages.table([one, other]).tolist() == [[0, 1, 2], [3, 4, 0]]
    other.tokens += [0]
    assert not pages.reserve(other) and pages.of[other] == [3, 4]
    pages.release(one)
    assert pages.reserve(other) and pages.of[other][:2] == [3, 4] and len(pages.free) == 2


@pytest.mark.parametrize(
    "prompt, length, pages",
    [("", 3, 12), ("a" * 30, CONTEXT - 29, 12), ("a" * 20, 20, 2)],
    ids=["empty", "long", "pages"],
)
def test_what_cannot_be_served(prompt: str, length: int, pages: int) -> None:
    with pytest.raises(ValueError, match="are needed"):
        Server(model(), pages=pages).serve([Request(prompt, length)])


def test_a_request_that_just_fits() -> None:
    (text,) = Server(model(), pages=2).serve([Request("a" * 20, 12)])
    assert len(text) == 32
