"""The character GPT: all its gradients, its losses compared with plain attention's, training, sampling, the record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import device
from helpers.attention import reference
from helpers.attention.models import blas, char_gpt
from helpers.attention.models.char_gpt import (
    Adam,
    Attention,
    CharGPT,
    Config,
    FlashAttention,
    PlainAttention,
    learning_rate_at,
    to_host,
    train,
    xp,
)
from helpers.bench import records, study
from helpers.bench.records import NO_RECORD
from helpers.bench.studies import train as record

DATA = Path(record.__file__).resolve().parents[2] / "data"
CHAPTER = (DATA / "darwin_chapter_3.txt").read_text(encoding="utf-8")
PANGRAM = "pack my box with five dozen liquor jugs "
SMALL = Config(context=24, layers=2, heads=2, width=32)


def model_and_batch(attention: Attention, dtype: Any, config: Config = SMALL) -> tuple[CharGPT, Any, Any]:
    """Make a model with parameters far from 0, so that no gradient is small, and 3 texts shorter than the context."""
    alphabet, rng = "".join(sorted(set(CHAPTER))), np.random.default_rng(1)
    model = CharGPT(alphabet, config, attention, dtype=dtype)
    model.parameters += xp.asarray(rng.normal(0, 0.1, model.parameters.shape)).astype(dtype)
    length = config.context - 1
    tokens = model.encode(CHAPTER)[: 3 * length + 1]
    return model, xp.asarray(tokens[:-1].reshape(3, length)), xp.asarray(tokens[1:].reshape(3, length))


# ---- gradients


def slope_errors(model: CharGPT, tokens: Any, targets: Any, h: float = 1e-4) -> dict[str, float]:
    """Compare central differences along a random direction of length 1 with g's slope, for each parameter.

    The error is relative to the length of the parameter's gradient.
    """
    model.loss_and_gradients(tokens, targets)
    rng, errors = np.random.default_rng(2), {}
    for name, a in model.p.items():
        direction = rng.normal(size=a.shape)
        direction = xp.asarray(direction / np.linalg.norm(direction))
        kept, losses = a.copy(), []
        for sign in (1, -1):
            a[...] = kept + sign * h * direction
            losses.append(float(model.loss(tokens, targets)))
        a[...] = kept
        slope = (losses[0] - losses[1]) / (2 * h)
        length = float(xp.linalg.norm(model.g[name].ravel()))
        errors[name] = abs(slope - float((direction * model.g[name]).sum())) / length
    return errors


def test_gradients_are_those_of_finite_differences() -> None:
    """In float64, for every parameter tensor. The remaining error is the third derivative times h^2 / 6."""
    errors = slope_errors(*model_and_batch(PlainAttention(), np.float64))
    assert len(errors) == 2 + 2 * 12 + 2
    assert max(errors.values()) < 2e-8, errors


class WrongAttention(PlainAttention):
    """Plain attention with one gradient 1 % too long."""

    def __init__(self, which: int) -> None:
        self.which = which

    def backward(self, do: Any, saved: Any) -> Any:
        gradients = list(super().backward(do, saved))
        gradients[self.which] = 1.01 * gradients[self.which]
        return tuple(gradients)


@pytest.mark.parametrize("which", range(3))
def test_finite_differences_see_a_wrong_gradient(which: int) -> None:
    errors = slope_errors(*model_and_batch(WrongAttention(which), np.float64))
    assert errors["1.qkv.weight"] > 1e-6, errors


@pytest.mark.parametrize("name", ["linear_backward", "layer_norm_backward", "gelu_backward"])
def test_finite_differences_see_a_wrong_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(char_gpt, name)

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        return (1.01 * found[0], *found[1:]) if isinstance(found, tuple) else 1.01 * found

    monkeypatch.setattr(char_gpt, name, wrong)
    assert max(slope_errors(*model_and_batch(PlainAttention(), np.float64)).values()) > 1e-4


def gradient_errors(attention: Attention) -> dict[str, float]:
    """Compare float32 gradients with float64 ones, relative to their length, for each parameter."""
    exact, tokens, targets = model_and_batch(PlainAttention(), np.float64)
    ours, _, _ = model_and_batch(attention, np.float32)
    ours.parameters[...] = exact.parameters
    exact.parameters[...] = ours.parameters  # both have the same values, because float64 represents float32 exactly
    exact.loss_and_gradients(tokens, targets)
    ours.loss_and_gradients(tokens, targets)
    norm = xp.linalg.norm
    return {name: float(norm((ours.g[name] - a).ravel()) / norm(a.ravel())) for name, a in exact.g.items()}


def test_gradients_by_the_kernels_are_those_of_float64() -> None:
    ours, plain = gradient_errors(FlashAttention()), gradient_errors(PlainAttention())
    assert max(ours.values()) < 2.5e-6, ours
    assert max(ours.values()) < 4 * max(plain.values()), (ours, plain)


def test_gradients_by_the_kernels_in_bfloat16() -> None:
    """Q, K, V, P and O are rounded to 8 bits, an error of 2^-9 each, over some hundred keys and two layers."""
    errors = gradient_errors(FlashAttention("bfloat16"))
    assert 1e-4 < max(errors.values()) < 2e-2, errors


def test_plain_attention_is_the_reference() -> None:
    rng = np.random.default_rng(3)
    q, k, v, do = (rng.normal(size=(2, 17, 3, 8)) for _ in range(4))
    o, saved = PlainAttention().forward(*map(xp.asarray, (q, k, v)))
    found = o, *PlainAttention().backward(xp.asarray(do), saved)
    q, k, v, do = (a.swapaxes(1, 2) for a in (q, k, v, do))
    expected = reference.attention(q, k, v, causal=True), *reference.attention_backward(do, q, k, v, causal=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(to_host(a).swapaxes(1, 2), b, rtol=1e-12, atol=1e-12)


def test_the_reference_as_attention_gives_the_same_loss() -> None:
    """Any object with forward and backward can be an attention."""

    class Reference:
        def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            heads = [to_host(a).swapaxes(1, 2) for a in (q, k, v)]
            return xp.asarray(reference.attention(*heads, causal=True).swapaxes(1, 2)), heads

        def backward(self, do: Any, saved: Any) -> tuple[Any, ...]:
            found = reference.attention_backward(to_host(do).swapaxes(1, 2), *saved, causal=True)
            return tuple(xp.asarray(a.swapaxes(1, 2)) for a in found)

    losses, gradients = [], []
    for attention in (Reference(), PlainAttention()):
        model, tokens, targets = model_and_batch(attention, np.float64)
        losses.append(float(model.loss_and_gradients(tokens, targets)))
        gradients.append(to_host(model.gradient))
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)
    np.testing.assert_allclose(*gradients, rtol=1e-9, atol=1e-13)


# ---- training


FIRST: dict[str, Any] = {
    "config": Config(32, 2, 2, 32),
    "batch": 4,
    "held_out": 0.0,
    "every": 1000,
    "report": None,
}


def test_a_wrong_gradient_changes_the_first_losses() -> None:
    right, wrong = (train(CHAPTER, 20, attention=a, **FIRST).losses for a in (PlainAttention(), WrongAttention(2)))
    assert abs(right[-1] - wrong[-1]) > 2e-5 * right[-1]


def test_training_learns_and_reports() -> None:
    lines: list[str] = []
    run = train(
        PANGRAM * 20,
        80,
        config=Config(16, 1, 2, 32),
        attention=PlainAttention(),
        batch=8,
        learning_rate=1e-2,
        held_out=0.2,
        every=25,
        report=lines.append,
    )
    assert len(run.losses) == 80 and run.losses[0] > math.log(len(run.model.characters)) > 3 > run.losses[20]
    assert [step for step, _ in run.validation] == [25, 50, 75, 80] and len(lines) == 4
    assert run.validation[-1][1] < 0.2 and f"validation {run.validation[-1][1]:.3f}" in lines[-1]
    assert run.model.sample("pack", len(PANGRAM), temperature=0.1) == PANGRAM + "pack"


def test_the_same_seed_gives_the_same_run() -> None:
    how: dict[str, Any] = {"config": Config(16, 1, 1, 8), "attention": PlainAttention(), "batch": 2, "report": None}
    a, b, other = (train(CHAPTER, 3, seed=seed, **how) for seed in (0, 0, 1))
    assert a.losses == b.losses != other.losses
    assert a.validation == b.validation


def test_what_train_and_the_model_refuse() -> None:
    with pytest.raises(ValueError, match="too few for a context of 32"):
        train("some words " * 4, 1, report=None)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 64"):
        CharGPT("ab", Config(heads=3), PlainAttention())
    with pytest.raises(ValueError, match="twice"):
        CharGPT("aba", Config(), PlainAttention())
    model = CharGPT("ab", Config(8, 1, 1, 8), PlainAttention())
    samples: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "prompt is empty", ("", 1), {}),
        (TypeError, "prompt must be a str; got bytes", (b"a", 1), {}),
        (ValueError, "'c' is not in the alphabet of the model, which has 2 characters: 'ab'", ("abc", 1), {}),
        (ValueError, "length = -1; 0 or more", ("a", -1), {}),
        (TypeError, "length must be a whole number; got float", ("a", 1.5), {}),
        (ValueError, "temperature = -0.5; 0, for the likeliest", ("a", 1), {"temperature": -0.5}),
        (ValueError, "temperature = inf", ("a", 1), {"temperature": math.inf}),
        (TypeError, "temperature must be a number; got bool", ("a", 1), {"temperature": True}),
        (ValueError, "seed = -1", ("a", 1), {"seed": -1}),
    ]
    for error, message, args, options in samples:
        with pytest.raises(error, match=message):
            model.sample(*args, **options)
    assert model.sample("a", 0) == "a" and len(model.sample("ab", np.int32(3), temperature=5e-324)) == 5
    model.parameters[...] = np.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        model.sample("a", 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": -1}, ValueError, "steps = -1; 0 or more"),
        ({"steps": 1.0}, TypeError, "steps must be a whole number"),
        ({"batch": 0}, ValueError, "batch = 0; 1 or more"),
        ({"every": 0}, ValueError, "every = 0; 1 or more"),
        ({"seed": -1}, ValueError, "seed = -1"),
        ({"warm_up": -1}, ValueError, "warm_up = -1"),
        ({"held_out": 1.0}, ValueError, "held_out = 1.0; a share"),
        ({"held_out": -0.5}, ValueError, "held_out = -0.5"),
    ],
    ids=str,
)
def test_training_refuses_numbers_that_are_none(options: dict[str, Any], error: type[Exception], message: str) -> None:
    how: dict[str, Any] = {"steps": 1, "config": Config(8, 1, 1, 8), "attention": PlainAttention(), "report": None}
    with pytest.raises(error, match=message):
        train("some words " * 40, **how | options)


@pytest.mark.parametrize("field", ["context", "layers", "heads", "width"])
def test_a_config_has_whole_numbers(field: str) -> None:
    for value, error in ((0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=field):
            Config(**{field: value})


def test_tokens_that_there_are_not_are_refused() -> None:
    model = CharGPT("ab", Config(8, 1, 1, 8), PlainAttention())
    for tokens in [np.zeros((1, 9), int), np.zeros(3, int), np.zeros((0, 3), int), np.zeros((1, 0), int), [[0]]]:
        with pytest.raises(ValueError, match=r"tokens must be an array \(B, T\), B from 1, T from 1 to the context"):
            model.forward(xp.asarray(tokens) if isinstance(tokens, np.ndarray) else tokens)
    tokens = xp.zeros((1, 3), int)
    with pytest.raises(ValueError, match="positions is float64; whole numbers"):
        model.forward(tokens, positions=xp.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"targets has shape \(1, 2\); \(1, 3\) is needed"):
        model.loss(tokens, tokens[:, :2])
    with pytest.raises(ValueError, match=r"targets has shape \(1, 3\); \(2, 3\) is needed"):
        model.loss(xp.zeros((2, 3), int), tokens)
    if not device.ON_GPU:  # the host need not wait to see them
        for tokens, positions, name in ((-1, 0, "tokens has -1"), (2, 0, "tokens has 2"), (0, 8, "positions has 8")):
            with pytest.raises(ValueError, match=name):
                model.forward(np.full((1, 3), tokens), positions=np.full((1, 3), positions))
        for target in (-1, 2):
            with pytest.raises(ValueError, match=f"targets has {target} to {target}; there are 0 to 1"):
                model.loss(np.zeros((1, 3), int), np.full((1, 3), target))


def test_a_model_is_made_of_what_it_needs() -> None:
    small, plain = Config(8, 1, 1, 8), PlainAttention()
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "characters is empty", lambda: CharGPT("", small, plain)),
        (TypeError, "config must be a Config", lambda: CharGPT("ab", None, plain)),  # type: ignore[arg-type]
        (TypeError, "attention must have forward", lambda: CharGPT("ab", small, None)),  # type: ignore[arg-type]
        (ValueError, "got int32", lambda: CharGPT("ab", small, plain, dtype=np.int32)),
        (ValueError, "seed = -1; 0 or more", lambda: CharGPT("ab", small, plain, seed=-1)),
        (ValueError, "dtype = 'float64'; there are float32", lambda: FlashAttention("float64")),
        (TypeError, "deterministic must be True or False", lambda: FlashAttention(deterministic=1)),  # type: ignore[arg-type]
        (TypeError, "text must be a str; got int", lambda: train(5, 1)),  # type: ignore[arg-type]
        (TypeError, "report must be a function", lambda: train("ab", 1, report=5)),  # type: ignore[arg-type]
        (ValueError, "learning_rate = nan; a finite", lambda: train("ab", 1, learning_rate=math.nan)),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


def test_adam_is_its_algorithm() -> None:
    """Element by element, as the paper writes it."""
    gradients = np.random.default_rng(4).normal(size=(5, 3))
    parameters = xp.ones(3)
    adam = Adam(parameters)
    theta, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t, g in enumerate(gradients, start=1):
        adam.step(xp.asarray(g), 0.1)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        theta = theta - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        np.testing.assert_allclose(to_host(parameters), theta, rtol=1e-12)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate_at(step, 100, 1.0, 10) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def test_training_leaves_the_threads_of_products_as_they_were() -> None:
    """There is one thread meanwhile: OpenBLAS's others would take cores from the kernels."""
    if not (found := blas._openblas()):
        pytest.skip("NumPy does not multiply by OpenBLAS here")
    get, put = found
    before = get()
    try:
        put(2)
        seen: list[int] = []
        how: dict[str, Any] = {"config": Config(16, 1, 1, 8), "attention": PlainAttention(), "every": 1}
        train(CHAPTER, 1, report=lambda line: seen.append(get()), **how)
        with pytest.raises(ValueError):
            train("", 1, **how)
        assert seen == [1] and get() == 2
    finally:
        put(before)


# ---- sampling


@pytest.mark.parametrize("attention", [PlainAttention(), FlashAttention()], ids=["plain", "kernels"])
def test_what_comes_later_is_not_seen(attention: Attention) -> None:
    model, tokens, _ = model_and_batch(attention, np.float32)
    changed = tokens.copy()
    changed[:, 10:] = (changed[:, 10:] + 1) % len(model.characters)
    a, b = (to_host(model.forward(t)[0]) for t in (tokens, changed))
    np.testing.assert_array_equal(a[:, :10], b[:, :10])
    assert (np.abs(a[:, 10:] - b[:, 10:]).max(axis=-1) > 1e-3).all()


def test_a_sample_is_drawn_by_seed_and_temperature() -> None:
    model, _, _ = model_and_batch(PlainAttention(), np.float32)
    a, again, other = (model.sample("The", 40, temperature=2.0, seed=seed) for seed in (0, 0, 1))
    assert a == again != other and len(a) == 43 and a.startswith("The")
    cold = {model.sample("The", 40, temperature=1e-3, seed=seed) for seed in range(3)}
    assert len(cold) == 1  # longer than the context of 24: the window moves on
    text = cold.pop()
    seen = model.encode(text[16:42][-24:])
    best = int(np.argmax(to_host(model.forward(xp.asarray(seen[None]))[0])[0, -1]))
    assert model.characters[best] == text[42]


# ---- the record


def test_the_book_has_the_chapter_word_for_word() -> None:
    book = record.origin()
    assert CHAPTER.strip() in book and len(book) > 800_000
    assert "gutenberg" not in book.lower()


TINY = record.Sizes(
    Config(16, 1, 1, 16), batch=2, steps=4, warm_up=2, every=2, compared=2, contexts=(16, 32), timed=1, sample=3
)


def test_a_record_is_measured_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpt.json"
    monkeypatch.setattr(record, "recorded", lambda: records.load(path))
    monkeypatch.setattr(record, "measure", lambda measure=record.measure: measure(CHAPTER, TINY))
    assert record.table() == NO_RECORD
    monkeypatch.setattr(study, "ON_GPU", True)  # what is measured is small
    assert study.main(["train", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["failed"] == []
    names = set(record.attentions())
    assert {row["name"] for row in found["first_steps"]} == names | {"plain float64", "kernels float32 deterministic"}
    assert all(len(row["losses"]) == 2 for row in found["first_steps"])
    assert {run["name"] for run in found["runs"]} == {name for name in names if name.startswith("kernels")}
    for run in found["runs"]:
        assert len(run["losses"]) == 4 and [step for step, _ in run["validation"]] == [2, 4]
        assert len(run["sample"]) == len("The ") + 3
    assert {(row["name"], row["context"], row["batch"]) for row in found["steps"]} == {
        (name, context, batch) for name in names for context, batch in ((16, 2), (32, 1))
    }
    assert all(0 < row["attention_ms"] < row["ms"] for row in found["steps"])
    capsys.readouterr()
    assert study.main(["train"]) == 0
    told = capsys.readouterr().out
    assert told.count("kernels bfloat16") == 4 and "FAILED" not in told
    assert study.main(["train", str(tmp_path / "a"), "b"]) == 2


def test_what_fails_is_in_the_record_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(PlainAttention):
        def backward(self, do: Any, saved: Any) -> Any:
            raise RuntimeError("out of something")

    monkeypatch.setattr(record, "attentions", lambda: {"kernels broken": Broken(), "plain float32": PlainAttention()})
    monkeypatch.setattr(record, "FlashAttention", lambda **_: Broken())
    found = record.measure(CHAPTER, TINY, report=lambda line: None)
    assert {row["name"] for row in found["first_steps"]} == {"plain float32", "plain float64"}
    assert len(found["failed"]) == 1 + 2 + 1 + 2 and "out of something" in found["failed"][0]["error"]
    assert "FAILED first steps, kernels broken: RuntimeError" in record.table(found)
