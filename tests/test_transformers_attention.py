"""helpers.transformers_attention: whole models with random weights, against their own runs with SDPA and eager."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

from helpers.device import ON_GPU

torch = pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")
if find_spec("transformers") is None or int(version("transformers").partition(".")[0]) < 5:
    pytest.skip("transformers 5 is optional, and not installed here", allow_module_level=True)

from helpers import torch_attention  # noqa: E402 (after the skips)

HAS_CUDA = ON_GPU and torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU that CuPy and PyTorch both see")
SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import transformers, which imports PyTorch's compiler: collecting these tests needs neither."""
    global transformers, course, CACHE
    import transformers

    from helpers import transformers_attention as course

    # The name of forward's argument, which has changed.
    CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


def gpt2(**more: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=97,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel, config


def llama() -> Any:
    """Make a model with four query heads and two KV heads."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = transformers.LlamaConfig(**SIZES, **heads, bos_token_id=0, eos_token_id=None)
    return transformers.LlamaForCausalLM, config


def mistral() -> Any:
    """Make a model with a sliding window of 24 tokens."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = transformers.MistralConfig(**SIZES, **heads, bos_token_id=0, eos_token_id=None, sliding_window=24)
    return transformers.MistralForCausalLM, config


def bert() -> Any:
    """Make a model with bidirectional attention."""
    config = transformers.BertConfig(
        **SIZES, num_attention_heads=4, intermediate_size=128, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0
    )
    return transformers.BertModel, config


def gemma2() -> Any:
    """Make a model with soft caps, and a sliding window of 24 tokens only in the first layer."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 16}
    more = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": None, "query_pre_attn_scalar": 16}
    more |= {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False}
    config = transformers.Gemma2Config(**SIZES, **heads, **more, bos_token_id=0, eos_token_id=None)
    return transformers.Gemma2ForCausalLM, config


def gpt_oss() -> Any:
    """Make a model with a sink per head, sliding windows as in gemma2, and a mixture of two experts."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 16}
    more = {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 2}
    more |= {"layer_types": ["sliding_attention", "full_attention"], "experts_implementation": "eager"}
    config = transformers.GptOssConfig(**SIZES, **heads, **more, bos_token_id=0, eos_token_id=None)
    return transformers.GptOssForCausalLM, config


MODELS = {"gpt2": gpt2, "llama": llama, "mistral": mistral, "bert": bert, "gemma2": gemma2, "gpt_oss": gpt_oss}
CAUSAL = [name for name in MODELS if name != "bert"]
WINDOWED = "mistral", "gemma2", "gpt_oss"


def model_of(name: str, where: str, dtype: Any = torch.float32) -> Any:
    kind, config = MODELS[name]()
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():  # the usual 0.02 would leave all attention nearly uniform
        weight.data.mul_(3.0)
        if weight.shape == (4,):  # gpt-oss's sinks: as large as scores, and frozen
            weight.requires_grad_(False).copy_(torch.linspace(-1, 2, 4))
    return model.to(where, dtype)


def theirs(name: str) -> str:
    """Return the name of transformers' own attention: SDPA has neither soft caps nor sinks."""
    return "eager" if name in ("gemma2", "gpt_oss") else "sdpa"


def tokens(length: int, where: str, batch: int = 2) -> Any:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(length)).to(where)


def by(model: Any, implementation: str) -> Any:
    """Return the model with another attention, after checking that it is the one that runs."""
    if implementation == "course":
        course.register()
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


def output(model: Any, ids: Any) -> Any:
    found = model(ids)
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).float()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the rows and keys of each call of ours."""
    seen: list[tuple[int, int]] = []
    true = course.attend_heads_first

    def spy(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append((q.shape[2], k.shape[2]))
        return true(q, k, v, **options)

    monkeypatch.setattr(course, "attend_heads_first", spy)
    return seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits(name: str, dtype: str, where: str, calls: list[tuple[int, int]]) -> None:
    """The 2x rule: compared with eager in float64, at most twice the error of transformers' own in the same type."""
    ids = tokens(65, where)
    with torch.no_grad():
        want = by(model_of(name, where, torch.float64), "eager")(ids)
        want = want.logits if hasattr(want, "logits") else want.last_hidden_state
        typed = getattr(torch, dtype)
        errors = {}
        for implementation in (theirs(name), "course"):
            model = model_of(name, where).to(typed)
            errors[implementation] = float((output(by(model, implementation), ids).double() - want).abs().max())
    assert calls == [(65, 65)] * 2
    assert errors["course"] <= 2 * errors[theirs(name)] + 1e-6 * float(want.abs().max()), errors


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_generation_is_the_same(name: str, where: str, calls: list[tuple[int, int]]) -> None:
    """With the KV cache: a prefill of 20 tokens, then one query per step; mistral's window is exceeded on the way."""
    model, ids = model_of(name, where), tokens(20, where)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    whole = torch.ones_like(ids)
    want = by(model, theirs(name)).generate(ids, attention_mask=whole, **options)
    got = by(model, "course").generate(ids, attention_mask=whole, **options)
    assert torch.equal(got, want) and got.shape == (2, 36)
    assert calls[0] == (20, 20) and calls[2][0] == 1 and calls[-1][0] == 1
    assert len(set(want[:, 20:].flatten().tolist())) > 4  # not a model that repeats one word


@pytest.mark.parametrize("name", MODELS)
def test_training_step(name: str, where: str) -> None:
    ids = tokens(33, where)
    gradients = {}
    for implementation in ("eager", "course"):
        model = by(model_of(name, where), implementation).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        output(model, ids).square().mean().backward()
        gradients[implementation] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients["course"].keys() == gradients["eager"].keys()
    for weight, want in gradients["eager"].items():
        torch.testing.assert_close(
            gradients["course"][weight], want, atol=2e-5 * max(1.0, float(want.abs().max())), rtol=0, msg=weight
        )


def test_a_cache_that_is_filled_in_parts(where: str) -> None:
    """A second part of 13 tokens sees the first part's 20 and itself: bottom-right."""
    model, ids = by(model_of("llama", where), "course"), tokens(33, where)
    with torch.no_grad():
        first = model(ids[:, :20], use_cache=True)
        second = model(ids[:, 20:], **{CACHE: first.past_key_values})
        want = by(model, "eager")(ids).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), want, atol=1e-4, rtol=1e-4)


# ---- padding

HOLES: dict[str, Callable[[Any], Any]] = {
    "left": lambda at: at >= torch.tensor([[0], [9], [20]]),
    "right": lambda at: at < torch.tensor([[33], [20], [5]]),
    "holes": lambda at: (at % 5 != torch.tensor([[7], [0], [3]])) & (at > 2),
}


def padding(kind: str, where: str) -> Any:
    """Return a mask (3, 33) of bool: three sequences, some of whose tokens are padding."""
    return HOLES[kind](torch.arange(33)[None].expand(3, -1)).to(where)


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the rows and keys of each call of ours for packed sequences; and each read of a mask."""
    seen: list[tuple[int, int]] = []
    true, tokens_of = course.flash_attention_varlen, course._Tokens.of

    def spy(q: Any, k: Any, *rest: Any, **options: Any) -> Any:
        seen.append((len(q), len(k)))
        return true(q, k, *rest, **options)

    def read(mask: Any) -> Any:
        seen.append((0, 0))
        return tokens_of(mask)

    monkeypatch.setattr(course, "flash_attention_varlen", spy)
    monkeypatch.setattr(course._Tokens, "of", read)
    return seen


@pytest.mark.parametrize("kind", HOLES)
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name: str, kind: str, where: str, unpadded: list[tuple[int, int]]) -> None:
    """Outputs and gradients of everything except padding, against transformers'; the kernels see only other tokens."""
    if name in WINDOWED and kind == "holes":
        pytest.skip("a window counts tokens, as FlashAttention's integration has it, and SDPA's counts holes too")
    ids, mask = tokens(33, where, batch=3), padding(kind, where)
    found = {}
    for implementation in (theirs(name), "course"):
        model = by(model_of(name, where), implementation)
        out = model(ids, attention_mask=mask.long(), **({"use_cache": False} if name != "bert" else {}))
        out = (out.logits if hasattr(out, "logits") else out.last_hidden_state)[mask]
        out.square().mean().backward()
        found[implementation] = [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    rows = 3 * 33 if name == "bert" else int(mask.sum())  # bidirectional attention may be cross-attention
    layer = rows, int(mask.sum())
    again = [(0, 0)] if name in ("gemma2", "gpt_oss") else []  # their layers with a window have their own mask
    assert unpadded == [(0, 0), layer, *again, layer]  # otherwise it is read once, for two layers
    assert len(found["course"]) == len(found[theirs(name)]) > 10
    for got, want in zip(found["course"], found[theirs(name)], strict=True):
        torch.testing.assert_close(got, want, atol=2e-5 * max(1.0, float(want.abs().max())), rtol=0)


@pytest.mark.parametrize("name", CAUSAL)
def test_padded_prompts_are_continued(name: str, where: str, unpadded: list[tuple[int, int]]) -> None:
    """Greedy search with the KV cache: one query per step, with padding among the keys."""
    model, ids, mask = model_of(name, where), tokens(33, where, batch=3), padding("left", where).long()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = by(model, theirs(name)).generate(ids, **options)
    got = by(model, "course").generate(ids, **options)
    assert torch.equal(got, want) and got.shape == (3, 45)
    calls = [rows for rows, _ in unpadded if rows]
    assert calls[:3] == [int(mask.sum())] * 2 + [3] and (len(calls) == 2 * 12 or name in WINDOWED)


@pytest.mark.parametrize("more", [1, 8])
@pytest.mark.parametrize("kind", HOLES)
def test_a_padded_prompt_in_two_parts(kind: str, more: int, where: str, unpadded: list[tuple[int, int]]) -> None:
    """The second part's queries are the last of each sequence, wherever the padding before them is."""
    model, ids = model_of("llama", where), tokens(33, where, batch=3)[:, : 25 + more]
    mask = torch.cat([padding(kind, where)[:, :25], torch.ones(3, more, dtype=torch.bool, device=where)], 1).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = {}
    with torch.no_grad():
        for implementation in ("sdpa", "course"):
            by(model, implementation)
            first = model(ids[:, :25], attention_mask=mask[:, :25], position_ids=positions[:, :25], use_cache=True)
            cache = {CACHE: first.past_key_values}
            second = model(ids[:, 25:], attention_mask=mask, position_ids=positions[:, 25:], **cache)
            found[implementation] = second.logits
    assert unpadded[-1] == (3 * more, int(mask.sum()))
    torch.testing.assert_close(found["course"], found["sdpa"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own", ["course", "with a fallback"])
def test_padding_of_an_encoder_is_not_that_of_its_decoder(own: str, where: str, monkeypatch: Any) -> None:
    """Cross-attention: the mask is the keys', and may be as long as the queries; no query is dropped."""
    if own != "course":
        monkeypatch.setattr(torch_attention, "_WARNED", {"told before"})
        monkeypatch.setattr(course, "_refuse", refuse_all)
        course.register(own, fallback=True)
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 64, "vocab_size": 97}
    torch.manual_seed(0)
    model = transformers.BartModel(transformers.BartConfig(**sizes, max_position_embeddings=256)).eval().to(where)
    ids, mask = tokens(33, where, batch=3), padding("right", where).long()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PyTorch computes this attention")
        for length in (70, 33, 12):
            call = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(length, where, batch=3)}
            want, got = (by(model, name)(**call).last_hidden_state for name in ("sdpa", own))
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_sequence_of_padding_alone(where: str) -> None:
    model, ids = by(model_of("llama", where), "course"), tokens(33, where, batch=3)
    mask = padding("right", where).long()
    mask[1] = 0
    with torch.no_grad():
        out, whole = model(ids, attention_mask=mask).logits, model(ids).logits
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[0], whole[0], atol=1e-4, rtol=1e-4)


# ---- what the kernels do not support


def four_axes(model: Any, ids: Any) -> Any:
    return model(ids, attention_mask=torch.zeros(2, 1, 33, 33, device=ids.device))


def packed(model: Any, ids: Any) -> Any:
    positions = torch.cat([torch.arange(20), torch.arange(13)])[None].to(ids.device)
    return model(ids[:1], position_ids=positions, use_cache=False)


def static_cache(model: Any, ids: Any) -> Any:
    return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation="static")


def dropout(model: Any, ids: Any) -> Any:
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model.train()(ids)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a mask of four axes": (four_axes, "attention_mask has shape (2, 1, 33, 33), and 'course' takes no mask"),
    "packed sequences": (
        packed,
        "this model asks for another mask here (a static cache, packed sequences by position_ids",
    ),
    "a static cache": (static_cache, "caches without room to spare, such as DynamicCache"),
    "dropout": (dropout, "attention dropout is 0.1, and 'course' has none: model.eval(), or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, where: str) -> None:
    call, message = REFUSED[case]
    model = by(model_of("llama", where), "course")
    with pytest.raises(ValueError, match=re.escape(message)), torch.set_grad_enabled(case == "dropout"):
        call(model, tokens(33, where))


@pytest.mark.parametrize("what", ["position_bias", "cache"])
def test_what_changes_the_result_is_refused(what: str) -> None:
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=f"this model needs {what}, which 'course' does not support"):
        course.attend(torch.nn.Module(), q, q, q, None, **{what: 1.0})


def test_a_mask_that_hides_nothing_is_taken(where: str) -> None:
    model, ids = by(model_of("llama", where), "course"), tokens(33, where)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


def test_a_step_that_is_traced_needs_a_cache(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads no position_ids then: without a cache, they may be those of packed sequences."""
    model, ids = by(model_of("llama", where), "course"), tokens(33, where)
    want = model(ids, use_cache=False).logits
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    assert torch.equal(model(ids, use_cache=True).logits, want)
    with pytest.raises(ValueError, match="takes those of a call without a cache for packed sequences: use_cache=True"):
        model(ids, use_cache=False)


@on_gpu
def test_a_step_in_a_graph() -> None:
    """A replay gives the gradients of a step from Python, with other numbers than the captured ones."""
    model, ids = by(model_of("llama", "cuda", torch.bfloat16), "course").train(), tokens(130, "cuda")

    def step() -> None:
        model(ids, labels=ids, use_cache=True).loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ids.copy_(ids.flip(1))
    graph.replay()
    replayed = [a.grad.clone() for a in model.parameters()]
    model.zero_grad(set_to_none=True)
    step()
    for got, want in zip(replayed, (a.grad for a in model.parameters()), strict=True):
        assert float((got - want).abs().max()) <= 0.02 * float(want.abs().max())


# ---- fallback


@pytest.mark.parametrize("case", [*REFUSED, "float64"])
def test_falls_back_to_sdpa(case: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning that gives the reason, and SDPA's own numbers."""
    monkeypatch.setattr(torch_attention, "_WARNED", set())
    monkeypatch.setattr(course, "_MADE", set())
    call, message = REFUSED.get(case, (lambda model, ids: model.double()(ids), "q is float64"))
    course.register("with a fallback", fallback=True)
    found = {}
    with warnings.catch_warnings(record=True) as seen, torch.set_grad_enabled(case == "dropout"):
        warnings.simplefilter("always")
        for implementation in ("sdpa", "with a fallback"):
            torch.manual_seed(1)  # for the dropout
            model = by(model_of("llama", where), implementation)
            torch.manual_seed(1)
            out = call(model, tokens(33, where))
            found[implementation] = getattr(out, "logits", out)
    assert torch.equal(found["with a fallback"], found["sdpa"])
    (told,) = [str(w.message) for w in seen if "PyTorch computes this attention" in str(w.message)]
    assert message in told


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
@pytest.mark.parametrize("kind", ["none", "left", "right"])
def test_a_fallback_sees_what_the_kernels_see(name: str, kind: str, where: str, monkeypatch: Any) -> None:
    """Dropout that drops nothing: masks, windows and padding are the same as in the kernels."""
    monkeypatch.setattr(torch_attention, "_WARNED", {"told before"})
    monkeypatch.setattr(course, "_refuse", refuse_all)
    course.register("with a fallback", fallback=True)
    model, ids = model_of(name, where), tokens(33, where, batch=3)
    mask = padding(kind, where) if kind != "none" else torch.ones(3, 33, dtype=torch.bool, device=where)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (
            by(model, implementation)(ids, attention_mask=mask.long()) for implementation in ("with a fallback", "sdpa")
        )
    got, want = (getattr(a, "logits", None) if hasattr(a, "logits") else a.last_hidden_state for a in (got, want))
    torch.testing.assert_close(got[mask], want[mask], atol=2e-5 * float(want.abs().max()), rtol=0)


def refuse_all(*_: Any) -> None:
    raise ValueError("for a test: the kernels are not asked")


def test_chunks_among_cached_keys(where: str) -> None:
    """A layer with chunks keeps as many keys as a chunk has, and they may be of two: a step sees those of its own."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "intermediate_size_mlp": 128}
    more = {"attention_chunk_size": 8, "num_local_experts": 1, "head_dim": 16, "experts_implementation": "eager"}
    config = transformers.Llama4TextConfig(**SIZES, **heads, **more, bos_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval().to(where)
    for weight in model.parameters():
        weight.data.mul_(3.0)
    course.register("with a fallback", fallback=True)
    ids, how = tokens(7, where), {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}
    kept = {"output_scores": True, "return_dict_in_generate": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (
            torch.stack(by(model, each).generate(ids, **how, **kept).scores) for each in ("with a fallback", "sdpa")
        )
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)
    with pytest.raises(ValueError, match="'course' has no chunks of 8 tokens"):
        by(model, "course").generate(ids, **how)


def test_a_cache_that_is_paged_is_no_fallback() -> None:
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="this model needs cache, which 'course' does not support"):
        course.attend(torch.nn.Module(), q, q, q, None, fallback=True, cache=1.0)


@pytest.mark.parametrize("what", [{"softcap": 1.0}, {"s_aux": torch.zeros(2)}], ids=lambda what: next(iter(what)))
def test_what_sdpa_has_not_is_no_fallback(what: dict[str, Any]) -> None:
    """SDPA would silently ignore a sink."""
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=re.escape("attention dropout is 0.1")):
        course.attend(torch.nn.Module(), q, q, q, None, dropout=0.1, fallback=True, **what)


def test_a_sink_that_is_learned(where: str) -> None:
    """Its gradient equals that of transformers' own attention."""
    found = []
    for implementation in ("course", "eager"):
        model, ids = by(model_of("gpt_oss", where), implementation), tokens(33, where)
        sinks = model.model.layers[0].self_attn.sinks.requires_grad_()
        found.append(torch.autograd.grad(model(ids).logits.float().square().sum(), sinks)[0])
    torch.testing.assert_close(*found, rtol=2e-3, atol=1e-4)
