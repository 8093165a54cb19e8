"""Streams, events, the order in which queued work runs, who is ordered before whom, and how long it would take.

Note: three clocks
------------------
*Order*: work queued on a stream runs when the chosen :class:`Order` lets it, never before what it waits for. This
decides which bytes a kernel sees.
*Happens-before*: each actor (the host and every stream) has a vector clock, advanced when work is issued. Two accesses
of the same bytes, one of them a write, that no chain of queueing, waiting and synchronising orders are a
:class:`Race`, whatever order they ran in this time.
*Time*: every piece of work has a duration by the :class:`TimeModel`, and starts when its stream, its engine, what it
waits for and the host that issues it are ready. This gives a makespan without anybody waiting for it.
"""

from __future__ import annotations

import random
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path

import attrs
import torch

Clock = dict[str, int]

#: The name of the actor that issues all work.
HOST = "host"
#: Where no caller is: the simulator's own files, and torch's.
_NOT_CALLERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class Order(str, Enum):
    """When queued work runs, within what events and waits allow."""

    LAZY = "lazy"
    """As late as possible: only when the host waits for it."""
    COPY_FIRST = "copy_first"
    """Copy streams as early as possible, with what they wait for; the computing stream as late as possible."""
    COMPUTE_FIRST = "compute_first"
    """The computing stream as early as possible, with what it waits for; copy streams as late as possible."""
    RANDOM = "random"
    """Some of what could run, chosen by a seed, after each piece of work is queued."""


@attrs.frozen(kw_only=True)
class TimeModel:
    """What the device can do: bytes per second over the link, operations per second, seconds to launch a kernel.

    `elements` is how many elements a second a kernel goes through that does no counted arithmetic.
    """

    bandwidth: float = 25e9
    rate: float = 100e12
    elements: float = 500e9
    launch: float = 5e-6


@attrs.frozen(kw_only=True)
class Access:
    """One access of memory: whose (`actor`, its `tick`), what it does, whether it writes, which bytes, from where."""

    actor: str
    tick: int
    operation: str
    writes: bool
    low: int
    high: int
    place: str

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.operation} on {self.actor} {verb} bytes {self.low}..{self.high} ({self.place})"


@attrs.frozen(kw_only=True)
class Race:
    """Two accesses of the same memory that nothing orders. `memory` says which: a device block or pinned memory."""

    memory: str
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"race on {self.memory}: {self.first} | {self.second}"


@attrs.define(eq=False)
class Marker:
    """The point in a stream that an event was recorded at."""

    stream: Stream
    clock: Clock
    time: float
    done: bool = False


class Event:
    """As a device's event: waiting for one that was never recorded waits for nothing."""

    def __init__(self) -> None:
        self.marker: Marker | None = None


@attrs.define(eq=False)
class Work:
    """One entry of a stream's queue: something to run, a marker to set, or a marker to wait for."""

    run: Callable[[], object] | None = None
    sets: Marker | None = None
    waits: Marker | None = None


class Stream:
    """A queue whose work runs in order; `copies` says that it is not the computing one."""

    def __init__(self, name: str, *, copies: bool) -> None:
        self.name = name
        self.copies = copies
        self.queue: deque[Work] = deque()
        self.clock: Clock = {}
        self.time = 0.0

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Memory:
    """Bytes whose accesses are watched: a block of the device, or pinned memory of the host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accesses: list[Access] = []


class Machine:
    """All streams of one simulated device, the host beside them, and what was seen."""

    def __init__(self, *, order: Order, seed: int, model: TimeModel) -> None:
        self.order = order
        self.model = model
        self.default = Stream("compute", copies=False)
        self.current = self.default
        self.streams = [self.default]
        self.races: list[Race] = []
        self.host: Clock = {HOST: 0}
        self.host_time = 0.0
        self.link_time = 0.0
        self.compute_seconds = 0.0
        self.link_bytes = 0
        self.stall = 0.0
        self.launches = 0
        self._random = random.Random(seed)
        self._running = False

    # --- issuing ---------------------------------------------------------------------------------------------------

    def new_stream(self, *, copies: bool = True) -> Stream:
        """Return a stream of its own."""
        stream = Stream(f"copy {len(self.streams)}" if copies else f"stream {len(self.streams)}", copies=copies)
        self.streams.append(stream)
        return stream

    def issue(
        self,
        stream: Stream,
        operation: str,
        run: Callable[[], object],
        accesses: Iterable[tuple[Memory, int, int, bool]],
        *,
        seconds: float = 0.0,
        link_bytes: int = 0,
        free: bool = False,
    ) -> None:
        """Queue work that touches `(memory, low, high, writes)` and takes `seconds`, or `link_bytes` over the link.

        With `free` it costs no time: bookkeeping that a real device does not do.
        """
        self._advance(stream)
        place = _place()
        for memory, low, high, writes in accesses:
            self._touch(memory, stream.name, stream.clock, operation, low, high, writes, place)
        if not free:
            self.host_time += self.model.launch
            self.launches += 1
        start = max(stream.time, self.host_time)
        if link_bytes:
            start = max(start, self.link_time)
            stream.time = self.link_time = start + link_bytes / self.model.bandwidth
            self.link_bytes += link_bytes
        else:
            stream.time = start + seconds
            self.compute_seconds += seconds
        stream.queue.append(Work(run=run))
        self._let_run()

    def record(self, event: Event, stream: Stream) -> None:
        """Record an event after all that is queued on the stream now."""
        self._advance(stream)
        event.marker = Marker(stream, dict(stream.clock), stream.time)
        stream.queue.append(Work(sets=event.marker))
        self._let_run()

    def wait(self, stream: Stream, event: Event) -> None:
        """Have the stream's next work wait for the event as it is recorded now."""
        self._advance(stream)
        marker = event.marker
        if marker is None:
            return
        _join(stream.clock, marker.clock)
        ready = max(stream.time, self.host_time)
        if marker.time > ready:
            if not stream.copies:
                self.stall += marker.time - ready
            stream.time = marker.time
        if not marker.done:
            stream.queue.append(Work(waits=marker))
        self._let_run()

    def host_access(self, memory: Memory, low: int, high: int, *, writes: bool, operation: str) -> None:
        """Note that the host touches memory that the device may be using."""
        self.host[HOST] += 1
        self._touch(memory, HOST, self.host, operation, low, high, writes, _place())

    # --- running ---------------------------------------------------------------------------------------------------

    def synchronize(self, stream: Stream | None = None) -> None:
        """Have the host wait for one stream, or for all."""
        for each in [stream] if stream is not None else self.streams:
            self._drain(each)
            _join(self.host, each.clock)
            self.host_time = max(self.host_time, each.time)

    def query(self, marker: Marker) -> bool:
        """Return whether what the marker stands for has run; if so the host knows, and what it issues next is later."""
        if marker.done:
            _join(self.host, marker.clock)
        return marker.done

    def _drain(self, stream: Stream, until: Marker | None = None) -> None:
        while stream.queue and not (until is not None and until.done):
            head = stream.queue[0]
            if head.waits is not None and not head.waits.done:
                self._drain(head.waits.stream, head.waits)
                continue
            self._step(stream)

    def _step(self, stream: Stream) -> None:
        work = stream.queue.popleft()
        if work.run is not None:
            self._running = True
            try:
                work.run()
            finally:
                self._running = False
        if work.sets is not None:
            work.sets.done = True

    def _ready(self, stream: Stream) -> bool:
        return bool(stream.queue) and (stream.queue[0].waits is None or stream.queue[0].waits.done)

    def _let_run(self) -> None:
        if self._running or self.order is Order.LAZY:
            return
        if self.order is Order.RANDOM:
            for _ in range(self._random.randrange(4)):
                ready = [stream for stream in self.streams if self._ready(stream)]
                if not ready:
                    return
                self._step(self._random.choice(ready))
            return
        # As early as allowed: what it waits for on another stream runs for its sake, and no more than that.
        for stream in self.streams:
            if stream.copies is (self.order is Order.COPY_FIRST):
                self._drain(stream)

    # --- ordering --------------------------------------------------------------------------------------------------

    def _advance(self, stream: Stream) -> None:
        self.host[HOST] += 1
        _join(stream.clock, self.host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1

    def _touch(
        self, memory: Memory, actor: str, clock: Clock, operation: str, low: int, high: int, writes: bool, place: str
    ) -> None:
        if high <= low:
            return
        now = Access(
            actor=actor, tick=clock[actor], operation=operation, writes=writes, low=low, high=high, place=place
        )
        kept = []
        for access in memory.accesses:
            overlaps = access.low < high and low < access.high
            ordered = clock.get(access.actor, 0) >= access.tick
            if overlaps and not ordered and (writes or access.writes) and access.actor != actor:
                self.races.append(Race(memory=memory.name, first=access, second=now))
            covered = low <= access.low and access.high <= high
            if not (ordered and covered and (writes or not access.writes)):
                kept.append(access)
        kept.append(now)
        memory.accesses = kept

    # --- figures ---------------------------------------------------------------------------------------------------

    @property
    def makespan(self) -> float:
        """Seconds until everything issued so far is done."""
        return max(self.host_time, *(stream.time for stream in self.streams))

    @property
    def bound(self) -> float:
        """Seconds below which no schedule can come: max(compute, bytes / bandwidth)."""
        return max(self.compute_seconds, self.link_bytes / self.model.bandwidth)


class Ranges:
    """Host memory that is watched, found by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, Memory]] = []

    def add(self, start: int, nbytes: int, memory: Memory) -> None:
        """Watch `nbytes` bytes from `start`."""
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._ranges.insert(index, (start, start + nbytes, memory))

    def remove(self, start: int) -> None:
        """Watch the range that starts there no more."""
        index = self._starts.index(start)
        del self._starts[index], self._ranges[index]

    def find(self, address: int) -> tuple[int, Memory] | None:
        """Return the range's start and memory, if the address lies in one."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start, end, memory = self._ranges[index]
        return (start, memory) if address < end else None


def _join(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


def _place() -> str:
    """Return file and line of the caller: the nearest frame that is neither torch's nor the simulator's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_CALLERS):
            return f"{Path(name).name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"
