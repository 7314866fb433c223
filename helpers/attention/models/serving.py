"""Serve the small GPT: many requests at once, over one cache in pages (continuous batching).

    server = Server(model, pages=24, page_size=16, watermark=2)
    server.serve([Request("The ", 60), Request("It is ", 20)])

Each step gives every running request one more character, whatever their lengths. A request that is done leaves at once,
and the next one takes its pages (Yu et al. 2022, "Orca"; Kwon et al. 2023, "PagedAttention"). `Schedule` decides who
runs and who waits, without a model; `Server` computes.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention import flash_attention_with_kvcache, warm_up
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

    @property
    def is_done(self) -> bool:
        """True if it has all its characters."""
        return len(self.tokens) >= len(self.prompt) + self.length


class Pages:
    """The allocator of the cache's pages. A request gets pages one by one, as it grows."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.free = count, size, list(range(count))[::-1]
        self.of: dict[Request, list[int]] = {}

    def reserve(self, request: Request, keep: int = 0) -> bool:
        """Give a request pages for all its tokens. Return False, and change nothing, if fewer than `keep` stay free."""
        mine = self.of.get(request, [])
        missing = -(-len(request.tokens) // self.size) - len(mine)
        if missing > len(self.free) - keep:
            return False
        self.of[request] = mine + [self.free.pop() for _ in range(missing)]
        return True

    def release(self, request: Request) -> None:
        """Free the pages of a request."""
        self.free += self.of.pop(request)

    def table(self, requests: Sequence[Request], width: int) -> np.ndarray:
        """Build the block table, int32 (requests, width): 0 where a request has no more pages."""
        rows = (self.of[request] for request in requests)
        return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)

    def check(self) -> None:
        """Raise RuntimeError for a page that is lost, or given away twice."""
        counts = Counter(self.free)
        for own in self.of.values():
            counts.update(own)
        for page in range(self.count):
            if counts[page] != 1:
                raise RuntimeError(f"page {page} is in {counts[page]} lists of pages, of requests or free; 1 is right")


class Schedule:
    """The order in which requests are computed, given their pages.

    running: requests with pages, the oldest first; most: at once. steps, passes: so far, passes of the model. evicted:
    how often a request lost its pages. lost: the keys that were in them, which are computed again.
    """

    def __init__(self, requests: Sequence[Request], pages: Pages, watermark: int = 0) -> None:
        self.waiting = deque(sorted(requests, key=lambda request: request.arrives))
        self.running: list[Request] = []
        self.pages, self.watermark = pages, watermark
        self.steps = self.passes = self.most = self.evicted = self.lost = 0

    def step(self) -> list[list[Request]]:
        """Return the groups to compute in the next step: each new request alone, then all those that ran before."""
        # Requests that wait are admitted, oldest first, while enough pages stay free for those that run.
        waiting, running, new = self.waiting, self.running, list[Request]()
        while waiting and waiting[0].arrives <= self.steps:
            if not self.pages.reserve(waiting[0], keep=self.watermark if running or new else 0):
                break
            new.append(waiting.popleft())
        # A running request sometimes needs another page. If none is free, the youngest loses its pages and waits.
        for request in list(running):
            while request in running and not self.pages.reserve(request):
                youngest = new.pop() if new else running.pop()
                self.pages.release(youngest)
                waiting.appendleft(youngest)
                self.evicted, self.lost, youngest.cached = self.evicted + 1, self.lost + youngest.cached, 0
        before = list(running)
        running += new
        self.steps, self.most = self.steps + 1, max(self.most, len(running))
        groups = [*([request] for request in new), *([before] if before else [])]
        self.passes += len(groups)
        return groups

    def end(self, request: Request) -> None:
        """Free the pages of a running request, which is done or has failed."""
        self.running.remove(request)
        self.pages.release(request)


def replay(requests: Sequence[Request], *, pages: int, page_size: int = 16, watermark: int = 0) -> Schedule:
    """Follow the schedule of requests to its end, without a model: what would a watermark cost, in steps and evictions?

    Args:
        requests: as `Server.serve` takes them; not changed. The others: as `Server` takes them.

    Raises:
        ValueError: a request that is longer than all pages.
    """
    copies = [replace(request, tokens=[0] * len(request.prompt), cached=0) for request in requests]
    for i, request in enumerate(copies):
        if len(request.prompt) + request.length > pages * page_size:
            raise ValueError(f"requests[{i}] is longer than {pages} pages of {page_size} keys")
    schedule = Schedule(copies, Pages(pages, page_size), watermark)
    while schedule.waiting or schedule.running:
        for request in itertools.chain(*schedule.step()):
            request.cached = len(request.tokens)
            request.tokens.append(0)
        for request in [each for each in schedule.running if each.is_done]:
            schedule.end(request)
    return schedule


class Step(NamedTuple):
    """The state of the cache after a step. owners: the request's number for each page, or -1. tokens: in all pages."""

    owners: list[int]
    tokens: int
    running: int
    seconds: float


class Server:
    """A server for a model whose heads are 8 to 256 wide, a multiple of 8.

    history: a Step for each step of all calls. evicted, lost: as in Schedule, of all calls. failed: of the last call,
    the error of each request that could not be finished, by its place in `requests`.
    """

    def __init__(
        self, model: CharGPT, *, pages: int, page_size: int = 16, watermark: int = 0, dtype: str = "float32"
    ) -> None:
        """
        Args:
            pages: of the cache, page_size keys each. dtype: of the cache, one of DTYPES.
            watermark: how many pages must stay free when a request is admitted while others run, for those to grow
                into. 0 admits all that fit: most requests at once, most evictions.

        Raises:
            TypeError, ValueError: an argument of the wrong type or too small; a watermark that no request could pass;
                heads of another width; an unknown dtype.
        """
        if not isinstance(model, CharGPT):
            raise TypeError(f"model must be a CharGPT; got {type(model).__name__}")
        pages, page_size = (whole_number(*each, least=1) for each in (("pages", pages), ("page_size", page_size)))
        watermark = whole_number("watermark", watermark, least=0)
        if watermark >= pages:
            raise ValueError(f"watermark = {watermark}; with {pages} pages, fewer than {pages} can stay free")
        if dtype not in DTYPES:
            raise ValueError(f"dtype = {dtype!r:.40}; there are {', '.join(DTYPES)}")
        config = model.config
        head_dim = config.width // config.heads
        if head_dim % 8 or head_dim > max(HEAD_DIMS):
            wanted = f"a multiple of 8 up to {max(HEAD_DIMS)}"
            raise ValueError(f"model has heads {head_dim} wide (width / heads of its Config); {wanted} can be served")
        self.model, self.pages, self.watermark = model, Pages(pages, page_size), watermark
        self.room = min(config.context, pages * page_size)  # characters of a text
        shape = config.layers, pages, page_size, config.heads, head_dim
        self.cache = _Cache(*(device.cp.zeros(shape, dtype=dtype_of(dtype)) for _ in "kv"))
        self.history: list[Step] = []
        self.failed: dict[int, Exception] = {}
        self.evicted = self.lost = 0

    @one_thread()
    def serve(self, requests: Sequence[Request], *, temperature: float = 0.5, seed: int = 0) -> list[str | None]:
        """Return the texts of all requests, prompts included; None for one that failed, whose error is in `failed`.

        A pass of the model that raises an exception is tried again with each of its requests alone, and those with
        which it fails again end. The others get the same texts as without them. After an error that ends the call,
        such as KeyboardInterrupt, the next call starts with all pages free.

        Args:
            requests: any number; the same one twice gives two texts.
            temperature: characters are drawn from softmax(logits / temperature); 0 takes the likeliest one.
            seed: of the draws, a whole number from 0 on.

        Raises:
            TypeError: requests is not a list of Request; a prompt, length or option of another type.
            ValueError: a request that is longer than the model's context, or than all pages; an empty prompt, or one
                with characters that the model does not know; a length below 1; a temperature below 0. All this is
                checked before the first step.
            Exception: all requests failed; this is the first one's error.
        """
        if not isinstance(requests, (list, tuple)):
            raise TypeError(f"requests must be a list of Request; got {type(requests).__name__}")
        check_sampling(temperature, seed)
        prompts = [self._checked(f"requests[{i}]", request, self.room) for i, request in enumerate(requests)]
        places: dict[Request, int] = {}
        for place, (request, tokens) in enumerate(zip(requests, prompts, strict=True)):
            own = replace(request) if request in places else request  # one that comes again gets pages of its own
            own.tokens, own.cached, places[own] = tokens, 0, place
        self.failed = {}
        with self._cache_in_model():
            self._run(places, temperature, seed)
        if requests and len(self.failed) == len(requests):
            raise self.failed[0]
        letters = self.model.characters
        return [
            None if place in self.failed else "".join(letters[token] for token in request.tokens)
            for request, place in places.items()
        ]

    @one_thread()
    def warm_up(self) -> int:
        """Compile and plan what `serve` needs, by passes of the model over requests that are discarded.

        Later calls build nothing, and as long as nobody calls `forget`, they plan nothing: the plans of up to 128
        requests at once and of texts of up to 128 characters are kept, while other shapes get theirs when they come.

        Returns:
            How many kernel files, each with one set of sizes, were compiled, or existed already.
        """
        config, dtype = self.model.config, self.cache.k.dtype.name
        in_pages: dict[str, Any] = {"decoding": True, "paged": True, "page_size": self.pages.size}
        count = warm_up(config.heads, config.width // config.heads, dtype=dtype, **in_pages)
        of_steps = [(requests, 1) for requests in range(1, min(self.pages.count, 128) + 1)]
        of_prompts = [(1, tokens) for tokens in range(2, min(self.room, 128) + 1)]
        with self._cache_in_model():
            for requests, tokens in of_steps + of_prompts:
                group = [Request("", 0, tokens=[0] * tokens) for _ in range(requests)]
                for request in group:
                    self.pages.reserve(request)
                self._logits(group)
                for request in group:
                    self.pages.release(request)
        return count

    @contextlib.contextmanager
    def _cache_in_model(self) -> Iterator[None]:
        """Let the model attend to the cache; at the end all pages are free."""
        attention, self.model.attention = self.model.attention, self.cache
        try:
            yield
        finally:
            self.model.attention, self.pages = attention, Pages(self.pages.count, self.pages.size)

    def _checked(self, name: str, request: Any, room: int) -> list[int]:
        """Encode a request's prompt. TypeError or ValueError if the request cannot be served."""
        if not isinstance(request, Request):
            raise TypeError(f"{name} must be a Request; got {type(request).__name__}")
        if not isinstance(request.prompt, str):
            raise TypeError(f"{name}.prompt must be a str; got {type(request.prompt).__name__}")
        length = whole_number(f"{name}.length", request.length, least=1)
        whole_number(f"{name}.arrives", request.arrives)
        if not request.prompt or len(request.prompt) + length > room:
            raise ValueError(f"{name}: {request.prompt!r:.40} and {length} more: 1 to {room} characters are needed")
        try:
            return self.model.encode(request.prompt).tolist()
        except ValueError as error:
            raise ValueError(f"{name}.prompt: {error}") from None

    def _run(self, places: Mapping[Request, int], temperature: float, seed: int) -> None:
        schedule = Schedule([*places], self.pages, self.watermark)
        while schedule.waiting or schedule.running:
            began = time.perf_counter()
            for group in schedule.step():
                for request, error in self._write(group, places, temperature, seed):
                    self.failed[places[request]] = error
                    schedule.end(request)
            owners = {page: places[each] for each, pages in self.pages.of.items() for page in pages}
            tokens = sum(request.cached for request in schedule.running)
            now = time.perf_counter() - began
            owner_of_each = [owners.get(i, -1) for i in range(self.pages.count)]
            self.history.append(Step(owner_of_each, tokens, len(schedule.running), now))
            for request in [each for each in schedule.running if each.is_done]:
                schedule.end(request)
        self.evicted, self.lost = self.evicted + schedule.evicted, self.lost + schedule.lost

    def _write(
        self, group: list[Request], places: Mapping[Request, int], temperature: float, seed: int
    ) -> list[tuple[Request, Exception]]:
        """Append a character to each request of a group, which all have the same number of tokens to compute.

        Returns:
            The requests that failed, each with its error.
        """
        try:
            rows = self._logits(group)
        except Exception as error:
            self.pages.check()  # an error of the server itself ends the call
            if len(group) == 1:
                return [(group[0], error)]
            alone = (self._write([request], places, temperature, seed) for request in group)
            return [each for failed in alone for each in failed]
        failed: list[tuple[Request, Exception]] = []
        for request, row in zip(group, rows, strict=True):
            # The draw depends neither on the other requests nor on evictions.
            rng = np.random.default_rng((seed, places[request], len(request.tokens)))
            try:
                token = draw(row, temperature, rng)
            except ValueError as error:
                failed.append((request, error))
            else:
                request.cached = len(request.tokens)
                request.tokens.append(token)
        return failed

    def _logits(self, group: list[Request]) -> np.ndarray:
        """Compute the logits (requests, characters) of the next character of each request of a group."""
        cached = np.array([request.cached for request in group], np.int32)
        tokens = np.array([request.tokens[request.cached :] for request in group])
        self.cache.aim(cached, self.pages.table(group, -(-self.room // self.pages.size)))
        positions = cached[:, None] + np.arange(tokens.shape[1])
        logits, _ = self.model.forward(xp.asarray(tokens), positions=xp.asarray(positions))
        return to_host(logits[:, -1])


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
