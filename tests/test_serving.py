"""The server of the small GPT: the texts of many requests are those of each alone, whatever the pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import device
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
    """Make requests of any lengths, some of which come later."""
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


@pytest.mark.exhaustive(one_of_each=lambda pages: pages >= 40)
@pytest.mark.parametrize("pages, page_size", [(40, 16), (8, 8), (60, 1), (1, 64)], ids=lambda n: str(n))
def test_texts_are_those_of_each_request_alone(pages: int, page_size: int) -> None:
    server = Server(model(), pages=pages, page_size=page_size)
    assert server.serve(requests(), temperature=TEMPERATURE) == texts_one_by_one()
    assert sorted(server.pages.free) == list(range(pages)) and not server.pages.of
    assert (server.evicted > 0) == (pages in (8, 60)) and server.lost >= server.evicted * (pages in (8, 60))
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


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty": (Request("", 3), {}, ValueError, r"requests\[1\]: '' and 3 more: 1 to 32 characters are needed"),
    "long": (Request("a" * 30, CONTEXT - 29), {}, ValueError, "are needed"),
    "pages": (Request("a" * 20, 20), {}, ValueError, "1 to 32 characters are needed"),
    "length 0": (Request("a", 0), {}, ValueError, r"requests\[1\].length = 0; 1 or more is needed"),
    "length below 0": (Request("a", -3), {}, ValueError, "length = -3; 1 or more"),
    "no whole length": (Request("a", 2.0), {}, TypeError, "length is a whole number; got float 2.0"),
    "arrives at NaN": (Request("a", 2, float("nan")), {}, TypeError, "arrives is a whole number; got float nan"),
    "an unknown character": (Request("a日", 2), {}, ValueError, r"requests\[1\].prompt: '日' is not in the alphabet"),
    "bytes": (Request(b"a", 2), {}, TypeError, "prompt is a text; got bytes"),
    "no request": ("a", {}, TypeError, r"requests\[1\] is a Request; got str"),
    "cold": (Request("a", 2), {"temperature": -1.0}, ValueError, "temperature = -1.0; 0, for the likeliest"),
    "NaN": (Request("a", 2), {"temperature": float("nan")}, ValueError, "temperature = nan; a finite"),
    "no temperature": (Request("a", 2), {"temperature": "1"}, TypeError, "temperature is a number; got str"),
    "seed": (Request("a", 2), {"seed": -1}, ValueError, "seed = -1; 0 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served(name: str) -> None:
    request, options, error, message = REFUSED[name]
    first, server = Request("b", 1), Server(model(), pages=2)
    with pytest.raises(error, match=message):
        server.serve([first, request], **options)
    assert not server.history and not first.tokens, "nothing begins"


def test_what_is_no_server() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"pages": 0}, ValueError, "pages = 0; 1 or more"),
        ({"pages": 2.0}, TypeError, "pages is a whole number"),
        ({"page_size": 12}, ValueError, "page_size = 12; a power of two"),
        ({"page_size": 0}, ValueError, "page_size = 0"),
        ({"dtype": "float64"}, ValueError, "dtype = 'float64'; there are float32"),
        ({"model": CharGPT("ab", Config(8, 1, 2, 64), PlainAttention())}, ValueError, "model has heads 32 wide"),
        ({"model": 3}, TypeError, "model is a CharGPT"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            Server(**{"model": model(), "pages": 4, **options})
    with pytest.raises(TypeError, match="requests is a list of Request; got Request"):
        Server(model(), pages=np.int64(4)).serve(Request("a", 1))


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_server_serves_again_after_an_error(at: int, error: type[BaseException]) -> None:
    """Pages come back wherever it fails, and the texts are those of a new server."""
    gpt = model()
    attention, forward, server = gpt.attention, gpt.forward, Server(gpt, pages=8, page_size=8)
    calls = iter(range(1000))

    def fails(*given: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise error("in the model")
        return forward(*given, **options)

    gpt.forward = fails  # type: ignore[method-assign]
    with pytest.raises(error, match="in the model"):
        server.serve(requests(), temperature=TEMPERATURE)
    gpt.forward = forward  # type: ignore[method-assign]
    assert gpt.attention is attention
    assert sorted(server.pages.free) == list(range(8)) and not server.pages.of
    assert server.serve(requests(3), temperature=TEMPERATURE) == Server(model(), pages=8, page_size=8).serve(
        requests(3), temperature=TEMPERATURE
    )


@pytest.mark.skipif(device.ON_GPU, reason="unchecked on a GPU")
def test_an_error_in_a_launch_leaves_a_server_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of another request in a table: the engine's check of rows with two writers ends the call."""
    server = Server(model(), pages=8)
    monkeypatch.setattr(Pages, "table", lambda self, group: np.zeros((len(group), 1), np.int32))
    with pytest.raises(ValueError, match="block_table: sequence 0 writes its key"):
        server.serve([Request("a", 3), Request("b", 3)])
    monkeypatch.undo()
    assert server.serve([Request("a", 2)]) == Server(model(), pages=8).serve([Request("a", 2)])


def test_temperature_0_is_the_likeliest_character() -> None:
    gpt = model()
    texts = Server(gpt, pages=12).serve(requests(3), temperature=0.0)
    assert texts == Server(gpt, pages=12).serve(requests(3), temperature=0, seed=7)
    for request, text in zip(requests(3), texts, strict=True):
        tokens = gpt.encode(request.prompt).tolist()
        for _ in range(request.length):
            tokens.append(int(to_host(gpt.forward(xp.asarray(np.array([tokens])))[0][0, -1]).argmax()))
        assert (
            text
            == "".join(LETTERS[token] for token in tokens)
            == gpt.sample(request.prompt, request.length, temperature=0)
        )


def test_the_same_request_twice_gives_two_texts() -> None:
    again = Request("abc", 20)
    texts = Server(model(), pages=12).serve([again, Request("b", 4), again], temperature=TEMPERATURE)
    copies = [Request("abc", 20), Request("b", 4), Request("abc", 20)]
    assert texts == Server(model(), pages=12).serve(copies, temperature=TEMPERATURE) and texts[0] != texts[2]
    assert "".join(LETTERS[token] for token in again.tokens) == texts[0]


def test_a_request_that_just_fits() -> None:
    (text,) = Server(model(), pages=2).serve([Request("a" * 20, 12)])
    assert len(text) == 32
