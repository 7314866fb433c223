"""Run a call of attention of any direction, with the plan of an earlier call of its shapes, or a new one.

    run(Attention({"q": q, "k": k, "v": v}, ForwardOptions(causal=True)))

A plan contains everything that does not depend on addresses: the copies that kernels need, the returned arrays,
scratch, and the compiled launches. Each direction has a subclass of `Call`: in calls.py, decoding.py, passes.py,
rotary_and_projection.py and ring's modules.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from helpers import device
from helpers.attention.kernel import launches_are_replaced
from helpers.attention.ladder import Stage, limits
from helpers.attention.ladder.call import WITH_HEAD_DIM, Options
from helpers.attention.ladder.kinds import (
    DeviceArrays,
    TorchTensors,
    as_device_array,
    as_kind_of,
    follows_calls,
    kind_of,
    on_device,
)
from helpers.attention.ladder.layout import Spec, dense
from helpers.attention.ladder.plan import CompiledPlan

Kind = DeviceArrays | TorchTensors
Longest = tuple[int | None, int | None]
T = TypeVar("T")


class Cache(OrderedDict[tuple[Hashable, ...], T]):
    """A dict of its `most` newest entries: without a limit, lengths that change at every call would fill the memory."""

    most = 256

    def __setitem__(self, key: tuple[Hashable, ...], value: T) -> None:
        """Set a value, and drop the oldest entry if there are now more than `most`."""
        super().__setitem__(key, value)
        if len(self) > self.most:
            with contextlib.suppress(KeyError):  # another thread has just forgotten them
                self.popitem(last=False)


# ---- a call


class _Fields(NamedTuple):
    arrays: Mapping[str, Any]
    options: Options
    longest: Longest = (None, None)
    lengths: Hashable = None


class Call(_Fields):
    """A call as its caller made it.

    arrays: by name; q is the first or the second. longest: the rows of the longest packed sequence of q, and of k.
    lengths: the part of `longest` that a plan depends on.
    """

    __slots__ = ()

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """Check the call with arrays of these specs, then plan and compile it.

        Raises:
            TypeError, ValueError: as for the public function that made the call.
        """
        raise NotImplementedError

    def check_host_arrays(self) -> None:
        """Check what can only be checked in host memory, before the arrays are copied to the device."""

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the inputs that the launches write."""
        return ()


def run(call: Call, kind: Kind | None = None) -> Any:
    """Run a call: find or make its plan, and launch. kind: that of the arrays, if the caller knows it.

    Arrays that a launch cannot read in place are brought to the device first; the results are then converted to the
    caller's kind of array.
    """
    given = (*call.arrays.values(),)
    kind = kind or kind_of(*given)
    if kind is not None:
        key, plan = _find_plan(kind, call, given)
        if plan is not None or all(map(kind.reads_in_place, given)):
            elsewhere = on_device(kind.device_id(given[0]))
            if elsewhere is None:
                return (plan or _make_plan(kind, call, key))(kind, given)
            with elsewhere:
                return (plan or _make_plan(kind, call, key))(kind, given)
    return _via_device_arrays(call)


_Key = tuple[Hashable, ...]


def _find_plan(kind: Kind, call: Call, given: Sequence[Any]) -> tuple[_Key, Plan | None]:
    """Return a call's key, and the plan kept under it, None if none is."""
    key = kind, *call.arrays, call.options.key, call.lengths, limits.reserved_sms(), *kind.cache_keys(given)
    try:
        return key, _PLANS.get(key)
    except TypeError:  # `Call.plan` refuses options that are not hashable
        return key, None


def _make_plan(kind: Kind, call: Call, key: _Key) -> Plan:
    """Check and plan a call on the current device, and keep the plan under the key that `_find_plan` returned."""
    plan = _PLANS[key] = call.plan(_specs(kind, call))
    return plan


def _specs(kind: Kind, call: Call) -> dict[str, Spec]:
    """Describe a call's arrays, by name."""
    return dict(zip(call.arrays, map(kind.spec, kind.cache_keys([*call.arrays.values()])), strict=True))


def _via_device_arrays(call: Call) -> Any:
    """Bring a call's arrays to the device, run it, and convert the results. NumPy inputs that it writes are updated."""
    arrays = call.arrays
    q = as_device_array("q", arrays["q"])
    with q.device if device.ON_GPU else contextlib.nullcontext():
        call.check_host_arrays()
        there = {name: q if name == "q" else as_device_array(name, a) for name, a in arrays.items()}
        given, kind = (*there.values(),), kind_of(q)
        call = call._replace(arrays=there)
        key, plan = _find_plan(kind, call, given)
        result = (plan or _make_plan(kind, call, key))(kind, given)
        for name in call.written:
            if there[name] is not arrays[name] and isinstance(arrays[name], np.ndarray):
                arrays[name][...] = device.cp.asnumpy(there[name])
    if not isinstance(result, tuple):
        return as_kind_of(arrays["q"], result)
    likes = "qkv" if "do" in arrays else "qq"
    return tuple(as_kind_of(arrays[like], a) for like, a in zip(likes, result, strict=True))


_PLANS: Cache[Plan] = Cache()
_COMPILED: Cache[CompiledPlan] = Cache()
FAMILIES: Cache[Any] = Cache()  # results that a direction shares between calls that differ only in shapes
_SCRATCH: dict[tuple[Any, ...], dict[str, Any]] = {}
# Threads share scratch on a stream, and a launch reads what the previous one wrote there: no other may come in between.
_IN_TURN = threading.RLock()
_NO_TURNS: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def forget() -> None:
    """Forget all earlier calls and their scratch: the next one of each kind is checked and planned again."""
    for kept in (_PLANS, FAMILIES, _COMPILED, _SCRATCH):
        kept.clear()


# ---- a plan


class Change(NamedTuple):
    """A copy of an input that the kernels can read.

    how: "copied" (C-contiguous), "negated", "int32", or "padded" with zeros to `columns` columns. whole_heads: in the
    copy, all rows of a head are contiguous.
    """

    name: str
    how: str
    whole_heads: bool = False
    columns: int = 0

    def spec(self, a: Spec) -> Spec:
        """Return the spec of the copy of an array with spec `a`."""
        shape = (*a.shape[:-1], self.columns) if self.columns else a.shape
        if not self.whole_heads:
            dtype = np.dtype(np.int32) if self.how == "int32" else a.dtype
            return dense(shape, dtype)._replace(device=a.device)
        *lead, rows, heads, columns = shape
        *strides, by_head, by_row, by_column = dense((*lead, heads, rows, columns), a.dtype).strides
        return Spec(shape, (*strides, by_row, by_head, by_column), a.dtype, 0, a.device)

    def __call__(self, kind: Kind, a: Any) -> Any:
        """Return the copy of `a` that this change describes."""
        if self.columns:
            return kind.padded(a, self.columns)
        if self.how == "int32":
            return kind.as_int32(a)
        make = kind.negative if self.how == "negated" else kind.copy
        return make(a.swapaxes(-3, -2)).swapaxes(-3, -2) if self.whole_heads else make(a)


def changed(specs: Mapping[str, Spec], changes: Iterable[Change]) -> dict[str, Spec]:
    """Return the specs of a call's arrays, with those of the copies in place of the arrays that are copied."""
    return {**specs, **{change.name: change.spec(specs[change.name]) for change in changes}}


def copies(stage: Stage, call: Any) -> list[Change]:
    """List the copies that a stage needs of a call's inputs: of those that it cannot read, and -q for a negative scale.

    A decoder's copies have the layout of models.
    """
    negated = ["q"] if stage.negates(call) else []
    names = [name for name in stage.unreadable(call) if name not in negated]
    whole = WITH_HEAD_DIM if stage.direction != "decode" else ()
    how = [(name, "copied") for name in names] + [(name, "negated") for name in negated]
    return [Change(name, each, name in whole) for name, each in how]


class Output(NamedTuple):
    """The shape and dtype of an array that a call returns.

    heads_first: it is allocated in `shape`, (..., heads, rows, head_dim), and returned as (..., rows, heads, head_dim).
    zeroed: it is 0 before the launches, which add to it.
    """

    shape: tuple[int, ...]
    dtype: Any
    heads_first: bool = False
    zeroed: bool = False


class _Kept(NamedTuple):
    """The scratch that was written once on a stream."""

    stream: int
    scratch: list[Any]


class Plan:
    """A call that has been checked, planned and compiled, and that lacks only its arrays."""

    __slots__ = (
        *("_again", "_before", "_block_bytes", "_changes", "_columns", "_compiled", "_kept"),
        *("_launches", "_memory_hint", "_names", "_outputs", "_returned", "_scratch", "_starts", "_sums"),
        *("_whole_heads", "_written_once", "_zeroed"),
    )

    def __init__(
        self,
        compiled: CompiledPlan | None,
        inputs: Sequence[str],
        outputs: Mapping[str, Output],
        *,
        changes: Sequence[Change] = (),
        columns: int = 0,
        before: Callable[[Kind, Mapping[str, Any]], None] | None = None,
        memory_hint: str = "",
    ) -> None:
        """
        Args:
            compiled: None if there is no row or no key: outputs are then 0, and lse is -inf.
            inputs: the names of the call's arrays, in order. outputs: by name.
            changes: the copies of inputs, in order. columns: those of the results, if the launches compute padded ones;
                else 0.
            before: called first, with the kind and the inputs by name. memory_hint: the beginning of the message if
                there is no memory for scratch.
        """
        self._compiled, self._names = compiled, (*inputs, *outputs)
        self._outputs, self._returned = [(each.shape, each.dtype) for each in outputs.values()], tuple(outputs)
        self._whole_heads = [i for i, output in enumerate(outputs.values()) if output.heads_first]
        self._sums = [i for i, output in enumerate(outputs.values()) if output.zeroed]
        self._changes = [(inputs.index(change.name), change) for change in changes]
        self._columns, self._before, self._memory_hint = columns, before, memory_hint
        self._kept: _Kept | None = None
        if compiled is None:
            return
        self._scratch = [(name, spec, spec.size) for name, spec in compiled.scratch.items()]
        self._zeroed = compiled.stage.zeroed
        whole_lines = [-(-size * spec.dtype.itemsize // 256) * 256 for _, spec, size in self._scratch]
        *self._starts, self._block_bytes = itertools.accumulate(whole_lines, initial=0)  # of all scratch as one block
        names = (*self._names, *compiled.scratch)
        self._launches = compiled.direct(names) if device.ON_GPU else compiled.on_engine(names)
        pairs = zip(compiled.launches, self._launches, strict=True)
        self._again = [launch for planned, launch in pairs if not (planned.once and device.ON_GPU)]
        written = {arg for launch in compiled.launches if launch.once for arg in launch.args if type(arg) is str}
        self._written_once = written.issuperset(compiled.scratch)

    def __call__(self, kind: Kind, given: Sequence[Any]) -> Any:
        """Launch on the current device; return the outputs. The arrays may differ in address from those planned for."""
        like, compiled = given[0], self._compiled
        if self._before is not None:
            self._before(kind, dict(zip(self._names, given, strict=False)))
        if compiled is None:
            return self._empty_results(kind, given)
        stream = kind.stream(like) if device.ON_GPU else 0
        if self._changes:
            given = self._changed(kind, given, stream)
        outputs = self._allocated(kind, like)
        arrays, launches, scratch = [*given, *outputs], self._launches, []
        is_known = compiled.is_compared
        if self._scratch:
            scratch, launches = self._scratch_on(kind, like, stream)
        if not scratch:
            self._launch(kind, like, arrays, launches, stream)
        else:
            try:
                with _IN_TURN if len(launches) > 1 else _NO_TURNS:
                    self._launch(kind, like, [*arrays, *scratch], launches, stream)
            except BaseException:  # Ctrl-C, on the CPU engine: scratch that is 0 between launches may not be
                _SCRATCH.clear()
                raise
            if len(self._again) < len(launches) and is_known and not kind.is_captured(stream):
                self._kept = _Kept(stream, scratch)  # both at once: another thread may read it
        if self._columns:
            outputs = self._narrowed(kind, outputs, stream)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _launch(self, kind: Kind, like: Any, arrays: Sequence[Any], launches: Sequence[Any], stream: int) -> None:
        """Launch on these arrays, the last of which are scratch, or one block for all of it."""
        if not self._compiled.is_compared:
            self._compare(kind, like, arrays)
            return
        places = kind.pointers(arrays) if device.ON_GPU else [*arrays]
        if len(places) < len(self._names) + len(self._scratch):
            block = places.pop()
            places += [block + start for start in self._starts]
        for launch in launches:
            launch(places, stream)

    def _allocated(self, kind: Kind, like: Any) -> list[Any]:
        """Allocate the outputs on the device of `like`."""
        outputs = kind.empties(self._outputs, like)
        for i in self._whole_heads:
            outputs[i] = outputs[i].swapaxes(-3, -2)
        for i in self._sums:
            kind.fill(outputs[i], 0)
        return outputs

    def lay_out(self, kind: Kind, given: Sequence[Any]) -> tuple[CompiledPlan, dict[str, Any], list[Any]]:
        """Return the launches, all arrays as they read them, and the outputs: see the function `lay_out`."""
        compiled = self._compiled
        if compiled is None:
            raise ValueError("there is nothing to launch: no row, or no key")
        outputs = self._allocated(kind, given[0])
        for i, a in enumerate(outputs):
            kind.fill(a, 0 if i in self._sums else math.nan)
        scratch = {name: compiled.empty(name, spec) for name, spec in compiled.scratch.items()}
        for name, a in scratch.items():
            if name not in self._zeroed and a.dtype.kind == "f":
                kind.fill(a, math.nan)
        named = zip(self._names, [*self._changed(kind, given, 0), *outputs], strict=True)
        return compiled, {**compiled.views(named), **scratch}, outputs

    def _compare(self, kind: Kind, like: Any, arrays: Sequence[Any]) -> None:
        """Compare the arguments with the kernels' signatures, and launch: only in the first call of these kernels."""
        names = (*self._names, *self._compiled.scratch)
        with kind.on_stream_of(like):
            self._compiled.bind(self._compiled.views(zip(names, map(kind.device_array, arrays), strict=True)))()
        self._compiled.is_compared = not launches_are_replaced()

    def _changed(self, kind: Kind, given: Sequence[Any], stream: int) -> list[Any]:
        """Copy the inputs that the kernels cannot read in place."""
        changed, copies = [*given], []
        for i, change in self._changes:
            changed[i] = change(kind, changed[i])
            copies.append(changed[i])
        if device.ON_GPU and kind.is_captured(stream):
            kind.keep_alive(copies)
        return changed

    def _narrowed(self, kind: Kind, outputs: Sequence[Any], stream: int) -> list[Any]:
        """Copy the results without the columns of zeros that their head_dim was padded with."""
        if device.ON_GPU and kind.is_captured(stream):
            kind.keep_alive(outputs)
        named = zip(self._returned, outputs, strict=True)
        return [kind.copy(a[..., : self._columns]) if name in WITH_HEAD_DIM else a for name, a in named]

    def _empty_results(self, kind: Kind, given: Sequence[Any]) -> Any:
        """Return zeros, and lse of -inf or the sinks': there is no row, or no key."""
        outputs, like = self._allocated(kind, given[0]), given[0]
        with kind.on_stream_of(like):
            for name, a in zip(self._returned, outputs, strict=True):
                kind.fill(a, -math.inf if name == "lse" else 0)
                if name == "lse" and "sinks" in self._names:
                    a[...] = given[self._names.index("sinks")][:, None]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _scratch_on(self, kind: Kind, like: Any, stream: int) -> tuple[list[Any], Sequence[Any]]:
        """Find or allocate the scratch arrays, or one block for all of them; return them and the launches of this call.

        A stage that needs some scratch to be 0 between launches shares all of its scratch with the other plans on the
        stream, until `forget`. Calls on the per-thread stream get their own scratch, and so do graphs: every replay
        rewrites it, unless an earlier call has written all of it.
        """
        kept, captured = self._kept, device.ON_GPU and kind.is_captured(stream)
        if captured and kept is not None and self._written_once and follows_calls(kept.scratch):
            return kept.scratch, self._again
        ordered = not captured and stream != CU_STREAM_PER_THREAD
        if kept is not None and kept.stream == stream and ordered:
            return kept.scratch, self._again
        if self._zeroed:
            shared = _SCRATCH.setdefault((kind, kind.device_id(like), stream), {}) if ordered else {}
            scratch = []
            for name, spec, size in self._scratch:
                a = shared.get(name)
                if a is None or math.prod(a.shape) < size:
                    a = shared[name] = self._make_shared(kind, like, name, spec, size)
                scratch.append(a)
        elif len(self._scratch) > 1 and device.ON_GPU and self._compiled.is_compared:
            scratch = [kind.empty((self._block_bytes,), np.dtype(np.uint8), like)]
        else:
            scratch = kind.empties([(spec.shape, spec.dtype) for _, spec, _ in self._scratch], like)
        if captured:
            kind.keep_alive(scratch)
        return scratch, self._launches

    def _make_shared(self, kind: Kind, like: Any, name: str, spec: Spec, size: int) -> Any:
        """Allocate a scratch array for all plans on a stream."""
        try:
            a = kind.empty((size,), spec.dtype, like)
        except Exception as error:
            if not self._memory_hint or not _is_out_of_memory(error):
                raise
            raise MemoryError(
                f"{self._memory_hint}: {name}, what the parts hand to each other, takes {size * spec.dtype.itemsize:,} "
                "bytes, and there is no such memory: fewer parts are needed"
            ) from error
        if name in self._zeroed:
            with kind.on_stream_of(like):
                kind.fill(a, 0)
        return a


CU_STREAM_PER_THREAD = 2  # CUDA's handle for one stream per thread


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if an allocation found no memory: CuPy raises a MemoryError, PyTorch its own OutOfMemoryError."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def compile_plan(stage: Stage, call: Any, *family: Hashable) -> CompiledPlan:
    """Plan and compile the launches of a call, or take the kernels of an earlier call that needs the same.

    family: with the names and dtypes of arrays, equal for calls that differ only in shapes, strides and addresses.
    """
    source, own_sizes = _EXPERIMENT.get()
    sizes = stage.sizes_for(call, own_sizes)
    if source or own_sizes:
        return CompiledPlan(stage, call, sizes, source)
    arrays = call.arrays.values()
    of_arrays = next(iter(arrays)).device, *call.arrays, *[a.dtype for a in arrays]
    key = *family, stage.name, call.mod and call.mod.form, *of_arrays, *sizes.items()
    like = _COMPILED.get(key)
    compiled = CompiledPlan(stage, call, sizes, like=like)
    if compiled.kernels is not (like and like.kernels):
        _COMPILED[key] = compiled
    return compiled


# ---- for X-rays and experiments

_EXPERIMENT: contextvars.ContextVar[tuple[str | None, Mapping[str, int] | None]] = contextvars.ContextVar(
    "_EXPERIMENT", default=(None, None)
)


def lay_out(
    call: Call, *, source: str | None = None, sizes: Mapping[str, int] | None = None
) -> tuple[CompiledPlan, dict[str, Any], list[Any]]:
    """Plan a call of device arrays without launching it: `compiled.bind(arrays)` makes a function that launches.

    Args:
        source: kernel code to use instead of the stage's file. sizes: -D options that override the stage's own.

    Returns:
        The launches; all arrays by name, as the launches read them, scratch too; the outputs. These and scratch are
        full of NaN, but for what the launches need to be 0.

    Raises:
        ValueError: there is nothing to launch.
    """
    kind = DeviceArrays()
    before = _EXPERIMENT.set((source, sizes))
    try:
        plan = call.plan(_specs(kind, call))
    finally:
        _EXPERIMENT.reset(before)
    return plan.lay_out(kind, [*call.arrays.values()])
