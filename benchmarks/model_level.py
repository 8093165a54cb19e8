"""What `model_level` costs: for each call, for a swap, for enabling; beside accelerate's and diffusers' model offload.

    python benchmarks/model_level.py            # about two minutes on two cores; writes docs/benchmarks.md

No accelerator is needed: copies go from host memory to host memory, so figures of copies are those of this memory,
not of a link. accelerate and diffusers copy nothing when both sides are the CPU; only their Python is compared.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import sidestream
from sidestream import OffloadConfig
from sidestream.testing import pipelines
from sidestream.testing.runtimes import WatchfulRuntime
from sidestream_model_cpu.backend import ModelLevelBackend
from table import by_turns, median, rows, setting, write

MIB = 1 << 20


class Block(nn.Module):
    """Sixteen tiny linears: 32 tensors, as a Flux double block has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 8)` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def denoiser() -> nn.Module:
    """Return 36 blocks of 32 tensors: as many tensors as Flux, and hardly any arithmetic."""
    return nn.Sequential(*(Block() for _ in range(36))).requires_grad_(False)


def cost_of_a_call() -> str:
    """Python time that one call of a component on the device takes over no offload."""
    from accelerate import cpu_offload_with_hook

    x = torch.randn(1, 8)
    plain, ours, theirs = denoiser(), denoiser(), denoiser()
    with sidestream.offload({"transformer": ours}, "model_level", device="cpu"):
        theirs, hook = cpu_offload_with_hook(theirs, torch.device("cpu"))
        seconds = by_turns(
            {"no offload": lambda: plain(x), "model_level": lambda: ours(x), "accelerate": lambda: theirs(x)}, rounds=60
        )
        hook.remove()
    base = median(seconds["no offload"])
    table = [
        [name, f"{min(values) * 1e3:.2f}", f"{median(values) * 1e3:.2f}", f"{(median(values) - base) * 1e3:+.2f}"]
        for name, values in seconds.items()
    ]
    return (
        "### A call of a component that is on the device\n\n1152 tiny tensors in 650 modules (as many as Flux). For "
        "`model_level` this holds the look at every weight (structure, layout, version, samples), binding the device "
        "copies and putting the masters back. It is paid once for each denoising step.\n\n"
        + rows(["", "min ms", "median ms", "over no offload, ms"], table)
    )


def cost_of_a_swap() -> str:
    """Seconds for a component to come in, beside one plain copy of as many bytes."""
    size = 512 * MIB
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(size // (2048 * 2048 * 4))))
    model.requires_grad_(False)
    source, target = torch.empty(size, dtype=torch.uint8).fill_(1), torch.empty(size, dtype=torch.uint8)
    backends = {}
    for pin in (True, False):
        twin = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in model)).requires_grad_(False)
        backends[pin] = ModelLevelBackend(
            config=OffloadConfig("model_level", pin_cpu_memory=pin),
            device="cpu",
            runtime=Quiet if pin else lambda device: Quiet(device, pin_total=0),
        )
        backends[pin].enable({"transformer": twin})

    def swap(backend: ModelLevelBackend) -> None:
        backend.release()
        unit = backend._units["transformer"]
        prefetcher = backend._parts()[1]
        prefetcher.fetch(unit)
        prefetcher.wait(unit)
        prefetcher.unbind(unit)

    def fresh() -> None:
        torch.empty_like(source).copy_(source)

    seconds = by_turns(
        {
            "one plain copy, warm target": lambda: target.copy_(source),
            "one plain copy, fresh target": fresh,
            "model_level, masters in slabs": lambda: swap(backends[True]),
            "model_level, masters where they were": lambda: swap(backends[False]),
        },
        rounds=9,
    )
    base = median(seconds["one plain copy, fresh target"])
    table = [
        [name, f"{median(values) * 1e3:.0f}", f"{size / median(values) / 1e9:.2f}", f"{median(values) / base:.2f}"]
        for name, values in seconds.items()
    ]
    for backend in backends.values():
        backend.disable()
    return (
        "### A swap\n\nA component of 512 MiB in 32 tensors is copied in; its device memory is fresh, as after another "
        "component's turn. Moving out copies nothing.\n\n" + rows(["", "ms", "GB/s", "of a plain copy"], table)
    )


class Quiet(WatchfulRuntime):
    """Simulated pinning without the poison, which would be measured too."""

    inline_below = 1 << 40

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.ledger.device(nbytes)
        return buffer

    def free(self, buffer: torch.Tensor, copy: object = None) -> None:
        self.ledger.device(-buffer.nbytes)


def enabling() -> str:
    """Seconds and host memory for enabling and disabling, each in a process of its own."""
    table = []
    for pin in (True, False):
        runs = [_enable_in_a_process(pin) for _ in range(3)]
        seconds, growth, back_seconds, back_growth = (median(values) for values in zip(*runs, strict=True))
        table.append(
            [
                "pinned slabs" if pin else "left where they are",
                f"{seconds:.2f}",
                f"{growth / MIB:+.0f}",
                f"{back_seconds:.2f}",
                f"{back_growth / MIB:+.0f}",
            ]
        )
    return (
        "### Enabling and disabling\n\n1 GiB of weights in 64 tensors; host memory is the peak over the model alone. "
        "Pinning is simulated, so the seconds are those of the copy into the slabs.\n\n"
        + rows(["masters", "enable s", "peak MiB", "disable s", "peak MiB"], table)
    )


def _enable_in_a_process(pin: bool) -> list[float]:
    command = [sys.executable, __file__, "--enable", "pin" if pin else "no pin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def _enable(pin: bool) -> None:
    import time

    def status(key: str) -> int:
        found = re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0

    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(64))).requires_grad_(False)
    sidestream.enable_offload({"transformer": nn.Linear(2, 2)}, "model_level", device="cpu").disable()  # imports
    config = OffloadConfig("model_level", pin_cpu_memory=pin)
    backend = ModelLevelBackend(config=config, device="cpu", runtime=Quiet)
    figures: list[float] = []
    calls: list[Callable[[], None]] = [functools.partial(backend.enable, {"transformer": model}), backend.disable]
    for call in calls:
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        call()
        figures += [time.perf_counter() - start, status("VmHWM") - before]
    print(*figures)


def whole_pipelines() -> str:
    """Seconds for whole tiny pipelines: Python time is all there is."""
    table = []
    for name in ("flux", "wan22", "sdxl"):
        plain, ours, theirs = (pipelines.build(name) for _ in range(3))
        theirs.enable_model_cpu_offload(device="cpu")
        with sidestream.offload(ours, "model_level", device="cpu"):
            cases = {"plain": plain, "ours": ours, "theirs": theirs}
            seconds = by_turns(
                {case: functools.partial(pipelines.run, name, pipe) for case, pipe in cases.items()}, rounds=9
            )
        base = median(seconds["plain"])
        ratios = [f"{median(values) / base:.2f}" for values in seconds.values()]
        table.append([name, f"{base * 1e3:.0f}", *ratios[1:]])
    return (
        "### Whole pipelines with tiny weights\n\nThree steps each; how many times as long as without offload. "
        "diffusers copies nothing here, `model_level` copies every component at each of its turns.\n\n"
        + rows(["", "no offload, ms", "model_level", "diffusers enable_model_cpu_offload"], table)
    )


def main() -> None:
    """Measure everything and write the section."""
    if "--enable" in sys.argv:
        _enable(sys.argv[-1] == "pin")
        return
    torch.set_num_threads(1)
    with torch.inference_mode():
        parts = [cost_of_a_call(), cost_of_a_swap(), enabling(), whole_pipelines()]
    head = "## model_level\n\n`python benchmarks/model_level.py`. " + setting("accelerate", "diffusers")
    write("model_level", "\n\n".join([head, "Cases run by turns; medians.", *parts]))


if __name__ == "__main__":
    main()
