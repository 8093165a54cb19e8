"""Real asynchrony, on a real thread: copies over a slow link overlap with computing.

The one test that looks at a clock. Both sides sleep, so the machine's speed does not matter, and the bound is halfway
between what perfect overlap and none at all would take.
"""

from __future__ import annotations

import time

import torch

from sidestream.streaming.runtime import WaitMeter
from sidestream.testing.runtimes import ThrottledRuntime

LAYERS, SECONDS, NBYTES = 8, 0.04, 1 << 16


def stream(*, ahead: bool) -> float:
    """Copy and compute each layer, the next one copied while the present one computes, or not; return seconds."""
    runtime = ThrottledRuntime(torch.device("cpu"), bandwidth=NBYTES / SECONDS)
    link, meter = runtime.new_stream(), WaitMeter()
    sources = [torch.full((NBYTES,), layer, dtype=torch.uint8) for layer in range(LAYERS)]
    slots = [runtime.empty(NBYTES) for _ in range(2)]
    start = time.perf_counter()
    pending = runtime.copy(link, [(slots[0], sources[0])])
    for layer in range(LAYERS):
        runtime.wait(pending, meter)
        following = layer + 1
        if ahead and following < LAYERS:
            pending = runtime.copy(link, [(slots[following % 2], sources[following])])
        time.sleep(SECONDS)  # computing: it lets the copying thread go on, as torch's kernels do
        assert torch.equal(slots[layer % 2], sources[layer])
        if not ahead and following < LAYERS:
            pending = runtime.copy(link, [(slots[following % 2], sources[following])])
    seconds = time.perf_counter() - start
    runtime.drain(link)
    runtime.close(link)
    return seconds


def test_copies_over_a_slow_link_overlap_with_computing() -> None:
    """Near max(compute, copy), far from their sum."""
    overlapped, serial = stream(ahead=True), stream(ahead=False)
    perfect, none = (LAYERS + 1) * SECONDS, 2 * LAYERS * SECONDS
    assert serial >= none
    assert overlapped < (perfect + none) / 2
