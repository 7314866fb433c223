"""A small GPT generating text in PyTorch: a loop on the host, and the same step replayed as a CUDA graph.

Weights are `char_gpt`'s; q, k and v have 16 bits; the cache is paged. A step reads the tokens, lengths and pages of all
sequences from device arrays and writes the next tokens and lengths there, so a graph of one step serves all steps and
all lengths.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from helpers import device
from helpers.attention import flash_attention_with_kvcache, kernel
from helpers.attention.models.char_gpt import CharGPT, Config, PlainAttention, to_host, xp
from helpers.attention.models.serving import Request, Server
from helpers.bench.harness import Row
from helpers.bench.peers import TORCH_DEVICE
from helpers.bench.timing import quartiles

CHARACTERS = "".join(map(chr, range(32, 127)))
LOOP, SERVED = Config(512, 4, 4, 256), Config(128, 2, 1, 64)  # the second: notebook 14's live server
LOGITS_DIFFER = 5e-2  # relative to the largest logit: q, k and v are rounded to 16 bits


class Writer:
    """Sequences that a model continues greedily, all in one launch of each kernel.

    Attributes:
        tokens: int64 (batch,), the newest of each sequence. lengths: int32 (batch,), cached keys before it.
        logits: (batch, characters) of the last step.
    """

    def __init__(self, model: CharGPT, prompts: np.ndarray, *, page: int = 16, dtype: str = "float16") -> None:
        """
        Args:
            prompts: (batch, tokens) int, of which the first `i % tokens + 1` start sequence i: lengths differ.
        """
        import torch

        self.torch, self.config = torch, model.config
        self.p = {name: torch.as_tensor(to_host(a), device=TORCH_DEVICE) for name, a in model.p.items()}
        batch, tokens = prompts.shape
        self.dtype = getattr(torch, dtype)
        pages = -(-self.config.context // page)
        shape = (batch * pages, page, self.config.heads, self.config.width // self.config.heads)
        self.caches = [[self._zeros(shape) for _ in "kv"] for _ in range(self.config.layers)]
        table = np.random.default_rng(3).permutation(batch * pages).reshape(batch, pages)
        self.table = torch.as_tensor(table.astype(np.int32), device=TORCH_DEVICE)
        self.prompts = torch.as_tensor(prompts, device=TORCH_DEVICE)
        self.ends = torch.arange(batch, device=TORCH_DEVICE) % tokens + 1
        self.tokens = self.prompts[:, 0].clone()
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=TORCH_DEVICE)
        self.logits = torch.zeros(batch, len(model.characters), device=TORCH_DEVICE)

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        """Make a cache: PyTorch's on a GPU. The CPU engine writes only into its own arrays."""
        if device.ON_GPU:
            return self.torch.zeros(shape, dtype=self.dtype, device=TORCH_DEVICE)
        return device.cp.zeros(shape, dtype=str(self.dtype).removeprefix("torch."))

    def restart(self) -> None:
        """Start again with the prompts."""
        self.tokens.copy_(self.prompts[:, 0])
        self.lengths.zero_()

    def step(self) -> None:
        """Compute the logits of each sequence's next token, and set it: to the prompt's, or else to the likeliest."""
        functional, config, p = self.torch.nn.functional, self.config, self.p
        batch, wide = len(self.tokens), (config.width,)
        x = p["characters"][self.tokens] + p["positions"][self.lengths.long()]
        for i, (k_cache, v_cache) in enumerate(self.caches):
            a = functional.layer_norm(x, wide, p[f"{i}.norm_1.gain"], p[f"{i}.norm_1.bias"])
            qkv = self.torch.addmm(p[f"{i}.qkv.bias"], a, p[f"{i}.qkv.weight"]).to(self.dtype)
            q, k, v = qkv.view(batch, 1, 3, config.heads, -1).unbind(2)
            o = flash_attention_with_kvcache(
                *(q, k_cache, v_cache), cache_seqlens=self.lengths, block_table=self.table, k=k, v=v, checked=False
            )
            o = o.reshape(batch, -1).to(x.dtype)
            x = x + self.torch.addmm(p[f"{i}.out.bias"], o, p[f"{i}.out.weight"])
            b = functional.layer_norm(x, wide, p[f"{i}.norm_2.gain"], p[f"{i}.norm_2.bias"])
            up = self.torch.addmm(p[f"{i}.up.bias"], b, p[f"{i}.up.weight"])
            active = functional.gelu(up, approximate="tanh")
            x = x + self.torch.addmm(p[f"{i}.down.bias"], active, p[f"{i}.down.weight"])
        y = functional.layer_norm(x, wide, p["norm.gain"], p["norm.bias"])
        self.logits.copy_(y @ p["characters"].T)  # a graph replays into the same memory
        self.lengths += 1
        at = self.lengths.long().clamp(max=self.prompts.shape[1] - 1)
        given = self.prompts.gather(1, at[:, None])[:, 0]
        self.tokens.copy_(self.torch.where(self.lengths < self.ends, given, self.logits.argmax(-1)))

    def captured(self) -> Callable[[], None]:
        """Capture a step after a warm-up step; return what replays it."""
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            self.step()
        self.torch.cuda.current_stream().wait_stream(stream)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def write(self, step: Callable[[], None], count: int) -> tuple[Any, float]:
        """Restart and take steps. Return the tokens after each, (count, batch), and the total seconds."""
        self.restart()
        said = self.torch.empty((count, len(self.tokens)), dtype=self.torch.int64, device=TORCH_DEVICE)
        self._wait()
        began = time.perf_counter()
        for i in range(count):
            step()
            said[i].copy_(self.tokens)
        self._wait()
        return said, time.perf_counter() - began

    def _wait(self) -> None:
        if device.ON_GPU:
            self.torch.cuda.synchronize()


def logits_error(model: CharGPT, writer: Writer, said: Any) -> float:
    """Return the error of the last step's logits against the model run on all tokens, relative to the largest logit."""
    said = said.cpu().numpy()
    texts = np.concatenate([writer.prompts[:, :1].cpu().numpy(), said.T[:, :-1]], axis=1)
    wanted = to_host(model.forward(xp.asarray(texts))[0][:, -1])
    return float(np.abs(writer.logits.float().cpu().numpy() - wanted).max() / np.abs(wanted).max())


def graph_rows(
    batches: tuple[int, ...] = (1, 8, 64), config: Config = LOOP, count: int = 256, rounds: int = 7
) -> Iterator[list[Row]]:
    """Measure tokens per second with the host's loop and with replays of one graph, in turns.

    Raises:
        ValueError: the two generate different tokens, or their logits differ from the model's.
    """
    model = CharGPT(CHARACTERS, config, PlainAttention())
    for batch in batches:
        prompts = np.random.default_rng(5).integers(0, len(CHARACTERS), (batch, 17))
        writer = Writer(model, prompts)
        ways: dict[str, Callable[[], None]] = {"a loop on the host": writer.step}
        if device.ON_GPU:
            ways["one CUDA graph"] = writer.captured()
        texts, errors = {}, {}
        for name, step in ways.items():
            texts[name], _ = writer.write(step, count)
            errors[name] = logits_error(model, writer, texts[name])
            if errors[name] > LOGITS_DIFFER:
                raise ValueError(f"{name}: logits differ by {errors[name]:.1e}")
            if not bool((texts[name] == texts["a loop on the host"]).all()):
                raise ValueError(f"{name} generates other tokens")
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, step in ways.items():
                taken[name].append(writer.write(step, count)[1])
        what = {"part": "graph", "batch": batch, "steps": count, "config": vars(config)}
        rows = []
        for name, seconds in taken.items():
            median, low, high = quartiles([batch * count / each for each in seconds])
            row = {**what, "name": name, "tokens_per_s": median, "q1": low, "q3": high, "logits_error": errors[name]}
            rows.append({**row, "us_per_step": 1e6 * statistics.median(seconds) / count})
        yield rows


def server_rows(
    watermarks: tuple[int, ...] = (0, 4), config: Config = SERVED, requests: int = 64, pages: int = 40
) -> Iterator[Row]:
    """Measure `Server`: seconds of warm_up and of the first request, builds after it, tokens per second, evictions."""
    model = CharGPT(CHARACTERS, config, PlainAttention())
    rng = np.random.default_rng(3)
    asked = [
        ("".join(rng.choice(list(CHARACTERS), rng.integers(6, 25))), 8 + min(90, int(rng.exponential(30))), arrives)
        for arrives in rng.integers(0, 40, requests)
    ]
    for watermark in watermarks:
        server = Server(model, pages=pages, watermark=watermark, dtype="float16" if device.ON_GPU else "float32")
        began = time.perf_counter()
        server.warm_up()
        warming = time.perf_counter() - began
        before, began = dict(kernel.COUNTS), time.perf_counter()
        server.serve([Request("The ", 1)])
        first = time.perf_counter() - began
        made = [Request(prompt, length, int(arrives)) for prompt, length, arrives in asked]
        server.history.clear()
        began = time.perf_counter()
        server.serve(made)
        seconds = time.perf_counter() - began
        yield {
            **{"part": "server", "name": f"watermark {watermark}", "watermark": watermark},
            **{"warm_up_s": warming, "first_token_ms": 1e3 * first, "steps": len(server.history)},
            **{f"{name}_after": kernel.COUNTS[name] - before[name] for name in ("compiled", "planned")},
            "tokens_per_s": sum(request.length for request in made) / seconds,
            "longest_step_ms": 1e3 * max(step.seconds for step in server.history),
            "median_step_ms": 1e3 * statistics.median(step.seconds for step in server.history),
            **{"evicted": server.evicted, "lost": server.lost},
            "needed": sum(len(request.tokens) - 1 for request in made),
        }
