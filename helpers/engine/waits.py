"""Explain a deadlock: what each thread of the block waits for, what is missing, and which threads could provide it.

The engine's C++ lists the facts when no thread can run (`tell_waits` of cpp/failure.cpp); here they become sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

WARP, GROUP = 32, 128


@dataclass(frozen=True)
class Waiting:
    """Neighbouring threads that wait for the same thing at one place.

    kind: mbarrier, named, block, cluster, lanes, group; or left (the kernel). what: the mbarrier's address, the
    barrier's number, or the operation's name; value: the parity, the mask, or an operand.
    """

    first: int
    last: int
    kind: str
    what: str
    value: str
    at: str

    @property
    def threads(self) -> range:
        """Their numbers."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of one warp's threads at an mbarrier, at one place. lanes: a mask; count: arrivals, or bytes.

    rank: their block's, in the cluster.
    """

    rank: int
    warp: int
    lanes: int
    lanes_now: int
    count: int
    of_bytes: bool
    at: str

    def threads(self, *, now: bool = False) -> set[int]:
        """Return the threads that have arrived here, or only those of this phase."""
        mask = self.lanes_now if now else self.lanes
        return {self.warp * WARP + lane for lane in range(WARP) if mask >> lane & 1}


@dataclass
class Mbarrier:
    """An mbarrier that threads wait for. missing: missing arrivals, and the total. ended: completed phases."""

    missing: int
    expected: int
    missing_bytes: int
    parity: int
    ended: int
    arrivals: list[Arrivals] = field(default_factory=list)


@dataclass(frozen=True)
class Named:
    """A numbered barrier: how many threads have arrived, how many must, and which have."""

    arrived: int
    expected: int
    threads: frozenset[int]


def names(threads: Iterable[int], n_threads: int) -> str:
    """Name threads: "warps 0 to 3", "thread 128", "threads 16 to 31"."""
    left, parts = sorted(set(threads)), []
    while left:
        first = left[0]
        size = next(i for i in range(1, len(left) + 1) if i == len(left) or left[i] != first + i)
        run, left = range(first, first + size), left[size:]
        begin, end = run[0], run[-1] + 1
        if begin % WARP == 0 and (end % WARP == 0 or end == n_threads):
            parts.append(_span("warp", begin // WARP, (end - 1) // WARP))
        else:
            parts.append(_span("thread", begin, end - 1))
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _span(unit: str, first: int, last: int) -> str:
    return f"{unit} {first}" if first == last else f"{unit}s {first} to {last}"


def _plural(text: str) -> bool:
    return not text.startswith(("warp ", "thread ")) or ", " in text or " and " in text


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


class Block:
    """The block in which no thread can run."""

    def __init__(
        self, told: str, name_of: Callable[[int], str], line_at: Callable[[int], tuple[str, int] | None]
    ) -> None:
        """Read the engine's report. name_of, line_at: as for `failures.describe`."""
        self._name_of, self._line_at = name_of, line_at
        self.waiting: list[Waiting] = []
        self.mbarriers: dict[str, Mbarrier] = {}
        self.named: dict[str, Named] = {}
        self.groups: dict[int, tuple[int, int, bool, int]] = {}  # arrived, registers, is short of them, pool
        self.peers: dict[int, list[Waiting]] = {}  # in the cluster's other blocks, by rank
        self.rank, self.cluster = 0, [0, 0]  # in the cluster; threads that arrived at barrier.cluster, and their total
        for line in told.splitlines():
            kind, *fields = line.split("\t")
            if kind == "threads":
                first, last, of, what, value, number, place, file = fields
                self.waiting.append(Waiting(int(first), int(last), of, what, value, self._at(file, number, place)))
            elif kind == "peer":
                rank, first, last, of, what, value, number, place, file = fields
                one = Waiting(int(first), int(last), of, what, value, self._at(file, number, place))
                self.peers.setdefault(int(rank), []).append(one)
            elif kind == "cluster":
                self.rank, *self.cluster = map(int, fields)
            elif kind == "mbarrier":
                word, *numbers = fields
                self.mbarriers[word] = Mbarrier(*map(int, numbers))
            elif kind == "arrived":
                word, rank, warp, lanes, now, count, of_bytes, number, place, file = fields
                at = self._at(file, number, place)
                self.mbarriers[word].arrivals.append(
                    Arrivals(int(rank), int(warp), int(lanes, 16), int(now, 16), int(count), of_bytes == "1", at)
                )
            elif kind == "named":
                number, arrived, expected, *masks = fields
                came = {warp * WARP + lane for warp, mask in enumerate(masks) for lane in _lanes(int(mask, 16))}
                self.named[number] = Named(int(arrived), int(expected), frozenset(came))
            elif kind == "group":
                number, *numbers = fields
                arrived, registers, is_short, pool = map(int, numbers)
                self.groups[int(number)] = arrived, registers, bool(is_short), pool
        self.n_threads = 1 + max((w.last for w in self.waiting), default=-1)
        self._left = {t for w in self.waiting if w.kind == "left" for t in w.threads}

    def _at(self, file: str, line: str, place: str) -> str:
        """Name a place; for a header's function, the line that calls it."""
        known = self._line_at(int(place, 16)) if int(place, 16) else None
        name, number = known or (file, int(line))
        return f"{name}:{number}" if name else ""

    def _names(self, threads: Iterable[int]) -> str:
        return names(set(threads) & set(range(self.n_threads)), self.n_threads)

    # ------------------------------------------------------------------------------------ which threads wait for which

    def could(self, waiting: Waiting) -> set[int]:
        """Return the remaining threads that could end a wait: for an mbarrier, those that arrived at it before."""
        alive = set(range(self.n_threads)) - self._left
        if waiting.kind == "mbarrier":
            known = self.mbarriers.get(waiting.what)
            if known is None:
                return set()
            ours = [a for a in known.arrivals if a.rank == self.rank]
            before = set().union(*(a.threads() for a in ours if not a.of_bytes or known.missing_bytes > 0))
            now = set().union(*(a.threads(now=True) for a in ours if not a.of_bytes))
            others = alive - self._waits_for(waiting)
            some = ((before & alive) - now) or (before & alive if known.missing_bytes > 0 else set())
            return some or (others if not before and ours == known.arrivals else set())
        if waiting.kind == "named":
            return alive - (self.named[waiting.what].threads if waiting.what in self.named else set())
        if waiting.kind in ("block", "cluster"):
            return {t for w in self.waiting if w.kind not in (waiting.kind, "left") for t in w.threads}
        if waiting.kind == "lanes":
            warp, mask = waiting.first // WARP, int(waiting.value, 16)
            lanes = {warp * WARP + lane for lane in _lanes(mask)} & alive
            return lanes - {t for w in self.waiting if _same(w, waiting) for t in w.threads}
        number = waiting.first // GROUP
        if self.groups.get(number, (0, 0, False, 0))[2]:  # registers held by the other warpgroups
            return {t for t in alive if t // GROUP != number}
        group = {t for t in alive if t // GROUP == number}
        return group - {t for w in self.waiting if _same(w, waiting) for t in w.threads}

    def _waits_for(self, waiting: Waiting) -> set[int]:
        return {t for w in self.waiting if _same(w, waiting) for t in w.threads}

    def object_of(self, waiting: Waiting) -> str:
        """Name what threads wait for."""
        if waiting.kind == "mbarrier":
            known = self.mbarriers.get(waiting.what)
            number = f", phase {known.ended}" if known else ""
            return f"{self._name_of(int(waiting.what, 16))}{number} (parity {waiting.value})"
        if waiting.kind == "named":
            return f"bar.sync {waiting.what}"
        if waiting.kind == "cluster":
            return "barrier.cluster"
        if waiting.kind == "block":
            return "__syncthreads()"
        if waiting.kind == "lanes":
            return f"{waiting.what} with mask 0x{int(waiting.value, 16):08x}"
        return f"{waiting.what} {waiting.value}"

    def lacks(self, waiting: Waiting) -> str:
        """Describe what is missing where threads wait."""
        if waiting.kind == "mbarrier" and (known := self.mbarriers.get(waiting.what)):
            parts = []
            if known.missing:
                verb = "is" if known.missing == 1 else "are"
                of = f"{known.missing} of the {known.expected} arrivals"
                if known.missing == known.expected:
                    of = f"all {known.expected} arrivals" if known.expected > 1 else "the one arrival"
                parts.append(f"{of} of a phase {verb} missing")
            if known.missing_bytes > 0:
                parts.append(f"{_count(known.missing_bytes, 'byte')} that expect_tx announced have not been sent")
            if known.missing_bytes < 0:
                parts.append(f"{_count(-known.missing_bytes, 'byte')} more than expect_tx announced have been sent")
            return " and ".join(parts)
        if waiting.kind == "named" and (barrier := self.named.get(waiting.what)):
            return f"{barrier.arrived} of {_count(barrier.expected, 'thread')} have come"
        if waiting.kind == "cluster":
            return f"{self.cluster[0]} of the {self.cluster[1]} threads that the cluster still has have come"
        if waiting.kind == "group":
            arrived, registers, is_short, pool = self.groups[waiting.first // GROUP]
            if is_short:
                return (
                    f"its threads have {registers} registers each, and only {pool} more are free, until another "
                    "warpgroup gives some back by setmaxnreg.dec"
                )
            return f"{arrived} of the warpgroup's {GROUP} threads have come"
        if waiting.kind == "lanes":
            missing = self.could(waiting)
            return f"{self._names(missing)} of that mask {'have' if _plural(self._names(missing)) else 'has'} not come"
        return "it waits for all threads that have not left the kernel"

    def _came(self, waiting: Waiting) -> list[str]:
        """Describe which threads have arrived at an mbarrier so far, and what was sent to it."""
        known = self.mbarriers.get(waiting.what) if waiting.kind == "mbarrier" else None
        if known is None:
            return []
        sentences = []
        places: dict[tuple[bool, str, int], list[Arrivals]] = {}
        for one in known.arrivals:
            places.setdefault((one.of_bytes, one.at, one.rank), []).append(one)
        for (of_bytes, at, rank), found in sorted(places.items()):
            who = self._names(set().union(*(one.threads() for one in found)))
            who += "" if rank == self.rank else f" of block {rank} of the cluster"
            count = sum(one.count for one in found)
            if of_bytes:
                sentences.append(f"so far {_count(count, 'byte')} {_were(count)} sent to it, by {who} at {at}")
                continue
            now = set().union(*(one.threads(now=True) for one in found))
            in_phase = "none of them in this phase" if not now else f"in this phase by {self._names(now)}"
            sentences.append(f"so far it had {_count(count, 'arrival')} by {who} at {at}, {in_phase}")
        if not any(not one.of_bytes for one in known.arrivals):
            sentences.append("nobody has arrived at it since its initialisation")
        return sentences

    def _helpers(self, waiting: Waiting) -> list[str]:
        """Describe which threads could still provide what is missing and why they do not, or why none can."""
        known = self.mbarriers.get(waiting.what) if waiting.kind == "mbarrier" else None
        before = set().union(*(a.threads() for a in known.arrivals if a.rank == self.rank)) if known else set()
        gone = (before & self._left) or self._left
        left = f"{self._names(gone)} {'have' if _plural(self._names(gone)) else 'has'} left the kernel" if gone else ""
        could = self.could(waiting)
        parts = []
        for one in self.waiting:
            if here := could & set(one.threads):
                who, same = self._names(here), _same(one, waiting)
                verb = "wait" if _plural(who) else "waits"
                parts.append(f"{who}, which {verb} for {'this itself' if same else self.object_of(one)} at {one.at}")
        parts += self._peers(waiting)
        if parts:
            known_to = " (those that have arrived before)" if before & could else ""
            return [f"could still bring it{known_to}: {'; '.join(parts)}", *([left] if left and known else [])]
        if known and known.missing and before - self._left:
            counts = f"mbarrier.init counts {known.expected}, and {known.expected - known.missing} came"
            return [f"all who ever arrived at it have done so in this phase: {counts}" + (f"; {left}" if left else "")]
        return [f"nobody can bring it any more{': ' if left else ''}{left}"]

    def _peers(self, waiting: Waiting) -> list[str]:
        """Describe which threads of the cluster's other blocks could provide what is missing, and why they do not."""
        known = self.mbarriers.get(waiting.what) if waiting.kind == "mbarrier" else None
        parts = []
        for rank, every in sorted(self.peers.items()):
            came = set().union(*(a.threads() for a in known.arrivals if a.rank == rank)) if known else set()
            for one in every:
                waits_too = waiting.kind == "cluster" and one.kind != "cluster"
                here = set(one.threads) if waits_too else came & set(one.threads)
                if not here or one.kind == "left":
                    continue
                who = self._names(here)
                verb = "wait" if _plural(who) else "waits"
                parts.append(
                    f"{who} of block {rank} of the cluster, which {verb} for {self.object_of(one)} at {one.at}"
                )
        return parts

    def sentences(self) -> list[str]:
        """Describe for each wait which threads wait, what is missing, and which threads could provide it."""
        lines, told = [], set()
        for one in self.waiting:
            size = _ALONE.get(one.kind)
            key = (one.kind, one.what, one.value, one.first // size if size else 0)
            if one.kind in ("left", "runs") or key in told:
                continue
            told.add(key)
            places: dict[str, set[int]] = {}
            for w in self.waiting:
                if _same(w, one):
                    places.setdefault(w.at, set()).update(w.threads)
            who = " and ".join(f"{self._names(threads)} at {at}" for at, threads in places.items())
            verb = "wait" if len(places) > 1 or _plural(who.partition(" at ")[0]) else "waits"
            wait = f"{who} {verb} for {self.object_of(one)}: {self.lacks(one)}"
            facts = [wait, *self._came(one), *self._helpers(one)]
            lines.append(". ".join(fact[0].upper() + fact[1:] for fact in facts))
        return lines

    def circle(self) -> list[Waiting]:
        """Return groups of threads that each wait for the next, and the last for the first; [] if there are none."""
        waiting = [w for w in self.waiting if w.kind not in ("left", "runs")]
        could = {w: self.could(w) for w in waiting}
        after = {w: [o for o in waiting if o != w and not could[w].isdisjoint(o.threads)] for w in waiting}

        def search(path: list[Waiting]) -> list[Waiting]:
            for other in after[path[-1]]:
                if other in path:
                    return path[path.index(other) :]
                if found := search([*path, other]):
                    return found
            return []

        return next((found for w in waiting if (found := search([w]))), [])


_ALONE = {"lanes": WARP, "group": GROUP}  # waited for by each warp, or each warpgroup, on its own


def _same(one: Waiting, other: Waiting) -> bool:
    """Tell whether both wait for the same thing."""
    size = _ALONE.get(one.kind)
    is_one = size is None or one.first // size == other.first // size
    return (one.kind, one.what, one.value) == (other.kind, other.what, other.value) and is_one


def _lanes(mask: int) -> list[int]:
    return [lane for lane in range(WARP) if mask >> lane & 1]


def explain(told: str, name_of: Callable[[int], str], line_at: Callable[[int], tuple[str, int] | None]) -> str:
    """Explain a deadlock, a line for each wait; "" if the engine reported nothing."""
    block = Block(told, name_of, line_at)
    sentences: Sequence[str] = block.sentences()
    if not sentences:
        return ""
    lines = ["Who waits for whom:", *(f"  - {sentence}." for sentence in sentences)]
    if circle := block.circle():
        steps = [names(w.threads, block.n_threads) for w in [*circle, circle[0]]]
        lines.append(f"  They wait for each other in a circle: {' -> '.join(steps)}.")
    return "\n".join(lines)
