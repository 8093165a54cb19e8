"""Device, pinned and host memory stay within what the configuration says, computed from the model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sidestream import ConfigError, OffloadWarning, PinError, UnsupportedModelError
from sidestream.streaming.pool import align
from sidestream.testing import toys
from sidestream_model_cpu.schedule import enough_gib

ALL = {"dit", "text_encoder", "vae"}


def image_bytes(module: nn.Module) -> int:
    """Return what a module takes on the device: each distinct tensor at a multiple of 256 bytes."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(align(tensor.nbytes) for tensor in tensors.values())


def exact_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's distinct tensors."""
    return sum({id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}.values())


def test_turns_cost_the_largest_component_and_what_stays(start: Any) -> None:
    """Wan2.2's two DiTs are never both there (vllm-project/vllm-omni#3224); a swap has no peak of its own."""
    pipe = toys.pipeline(second=True)
    backend, runtime = start(pipe, pin=False)
    for seed in range(3):
        pipe(toys.prompt(), seed=seed)
    turns = [image_bytes(m) for m in (pipe.text_encoder, pipe.transformer, pipe.transformer_2)]
    report = backend.report()
    assert report.peak_device_bytes == exact_bytes(pipe.vae) + max(turns)
    assert report.host_bytes == sum(exact_bytes(m) for m in (pipe.text_encoder, pipe.transformer, pipe.transformer_2))
    vae = next(component for component in report.components if component.name == "vae")
    assert (vae.resident_bytes, vae.streamed_bytes) == (exact_bytes(pipe.vae), 0)
    assert [note.name for note in report.resident] == ["vae"]
    backend.release()
    assert runtime.ledger.device_bytes == exact_bytes(pipe.vae)


@pytest.mark.parametrize("factor", [1.0, 1.4, 2.0, 9.0])
def test_a_budget_is_kept_whatever_is_copied_ahead(start: Any, factor: float) -> None:
    """Prefetching a neighbour must not break the promised peak (hao-ai-lab/FastVideo#1836)."""
    pipe, reference = toys.pipeline(second=True), toys.pipeline(second=True)
    modules = (pipe.text_encoder, pipe.transformer, pipe.transformer_2, pipe.vae)
    sizes = [image_bytes(module) for module in modules]
    budget = int(max(sizes) * factor)
    backend, runtime = start(
        pipe, components=ALL, pin=False, runtime={"capacity": budget}, device_budget_gib=budget / 2**30
    )
    for seed in range(4):
        assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
    assert runtime.ledger.peak_device_bytes <= budget
    if factor == 9.0:
        assert backend.report().fetches == len(modules), "everything fits and nothing has to leave"


def test_a_budget_that_the_largest_component_exceeds_is_refused_at_once(start: Any) -> None:
    """The error names it, and the least that works."""
    pipe = toys.pipeline()
    needed = image_bytes(pipe.transformer)
    with pytest.raises(UnsupportedModelError, match=rf"transformer.*needs {needed} bytes.*at least") as caught:
        start(pipe, components=ALL, pin=False, device_budget_gib=(needed - 1) / 2**30)
    assert "device_budget_gib" in str(caught.value)
    advised = re.search(r"at least (\d+\.\d+)", str(caught.value))
    assert advised is not None
    start(pipe, components=ALL, pin=False, device_budget_gib=float(advised[1]))


@pytest.mark.parametrize("nbytes", [1, 1073, 1074, 24064, 28_561_962_000, 2**34 + 1])
def test_the_advised_budget_is_never_too_small_by_rounding(nbytes: int) -> None:
    """Who does what the error says must not meet it again."""
    assert nbytes <= int(float(enough_gib(nbytes)) * 2**30) <= nbytes + 1100


def test_a_component_that_grows_past_the_budget_says_so_at_its_next_call(start: Any) -> None:
    """An adapter added later counts too."""
    pipe = toys.pipeline()
    start(pipe, components=ALL, device_budget_gib=(image_bytes(pipe.transformer) + 20_000) / 2**30)
    pipe(toys.prompt())
    pipe.transformer.register_parameter("late", nn.Parameter(torch.zeros(10_000), requires_grad=False))
    with pytest.raises(UnsupportedModelError, match="raise device_budget_gib"):
        pipe(toys.prompt())
    del pipe.transformer.late
    pipe(toys.prompt())


def test_release_after_request_leaves_only_what_stays(start: Any) -> None:
    """huggingface/diffusers#11376, vllm-project/vllm-omni#1670: the last component stayed, the next request ran out."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    backend, runtime = start(pipe, components=ALL, release_after_request=True)
    for seed in range(3):
        assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
        assert backend.report().device_bytes == runtime.ledger.device_bytes == 0


def test_release_after_request_of_a_diffusers_pipeline(start: Any) -> None:
    """Its call ends with a method that every diffusers pipeline calls."""
    from sidestream.testing import pipelines

    pipe = pipelines.build("flux")
    pipelines.run("flux", pipe)
    attributes = sorted(vars(pipe))
    backend, runtime = start(pipe, components=ALL, release_after_request=True)
    pipelines.run("flux", pipe)
    assert backend.report().moved_bytes > 0
    assert runtime.ledger.device_bytes == 0
    backend.disable()
    assert sorted(vars(pipe)) == attributes


def test_release_after_request_where_no_end_can_be_seen_is_refused(start: Any) -> None:
    """A mapping of modules has no call of its own."""
    with pytest.raises(UnsupportedModelError, match=r"backend\.release\(\)"):
        start({"transformer": toys.pipeline().transformer}, release_after_request=True)


@pytest.mark.parametrize(
    ("runtime", "options", "reason"),
    [
        ({"pin_limit": 4096}, {}, "the driver refused"),
        ({"pin_total": 0}, {}, "the driver refused"),
        ({"pin_total": 20_000}, {}, "the driver refused"),
        ({}, {"pin_budget_gib": 20_000 / 2**30}, "budget"),
        ({}, {"pin_budget_gib": 0.0}, "budget"),
    ],
)
def test_pinning_that_fails_or_is_limited_falls_back_with_one_warning(
    start: Any, runtime: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    """vllm-project/vllm-omni#2748, comfyanonymous/ComfyUI#11531: one huge pin failed, a quota lay far below the RAM."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    with pytest.warns(OffloadWarning, match=f"stays pageable.*{reason}") as caught:
        backend, watched = start(pipe, components=ALL, runtime=runtime, **options)
    assert len(caught) == 1
    assert watched.ledger.peak_pinned_bytes <= 20_000
    for seed in range(2):
        assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
    assert backend.report().moved_bytes > 0


def test_pinning_that_fails_is_an_error_if_so_configured(start: Any) -> None:
    """And the model is as it was."""
    pipe = toys.pipeline()
    with pytest.raises(PinError, match="pin_cpu_memory"):
        start(pipe, runtime={"pin_total": 0}, pin_failure="fail")
    with pytest.raises(PinError, match="budget"):
        start(pipe, pin_budget_gib=0.0, pin_failure="fail")
    assert torch.equal(toys.pipeline()(toys.prompt()), pipe(toys.prompt()))


def test_without_pinning_nothing_is_ever_pinned(start: Any) -> None:
    """vllm-project/vllm#37699: one backend ignored the setting."""
    pipe = toys.pipeline()
    _, runtime = start(pipe, components=ALL, pin=False, device_budget_gib=1.0)
    pipe(toys.prompt())
    assert runtime.pins == 0
    assert runtime.copied > 0


def test_pinned_bytes_are_near_the_weights(start: Any) -> None:
    """pytorch/pytorch#150517: one request for each weight takes up to twice as much, by rounding to powers of two."""
    model = nn.ModuleList(nn.Linear(300, 1000, bias=False) for _ in range(200)).requires_grad_(False)  # 1.2 MB each
    backend, _ = start({"transformer": nn.Sequential(*model)})
    weights = exact_bytes(model)
    pinned = backend.report().pinned_bytes
    assert weights <= pinned <= 1.05 * weights


def test_options_out_of_bounds_are_refused() -> None:
    """Before anything is loaded."""
    from sidestream_model_cpu.options import ModelLevelOptions

    for bad in (
        {"device_budget_gib": 0.0},
        {"pin_budget_gib": -1.0},
        {"device_budget_gib": "8"},
        {"prefetch": "false"},
    ):
        with pytest.raises(ConfigError):
            ModelLevelOptions(**bad)


def _growth(pin: bool, tmp_path: Path) -> Sequence[int]:
    code = f"""
import re, torch
from pathlib import Path
from torch import nn
from sidestream import OffloadConfig
from sidestream.testing.runtimes import WatchfulRuntime
from sidestream_model_cpu.backend import ModelLevelBackend

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def reset():
    Path("/proc/self/clear_refs").write_text("5")

model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24))).requires_grad_(False)
def make():
    return ModelLevelBackend(
        config=OffloadConfig("model_level", pin_cpu_memory={pin}), device="cpu", runtime=WatchfulRuntime)

first = make()  # what it imports is not what it holds
first.enable({{"transformer": nn.Linear(2, 2)}})
first.disable()
backend = make()
before = status("VmRSS"); reset()
backend.enable({{"transformer": model}})
enabling = status("VmHWM") - before
before = status("VmRSS"); reset()
backend.disable()
disabling = status("VmHWM") - before
print(enabling, disabling, sum(p.nbytes for p in model.parameters()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
def test_host_memory_while_enabling_and_disabling_grows_by_one_slab_at_most(tmp_path: Path, pin: bool) -> None:
    """huggingface/diffusers#11106: elsewhere memory doubled. 400 MB of weights, one slab is 64 MiB."""
    enabling, disabling, weights = _growth(pin, tmp_path)
    slab = 64 << 20
    assert weights > 4 * slab
    assert enabling <= slab + (24 << 20)
    assert disabling <= slab + (24 << 20)
