"""Count the costs of arrays and source lines in a checked run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from .. import observed
from ..steps import Step

Line = tuple[str, int]  # file and number


@dataclass
class Figures:
    """The cost of an array, or of a line of the source.

    read, written: bytes that threads requested. loads, stores: requests, one per instruction of a warp, of which
    shared_requests went to shared memory. sectors: 32-byte pieces of global memory touched by the others; wavefronts:
    in shared memory; conflicts: wavefronts beyond the minimum for the lanes' width: one for 4 bytes each, four for 16.
    atomics: atomic accesses.
    """

    read: int = 0
    written: int = 0
    loads: int = 0
    stores: int = 0
    shared_requests: int = 0
    sectors: int = 0
    wavefronts: int = 0
    conflicts: int = 0
    atomics: int = 0

    @property
    def requests(self) -> int:
        """The warp instructions that accessed it: loads plus stores."""
        return self.loads + self.stores

    @property
    def sectors_per_request(self) -> float:
        """4 means that a warp reads 32 neighbouring words; 1, all lanes the same word; 32, each lane somewhere else."""
        requests = self.requests - self.shared_requests
        return self.sectors / requests if requests else 0.0

    @property
    def wavefronts_per_request(self) -> float:
        """For words, 1 means no bank conflict; 32, that all lanes of a warp need different words of the same bank."""
        return self.wavefronts / self.shared_requests if self.shared_requests else 0.0

    def add(self, site: observed.Site, *, is_shared: bool) -> None:
        """Add the figures of one instruction."""
        size = site.count * site.size
        if site.is_write:
            self.written += size
            self.stores += site.requests
        else:
            self.read += size
            self.loads += site.requests
        self.shared_requests += site.requests if is_shared else 0
        self.sectors += site.sectors
        self.wavefronts += site.wavefronts
        self.conflicts += max(site.wavefronts - site.requests * max(1, site.size // 4), 0)
        self.atomics += site.count if site.is_atomic and site.is_write else 0


@dataclass
class Tables:
    """The figures of a run by array, by line, and by both; see the fields of Report with these names."""

    traffic: dict[str, Figures] = field(default_factory=dict)
    shared: dict[str, Figures] = field(default_factory=dict)
    by_line: dict[Line, Figures] = field(default_factory=dict)
    by_access: dict[Line, dict[str, Figures]] = field(default_factory=dict)
    worst: dict[Line, list[tuple[str, int, dict[int, int]]]] = field(default_factory=dict)


def _is_constant(region: observed.Region) -> bool:
    """Return True for a constant: sectors do not measure the constant cache, which broadcasts a word."""
    return region.kind == observed.VARIABLE and not region.writable


def tables(seen: observed.Observed) -> Tables:
    """Sum up the sites of a run by array and line."""
    result = Tables()
    for region in seen.regions:
        if region.size and region.kind != observed.VARIABLE:
            (result.shared if region.is_shared else result.traffic)[region.name] = Figures()
    for site in seen.sites:
        region = seen.regions[site.region]
        is_shared = region.is_shared
        if _is_constant(region):
            continue
        table = result.shared if is_shared else result.traffic
        table.setdefault(region.name, Figures()).add(site, is_shared=is_shared)
        if site.place:
            result.by_line.setdefault(site.place, Figures()).add(site, is_shared=is_shared)
            parts = result.by_access.setdefault(site.place, {})
            parts.setdefault(region.name, Figures()).add(site, is_shared=is_shared)
            if site.worst:
                result.worst.setdefault(site.place, []).append((region.name, site.size, site.worst))
    return result


def fetches(seen: observed.Observed) -> dict[str, np.ndarray]:
    """Return how often each element of each array was read, in the array's shape."""
    return {part.name: part.fetches for r in seen.regions for part in r.parts if part.fetches is not None}


class Passed(Mapping[int, list[Step]]):
    """The steps of each block of a run, merged on request."""

    def __init__(self, seen: observed.Observed) -> None:
        """Take the run."""
        self._seen = seen
        self._steps: dict[int, list[Step]] = {}

    def __getitem__(self, block: int) -> list[Step]:
        if block not in self._steps:
            self._steps[block] = steps(self._seen, self._seen.traces[block])
        return self._steps[block]

    def __iter__(self) -> Iterator[int]:
        return iter(self._seen.traces)

    def __len__(self) -> int:
        return len(self._seen.traces)


def steps(seen: observed.Observed, passed: observed.BlockTrace) -> list[Step]:
    """Return the steps of one block; those with the same line and lanes are merged."""
    words: dict[int, tuple[int, str]] = {}  # by site, which many steps share
    threads: dict[tuple[int, int], tuple[int, ...]] = {}
    counts: dict[tuple[int, int, int, str, tuple[int, ...]], int] = {}
    for interval, warp, number, lanes, count in passed.steps:
        site = seen.sites[number]
        if _is_constant(seen.regions[site.region]):
            continue
        if number not in words:
            where = "shared" if seen.regions[site.region].is_shared else "global"
            what = "atomic" if site.is_atomic else f"{'write' if site.is_write else 'read'} {where}"
            words[number] = site.place[1] if site.place else 0, what
        if (warp, lanes) not in threads:
            threads[warp, lanes] = tuple(32 * warp + lane for lane in range(32) if lanes >> lane & 1)
        key = (interval, warp, *words[number], threads[warp, lanes])
        counts[key] = counts.get(key, 0) + count
    ends = dict(enumerate(line for _, line in passed.barriers))
    in_order = sorted(counts.items(), key=lambda item: item[0][0])
    return [Step(*key, count, ends.get(key[0])) for key, count in in_order]
