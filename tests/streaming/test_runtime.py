"""Copies on the CPU's streams: they happen, they end, their errors come out, and a lost worker hangs nobody."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream import TransferError, UnsupportedModelError
from sidestream.streaming import runtime as runtime_module
from sidestream.streaming.runtime import CpuRuntime, WaitMeter, open_runtime, resolve_device


class EagerThreads(CpuRuntime):
    """Uses the worker thread for copies of any size."""

    inline_below = 0


@pytest.fixture
def runtime() -> EagerThreads:
    return EagerThreads(torch.device("cpu"))


def test_a_copy_overlaps_with_the_caller_and_wait_makes_its_bytes_visible(runtime: EagerThreads) -> None:
    """It is started on another thread; only `wait` blocks."""
    stream, gate = runtime.new_stream(), threading.Event()
    source, target = torch.arange(64, dtype=torch.uint8), runtime.empty(64)
    # Hold the worker up, as a long copy before would.
    runtime.copy(stream, [(target, source)])
    stream._executor.submit(gate.wait)
    target.zero_()
    second = runtime.copy(stream, [(target, source)])
    assert not second.waited
    assert not torch.equal(source, target)
    threading.Timer(0.05, gate.set).start()
    meter = WaitMeter()
    runtime.wait(second, meter)
    assert torch.equal(source, target)
    assert 0 < meter.seconds() < 5
    runtime.drain(stream)
    runtime.close(stream)


def test_small_copies_are_done_by_the_caller() -> None:
    """The hand-over to a thread would cost more than the copy."""
    small = CpuRuntime(torch.device("cpu"))
    stream = small.new_stream()
    copy = small.copy(stream, [(small.empty(8), torch.ones(8, dtype=torch.uint8))])
    assert copy.waited
    assert stream._executor is None


def test_an_error_in_the_worker_reaches_whoever_waits(runtime: EagerThreads) -> None:
    """And waiting again, as cleaning up does, does not hang or raise a second time."""
    stream = runtime.new_stream()
    copy = runtime.copy(stream, [(runtime.empty(8), torch.ones(9, dtype=torch.uint8))])
    with pytest.raises(TransferError, match="copy of 9 bytes failed"):
        runtime.wait(copy, WaitMeter())
    runtime.wait(copy, WaitMeter())
    runtime.close(stream)


def test_a_lost_worker_is_an_error_after_the_time_limit(runtime: EagerThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead thread once hung a forward for ever."""
    monkeypatch.setattr(runtime_module, "COPY_TIMEOUT", 0.05)
    stream, gate = runtime.new_stream(), threading.Event()
    first = runtime.copy(stream, [(runtime.empty(8), torch.ones(8, dtype=torch.uint8))])
    runtime.wait(first, WaitMeter())
    stream._executor.submit(gate.wait)
    copy = runtime.copy(stream, [(runtime.empty(8), torch.ones(8, dtype=torch.uint8))])
    start = time.monotonic()
    with pytest.raises(TransferError, match="worker thread is lost"):
        runtime.wait(copy, WaitMeter())
    assert time.monotonic() - start < 10
    gate.set()
    runtime.close(stream)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_buffers_are_normal_tensors_in_every_mode(runtime: EagerThreads, mode: Any) -> None:
    """A buffer born as an inference tensor would refuse the worker's next write."""
    stream = runtime.new_stream()
    with mode():
        buffer = runtime.empty(16)
        copy = runtime.copy(stream, [(buffer, torch.ones(16, dtype=torch.uint8))])
    runtime.wait(copy, WaitMeter())
    assert not buffer.is_inference()
    with torch.no_grad():
        buffer.copy_(torch.zeros(16, dtype=torch.uint8))
    runtime.close(stream)


def test_a_forked_child_copies_by_itself_and_exits(runtime: EagerThreads) -> None:
    """hivemind#139, PaddlePaddle/Paddle#78171: threads do not survive a fork, as in a DataLoader's workers."""
    stream = runtime.new_stream()
    source = torch.ones(16, dtype=torch.uint8)
    runtime.wait(runtime.copy(stream, [(runtime.empty(16), source)]), WaitMeter())
    child = os.fork()
    if child == 0:
        target = runtime.empty(16)
        runtime.wait(runtime.copy(stream, [(target, source)]), WaitMeter())
        runtime.drain(stream)
        os._exit(0 if torch.equal(target, source) else 3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    runtime.close(stream)


def test_the_ledger_counts_live_and_peak(runtime: EagerThreads) -> None:
    """Bytes, not tensors."""
    first, second = runtime.empty(100), runtime.empty(50)
    runtime.free(first)
    third = runtime.empty(20)
    assert (runtime.ledger.device_bytes, runtime.ledger.peak_device_bytes) == (70, 150)
    for buffer in (second, third):
        runtime.free(buffer)
    assert runtime.ledger.device_bytes == 0


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_device_may_be_a_name_or_a_device(device: Any) -> None:
    """Nothing is initialised by naming one."""
    assert resolve_device(device) == torch.device("cpu")
    assert isinstance(open_runtime(resolve_device(device)), CpuRuntime)


def test_without_an_accelerator_none_means_the_cpu() -> None:
    """So that everybody can try."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert resolve_device(None) == torch.device("cpu")


@pytest.mark.parametrize(("device", "text"), [("warp:9", "'warp:9' is not a device"), ("meta", "not usable here")])
def test_a_device_that_is_not_there_is_a_clear_error(device: str, text: str) -> None:
    """One line, with what there is."""
    with pytest.raises(UnsupportedModelError, match=text):
        open_runtime(resolve_device(device))


def test_nothing_outside_the_runtime_speaks_of_one_vendor() -> None:
    """CUDA, ROCm, XPU, NPU alike: all of it goes through torch.accelerator, in one file."""
    root = Path(runtime_module.__file__).parents[2]
    plugin = pytest.importorskip("sidestream_model_cpu")
    files = [*root.rglob("*.py"), *Path(plugin.__file__).parent.rglob("*.py")]
    assert len(files) > 20
    for file in files:
        text = file.read_text()
        for word in ("torch.cuda", "torch.xpu", "torch.npu"):
            assert word not in text, file
        if file != Path(runtime_module.__file__) and "testing" not in file.parts:
            for word in ("torch.accelerator", "torch.Stream(", "torch.Event("):
                assert word not in text, file
