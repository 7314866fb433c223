"""A small GPT on characters, trained on the course's attention kernels. Every gradient is written out.

    from helpers.attention.models.char_gpt import Config, PlainAttention, train
    run = train(text, steps=300)                    # attention by flash_attention and flash_attention_backward
    print(run.model.sample("The ", 200, seed=1))
    plain = train(text, steps=50, attention=PlainAttention())  # the same model, the same batches

The model is a small GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"): embeddings of
characters and positions; blocks of attention and an MLP, each with a layer norm before it and its input added to its
output; a last layer norm; and a head that shares its weights with the embedding of characters. On a GPU the arrays are
CuPy's. Without one they are NumPy's, and the kernels run on the CPU engine.

Letters in shapes: B sequences of a batch, T tokens of a sequence, D the width of the model, H heads, d = D / H, V
characters. A function `f_backward` takes the gradient of the loss with respect to f's output, here called dy, and
returns those with respect to its inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from helpers import device
from helpers.attention import flash_attention, flash_attention_backward
from helpers.attention.models.blas import one_thread
from helpers.attention.scalars import check_flags, finite_number, whole_number
from helpers.engine.cuda_source.c_types import dtype_of

xp = device.cp if device.ON_GPU else np  # the array module of the model


def to_host(a: Any) -> np.ndarray:
    """Return an array of the model as a NumPy array."""
    return device.cp.asnumpy(a) if device.ON_GPU else np.asarray(a)


# ---- attention: the course's kernels, or one that keeps all scores


class Attention(Protocol):
    """Causal attention of q, k and v (B, T, H, d)."""

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output (B, T, H, d), and what backward needs."""

    def backward(self, do: Any, saved: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v, each (B, T, H, d)."""


class FlashAttention:
    """Attention by the course's kernels.

    dtype: q, k and v are converted to it: "float32", "float16" or "bfloat16". The output and the gradients are
    converted back to the model's dtype. On the CPU engine float32 is the fastest.
    stage, backward_stage, deterministic: options of flash_attention and flash_attention_backward.
    """

    def __init__(
        self,
        dtype: str = "float32",
        *,
        stage: str | int | None = None,
        backward_stage: str | int | None = None,
        deterministic: bool = False,
    ) -> None:
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype = {dtype!r:.40}; there are float32, float16 and bfloat16, by name")
        check_flags(deterministic=deterministic)
        self.dtype, self.stage = dtype_of(dtype), stage
        self.backward_options = {"stage": backward_stage, "deterministic": deterministic}

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output (B, T, H, d), and (q, k, v, o, lse) on the device. lse: a row's log-sum-exp."""
        model_dtype = q.dtype
        q, k, v = (device.cp.asarray(a.astype(self.dtype, copy=False)) for a in (q, k, v))
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True, stage=self.stage)
        return self._to_model(o, model_dtype), (q, k, v, o, lse)

    def backward(self, do: Any, saved: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v, each (B, T, H, d). P is recomputed from lse: see notebook 08."""
        device_do = device.cp.asarray(do.astype(self.dtype, copy=False))
        gradients = flash_attention_backward(device_do, *saved, causal=True, **self.backward_options)
        dq, dk, dv = (self._to_model(a, do.dtype) for a in gradients)
        return dq, dk, dv

    @staticmethod
    def _to_model(a: Any, dtype: Any) -> Any:
        return (a if device.ON_GPU else np.asarray(device.cp.asnumpy(a))).astype(dtype, copy=False)


class PlainAttention:
    """Attention by all T x T scores of all heads at once, in the arithmetic and the dtype of the model."""

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output (B, T, H, d), and q, k, v and P as (B, H, T, d or T)."""
        q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
        tokens = q.shape[2]
        s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
        s = xp.where(xp.tri(tokens, dtype=bool), s, -math.inf)
        p = xp.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return (p @ v).swapaxes(1, 2), (q, k, v, p)

    def backward(self, do: Any, saved: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v, each (B, T, H, d)."""
        q, k, v, p = saved
        do = do.swapaxes(1, 2)
        dp = do @ v.swapaxes(2, 3)
        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[3])
        dq, dk, dv = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
        return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


# ---- the other layers


def linear(x: Any, weight: Any, bias: Any) -> Any:
    """Return x (..., in) times weight (in, out), plus bias (out,)."""
    return x @ weight + bias


def linear_backward(dy: Any, x: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Return dx (..., in), dweight (in, out) and dbias (out,). Every token uses a weight: its gradients are summed."""
    rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return dy @ weight.T, rows.T @ dy_rows, dy_rows.sum(axis=0)


def layer_norm(x: Any, gain: Any, bias: Any) -> tuple[Any, Any]:
    """Shift and scale each row of x (..., D) to mean 0 and variance 1; return it times gain (D,), plus bias (D,).

    Also return what backward needs.
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)  # of the standard deviation
    x_hat = centred * inverse
    return gain * x_hat + bias, (x_hat, inverse)


def layer_norm_backward(dy: Any, gain: Any, saved: Any) -> tuple[Any, Any, Any]:
    """Return dx (..., D), dgain (D,), dbias (D,).

    Two means are subtracted from g because every element of x contributes to the mean and the variance of its row.
    """
    x_hat, inverse = saved
    g = dy * gain
    mean_g, mean_gx = g.mean(axis=-1, keepdims=True), (g * x_hat).mean(axis=-1, keepdims=True)
    rows = tuple(range(dy.ndim - 1))
    return inverse * (g - mean_g - x_hat * mean_gx), (dy * x_hat).sum(axis=rows), dy.sum(axis=rows)


_GELU_SCALE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def gelu(x: Any) -> tuple[Any, Any]:
    """Return x times the probability that a standard normal number is below x; and the tanh that backward needs.

    The probability is GPT-2's approximation by a tanh (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units").
    """
    tanh = xp.tanh(_GELU_SCALE * (x + _GELU_CUBE * x * x * x))
    return 0.5 * x * (1 + tanh), tanh


def gelu_backward(dy: Any, x: Any, tanh: Any) -> Any:
    """Return dx, of x's shape: the product rule, with tanh' = 1 - tanh^2."""
    inner = _GELU_SCALE * (1 + 3 * _GELU_CUBE * x * x)  # the derivative of tanh's argument
    return dy * 0.5 * (1 + tanh + x * (1 - tanh * tanh) * inner)


def cross_entropy(logits: Any, targets: Any) -> tuple[Any, Any]:
    """Return the mean of -log(probability of the target) over all tokens, and its gradient by the logits.

    logits (B, T, V), targets (B, T) of int. Returns a scalar array in nats, and (B, T, V): softmax - one-hot, over B T.
    ValueError for targets of another shape or dtype, and on the CPU for one that is not from 0 to V - 1.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets has shape {targets.shape}; {logits.shape[:-1]} is needed, one for each of the logits"
        )
    _check_indices("targets", targets, logits.shape[-1])
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
    target = one_hot(targets, logits.shape[-1], logits.dtype)
    return -(log_p * target).sum() / targets.size, (xp.exp(log_p) - target) / targets.size


def _check_indices(name: str, a: Any, end: int) -> None:
    """Refuse anything but indices from 0 to end - 1; on a GPU check only the dtype, so that the host does not wait."""
    if a.dtype.kind not in "iu":
        raise ValueError(f"{name} is {a.dtype}; whole numbers are needed")
    if not device.ON_GPU and a.size and not (a.min() >= 0 and a.max() < end):
        raise ValueError(f"{name} has {a.min()} to {a.max()}; there are 0 to {end - 1}")


def one_hot(tokens: Any, characters: int, dtype: Any) -> Any:
    """Turn tokens (...) of int into (..., V): 1 at the token, else 0."""
    return (tokens[..., None] == xp.arange(characters)).astype(dtype)


# ---- the model


@dataclass(frozen=True)
class Config:
    """The size of a model. heads divides width."""

    context: int = 32
    layers: int = 2
    heads: int = 2
    width: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole_number(name, value, least=1)

    def shapes(self, characters: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter. The MLP is four times as wide inside."""
        wide, shapes = self.width, {"characters": (characters, self.width), "positions": (self.context, self.width)}
        for i in range(self.layers):
            for norm in ("norm_1", "norm_2"):
                shapes |= {f"{i}.{norm}.gain": (wide,), f"{i}.{norm}.bias": (wide,)}
            for name, n_in, n_out in (
                ("qkv", wide, 3 * wide),
                ("out", wide, wide),
                ("up", wide, 4 * wide),
                ("down", 4 * wide, wide),
            ):
                shapes |= {f"{i}.{name}.weight": (n_in, n_out), f"{i}.{name}.bias": (n_out,)}
        return shapes | {"norm.gain": (wide,), "norm.bias": (wide,)}


def named_views(flat: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Cut a vector into consecutive views by name and shape. They share its memory."""
    views, start = {}, 0
    for name, shape in shapes.items():
        views[name] = flat[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    return views


class CharGPT:
    """The model: its parameters, the loss with all gradients, and text by sampling.

    Attributes:
        parameters: all of them as one vector, so that Adam is a few operations on one array.
        p: views of it by name.
        gradient, g: the same for the gradients of the last call of loss_and_gradients.
    """

    def __init__(
        self, characters: str, config: Config, attention: Attention, *, seed: int = 0, dtype: Any = np.float32
    ) -> None:
        """
        Args:
            characters: the alphabet, each character once. A character's place in it is its token.
            dtype: np.float32; np.float64 for PlainAttention.

        Raises:
            TypeError, ValueError: heads does not divide width; no character, or one twice; attention or config is not
                one; another dtype.
        """
        if not isinstance(config, Config) or not hasattr(attention, "forward"):
            got = f"{type(config).__name__} and {type(attention).__name__}"
            raise TypeError(f"config must be a Config, and attention must have forward and backward; got {got}")
        if np.dtype(dtype) not in (np.float32, np.float64):
            raise ValueError(f"dtype must be float32, or float64 for PlainAttention; got {np.dtype(dtype)}")
        whole_number("seed", seed, least=0)
        if not characters:
            raise ValueError("characters is empty: an alphabet has one or more")
        if config.width % config.heads:
            raise ValueError(f"{config.heads} heads do not divide a width of {config.width}")
        if len(set(characters)) != len(characters):
            raise ValueError(f"a character is in the alphabet twice: {characters!r}")
        self.characters, self.config, self.attention = characters, config, attention
        shapes = config.shapes(len(characters))
        size = sum(map(math.prod, shapes.values()))
        self.parameters, self.gradient = xp.zeros(size, dtype), xp.zeros(size, dtype)
        self.p, self.g = named_views(self.parameters, shapes), named_views(self.gradient, shapes)
        rng = np.random.default_rng(seed)
        for name, a in self.p.items():
            if name.endswith("gain"):
                a[...] = 1
            elif not name.endswith("bias"):
                deviation = 1 / math.sqrt(a.shape[0] if name.endswith("weight") else config.width)
                if name == "characters":  # this factor and the next were found by trial: the loss falls faster
                    deviation *= 2
                elif name == "positions":
                    deviation *= 0.6
                elif name.endswith(("out.weight", "down.weight")):  # as GPT-2: 2 a layer are added up along the model
                    deviation /= math.sqrt(2 * config.layers)
                a[...] = xp.asarray(rng.normal(0, deviation, a.shape).astype(dtype))

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int64. ValueError for a character that is not in the alphabet."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a str; got {type(text).__name__}")
        token = {character: i for i, character in enumerate(self.characters)}
        if unknown := [character for character in text if character not in token]:
            known = f"{len(token)} characters: {self.characters!r:.80}"
            raise ValueError(f"{unknown[0]!r} is not in the alphabet of the model, which has {known}")
        return np.array([token[character] for character in text], dtype=np.int64)

    def forward(self, tokens: Any, positions: Any = None) -> tuple[Any, Any]:
        """Compute the logits (B, T, V) of the character after each of tokens (B, T); and return what backward needs.

        positions: (B, T) of int, for a server; without them 0 to T - 1, as backward takes them.

        Raises:
            ValueError: tokens is not (B, T) of int, with T at most the context; on the CPU also an invalid token or
                position, which a GPU's arrays would silently replace by another one.
        """
        self._check_tokens(tokens, positions)
        places = slice(tokens.shape[1]) if positions is None else positions
        x = self.p["characters"][tokens] + self.p["positions"][places]
        blocks = []
        for layer in range(self.config.layers):
            x, saved = self._block(layer, x)
            blocks.append(saved)
        y, norm = layer_norm(x, self.p["norm.gain"], self.p["norm.bias"])
        return y @ self.p["characters"].T, (tokens, blocks, y, norm)

    def _check_tokens(self, tokens: Any, positions: Any) -> None:
        context = self.config.context
        for name, a, end in (("tokens", tokens, len(self.characters)), ("positions", positions, context)):
            if a is None:
                continue
            if not isinstance(a, xp.ndarray) or a.ndim != 2 or not len(a) or not 0 < a.shape[1] <= context:
                got = f"shape {a.shape}" if isinstance(a, xp.ndarray) else type(a).__name__
                raise ValueError(
                    f"{name} must be an array (B, T), B from 1, T from 1 to the context of {context}; got {got}"
                )
            _check_indices(name, a, end)

    def _block(self, layer: int, x: Any) -> tuple[Any, Any]:
        """Pass x (B, T, D) through attention and the MLP of one layer."""
        p = self.p
        a, norm_1 = layer_norm(x, p[f"{layer}.norm_1.gain"], p[f"{layer}.norm_1.bias"])
        qkv = linear(a, p[f"{layer}.qkv.weight"], p[f"{layer}.qkv.bias"])
        heads = qkv.reshape(*x.shape[:2], 3, self.config.heads, -1)
        o, attention = self.attention.forward(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        o = o.reshape(x.shape)
        x = x + linear(o, p[f"{layer}.out.weight"], p[f"{layer}.out.bias"])
        b, norm_2 = layer_norm(x, p[f"{layer}.norm_2.gain"], p[f"{layer}.norm_2.bias"])
        up = linear(b, p[f"{layer}.up.weight"], p[f"{layer}.up.bias"])
        active, tanh = gelu(up)
        x = x + linear(active, p[f"{layer}.down.weight"], p[f"{layer}.down.bias"])
        return x, (a, norm_1, attention, o, b, norm_2, up, tanh, active)

    def backward(self, dlogits: Any, saved: Any) -> None:
        """Write the gradients of all parameters into g, from that of the logits (B, T, V)."""
        tokens, blocks, y, norm = saved
        table = self.p["characters"]  # used twice, as embedding and as head, so its gradient has two terms
        head = dlogits.reshape(-1, len(table)).T @ y.reshape(-1, y.shape[-1])
        dx, self.g["norm.gain"][...], self.g["norm.bias"][...] = layer_norm_backward(
            dlogits @ table, self.p["norm.gain"], norm
        )
        for layer in reversed(range(self.config.layers)):
            dx = self._block_backward(layer, dx, blocks[layer])
        rows = one_hot(tokens, len(table), table.dtype).reshape(-1, len(table))
        self.g["characters"][...] = head + rows.T @ dx.reshape(-1, dx.shape[-1])
        self.g["positions"][...] = 0
        self.g["positions"][: dx.shape[1]] = dx.sum(axis=0)

    def _block_backward(self, layer: int, dx: Any, saved: Any) -> Any:
        """Return the gradient of a block's input from its output's, dx (B, T, D). Where x was added, dx is added."""
        a, norm_1, attention, o, b, norm_2, up, tanh, active = saved
        dup = gelu_backward(self._linear_backward(f"{layer}.down", dx, active), up, tanh)
        dx = dx + self._norm_backward(f"{layer}.norm_2", self._linear_backward(f"{layer}.up", dup, b), norm_2)
        do = self._linear_backward(f"{layer}.out", dx, o)
        heads = do.reshape(*do.shape[:2], self.config.heads, -1)
        dqkv = xp.stack(self.attention.backward(heads, attention), axis=2).reshape(*do.shape[:2], -1)
        return dx + self._norm_backward(f"{layer}.norm_1", self._linear_backward(f"{layer}.qkv", dqkv, a), norm_1)

    def _linear_backward(self, name: str, dy: Any, x: Any) -> Any:
        weight = self.p[f"{name}.weight"]
        dx, self.g[f"{name}.weight"][...], self.g[f"{name}.bias"][...] = linear_backward(dy, x, weight)
        return dx

    def _norm_backward(self, name: str, dy: Any, saved: Any) -> Any:
        dx, self.g[f"{name}.gain"][...], self.g[f"{name}.bias"][...] = layer_norm_backward(
            dy, self.p[f"{name}.gain"], saved
        )
        return dx

    def loss(self, tokens: Any, targets: Any) -> Any:
        """Return the mean cross entropy in nats a character, a scalar array. tokens, targets: (B, T) int."""
        return cross_entropy(self.forward(tokens)[0], targets)[0]

    def loss_and_gradients(self, tokens: Any, targets: Any) -> Any:
        """Return loss(), and write the gradients of all parameters into g."""
        logits, saved = self.forward(tokens)
        loss, dlogits = cross_entropy(logits, targets)
        self.backward(dlogits, saved)
        return loss

    @one_thread()
    def sample(self, prompt: str, length: int, *, temperature: float = 0.8, seed: int = 0) -> str:
        """Return the prompt and `length` more characters, each drawn from softmax(logits / temperature).

        temperature: 0 for the likeliest character each time. seed: that of the draws, a whole number from 0 on.

        All `context` positions are computed for each character, so that every call has the same shapes. Positions after
        the last character hold padding, which it cannot see, because attention is causal.

        Raises:
            TypeError: an argument of another type.
            ValueError: an empty prompt, or one with a character that is not in the alphabet; a length or a temperature
                below 0.
        """
        if not isinstance(prompt, str):
            raise TypeError(f"prompt must be a str; got {type(prompt).__name__}")
        if not prompt:
            raise ValueError("prompt is empty: a sample needs a character or more to go on with")
        length = whole_number("length", length, least=0)
        check_sampling(temperature, seed)
        rng, context = np.random.default_rng(seed), self.config.context
        tokens = self.encode(prompt).tolist()
        for _ in range(length):
            seen = tokens[-context:]
            padded = xp.asarray(np.array([seen + [0] * (context - len(seen))]))
            tokens.append(draw(to_host(self.forward(padded)[0][0, len(seen) - 1]), temperature, rng))
        return "".join(self.characters[token] for token in tokens)


def draw(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Draw a token from softmax(logits / temperature); at 0 take the likeliest. ValueError for NaN among the logits."""
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise ValueError("the model's logits are not finite: no character can be drawn from them")
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # cold: all but the likeliest become 0
        p = np.exp((logits - logits.max()) / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))


def check_sampling(temperature: Any, seed: Any) -> None:
    """Refuse a temperature that is not finite or below 0, and a seed that is not a whole number from 0 on."""
    if finite_number("temperature", temperature) < 0:
        raise ValueError(f"temperature = {temperature}; 0, for the likeliest character, or more is needed")
    whole_number("seed", seed, least=0)


# ---- training


class Adam:
    """Algorithm 1 of Kingma and Ba 2015, "Adam": steps along the running mean of the gradients, divided by the root of
    the running mean of their squares.
    """

    def __init__(self, parameters: Any, *, beta_1: float = 0.9, beta_2: float = 0.99, epsilon: float = 1e-8) -> None:
        self.parameters, self.betas, self.epsilon = parameters, (beta_1, beta_2), epsilon
        self.mean, self.square, self.steps = xp.zeros_like(parameters), xp.zeros_like(parameters), 0

    def step(self, gradient: Any, learning_rate: float) -> None:
        """Change the parameters in place. Both means begin at 0, which the divisions by 1 - beta^steps make up for."""
        self.steps += 1
        beta_1, beta_2 = self.betas
        self.mean += (1 - beta_1) * (gradient - self.mean)
        self.square += (1 - beta_2) * (gradient * gradient - self.square)
        rate = learning_rate / (1 - beta_1**self.steps)
        self.parameters -= rate * self.mean / (xp.sqrt(self.square / (1 - beta_2**self.steps)) + self.epsilon)


def learning_rate_at(step: int, steps: int, highest: float, warm_up: int) -> float:
    """Return the learning rate of a step: linear warm-up for `warm_up` steps, then a half cosine down to a tenth."""
    if step < warm_up:
        return highest * (step + 1) / warm_up
    share = (step - warm_up) / max(1, steps - warm_up)
    return highest * (0.55 + 0.45 * math.cos(math.pi * share))


@dataclass
class Training:
    """The record of a training run: losses in nats per character, one per step; validation as (steps done, loss)."""

    model: CharGPT
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


@one_thread()
def train(
    text: str,
    steps: int,
    *,
    config: Config | None = None,
    attention: Attention | None = None,
    batch: int = 6,
    learning_rate: float = 5e-3,
    warm_up: int = 20,
    held_out: float = 0.1,
    every: int = 50,
    seed: int = 0,
    dtype: Any = np.float32,
    report: Callable[[str], object] | None = print,
) -> Training:
    """Train a model on a text: `steps` batches of `batch` pieces of it, drawn at random.

    Args:
        config: the size of the model; by default Config().
        attention: by default FlashAttention(). With another one, the same seed gives the same parameters and batches.
        held_out: the share of the text, at its end, that is not trained on. 8 batches of it, the same ones each time,
            give the validation loss.
        every: steps between two validation losses and lines of the report. One more comes after the last step.
        report: gets a line of text; None for silence.

    Raises:
        TypeError, ValueError: a text too short for the context; arguments that are not numbers, or too small.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str; got {type(text).__name__}")
    if report is not None and not callable(report):
        raise TypeError(f"report must be a function that gets a line, or None; got {type(report).__name__}")
    finite_number("learning_rate", learning_rate)
    for name, value, least in (("steps", steps, 0), ("batch", batch, 1), ("every", every, 1), ("seed", seed, 0)):
        whole_number(name, value, least=least)
    whole_number("warm_up", warm_up, least=0)
    if not 0 <= finite_number("held_out", held_out) < 1:
        raise ValueError(f"held_out = {held_out}; a share of the text, from 0 to below 1, is needed")
    config = config or Config()
    model = CharGPT("".join(sorted(set(text))), config, attention or FlashAttention(), seed=seed, dtype=dtype)
    tokens = model.encode(text)
    kept = len(tokens) - int(held_out * len(tokens))
    if min(kept, len(tokens) - kept if held_out else kept) <= config.context:
        raise ValueError(f"{len(text)} characters are too few for a context of {config.context}")
    rng, optimizer, run = np.random.default_rng(seed), Adam(model.parameters), Training(model)
    shown = _pieces(np.random.default_rng(seed + 1), tokens[kept:], 8 * batch, config.context) if held_out else None
    losses: list[Any] = []
    began = time.perf_counter()
    for step in range(steps):
        losses.append(model.loss_and_gradients(*_pieces(rng, tokens[:kept], batch, config.context)))
        optimizer.step(model.gradient, learning_rate_at(step, steps, learning_rate, warm_up))
        if (step + 1) % every == 0 or step + 1 == steps:
            line = f"step {step + 1:5}   loss {float(losses[-1]):.3f}"
            if shown:
                run.validation.append((step + 1, float(model.loss(*shown))))
                line += f"   validation {run.validation[-1][1]:.3f}"
            if report:
                report(f"{line}   {time.perf_counter() - began:.0f} s")
    run.losses = [float(loss) for loss in losses]  # on a GPU each is waited for here, not in its step
    run.seconds = time.perf_counter() - began
    return run


def _pieces(rng: np.random.Generator, tokens: np.ndarray, batch: int, context: int) -> tuple[Any, Any]:
    """Draw `batch` pieces of the text (B, T), and the character after each of theirs (B, T)."""
    starts = rng.integers(0, len(tokens) - context, batch)
    pieces = tokens[starts[:, None] + np.arange(context + 1)]
    return xp.asarray(pieces[:, :-1]), xp.asarray(pieces[:, 1:])
