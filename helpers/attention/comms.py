"""Ranks and the transports between them: NCCL, peer copies, or virtual ranks on one device.

    comms = virtual_ranks(4)        # on one GPU, or on the CPU engine
    comms = peer_copies()           # all GPUs of this process, by their copy engines
    comms = nccl()                  # the same by NCCL
    comms = nccl_of_mpi(MPI.COMM_WORLD) or nccl_of_torch()    # one process a GPU
    comms = gloo_of_torch()         # one process a rank, on the CPU engine

All have the methods of `Comms`. Arrays travel as bytes, because CuPy's NCCL has no bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np

from helpers import device
from helpers.attention.ladder.kinds import graph_has_its_memory
from helpers.attention.ladder.layout import address, bits
from helpers.attention.run import Cache
from helpers.attention.scalars import finite_number, whole_number

TIMEOUT = 600.0  # seconds, the default of PyTorch's process groups
COMPILING = 600.0  # extra seconds that a rank may come later to a call of a new form, for its compiler
T = TypeVar("T")
LEAVE = 8  # multiprocessors for the blocks of NCCL's copies


class Message(NamedTuple):
    """A contiguous array of a local rank: to be sent to rank `peer`, or filled with what that rank sends.

    Messages between two ranks arrive in the order in which they are sent.
    """

    rank: int
    peer: int
    array: Any


class Comms:
    """`size` ranks, of which this process has `ranks`. This class has virtual ranks, which share the current device.

    leave: multiprocessors that kernels leave free while messages are in flight. compiled: what this process has
    compiled for calls. agreed: the forms of calls that all ranks have compared, in the same order on each.
    """

    compares_every_call = False

    def __init__(self, size: int, ranks: Sequence[int], leave: int = 0) -> None:
        self.size, self.ranks = size, tuple(ranks)
        self.leave = whole_number("leave", leave, least=0)
        self.compiled: Cache[bool] = Cache()
        self.tiles: Cache[int] = Cache()
        self.agreed: Cache[bool] = Cache()
        self.capturing: Mapping[int, Any] = {}  # by local rank, the stream that graphs are captured from
        self.recorded: _Replay | None = None  # what they are captured for

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Make the device of a local rank the current one in this context."""
        with self.capturing.get(rank, _NO_STREAM):
            yield

    @contextlib.contextmanager
    def beside(self, rank: int) -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
        """Queue work that may run in parallel with what the current stream of a local rank gets in this context.

            with comms.beside(rank) as aside:
                first()
                with aside():
                    second()    # which needs nothing of the first

        After the context both are done.
        """
        yield contextlib.nullcontext

    def put(self, arrays: Sequence[Any]) -> list[Any]:
        """Copy arrays to the devices of the local ranks.

        Args:
            arrays: one for each of all ranks, as `ring_schedules.shard` returns them, or one for each local rank.

        Raises:
            TypeError, ValueError: arrays is not a list, or has the wrong length.
        """
        if not isinstance(arrays, (list, tuple)):
            raise TypeError(
                f"arrays must be a list of one per rank, as ring_schedules.shard returns; got {type(arrays).__name__}"
            )
        if len(arrays) not in (self.size, len(self.ranks)):
            wanted = " or ".join(map(str, sorted({self.size, len(self.ranks)})))
            raise ValueError(f"arrays has {len(arrays)}; {wanted} are needed: one for each rank")
        local = [arrays[rank] for rank in self.ranks] if len(arrays) == self.size else arrays
        made = []
        for rank, a in zip(self.ranks, local, strict=True):
            with self.on(rank):
                made.append(device.cp.asarray(a))
        return made

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start moving arrays, after everything queued on the current streams of the local ranks' devices.

        Returns:
            A function that makes these streams wait until the messages have arrived; the host does not wait.

        Raises:
            ValueError: if all ranks are local: a message without its counterpart, or with another length.
        """
        for target, source in _pairs(sends, receives):
            with self.on(target.rank):
                bits(target.array)[...] = bits(source.array)
        return lambda: None

    def captured(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return a function that repeats `work`, with a CUDA graph per GPU for everything between messages.

        Short steps need it: the host takes longer for their launches than the GPUs for their work.

            step = comms.captured(lambda: ring_attention(q, k, v, causal=True, comms=comms))
            o = step()    # for the contents of q, k and v now; always the same arrays, which the next call overwrites

        Graphs hold addresses, shapes and options, and nothing that the host does but messages: `work` is called twice
        to compile and to compare the ranks' calls, and once more to be captured. Every process captures and calls it in
        the same order. Without a GPU, `work` itself is returned.

        Args:
            work: calls of ring.py with these comms, and of other kernels within `on`; nothing that waits for a GPU.

        Raises:
            ValueError: `work` has packed sequences, whose ends come from the host.
        """
        return _Replay(self, work) if device.ON_GPU else work

    def agree(self, call: Mapping[str, Any]) -> None:
        """Wait until all ranks have come to a call, and compare it: the first message of a call of a new form.

        A rank may exceed its time limit by COMPILING. If all ranks belong to this process, there is nothing to compare.
        A form that all ranks have agreed on is not compared again: if only some of them repeat it, the others wait
        until their time limit.

        Args:
            call: what must be equal on all ranks, by name.

        Raises:
            ValueError: on each rank, and names what differs, and on which ranks.
            RuntimeError: another rank has refused the call. RuntimeError, TimeoutError: as `finish`.
        """
        key = (*((name, str(value)) for name, value in call.items()),)
        if len(self.ranks) == self.size or (key in self.agreed and not self.compares_every_call):
            return
        try:
            words = {name: f"{value!s:.200}" for name, value in call.items()}
            calls = self._tell_all(words, 0.0 if key in self.agreed else COMPILING)
        except BaseException:
            self.abort()
            raise
        for rank, of_rank in enumerate(calls):
            if _REFUSED in of_rank:
                raise RuntimeError(f"rank {rank} has refused this call: {of_rank[_REFUSED]}")
        if differences := _differences(calls):
            raise ValueError(f"the ranks call with different arguments: {'; '.join(differences)}")
        self.agreed[key] = True

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which come to `agree`, that this one has refused the call with an error."""
        if len(self.ranks) < self.size:
            with contextlib.suppress(Exception):  # the caller raises the more important error
                self._tell_all({_REFUSED: f"{type(error).__name__}: {error!s:.500}"}, 0.0)

    def _tell_all(self, words: Mapping[str, str], longer: float) -> list[dict[str, str]]:
        """Exchange texts between all ranks, in messages of one size; return each rank's.

        longer: seconds in addition to the time limit.
        """
        text = json.dumps(words).encode()
        if len(text) > _FIRST_BYTES:
            raise ValueError(f"{len(text):,} bytes describe this call; {_FIRST_BYTES:,} are the most")
        sends, receives = [], []
        for rank in self.ranks:
            with self.on(rank):
                mine = device.cp.asarray(np.frombuffer(text.ljust(_FIRST_BYTES), np.uint8))
                for peer in range(self.size):
                    if peer != rank:
                        sends.append(Message(rank, peer, mine))
                        receives.append(Message(rank, peer, device.cp.empty(_FIRST_BYTES, "uint8")))
        arrived = self.start(sends, receives)
        self._wait_on_host(longer)
        arrived()
        told = {rank: dict(words) for rank in self.ranks}
        for rank, peer, a in receives:
            if peer not in self.ranks:
                with self.on(rank):
                    told[peer] = json.loads(device.cp.asnumpy(a).tobytes())
        return [told[rank] for rank in range(self.size)]

    def _wait_on_host(self, longer: float = 0.0) -> None:
        """Return when the last messages have arrived. longer: seconds in addition to the time limit."""

    def finish(self) -> None:
        """Return when the last messages have arrived, if ranks of other processes may fail.

        Raises:
            RuntimeError, TimeoutError: see `Nccl`.
        """
        self._wait_on_host()

    def abort(self) -> None:
        """Give up: an error has left the ranks in different steps."""


class _Replay:
    """A recording of what a function queues: messages of the local ranks, and each GPU's graph of all in between.

    A graph of all GPUs would make each wait for the others at its begin and end. These follow each other on the current
    streams, and GPUs wait only for messages. Their memory comes from a separate pool.
    """

    def __init__(self, comms: Comms, work: Callable[[], Any]) -> None:
        cuda = device.cp.cuda
        for _ in range(2):  # the second captures without what is written only once
            work()
        self._comms, self._memory, streams = comms, cuda.MemoryPool(), {}
        for rank in comms.ranks:
            with comms.on(rank):
                cuda.Device().synchronize()  # tables that are written once are ready
                shared = next((s for s in streams.values() if s.device_id == cuda.Device().id), None)
                streams[rank] = shared or cuda.Stream(non_blocking=True)  # CuPy's default stream cannot be captured
        self._of_gpus = {stream.device_id: (rank, stream) for rank, stream in reversed(streams.items())}
        self._steps: list[Callable[[], None]] = []
        comms.capturing, comms.recorded = streams, self
        try:
            with cuda.using_allocator(self._memory.malloc), graph_has_its_memory():
                self._begin()
                try:
                    self._results = work()
                except BaseException:
                    with contextlib.suppress(Exception):  # the caller raises the more important error
                        self._end()
                    raise
                self._end()
        finally:
            comms.capturing, comms.recorded = {}, None

    def __call__(self) -> Any:
        """Queue all on the current streams, after what is queued there."""
        for step in self._steps:
            step()
        self._comms.finish()
        return self._results

    def messages(self, start: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Record messages, as `Comms.start` starts them, and return a function that records their arrival."""
        waits: list[Callable[[], None]] = []
        self._between(lambda: waits.append(start()))
        return lambda: self._between(lambda: waits.pop()())

    def _between(self, step: Callable[[], None]) -> None:
        self._end()
        self._steps.append(step)
        self._begin()

    def _begin(self) -> None:
        for rank, stream in self._of_gpus.values():
            with self._comms.on(rank):
                stream.begin_capture()

    def _end(self) -> None:
        for rank, stream in self._of_gpus.values():
            with self._comms.on(rank):
                graph = stream.end_capture()
            self._steps.append(functools.partial(self._launch, rank, graph))

    def _launch(self, rank: int, graph: Any) -> None:
        with self._comms.on(rank):
            graph.launch(device.cp.cuda.get_current_stream())


_NO_STREAM: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_FIRST_BYTES = 4096
_REFUSED = "refused"


def _differences(calls: Sequence[Mapping[str, str]]) -> list[str]:
    """Name what differs between the ranks' calls: "causal is True on rank 0, False on ranks 1, 2"."""
    lines = []
    for name in dict.fromkeys(name for call in calls for name in call):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, call in enumerate(calls):
            ranks[call.get(name, "not given")].append(rank)
        if len(ranks) > 1:
            each = (f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items())
            lines.append(f"{name} is {', '.join(each)}")
    return lines


def virtual_ranks(size: int) -> Comms:
    """Make ranks that share the current device, which may be the CPU engine; they compute the same as real ones."""
    size = whole_number("size", size, least=1)
    return Comms(size, range(size))


def _pairs(sends: Sequence[Message], receives: Sequence[Message]) -> list[tuple[Message, Message]]:
    """Pair each receive with its send, if all ranks are local. Raises ValueError if they do not match."""
    queues: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    for message in sends:
        queues[message.rank, message.peer].append(message)
    pairs = []
    for message in receives:
        queue = queues[message.peer, message.rank]
        if not queue:
            raise ValueError(
                f"receives: rank {message.rank} waits for a message that rank {message.peer} does not send"
            )
        pairs.append((message, queue.popleft()))
        here, there = (each.array.nbytes for each in pairs[-1])
        if here != there:
            raise ValueError(
                f"rank {message.peer} sends {there:,} bytes to rank {message.rank}, which waits for {here:,}"
            )
    for (rank, peer), left in queues.items():
        if left:
            raise ValueError(f"sends: rank {peer} does not wait for a message that rank {rank} sends")
    return pairs


# ---- several GPUs


def _borrowed(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose arrays do not keep memory from being reused, which a replay's pool never returns."""
    made = []
    for rank, peer, a in messages:
        memory = device.cp.cuda.UnownedMemory(address(a), a.nbytes, None, a.data.device_id)
        made.append(Message(rank, peer, device.cp.ndarray(a.shape, a.dtype, device.cp.cuda.MemoryPointer(memory, 0))))
    return made


class _OfGpus(Comms):
    """Ranks with a GPU each, on which messages have their own stream."""

    def __init__(self, size: int, gpus: Mapping[int, int], leave: int) -> None:
        """
        Args:
            gpus: the GPU of each local rank.
        """
        super().__init__(size, [*gpus], leave)
        self._gpus, self._streams, self._beside = dict(gpus), {}, {}
        for rank in self.ranks:
            with self.on(rank):
                self._streams[rank] = device.cp.cuda.Stream(non_blocking=True, priority=-1)
                self._beside[rank] = device.cp.cuda.Stream(non_blocking=True)
        self._arrived: dict[int, Any] = {}

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        with device.cp.cuda.Device(self._gpus[rank]), super().on(rank):
            yield

    @contextlib.contextmanager
    def beside(self, rank: int) -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
        event = functools.partial(device.cp.cuda.Event, disable_timing=True)
        main, other = device.cp.cuda.get_current_stream(), self._beside[rank]
        other.wait_event(main.record(event()))
        yield lambda: other
        main.wait_event(other.record(event()))

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        if self.recorded:
            return self.recorded.messages(functools.partial(self._start, *map(_borrowed, (sends, receives))))
        return self._start(sends, receives)

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        ready = self._record(lambda rank: device.cp.cuda.get_current_stream())
        self._wait(ready, lambda rank: self._streams[rank])
        self._move(sends, receives)
        self._arrived = self._record(lambda rank: self._streams[rank])
        arrived = self._arrived
        return lambda: self._wait(arrived, lambda rank: device.cp.cuda.get_current_stream())

    def _record(self, stream_of: Callable[[int], Any]) -> dict[int, Any]:
        """Record an event on each local rank's stream."""
        events = {}
        for rank in self.ranks:
            with self.on(rank):
                events[rank] = stream_of(rank).record(device.cp.cuda.Event(disable_timing=True))
        return events

    def _wait(self, events: Mapping[int, Any], stream_of: Callable[[int], Any]) -> None:
        """Make each local rank's stream wait for the events of all, because each reads what others have written."""
        for rank in self.ranks:
            with self.on(rank):
                for event in events.values():
                    stream_of(rank).wait_event(event)

    def _move(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        raise NotImplementedError


class _PeerCopies(_OfGpus):
    """Copies between GPUs by their copy engines, which use no multiprocessor."""

    def _move(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for target, source in _pairs(sends, receives):
            with self.on(target.rank):
                runtime, stream = device.cp.cuda.runtime, self._streams[target.rank].ptr
                # and not memcpyPeerAsync, which no graph can be captured from
                where = target.array.data.ptr, source.array.data.ptr
                runtime.memcpyAsync(*where, source.array.nbytes, runtime.memcpyDefault, stream)


def peer_copies(gpus: Sequence[int] | None = None) -> Comms:
    """Make ranks on several GPUs of this process, whose arrays move by peer copies.

    Args:
        gpus: their numbers; by default all.

    Raises:
        RuntimeError: there is no GPU; two of them cannot read each other's memory.
    """
    numbers = _gpus(gpus)
    runtime = device.cp.cuda.runtime
    for number in numbers:
        for peer in numbers:
            if number == peer:
                continue
            if not runtime.deviceCanAccessPeer(number, peer):
                raise RuntimeError(f"GPU {number} cannot read the memory of GPU {peer}: use nccl()")
            with device.cp.cuda.Device(number):
                try:
                    runtime.deviceEnablePeerAccess(peer)
                except runtime.CUDARuntimeError as error:
                    if error.status != _ENABLED_BEFORE:
                        raise
    return _PeerCopies(len(numbers), dict(enumerate(numbers)), 0)


_ENABLED_BEFORE = 704  # cudaErrorPeerAccessAlreadyEnabled


def _gpus(gpus: Sequence[int] | None) -> list[int]:
    if not device.ON_GPU:
        raise RuntimeError("this needs GPUs, and none answers here: use virtual_ranks(size)")
    count = device.cp.cuda.runtime.getDeviceCount()
    numbers = list(range(count)) if gpus is None else [whole_number(f"gpus[{i}]", gpu) for i, gpu in enumerate(gpus)]
    if not numbers or len({*numbers}) != len(numbers) or not {*numbers} <= {*range(count)}:
        raise ValueError(f"gpus = {gpus}; one or more of 0 to {count - 1} are needed, each once")
    return numbers


class Nccl(_OfGpus):
    """Messages by NCCL's send and recv, in one group per step.

    A rank that fails in another process ends this one's calls with an error: after `timeout` seconds, or as soon as
    NCCL reports it. Then the communicators are aborted and can no longer be used.
    """

    def __init__(
        self,
        size: int,
        gpus: Mapping[int, int],
        communicators: Mapping[int, Any],
        *,
        leave: int = LEAVE,
        timeout: float | None = TIMEOUT,
        library: Any = None,
    ) -> None:
        """
        Args:
            gpus, communicators: by local rank; CuPy's NcclCommunicator. timeout: None: never wait on the host.
            library: in place of cupy.cuda.nccl.
        """
        super().__init__(size, gpus, leave)
        _check_timeout(timeout)
        self._library = library or nccl_library()
        self._communicators, self._timeout, self._failed = dict(communicators), timeout, ""

    def connect(self) -> None:
        """Send a byte to every rank: NCCL connects two ranks at their first message, which makes the host wait."""
        sends, receives = [], []
        for rank in self.ranks:
            with self.on(rank):
                for peer in range(self.size):
                    if peer != rank:
                        sends.append(Message(rank, peer, device.cp.zeros(1, dtype="uint8")))
                        receives.append(Message(rank, peer, device.cp.zeros(1, dtype="uint8")))
        if sends:
            self.start(sends, receives)()
            self.finish()

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        if self._failed:
            raise RuntimeError(f"these ranks have been given up: {self._failed}")
        return super().start(sends, receives)

    def _move(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        library = self._library
        library.groupStart()
        for messages, name in ((sends, "send"), (receives, "recv")):
            for rank, peer, a in messages:
                with self.on(rank):
                    move = getattr(self._communicators[rank], name)
                    move(address(a), a.nbytes, library.NCCL_UINT8, peer, self._streams[rank].ptr)
        library.groupEnd()

    def _wait_on_host(self, longer: float = 0.0) -> None:
        if self._timeout is None or len(self.ranks) == self.size or self.capturing:
            return  # no other process, which could fail; a graph contains no wait
        seconds = self._timeout + longer
        end = time.monotonic() + seconds
        while not all(event.done for event in self._arrived.values()):
            for rank, communicator in self._communicators.items():
                try:
                    communicator.check_async_error()
                except Exception as error:  # NcclError, or a KeyError for an error that CuPy has no name for
                    self._give_up(f"NCCL reports an error to rank {rank}: {error}", RuntimeError)
            if time.monotonic() > end:
                ranks = ", ".join(map(str, self.ranks))
                self._give_up(f"rank {ranks} has waited {seconds:g} s for the others", TimeoutError)
            time.sleep(_BETWEEN_LOOKS)

    def _give_up(self, reason: str, kind: type[Exception]) -> None:
        self.abort(reason)
        raise kind(f"{reason}. A rank has failed, or is slower than the time limit; the communicators are aborted")

    def abort(self, reason: str = "a rank of this process has failed") -> None:
        self._failed = self._failed or reason
        for communicator in self._communicators.values():
            communicator.abort()


_BETWEEN_LOOKS = 1e-4  # seconds


def _check_timeout(timeout: Any) -> None:
    if timeout is not None and finite_number("timeout", timeout) < 0:
        raise ValueError(f"timeout = {timeout}; seconds, or None to wait forever")


def nccl_library() -> Any:
    """Return CuPy's module for NCCL. Raises RuntimeError if there is none."""
    _gpus(None)
    library = importlib.import_module("cupy.cuda.nccl")  # cupy.cuda does not import it by itself
    if not library.available:
        raise RuntimeError("CuPy finds no NCCL: pip install nvidia-nccl-cu12, or use peer_copies()")
    return library


def nccl(gpus: Sequence[int] | None = None, *, leave: int = LEAVE) -> Nccl:
    """Make one rank for each of several GPUs of this process; NCCL moves their arrays.

    Args:
        gpus: their device numbers; by default all. leave: multiprocessors left to NCCL's blocks; how many NCCL uses
            depends on NCCL_MAX_P2P_NCHANNELS, which it reads once per process.

    Raises:
        RuntimeError: there is no GPU, or CuPy finds no NCCL.
    """
    numbers = _gpus(gpus)
    communicators = nccl_library().NcclCommunicator.initAll(numbers)
    made = Nccl(len(numbers), dict(enumerate(numbers)), dict(enumerate(communicators)), leave=leave)
    made.connect()
    return made


def nccl_of_id(size: int, rank: int, unique_id: bytes, *, leave: int = LEAVE, timeout: float | None = TIMEOUT) -> Nccl:
    """Make this process's rank, on its current GPU, among `size` processes that have the same unique_id.

    Args:
        unique_id: the result of cupy.cuda.nccl.get_unique_id() in one of them. timeout: seconds to wait for the others,
            here and in every call; None: forever, and calls return before their messages have arrived.

    Raises:
        TypeError, ValueError: there is no such rank; timeout is not a number of seconds.
        TimeoutError: not all ranks have come in time.
    """
    size, rank = whole_number("size", size, least=1), whole_number("rank", rank, least=0)
    if rank >= size:
        raise ValueError(f"rank = {rank}; there are 0 to {size - 1}, as size is {size}")
    whole_number("leave", leave, least=0)
    _check_timeout(timeout)
    library = nccl_library()
    gpu = device.cp.cuda.runtime.getDevice()

    def join() -> Nccl:
        with device.cp.cuda.Device(gpu):  # a new thread begins with the first one
            communicator = library.NcclCommunicator(size, unique_id, rank)
            made = Nccl(size, {rank: gpu}, {rank: communicator}, leave=leave, timeout=timeout)
            made.connect()
            return made

    return within(timeout, join, f"rank {rank} of {size}: not all ranks have come")


def within(seconds: float | None, work: Callable[[], Any], what: str) -> Any:
    """Return the result of `work`. Raises TimeoutError(what) if it takes longer; it then continues by itself."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((work(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)  # a call of NCCL cannot be interrupted
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError(f"{what} after {seconds:g} s")
    result, error = results[0]
    if error is not None:
        raise error
    return result


def nccl_of_mpi(comm: Any, *, leave: int = LEAVE, timeout: float | None = TIMEOUT) -> Nccl:
    """Make this process's rank of an mpi4py communicator, each of whose processes has a current GPU."""
    unique_id = comm.bcast(nccl_library().get_unique_id() if comm.Get_rank() == 0 else None)
    return nccl_of_id(comm.Get_size(), comm.Get_rank(), unique_id, leave=leave, timeout=timeout)


def nccl_of_torch(group: Any = None, *, leave: int = LEAVE, timeout: float | None = TIMEOUT) -> Nccl:
    """Make this process's rank of a torch.distributed group with any backend; None: the default group."""
    from torch import distributed

    rank = distributed.get_rank(group)
    box = [nccl_library().get_unique_id() if rank == 0 else None]
    distributed.broadcast_object_list(box, distributed.get_process_group_ranks(group)[0] if group else 0, group)
    return nccl_of_id(distributed.get_world_size(group), rank, box[0], leave=leave, timeout=timeout)


class Gloo(Comms):
    """This process's rank of a torch.distributed group whose messages go from CPU to CPU, for the CPU engine.

    A failing rank ends the others' calls with an error, as with `Nccl`. Every call is compared between the ranks.
    """

    compares_every_call = True

    def __init__(self, group: Any, *, timeout: float | None = TIMEOUT) -> None:
        """
        Args:
            group: with gloo among its backends; None: the default group. timeout: seconds; None: forever.
        """
        from torch import distributed

        _check_timeout(timeout)
        super().__init__(distributed.get_world_size(group), [distributed.get_rank(group)])
        self._distributed, self._group, self._timeout = distributed, group, timeout
        self._under_way: list[Any] = []
        self._failed = ""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        if self._failed:
            raise RuntimeError(f"these ranks have been given up: {self._failed}")
        from torch import from_numpy

        works = []
        own = self.ranks[0]
        for target, source in _pairs(*([m for m in messages if m.peer == own] for messages in (sends, receives))):
            bits(target.array)[...] = bits(source.array)
        for messages, move in ((sends, self._distributed.isend), (receives, self._distributed.irecv)):
            for _, peer, a in messages:
                if a.nbytes and peer != own:
                    words = from_numpy(np.asarray(a).view(np.ndarray).reshape(-1).view(np.uint8))
                    number = peer if self._group is None else self._distributed.get_global_rank(self._group, peer)
                    works.append((move(words, number, group=self._group), words))
        self._under_way += works
        return self._wait_on_host

    def _wait_on_host(self, longer: float = 0.0) -> None:
        seconds = None if self._timeout is None else self._timeout + longer
        end = None if seconds is None else time.monotonic() + seconds
        while self._under_way:
            work, _ = self._under_way.pop(0)
            try:
                if end is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError as error:
                late = end is not None and time.monotonic() >= end
                reason = f"waited {seconds:g} s for the others" if late else f"lost another one: {error}"
                self.abort(f"rank {self.ranks[0]} has {reason}")
                raise (TimeoutError if late else RuntimeError)(self._failed) from error

    def abort(self, reason: str = "a rank of this process has failed") -> None:
        self._failed = self._failed or reason
        self._under_way.clear()


def gloo_of_torch(group: Any = None, *, timeout: float | None = TIMEOUT) -> Gloo:
    """Make this process's rank of a torch.distributed group with the backend gloo, on the CPU engine.

    Args:
        group: None for the default group. timeout: seconds to wait for the others in every call; None: forever.

    Raises:
        RuntimeError: a GPU computes here, and gloo cannot send its arrays; the group cannot send between CPUs.
        TypeError, ValueError: timeout is not a number of seconds.
    """
    from torch import distributed

    if device.ON_GPU:
        raise RuntimeError("gloo sends arrays of a CPU, and a GPU computes here: use nccl_of_torch()")
    if "gloo" not in (backend := distributed.get_backend_config(group)):
        raise RuntimeError(f"the group's backends are {backend}; on the CPU gloo is needed")
    return Gloo(group, timeout=timeout)
