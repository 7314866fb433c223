"""The server of the small GPT: the texts of many requests are those of each alone, however pages are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import device
from helpers.attention import kernel
from helpers.attention.ladder import limits
from helpers.attention.models.char_gpt import CharGPT, Config, PlainAttention, draw, to_host, xp
from helpers.attention.models.serving import Pages, Request, Server, replay

pytestmark = pytest.mark.skipif(limits.compute_capability() < 80, reason="needs compute capability 8.0")
LETTERS = " abcdefghijklmnop"
CONTEXT = 60
TEMPERATURE = 4.0  # so that texts depend on more than the last letter


def model() -> CharGPT:
    return CharGPT(LETTERS, Config(context=CONTEXT, layers=2, heads=2, width=128), PlainAttention(), seed=3)


def requests(count: int = 7) -> list[Request]:
    """Make requests of any lengths, some of which arrive later."""
    rng = np.random.default_rng(5)
    return [
        Request("".join(rng.choice(list(LETTERS), rng.integers(1, 20))), int(rng.integers(1, 40)), int(arrives))
        for arrives in rng.integers(0, 12, count)
    ]


def texts_one_by_one(seed: int = 0) -> list[str]:
    """Generate each text alone, with all its tokens recomputed for each character."""
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
@pytest.mark.parametrize("pages, page_size", [(44, 15), (8, 8), (60, 1), (1, 64)], ids=lambda n: str(n))
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


def test_a_warm_server_builds_and_plans_nothing() -> None:
    gpt = CharGPT(LETTERS, Config(context=CONTEXT, layers=2, heads=1, width=64), PlainAttention(), seed=3)
    attention, server = gpt.attention, Server(gpt, pages=7, page_size=10)
    assert server.warm_up() >= 5, "rows of 1, 2, 4, 8 and 16 tokens"
    assert gpt.attention is attention and len(server.pages.free) == 7 and not server.history
    before = dict(kernel.COUNTS)
    texts = server.serve(requests(), temperature=TEMPERATURE)
    assert {name: kernel.COUNTS[name] - before[name] for name in ("compiled", "planned")} == {
        "compiled": 0,
        "planned": 0,
    }
    assert server.evicted and texts == Server(gpt, pages=40).serve(requests(), temperature=TEMPERATURE)


def test_half_types() -> None:
    server = Server(model(), pages=12, dtype="bfloat16")
    assert list(map(len, server.serve(requests()))) == list(map(len, texts_one_by_one()))


def test_a_watermark_lowers_evictions() -> None:
    asked = random_requests(np.random.default_rng(2), 60, 60)
    schedules = [replay(asked, pages=30, page_size=4, watermark=watermark) for watermark in (0, 4, 25)]
    evicted, lost = ([getattr(each, name) for each in schedules] for name in ("evicted", "lost"))
    assert evicted[0] > 2 * evicted[1] > 0 and evicted[2] == 0, evicted
    assert lost[0] > 1.5 * lost[1] > 0 and lost[2] == 0, lost
    assert schedules[2].steps > schedules[0].steps and schedules[2].most < schedules[0].most
    assert not any(request.tokens for request in asked)
    for schedule in schedules:
        schedule.pages.check()
        assert len(schedule.pages.free) == 30
    with pytest.raises(ValueError, match=r"requests\[0\] is longer than 2 pages of 4 keys"):
        replay([Request("a" * 8, 1)], pages=2, page_size=4)


@pytest.mark.parametrize("watermark", [0, 2])
def test_a_replay_foresees_a_server(watermark: int) -> None:
    server = Server(model(), pages=8, page_size=8, watermark=watermark)
    server.serve(requests(), temperature=TEMPERATURE)
    foreseen = replay(requests(), pages=8, page_size=8, watermark=watermark)
    assert (server.evicted, server.lost, len(server.history)) == (foreseen.evicted, foreseen.lost, foreseen.steps)
    assert foreseen.most == max(step.running for step in server.history)
    assert server.evicted > 0


def test_pages_are_of_one_request_each() -> None:
    pages, one, other = Pages(5, 4), Request("", 0, tokens=[0] * 9), Request("", 0, tokens=[0] * 8)
    assert pages.reserve(one) and pages.reserve(other) and not pages.free
    assert pages.table([one, other], 4).tolist() == [[0, 1, 2, 0], [3, 4, 0, 0]]
    other.tokens += [0]
    assert not pages.reserve(other) and pages.of[other] == [3, 4]
    pages.release(one)
    assert not pages.reserve(other, keep=3) and pages.reserve(other, keep=2)
    assert pages.of[other][:2] == [3, 4] and len(pages.free) == 2
    pages.check()
    pages.free.append(pages.of[other][0])
    with pytest.raises(RuntimeError, match="page 3 is in 2 lists"):
        pages.check()
    pages.free.pop()
    pages.of[other].remove(3)
    with pytest.raises(RuntimeError, match="page 3 is in 0 lists"):
        pages.check()


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty": (Request("", 3), {}, ValueError, r"requests\[1\]: '' and 3 more: 1 to 32 characters are needed"),
    "long": (Request("a" * 30, CONTEXT - 29), {}, ValueError, "are needed"),
    "pages": (Request("a" * 20, 20), {}, ValueError, "1 to 32 characters are needed"),
    "length 0": (Request("a", 0), {}, ValueError, r"requests\[1\].length = 0; 1 or more is needed"),
    "length below 0": (Request("a", -3), {}, ValueError, "length = -3; 1 or more"),
    "no whole length": (Request("a", 2.0), {}, TypeError, "length must be a whole number; got float 2.0"),
    "arrives at NaN": (Request("a", 2, float("nan")), {}, TypeError, "arrives must be a whole number; got float nan"),
    "an unknown character": (Request("a日", 2), {}, ValueError, r"requests\[1\].prompt: '日' is not in the alphabet"),
    "bytes": (Request(b"a", 2), {}, TypeError, "prompt must be a str; got bytes"),
    "no request": ("a", {}, TypeError, r"requests\[1\] must be a Request; got str"),
    "cold": (Request("a", 2), {"temperature": -1.0}, ValueError, "temperature = -1.0; 0, for the likeliest"),
    "NaN": (Request("a", 2), {"temperature": float("nan")}, ValueError, "temperature = nan; a finite"),
    "no temperature": (Request("a", 2), {"temperature": "1"}, TypeError, "temperature must be a number; got str"),
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
        ({"pages": 2.0}, TypeError, "pages must be a whole number"),
        ({"page_size": 0}, ValueError, "page_size = 0"),
        ({"watermark": 4}, ValueError, "watermark = 4; with 4 pages, fewer than 4"),
        ({"watermark": -1}, ValueError, "watermark = -1; 0 or more"),
        ({"watermark": 0.1}, TypeError, "watermark must be a whole number"),
        ({"dtype": "float64"}, ValueError, "dtype = 'float64'; there are float32"),
        ({"model": CharGPT("ab", Config(8, 1, 2, 72), PlainAttention())}, ValueError, "model has heads 36 wide"),
        ({"model": 3}, TypeError, "model must be a CharGPT"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            Server(**{"model": model(), "pages": 4, **options})
    with pytest.raises(TypeError, match="requests must be a list of Request; got Request"):
        Server(model(), pages=np.int64(4)).serve(Request("a", 1))


def failing(gpt: CharGPT, at: int, error: type[BaseException]) -> None:
    """Make the `at`-th call of the model raise an error."""
    forward, calls = gpt.forward, iter(range(10_000))

    def forward_or_fail(*given: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise error("in the model")
        return forward(*given, **options)

    gpt.forward = forward_or_fail  # type: ignore[method-assign]


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_server_serves_again_after_an_interrupt(at: int) -> None:
    """Pages are returned wherever it comes, and the texts are those of a new server."""
    gpt = model()
    attention, server = gpt.attention, Server(gpt, pages=7, page_size=10)
    failing(gpt, at, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt, match="in the model"):
        server.serve(requests(), temperature=TEMPERATURE)
    assert gpt.attention is attention
    assert sorted(server.pages.free) == list(range(7)) and not server.pages.of
    assert server.serve(requests(3), temperature=TEMPERATURE) == Server(model(), pages=8, page_size=8).serve(
        requests(3), temperature=TEMPERATURE
    )


@pytest.mark.parametrize("at, fails", [(0, True), (25, False)], ids=["a prompt", "a step of several"])
def test_an_error_ends_one_request(at: int, fails: bool) -> None:
    """A pass of several requests is retried with each alone, so a transient error ends none."""
    gpt, alone = model(), texts_one_by_one()
    failing(gpt, at, RuntimeError)
    server = Server(gpt, pages=40)
    texts = server.serve(requests(), temperature=TEMPERATURE)
    assert len(server.failed) == fails and texts.count(None) == fails
    for place, text in enumerate(texts):
        assert text == (None if place in server.failed else alone[place])
    assert all(str(error) == "in the model" for error in server.failed.values())
    assert server.serve(requests(), temperature=TEMPERATURE) == alone and not server.failed


def test_an_error_of_all_requests_is_raised() -> None:
    gpt = model()
    failing(gpt, 0, RuntimeError)
    server = Server(gpt, pages=4)
    with pytest.raises(RuntimeError, match="in the model"):
        server.serve([Request("a", 3)])
    assert server.serve([]) == [] and not server.failed


def test_logits_that_are_not_finite_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    server, logits = Server(model(), pages=40), Server._logits

    def spoiled(self: Server, group: list[Request]) -> np.ndarray:
        rows = np.array(logits(self, group))
        rows[[len(request.prompt) == len(requests()[2].prompt) for request in group]] = np.nan
        return rows

    monkeypatch.setattr(Server, "_logits", spoiled)
    texts = server.serve(requests(), temperature=TEMPERATURE)
    assert [*server.failed] == [2] and "not finite" in str(server.failed[2])
    assert texts == [None if place == 2 else text for place, text in enumerate(texts_one_by_one())]


@pytest.mark.skipif(device.ON_GPU, reason="unchecked on a GPU")
def test_a_page_of_two_requests_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses two writers of a row, which is not a request's fault, so no request is retried alone."""
    server = Server(model(), pages=8)
    monkeypatch.setattr(Pages, "reserve", lambda self, request, keep=0: bool(self.of.setdefault(request, [7])))
    with pytest.raises(RuntimeError, match="page 7 is in 3 lists of pages"):
        server.serve([Request("a", 3), Request("b", 3)])
    monkeypatch.undo()
    assert server.serve([Request("a", 2)]) == Server(model(), pages=8).serve([Request("a", 2)])


def random_requests(rng: np.random.Generator, count: int, context: int) -> list[Request]:
    made = []
    for arrives in rng.integers(0, count // 8, count):
        prompt = "".join(rng.choice(list(LETTERS), rng.integers(1, 16)))
        most = min(8, context - len(prompt)) if rng.random() < 0.8 else context - len(prompt)
        made.append(Request(prompt, int(rng.integers(1, most + 1)), int(arrives)))
    return made


def assert_drawn(gpt: CharGPT, place: int, request: Request) -> None:
    """Check that each character is what the model alone draws after the preceding ones."""
    logits = to_host(gpt.forward(xp.asarray(np.array([request.tokens])))[0][0])
    for at in range(len(request.prompt), len(request.tokens)):
        rng = np.random.default_rng((0, place, at))
        assert request.tokens[at] == draw(logits[at - 1], TEMPERATURE, rng), (place, at)


@pytest.mark.exhaustive(one_of_each=lambda pages: pages == 40)
@pytest.mark.parametrize("pages, page_size, watermark", [(40, 8, 3), (12, 16, 0), (200, 1, 3)])
def test_many_requests_with_injected_errors(
    pages: int, page_size: int, watermark: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page and no request is lost, and each text is the model's alone, up to where its request failed."""
    rng, config = np.random.default_rng(0), Config(context=40, layers=2, heads=1, width=64)
    gpt = CharGPT(LETTERS, config, PlainAttention(), seed=3)
    server = Server(gpt, pages=pages, page_size=page_size, watermark=watermark)
    asked = random_requests(rng, 140, 40)
    poisoned = {asked[i]: len(asked[i].prompt) + int(rng.integers(0, 4)) for i in rng.choice(140, 15, replace=False)}
    ended, raised, logits, forward = set[Request](), {"before": 0, "within": 0}, Server._logits, server.cache.forward

    def faulty_logits(self: Server, group: list[Request]) -> np.ndarray:
        self.pages.check()
        errors = sum(raised.values())
        try:
            if any(len(request.tokens) >= poisoned.get(request, 99) for request in group) or rng.random() < 0.02:
                raised["before"] += 1
                raise RuntimeError("injected")
            return logits(self, group)
        finally:
            if len(group) == 1 and sum(raised.values()) > errors:
                ended.update(group)

    def faulty_forward(*given: Any) -> Any:
        o = forward(*given)
        if rng.random() < 0.02:  # keys and values are in the cache by now
            raised["within"] += 1
            raise MemoryError("injected")
        return o

    monkeypatch.setattr(Server, "_logits", faulty_logits)
    server.cache.forward = faulty_forward  # type: ignore[method-assign]
    of_call = server.pages
    texts = server.serve(asked, temperature=TEMPERATURE)
    of_call.check()
    assert len(of_call.free) == pages and not of_call.of, "all pages are free again"
    assert {asked[place] for place in server.failed} == ended
    assert min(raised.values()) >= 3 and server.evicted >= 3 and 15 <= len(ended) < 60
    for place, (request, text) in enumerate(zip(asked, texts, strict=True)):
        assert (text is None) == (place in server.failed)
        if text is not None:
            assert len(text) == len(request.prompt) + request.length and text.startswith(request.prompt)
            assert text == "".join(LETTERS[token] for token in request.tokens)
        assert_drawn(gpt, place, request)


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
