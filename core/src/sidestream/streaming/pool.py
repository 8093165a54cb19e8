"""Host memory for masters: page-locked slabs within a budget, given back one by one.

torch's pinned allocator rounds every request up to a power of two, so one request for each weight can take twice the
weights. Slabs are powers of two to begin with, and are filled.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from sidestream.errors import OffloadWarning, PinError
from sidestream.streaming.runtime import DeviceRuntime

logger = logging.getLogger("sidestream")

#: Weights are staged at multiples of this many bytes: kernels choose by alignment, and another choice means other
#: last bits.
ALIGNMENT = 256
#: Largest slab that is not made for one larger tensor; also the transient cost of enabling and disabling.
SLAB_BYTES = 64 << 20
#: Share of the memory limit that is pinned at most when no budget is given.
DEFAULT_PIN_SHARE = 0.75


def align(nbytes: int) -> int:
    """Return `nbytes` rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def host_memory_limit(root: Path = Path("/")) -> int | None:
    """Return how many bytes of memory this process may use: the machine's or its cgroup's, whichever is less.

    Reads `/proc/meminfo` and the limits of cgroup v1 and v2 below `root`; None where neither can be read.
    """
    limits = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                limits.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError) as error:
        logger.debug("no memory total: %s", error)
    for path in _limit_files(root):
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # not every level of the hierarchy sets a limit
        # v2 says "max" for none, v1 a number near 2**63.
        if text.isdigit() and int(text) < 1 << 60:
            limits.append(int(text))
    return min(limits, default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the files that may hold this process's limit, own group first, then each group above it."""
    groups = {"v2": "/", "v1": "/"}
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number == "0" and not controllers:
                groups["v2"] = group
            elif "memory" in controllers.split(","):
                groups["v1"] = group
    except (OSError, ValueError) as error:
        logger.debug("no cgroup of our own: %s", error)
    for base, name, group in (
        ("sys/fs/cgroup", "memory.max", groups["v2"]),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", groups["v1"]),
    ):
        relative = Path(group.lstrip("/"))
        for level in (relative, *relative.parents):
            yield root / base / level / name


class Slab:
    """One piece of pinned host memory that tensors are carved from, front to back."""

    def __init__(self, memory: torch.Tensor, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.used = 0

    def fits(self, nbytes: int) -> bool:
        """Return whether `nbytes` more bytes can be carved."""
        return self.used + nbytes <= self.nbytes

    def carve(self, like: torch.Tensor) -> torch.Tensor:
        """Return host memory of the dtype, shape and dense strides of `like`, with a storage object of its own.

        Its own: otherwise saving one tensor would write the whole slab.
        """
        offset = self.used
        self.used += align(like.nbytes)
        # An inference tensor must stay one: given other memory it keeps its missing version counter.
        with torch.inference_mode(like.is_inference()):
            flat = torch.frombuffer(self.memory.numpy(), dtype=like.dtype, count=like.numel(), offset=offset)
            return torch.as_strided(flat, like.shape, like.stride())


class PinnedPool:
    """Hands out slabs within a budget of bytes; says so once when it cannot.

    `budget` None means :data:`DEFAULT_PIN_SHARE` of the memory limit. With `required` a slab that cannot be had is a
    `PinError`; otherwise it is one warning, and the rest stays pageable.
    """

    def __init__(self, runtime: DeviceRuntime, *, budget: int | None, required: bool = False) -> None:
        if budget is None:
            limit = host_memory_limit()
            budget = int(limit * DEFAULT_PIN_SHARE) if limit is not None else 1 << 62
        self.budget = budget
        self._runtime = runtime
        self._required = required
        self._exhausted = False
        self.slabs: list[Slab] = []

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned now, with the allocator's rounding."""
        return sum(slab.nbytes for slab in self.slabs)

    def take(self, nbytes: int) -> Slab | None:
        """Return a new slab of at least `nbytes` bytes, or None if the rest has to stay pageable."""
        if self._exhausted:
            return None
        size = self._runtime.pinned_size(nbytes)
        if self.pinned_bytes + size > self.budget:
            self._give_up(
                f"the budget of {self.budget} bytes is used up ({self.pinned_bytes} pinned, {size} more asked)"
            )
            return None
        try:
            memory = self._runtime.pin(size)
        except RuntimeError as error:
            self._give_up(f"the driver refused {size} bytes: {str(error).splitlines()[0]}", error)
            return None
        self._runtime.ledger.pinned(size)
        slab = Slab(memory, size)
        self.slabs.append(slab)
        return slab

    def give_back(self, slab: Slab) -> None:
        """Free a slab that nothing uses any more. Does nothing if that was done: an interrupt may come in between."""
        if slab not in self.slabs:
            return
        # In this order: if the first fails, the second has not been done, and both are done the next time.
        self._runtime.ledger.pinned(-slab.nbytes)
        self.slabs.remove(slab)

    def _give_up(self, reason: str, cause: BaseException | None = None) -> None:
        self._exhausted = True
        if self._required:
            raise PinError(
                f"cannot page-lock host memory: {reason}. Raise the budget, allow pageable memory, "
                "or set pin_cpu_memory to false"
            ) from cause
        warnings.warn(
            f"host memory stays pageable from here on, copies are slower: {reason}",
            OffloadWarning,
            stacklevel=3,
        )


def slab_size(wanted: int, remaining: int, largest: int = SLAB_BYTES) -> int:
    """Return the bytes of the next slab: room for `wanted`, at best a power of two that `remaining` will fill.

    `wanted` is the next tensor's size, `remaining` that of all tensors still to be placed, both aligned.
    """
    fill = 1 << (max(remaining, 1).bit_length() - 1)
    return max(wanted, min(fill, largest))
