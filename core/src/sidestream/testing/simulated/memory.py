"""The device's memory: a caching allocator that is ordered by streams, limited, counted and full of poison."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidestream.testing.simulated.machine import Event, Machine, Marker, Memory, Stream

#: What memory holds before anybody wrote it and after it was freed: as any float type, a NaN.
POISON = 0xFF
#: Requests are rounded up to this many bytes, and addresses are multiples of it.
GRANULE = 512


class Chunk:
    """Bytes of the device that are handed out again and again, on one stream."""

    def __init__(self, number: int, nbytes: int, stream: Stream) -> None:
        self.nbytes = nbytes
        self.stream = stream
        with torch.inference_mode(False):
            raw = torch.empty(nbytes + GRANULE, dtype=torch.uint8)
            shift = -raw.data_ptr() % GRANULE
            self.bytes = raw[shift : shift + nbytes]
        self.memory = Memory(f"device memory {number}")


class Block:
    """A chunk while somebody has it. Freed when the last tensor on it goes, as the host sees it: work that was issued
    and has not run holds the bytes, not the block."""

    def __init__(self, allocator: Allocator, chunk: Chunk, nbytes: int) -> None:
        self.chunk = chunk
        self.nbytes = nbytes
        self.used_on: set[Stream] = set()
        self._allocator = allocator

    def __del__(self) -> None:
        self._allocator.free(self)


class Allocator:
    """Hands out blocks on the current stream; a freed chunk is used again on its stream without waiting.

    Raises torch's `OutOfMemoryError` beyond `capacity` bytes of live blocks.
    """

    def __init__(self, machine: Machine, *, capacity: int | None) -> None:
        self.capacity = capacity
        self.live_bytes = 0
        self.peak_bytes = 0
        self.live_by_stream: dict[str, int] = {}
        self.poisoned = 0
        self._machine = machine
        self._free: list[Chunk] = []
        self._waiting: list[tuple[Chunk, list[Marker]]] = []
        self._count = 0

    def allocate(self, nbytes: int) -> Block:
        """Return a block of `nbytes` bytes, poisoned, for use on the current stream."""
        size = -(-max(nbytes, 1) // GRANULE) * GRANULE
        if self.capacity is not None and self.live_bytes + nbytes > self.capacity:
            raise torch.OutOfMemoryError(
                f"simulated device out of memory: {nbytes} bytes asked, {self.live_bytes} in use, "
                f"capacity {self.capacity}"
            )
        stream = self._machine.current
        self._recover()
        chunk = next((chunk for chunk in self._free if chunk.stream is stream and chunk.nbytes == size), None)
        if chunk is None:
            self._count += 1
            chunk = Chunk(self._count, size, stream)
        else:
            self._free.remove(chunk)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.live_by_stream[stream.name] = self.live_by_stream.get(stream.name, 0) + nbytes
        self._poison(chunk, "handing out memory")
        return Block(self, chunk, nbytes)

    def free(self, block: Block) -> None:
        """Take a block back; what still reads it on its own stream is safe, on another only if that was recorded."""
        chunk, stream = block.chunk, block.chunk.stream
        self.live_bytes -= block.nbytes
        self.live_by_stream[stream.name] -= block.nbytes
        others = [other for other in block.used_on if other is not stream]
        if not others:
            self._poison(chunk, "freeing memory")
            self._free.append(chunk)
            return
        markers = []
        for other in others:
            event = Event()
            self._machine.record(event, other)
            if event.marker is not None:
                markers.append(event.marker)
        self._waiting.append((chunk, markers))

    def _recover(self) -> None:
        still = []
        for chunk, markers in self._waiting:
            if all(self._machine.query(marker) for marker in markers):
                self._poison(chunk, "freeing memory")
                self._free.append(chunk)
            else:
                still.append((chunk, markers))
        self._waiting = still

    def _poison(self, chunk: Chunk, operation: str) -> None:
        self.poisoned += 1
        fill: Callable[[], object] = _filler(chunk.bytes)
        self._machine.issue(chunk.stream, operation, fill, [(chunk.memory, 0, chunk.nbytes, True)], free=True)


def _filler(target: torch.Tensor) -> Callable[[], object]:
    def fill() -> None:
        with torch.inference_mode(False), torch.no_grad():
            target.fill_(POISON)

    return fill
