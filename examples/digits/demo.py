"""Draw a digit twice, without offload and with it: the same picture, less device memory.

    python demo.py --strategy model_level --prompt "a handwritten seven in red"

Exit status: 0 when both pictures have the same bits, 1 when not, 2 for a request that cannot be met.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

# What optional packages say about themselves while diffusers imports them is not about this demo.
for _package in ("torchao", "torch.utils._pytree", "diffusers.quantizers", "transformers"):
    logging.getLogger(_package).setLevel(logging.ERROR)

from diffusers.utils import logging as diffusers_logging
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image
from transformers.utils import logging as transformers_logging

import sidestream
from data import unusable
from pipeline import PHASES, DigitsPipeline

HERE = Path(__file__).resolve().parent
ENLARGE = 12
"""Each pixel of the picture becomes a square of this many."""
SAMPLE_SECONDS = 0.002
SHADES = ("#dbeafe", "#f3f4f6", "#fef3c7")
"""A background for each of the pipeline's phases."""


@dataclass
class Timeline:
    """What the device held during one call: (seconds since its start, bytes), and when each phase began."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0


class Sampler(AbstractContextManager["Sampler"]):
    """Reads a number of bytes every two milliseconds, and at each phase, for the length of a `with` block."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.timeline = Timeline()
        self._read = read
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="device-bytes", daemon=True)
        self._began = 0.0

    def __enter__(self) -> Sampler:
        self._began = time.perf_counter()
        self.note()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.note()
        self.timeline.seconds = time.perf_counter() - self._began

    def note(self) -> None:
        """Take one sample now."""
        with self._lock:
            size = self._read()
            self.timeline.samples.append((time.perf_counter() - self._began, size))

    def phase(self, name: str) -> None:
        """Remember that the phase `name` begins now."""
        self.timeline.phases.append((time.perf_counter() - self._began, name))
        self.note()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.note()


@dataclass(frozen=True)
class Request:
    """What to draw, the same in every run."""

    prompt: str
    steps: int
    seed: int
    guidance: float

    def draw(self, pipe: DigitsPipeline, title: str, sampler: Sampler | None = None) -> tuple[torch.Tensor, float]:
        """Return the decoder's floats (1, 3, 32, 32) on the host, and the seconds that it took.

        `title` stands before the progress bar; a `sampler` learns when each component sets to work.
        """
        pipe.set_progress_bar_config(desc=f"{title:<22}")
        began = time.perf_counter()
        pictures = pipe(
            self.prompt,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            generator=torch.Generator().manual_seed(self.seed),
            output_type="raw",
            return_dict=False,
            on_phase=sampler.phase if sampler else None,
            callback_on_step_end=(lambda *_: sampler.note()) if sampler else None,
        )[0]
        host = pictures.cpu()  # waits for the device, so that the time is the whole time
        return host, time.perf_counter() - began


def weight_bytes(pipe: DigitsPipeline) -> int:
    """Return the bytes of all weights and buffers of the pipeline."""
    total = 0
    for name in PHASES:
        module: torch.nn.Module = getattr(pipe, name)
        total += sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return total


def pick_device(name: str | None) -> torch.device:
    """Return the device called `name`, else the current accelerator, else the CPU."""
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # a device that computes: "meta" does not
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot use the device {name!r}: {reason}") from error
    return device


def run(pipe: DigitsPipeline, request: Request, strategy: str, device: torch.device, out: Path) -> bool:
    """Draw without offload and with it, report, save; return whether the pictures have the same bits."""
    # A wrong strategy or configuration comes out here, before anything is drawn.
    checked = sidestream.enable_offload(pipe, strategy, device=device)
    checked.disable()
    total = weight_bytes(pipe)

    # The first call of each way warms up and, with offload, is plotted; only the second is timed.
    pipe.to(device)
    request.draw(pipe, "without offload")
    plain, plain_seconds = request.draw(pipe, "without offload, again")
    moves = checked.config.strategy != "none"
    if moves:
        pipe.to("cpu")

    with sidestream.offload(pipe, strategy, device=device) as backend:
        sampler = Sampler(lambda: backend.report().device_bytes if moves else total)
        with sampler:
            first, _ = request.draw(pipe, "with offload", sampler)
        second, seconds = request.draw(pipe, "with offload, again")
        report = backend.report()
    peak = report.peak_device_bytes if moves else total

    same = torch.equal(plain, first) and torch.equal(plain, second)
    save_picture(second, out / "picture.png")
    save_plot(sampler.timeline, total, report.strategy, out / "device_memory.png")

    print(f"\nafter two pictures: {report}\n")
    print(f"peak on {report.device}: {total:,} bytes without offload, {peak:,} with")
    print(f"host: {report.host_bytes:,} bytes of weights, {report.pinned_bytes:,} bytes pinned")
    if device.type == "cpu":
        print("(on the CPU the device's bytes are host memory too: this shows what moves and saves nothing)")
    print(f"one picture: {plain_seconds:.2f} s without offload, {seconds:.2f} s with")
    print(f"pictures: {'bit-identical' if same else 'NOT bit-identical'}")
    if not same:
        worst = max((plain - other).abs().max().item() for other in (first, second))
        print(f"largest difference of a value: {worst:g}")
    print(f"saved {out / 'picture.png'} and {out / 'device_memory.png'}")
    return same


def save_picture(picture: torch.Tensor, path: Path) -> None:
    """Save a picture (1, 3, H, W), near -1..1, its pixels enlarged and left sharp."""
    levels = ((picture[0].float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    image = Image.fromarray(levels.permute(1, 2, 0).numpy())
    size = (image.width * ENLARGE, image.height * ENLARGE)
    image.resize(size, Image.Resampling.NEAREST).save(path)


def save_plot(timeline: Timeline, total: int, strategy: str, path: Path) -> None:
    """Plot the bytes of weights on the device over the seconds of a call, beside `total`, all of them."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ends = [*(began for began, _ in timeline.phases[1:]), timeline.seconds]
    for (began, name), end, shade in zip(timeline.phases, ends, SHADES, strict=True):
        axes.axvspan(began, end, color=shade, label=f"{name} at work")
    axes.axhline(total, color="#6b7280", linestyle="--", label="without offload: all resident")
    times, sizes = zip(*timeline.samples, strict=True)
    axes.step(times, sizes, where="post", color="#b91c1c", label=f"with {strategy}")
    axes.set_xlim(0, timeline.seconds)
    axes.set_ylim(0, max(total, *sizes) * 1.1)
    axes.set_xlabel("seconds since the first call began")
    axes.set_ylabel("weights on the device, bytes")
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def main() -> int:
    """Read the command line and run; return the exit status."""
    parser = argparse.ArgumentParser(description="Draw a digit without offload and with it.")
    parser.add_argument("--strategy", default="model_level", help="a strategy's name, a file, or none")
    parser.add_argument("--prompt", default="a handwritten seven in red")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps, 1 to 1000")
    parser.add_argument("--seed", type=int, default=764)
    parser.add_argument("--guidance", type=float, default=2.0, help="1 or less: none")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder for the two pictures")
    options = parser.parse_args()
    if (problem := unusable(options.prompt)) is not None:
        parser.error(problem)
    if not 1 <= options.steps <= 1000:
        parser.error(f"--steps must lie in 1 to 1000, not {options.steps}")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed must lie in 0 to 2**63 - 1, not {options.seed}")
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # on a CPU: matrices this small are slower when shared
    request = Request(options.prompt, options.steps, options.seed, options.guidance)
    try:
        device = pick_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        pipe = DigitsPipeline.from_folder(HERE / "weights")
        return 0 if run(pipe, request, options.strategy, device, options.out) else 1
    except (sidestream.OffloadError, OSError) as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
