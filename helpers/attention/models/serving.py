"""Serve the small GPT: many requests at once, over one cache in pages (continuous batching).

    server = Server(model, pages=24, page_size=16)
    server.serve([Request("The ", 60), Request("It is ", 20)])

Each step gives every running request one more character, whatever their lengths. A request that is done leaves at once,
and the next one takes its pages (Yu et al. 2022, "Orca"; Kwon et al. 2023, "PagedAttention").
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention import flash_attention_with_kvcache
from helpers.attention.decoding import HEAD_DIMS
from helpers.attention.models.blas import one_thread
from helpers.attention.models.char_gpt import CharGPT, check_sampling, draw, to_host, xp
from helpers.attention.scalars import whole_number
from helpers.engine.cuda_source.c_types import dtype_of

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(eq=False)
class Request:
    """A prompt to continue by `length` characters, from step `arrives` on."""

    prompt: str
    length: int
    arrives: int = 0
    tokens: list[int] = field(default_factory=list)  # of the prompt and of what was written so far
    cached: int = 0  # how many of them have their keys and values in the cache


class Pages:
    """The allocator of the cache's pages. A request gets pages one by one, as it grows."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.free = size, list(range(count))[::-1]
        self.of: dict[Request, list[int]] = {}

    def reserve(self, request: Request) -> bool:
        """Give a request enough pages for all its tokens. Return False, and change nothing, if too few are free."""
        mine = self.of.get(request, [])
        missing = -(-len(request.tokens) // self.size) - len(mine)
        if missing > len(self.free):
            return False
        self.of[request] = mine + [self.free.pop() for _ in range(missing)]
        return True

    def release(self, request: Request) -> None:
        """Free the pages of a request."""
        self.free += self.of.pop(request)

    def table(self, requests: Sequence[Request]) -> np.ndarray:
        """Build the block table, int32 (requests, pages of the longest one): 0 where a request has no more."""
        rows = [self.of[request] for request in requests]
        return np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], np.int32)


class Step(NamedTuple):
    """The state of the cache after a step. owners: the request's number for each page, or -1. tokens: in all pages."""

    owners: list[int]
    tokens: int
    running: int
    seconds: float


class Server:
    """A server for a model whose heads are 64, 128 or 256 wide.

    history: a Step for each step. evicted: how often a request lost its pages. lost: the keys that were in them.
    """

    def __init__(self, model: CharGPT, *, pages: int, page_size: int = 16, dtype: str = "float32") -> None:
        """
        Args:
            pages: of the cache, page_size keys each, a power of two. dtype: of the cache, one of DTYPES.

        Raises:
            TypeError, ValueError: an argument of the wrong type or below 1; heads of another width; an unknown dtype.
        """
        if not isinstance(model, CharGPT):
            raise TypeError(f"model is a CharGPT; got {type(model).__name__}")
        pages, page_size = (whole_number(*each, least=1) for each in (("pages", pages), ("page_size", page_size)))
        if page_size & (page_size - 1):
            raise ValueError(f"page_size = {page_size}; a power of two is needed")
        if dtype not in DTYPES:
            raise ValueError(f"dtype = {dtype!r:.40}; there are {', '.join(DTYPES)}")
        config = model.config
        head_dim = config.width // config.heads
        if head_dim not in HEAD_DIMS:
            wanted = ", ".join(map(str, HEAD_DIMS))
            raise ValueError(f"model has heads {head_dim} wide (width / heads of its Config); {wanted} can be served")
        self.model, self.pages, self.count = model, Pages(pages, page_size), pages
        shape = config.layers, pages, page_size, config.heads, head_dim
        self.cache = _Cache(*(device.cp.zeros(shape, dtype=dtype_of(dtype)) for _ in "kv"))
        self.history: list[Step] = []
        self.evicted = self.lost = 0

    @one_thread()
    def serve(self, requests: Sequence[Request], *, temperature: float = 0.5, seed: int = 0) -> list[str]:
        """Return the texts of all requests, prompts included. After an error the next call starts with all pages free.

        Args:
            requests: any number; the same one twice gives two texts.
            temperature: characters are drawn from softmax(logits / temperature); 0 takes the likeliest one.
            seed: of the draws, a whole number from 0 on.

        Raises:
            TypeError: requests is not a list of Request; a prompt, length or option of another type.
            ValueError: a request that is longer than the model's context, or than all pages; an empty prompt, or one
                with characters that the model does not know; a length below 1; a temperature below 0.
        """
        if not isinstance(requests, (list, tuple)):
            raise TypeError(f"requests is a list of Request; got {type(requests).__name__}")
        check_sampling(temperature, seed)
        room = min(self.model.config.context, self.count * self.pages.size)
        prompts = [self._checked(f"requests[{i}]", request, room) for i, request in enumerate(requests)]
        own: list[Request] = []  # a request that comes again gets pages of its own
        for request, tokens in zip(requests, prompts, strict=True):
            own.append(replace(request) if any(request is each for each in own) else request)
            own[-1].tokens, own[-1].cached = tokens, 0
        attention, self.model.attention = self.model.attention, self.cache
        try:
            self._run(own, temperature, seed)
        finally:
            self.model.attention, self.pages = attention, Pages(self.count, self.pages.size)
        return ["".join(self.model.characters[token] for token in request.tokens) for request in own]

    def _checked(self, name: str, request: Any, room: int) -> list[int]:
        """Encode a request's prompt. TypeError or ValueError if the request cannot be served."""
        if not isinstance(request, Request):
            raise TypeError(f"{name} is a Request; got {type(request).__name__}")
        if not isinstance(request.prompt, str):
            raise TypeError(f"{name}.prompt is a text; got {type(request.prompt).__name__}")
        length = whole_number(f"{name}.length", request.length, least=1)
        whole_number(f"{name}.arrives", request.arrives)
        if not request.prompt or len(request.prompt) + length > room:
            raise ValueError(f"{name}: {request.prompt!r:.40} and {length} more: 1 to {room} characters are needed")
        try:
            return self.model.encode(request.prompt).tolist()
        except ValueError as error:
            raise ValueError(f"{name}.prompt: {error}") from None

    def _run(self, requests: list[Request], temperature: float, seed: int) -> None:
        waiting, running = deque(sorted(requests, key=lambda request: request.arrives)), list[Request]()
        step = 0
        while waiting or running:
            began = time.perf_counter()
            # Requests that wait are admitted, oldest first, while there are pages; a whole prompt is computed at once.
            new = []
            while waiting and waiting[0].arrives <= step and self.pages.reserve(waiting[0]):
                new.append(waiting.popleft())
            # A running request sometimes needs another page. If none is free, the youngest loses its pages and waits.
            for request in list(running):
                while request in running and not self.pages.reserve(request):
                    youngest = new.pop() if new else running.pop()
                    self.pages.release(youngest)
                    waiting.appendleft(youngest)
                    self.evicted, self.lost, youngest.cached = self.evicted + 1, self.lost + youngest.cached, 0
            for group in (*([request] for request in new), running):
                if group:
                    self._write(group, temperature, requests, seed)
            running += new
            owners = {page: requests.index(each) for each, pages in self.pages.of.items() for page in pages}
            tokens = sum(request.cached for request in running)
            now = time.perf_counter() - began
            self.history.append(Step([owners.get(i, -1) for i in range(self.count)], tokens, len(running), now))
            for request in [each for each in running if len(each.tokens) == len(each.prompt) + each.length]:
                running.remove(request)
                self.pages.release(request)
            step += 1

    def _write(self, group: list[Request], temperature: float, requests: list[Request], seed: int) -> None:
        """Append a character to each request of a group, which all have the same number of tokens to compute."""
        cached = np.array([request.cached for request in group], np.int32)
        tokens = np.array([request.tokens[request.cached :] for request in group])
        self.cache.aim(cached, self.pages.table(group))
        positions = cached[:, None] + np.arange(tokens.shape[1])
        logits, _ = self.model.forward(xp.asarray(tokens), positions=xp.asarray(positions))
        for request, row in zip(group, to_host(logits[:, -1]), strict=True):
            request.cached = len(request.tokens)
            # The draw depends neither on the other requests nor on evictions.
            rng = np.random.default_rng((seed, requests.index(request), request.cached))
            request.tokens.append(draw(row, temperature, rng))


class _Cache:
    """The model's attention while it serves: it reads and extends a paged cache of keys and values.

    k, v: (layers, pages, page size, heads, d); a block table names the pages of each request.
    """

    def __init__(self, k: Any, v: Any) -> None:
        self.k, self.v, self.layer = k, v, 0

    def aim(self, lengths: np.ndarray, table: np.ndarray) -> None:
        """Set how many keys are cached, int32 (requests,), and the block table for the next pass through the layers."""
        self.lengths, self.table, self.layer = device.cp.asarray(lengths), device.cp.asarray(table), 0

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Append the new tokens' k and v to the cache; return the output (B, T, H, d) and None: no backward pass."""
        of_model, dtype = q.dtype, self.k.dtype
        q, k, v = (device.cp.asarray(a.astype(dtype, copy=False)) for a in (q, k, v))
        caches = self.k[self.layer], self.v[self.layer]
        o = flash_attention_with_kvcache(q, *caches, cache_seqlens=self.lengths, block_table=self.table, k=k, v=v)
        self.layer += 1
        return (o if device.ON_GPU else np.asarray(device.cp.asnumpy(o))).astype(of_model, copy=False), None

    def backward(self, do: Any, saved: Any) -> tuple[Any, Any, Any]:
        """Raise NotImplementedError: serving has no backward pass."""
        raise NotImplementedError("a server has no gradients")
