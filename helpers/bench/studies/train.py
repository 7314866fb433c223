"""Train the GPT of helpers/attention/models/char_gpt.py on a GPU: its losses, a sample, and the cost of a step.

The text is Charles Darwin's "On the Origin of Species", first edition, John Murray, London 1859, in the public domain:
the introduction and chapters I to XIV, a paragraph a line, without the index.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.models.char_gpt import Adam, Attention, CharGPT, Config, FlashAttention, PlainAttention, train
from helpers.bench import records
from helpers.bench.run import device_facts
from helpers.device import cp

ROOT = Path(__file__).resolve().parents[3]
recorded = records.reader("nvidia-h200-gpt.json")
TEXT = ROOT / "helpers" / "data" / "darwin_origin.txt.gz"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and the length of its training."""

    config: Config = field(default_factory=lambda: Config(context=256, layers=2, heads=4, width=256))
    batch: int = 64
    steps: int = 3000
    learning_rate: float = 2e-3
    warm_up: int = 100
    every: int = 100
    compared: int = 50  # steps after which the losses of several attentions are compared
    contexts: tuple[int, ...] = (256, 1024, 4096)  # for the time and the memory of a step, with equally many tokens
    timed: int = 20  # steps
    sample: int = 600  # characters


def attentions() -> dict[str, Attention]:
    """Return the attentions by the names of their runs."""
    return {
        "kernels float32": FlashAttention(),
        "kernels bfloat16": FlashAttention("bfloat16"),
        "plain float32": PlainAttention(),
    }


class Timed:
    """An attention between device events, to find its share of a step."""

    def __init__(self, attention: Attention) -> None:
        self.attention, self.events = attention, []

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Run the attention's forward pass."""
        return self._between(self.attention.forward, q, k, v)

    def backward(self, do: Any, saved: Any) -> tuple[Any, Any, Any]:
        """Run the attention's backward pass."""
        return self._between(self.attention.backward, do, saved)

    def _between(self, call: Any, *arguments: Any) -> Any:
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        result = call(*arguments)
        end.record()
        self.events.append((start, end))
        return result

    def ms(self) -> float:
        """Return the total milliseconds of all calls since `ms` was last called."""
        for _, end in self.events:
            end.synchronize()
        total = sum(cp.cuda.get_elapsed_time(start, end) for start, end in self.events)
        self.events = []
        return total


def step_cost(config: Config, batch: int, attention: Attention, *, steps: int, characters: int = 80) -> dict[str, Any]:
    """Measure time and memory of a training step on tokens drawn at random.

    ms: wall-clock time per step, over `steps` steps. host_ms: until all of them were queued; if it is nearly ms, the
    host limits the speed, and attention_ms, measured between device events, includes pauses. peak_bytes: what CuPy's
    pool took for the whole step; None on the CPU engine.
    """
    timed = Timed(attention)
    model = CharGPT("".join(map(chr, range(33, 33 + characters))), config, timed)
    optimizer = Adam(model.parameters)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, characters, (batch, config.context + 1))
    xp_tokens = cp.asarray(tokens) if device.ON_GPU else tokens

    def step() -> None:
        model.loss_and_gradients(xp_tokens[:, :-1], xp_tokens[:, 1:])
        optimizer.step(model.gradient, 1e-3)

    pool = cp.get_default_memory_pool() if device.ON_GPU else None
    if pool:
        pool.free_all_blocks()
    for _ in range(3):  # compiles kernels, and fills the pool
        step()
    timed.ms()
    cp.cuda.Device().synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    queued = time.perf_counter() - began
    cp.cuda.Device().synchronize()
    took = time.perf_counter() - began
    return {
        "context": config.context,
        "batch": batch,
        "ms": 1e3 * took / steps,
        "host_ms": 1e3 * queued / steps,
        "attention_ms": timed.ms() / steps,
        "tokens_per_s": batch * config.context * steps / took,
        "peak_bytes": pool.total_bytes() if pool else None,
    }


def origin() -> str:
    """Read the whole book."""
    return gzip.decompress(TEXT.read_bytes()).decode("utf-8")


def measure(text: str | None = None, sizes: Sizes | None = None, report: Any = print) -> dict[str, Any]:
    """Measure the first steps with each attention, whole runs with the course's, and the cost of a step.

    A failed part's error is recorded, and the others continue.
    """
    text, sizes = origin() if text is None else text, sizes or Sizes()
    began = time.perf_counter()
    record: dict[str, Any] = {
        "device": device_facts(),
        "command": "python3 -m helpers.bench.study train FILE",
        "text": {
            "characters": len(text),
            "alphabet": len(set(text)),
            "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        },
        "sizes": asdict(sizes),
        **{"first_steps": [], "runs": [], "steps": [], "failed": []},
    }
    for what, rows, measured in _parts(text, sizes, report):
        report(f"--- {what}")
        try:
            record[rows].append(measured())
        except Exception as error:  # the rest is still useful, and GPU time is scarce
            record["failed"].append({"what": what, "error": f"{type(error).__name__}: {error}"[:2000]})
            report(f"FAILED: {error}")
    record["seconds"] = time.perf_counter() - began
    return record


def take(path: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Measure, and write the record. words: must be empty."""
    records.check_single_file("train", words)
    record = measure()
    records.save(path, record)
    return record


def _parts(text: str, sizes: Sizes, report: Any) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yield the parts: the name, the record's list that it belongs to, and a function that returns the row."""
    first = partial(_first_steps, text, sizes)
    for name, attention in attentions().items():
        yield f"first steps, {name}", "first_steps", partial(first, name, attention)
    yield "first steps, plain float64", "first_steps", partial(first, "plain float64", PlainAttention(), np.float64)
    for _ in range(2):  # are the bits the same twice?
        name = "kernels float32 deterministic"
        yield f"first steps, {name}", "first_steps", partial(first, name, FlashAttention(deterministic=True))
    for name, attention in attentions().items():
        if name.startswith("kernels"):
            yield f"a whole run, {name}", "runs", partial(_whole_run, text, sizes, name, attention, report)
    tokens = sizes.batch * sizes.config.context
    for context in sizes.contexts:
        config = replace(sizes.config, context=context)
        for name, attention in attentions().items():
            cost = partial(step_cost, config, max(1, tokens // context), attention, steps=sizes.timed)
            yield f"a step, {name}, context {context}", "steps", lambda n=name, cost=cost: {"name": n, **cost()}


def _how(sizes: Sizes) -> dict[str, Any]:
    rates = {"learning_rate": sizes.learning_rate, "warm_up": sizes.warm_up}
    return {"config": sizes.config, "batch": sizes.batch, **rates}


def _first_steps(text: str, sizes: Sizes, name: str, attention: Attention, dtype: Any = np.float32) -> dict[str, Any]:
    run = train(text, sizes.compared, attention=attention, dtype=dtype, every=10**9, report=None, **_how(sizes))
    return {"name": name, "losses": run.losses, "seconds": run.seconds}


def _whole_run(text: str, sizes: Sizes, name: str, attention: Attention, report: Any) -> dict[str, Any]:
    run = train(text, sizes.steps, attention=attention, every=sizes.every, report=report, **_how(sizes))
    sample = run.model.sample("The ", sizes.sample, temperature=0.7, seed=1)
    report(sample)
    return {
        "name": name,
        "losses": [round(loss, 5) for loss in run.losses],
        "validation": run.validation,
        "seconds": run.seconds,
        "tokens_per_s": sizes.steps * sizes.batch * sizes.config.context / run.seconds,
        "parameters": int(run.model.parameters.size),
        "sample": sample,
    }


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record, by default the committed one, as text: runs, the first steps, and steps."""
    lines = [
        record["device"]["description"],
        "",
        f"{'':32}{'train':>8}{'validation':>12}{'lowest':>12}{'at step':>9}{'s':>8}{'tokens/s':>12}",
    ]
    for run in record["runs"]:
        last = np.mean(run["losses"][-50:])
        step, lowest = min(run["validation"], key=lambda pair: pair[1])
        ends = f"{last:8.3f}{run['validation'][-1][1]:12.3f}{lowest:12.3f}{step:9,}"
        lines.append(f"{run['name']:32}{ends}{run['seconds']:8.1f}{run['tokens_per_s']:12,.0f}")
    first = {row["name"]: row["losses"] for row in record["first_steps"]}
    exact = first.get("plain float64")
    if exact:
        lines += ["", f"largest |loss - loss in float64| in the first {len(exact)} steps"]
        lines += [f"{name:32}{np.abs(np.subtract(a, exact)).max():10.1e}" for name, a in first.items() if a != exact]
    lines += ["", f"{'a step':32}{'context':>8}{'ms':>8}{'host ms':>9}{'attention':>11}{'MiB':>8}"]
    for row in record["steps"]:
        memory = f"{row['peak_bytes'] / 2**20:8,.0f}" if row["peak_bytes"] else ""
        share = row["attention_ms"] / row["ms"]
        lines.append(f"{row['name']:32}{row['context']:8}{row['ms']:8.2f}{row['host_ms']:9.2f}{share:11.0%}{memory}")
    lines += [f"FAILED {row['what']}: {row['error']}" for row in record["failed"]]
    return "\n".join(lines)
